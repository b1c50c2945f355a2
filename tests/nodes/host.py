"""Hosts on one machine: namespaces for network, processes, mounts, name and clocks, and a directory they share.

Each runs `server.py`, which owns one kernel.  A host has its own boot id, its own uptime, a ``/run`` of its own (where
the kernels' sockets are), and gives its processes the same ids and its kernels the same ports as any other.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from namespaces import enter, init_of, unshare

SERVER = Path(__file__).with_name("server.py")

_SETUP = """
set -e
hostname {name}
ip link set lo up
mount --make-rprivate /
mount -t tmpfs run /run
mount --bind {own}/boot_id /proc/sys/kernel/random/boot_id
mount --bind {shared} {shared}
exec "$@"
"""


class Host:
    """A host that shares ``shared`` with others; its server answers one line of JSON for each command."""

    def __init__(self, name: str, shared: Path, own: Path, *, uptime: int, boot: str) -> None:
        self.name, self.shared = name, shared
        (own / "boot_id").write_text(f"{boot}\n")
        environment = {
            **os.environ,
            "JUPYTER_GPU_CKPT_KEYS": str(shared / "keys"),
            "IPYTHONDIR": str(shared / "ipython"),
            "TMPDIR": str(own),
        }
        environment.pop("PYTEST_CURRENT_TEST", None)
        environment.pop("XDG_RUNTIME_DIR", None)
        self._log = (own / "log").open("wb")
        self.log = own / "log"
        setup = _SETUP.format(name=name, own=own, shared=shared)
        server = [sys.executable, str(SERVER), str(shared), f"/run/{name}"]
        self._process = subprocess.Popen(
            [*unshare(uptime=uptime), "sh", "-c", setup, "sh", *server],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            cwd=shared,
        )

    def send(self, command: str, *arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, *arguments]).encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, timeout: float = 90.0) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        line = self._process.stdout.readline() if ready else b""
        assert line, f"host {self.name} does not answer: {self.log.read_text()[-3000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, command: str, *arguments: Any) -> dict[str, Any]:
        self.send(command, *arguments)
        return self.hear()

    def inside(self, *command: str) -> str:
        """Return the output of a program that runs on this host."""
        done = subprocess.run([*enter(self._init()), *command], check=True, capture_output=True, text=True, timeout=60)
        return done.stdout.strip()

    def _init(self) -> int:
        return init_of(self._process.pid)

    def cut_off(self) -> None:
        """The network goes, and with it the shared directory: what was open stays open, nothing is found any more."""
        self.inside("ip", "link", "set", "lo", "down")
        self.inside("mount", "-t", "tmpfs", "gone", str(self.shared))

    def heal(self) -> None:
        self.inside("umount", str(self.shared))
        self.inside("ip", "link", "set", "lo", "up")

    def kill(self) -> None:
        """End all on this host at once, as when a container is killed or a node loses its power."""
        init = os.pidfd_open(self._init())
        self._process.kill()  # its only child, the host's PID 1, goes with it, and all others with that one
        self._process.wait(60)
        ended, _, _ = select.select([init], [], [], 30)
        os.close(init)
        assert ended

    def close(self) -> None:
        """End all that runs on this host."""
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its only child, the host's PID 1, goes with it
            self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()


@contextlib.contextmanager
def two_hosts(place: Path, *, one_machine: bool = False) -> Iterator[tuple[Host, Host, Path]]:
    """Hosts ``near`` and ``far`` with different uptimes, and the directory they share.

    ``one_machine``: they are containers of one, which was booted once.
    """
    why = why_not()
    if why:
        pytest.skip(why)
    shared = place / "shared"
    shared.mkdir()
    hosts: list[Host] = []
    boots = [str(uuid.uuid4())] * 2 if one_machine else [str(uuid.uuid4()) for _ in range(2)]
    try:
        for name, uptime in (("near", 500_000), ("far", -1)):
            (place / name).mkdir()
            hosts.append(Host(name, shared, place / name, uptime=uptime, boot=boots[len(hosts)]))
        yield hosts[0], hosts[1], shared
    finally:
        for host in hosts:
            host.close()


def why_not() -> str:
    """Why no hosts can be made here; empty when they can."""
    if os.geteuid() != 0:
        return "two hosts on one machine need root"
    for program in ("unshare", "nsenter", "ip"):
        if subprocess.run(["sh", "-c", f"command -v {program}"], capture_output=True).returncode:
            return f"two hosts on one machine need {program}: apt-get install util-linux iproute2"
    return ""
