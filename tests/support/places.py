"""Real servers on loopback that images can be pushed to, each started on its first use and ended with the session."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextlib.contextmanager
def _server(argv: list[str], port: int, log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        server = subprocess.Popen(argv, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        until(lambda: server.poll() is not None or _answers(port), f"{argv[0]} listens", 60)
        assert server.poll() is None, log.read_text()
        yield
    finally:
        server.terminate()
        server.wait(60)


@contextlib.contextmanager
def sftp_server(directory: Path, more: str = "") -> Iterator[dict[str, Any]]:
    """OpenSSH's own server, with a key and a port of its own; options for `Remote` and for ``sftp(1)``.

    ``more``: a line of its configuration.
    """
    program = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
    if program is None:
        pytest.skip(reason="no OpenSSH server: apt-get install openssh-server")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where it confines itself; without it sshd does not start
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / key)], check=True)
    port = free_port()
    (directory / "known_hosts").write_text(f"[127.0.0.1]:{port} {(directory / 'host.pub').read_text()}")
    (directory / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {directory}/host\nAuthorizedKeysFile {directory}/user.pub\n"
        f"PidFile none\nStrictModes no\nUsePAM no\nPermitRootLogin yes\nSubsystem sftp internal-sftp\n{more}\n"
    )
    with _server([program, "-D", "-e", "-f", str(directory / "config")], port, directory / "log"):
        options = {"client_keys": [str(directory / "user")], "known_hosts": str(directory / "known_hosts")}
        yield {"port": port, "options": options, "directory": directory}


@contextlib.contextmanager
def s3_server(directory: Path) -> Iterator[dict[str, Any]]:
    """moto's S3 over HTTP."""
    pytest.importorskip("moto", reason="no S3 server: pip install 'moto[server]' s3fs")
    port = free_port()
    argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _server(argv, port, directory / "log"):
        options = {"key": "key", "secret": "secret", "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}"}}
        yield {"port": port, "options": options}
