"""Rates of push and pull, beside the plain copy tool of each protocol: a directory, SFTP, S3, all on loopback.

Run ``python scripts/bench/remote.py [MIB]``; the image has 512 MiB of random bytes by default.  ``cp`` and a flush for
a directory, OpenSSH's ``sftp`` for SFTP, boto3's managed transfer (what ``aws s3 cp`` is made of) for S3; in turns with
ours, so that both meet what else the machine does; the medians are compared.  What is copied is not in the page cache.
A push compares hashes of what arrived on top of that, except on a disk of this machine, where everything is flushed; a
pull is proved and flushed.  The limit is 90 % of the plain tool; the exit status is `MISSED` below it.
"""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

import pytest
from images import publish
from limits import MISSED
from places import s3_server, sftp_server

from jupyter_gpu_ckpt.image.keys import Keyring
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.transfer.remote import Remote

LIMIT = 0.9
ROUNDS = 5


def forget(place: Path) -> None:
    """Have no file below ``place`` in the page cache."""
    os.sync()
    for path in place.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def rates(place: Path, theirs: Callable[[int], object], ours: Callable[[int], object], size: int) -> list[float]:
    """MB/s of both, each the median of `ROUNDS`, in turns; both get the number of the round.

    A directory that one returns is removed: what lies about on the disk is the same for both.
    """
    took: tuple[list[float], list[float]] = ([], [])
    for number in range(ROUNDS):
        for which, work in enumerate((theirs, ours)):
            forget(place)
            began = time.perf_counter()
            made = work(number)
            took[which].append(time.perf_counter() - began)
            if isinstance(made, Path):
                shutil.rmtree(made)
    return [size / median(seconds) / 1e6 for seconds in took]


def flushed(command: list[str], result: Path, **options: Any) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)
    fd = os.open(result, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def started(stack: ExitStack, server: AbstractContextManager[dict[str, Any]]) -> dict[str, Any] | None:
    """Start a server for as long as the stack; say why, and return None, where this machine has none."""
    try:
        return stack.enter_context(server)
    except pytest.skip.Exception as reason:
        print(f"left out: {reason}", flush=True)
        return None


def main(mebibytes: int) -> int:
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp")))
        store = Store(place / "images", Keyring(place / "keys"))
        image = publish(store, {"pages-1.img": os.urandom(mebibytes << 20)})
        pages, size = image.criu_directory / "pages-1.img", image.manifest.bytes

        def far(number: int) -> Store:
            return Store(place / f"far-{number}-{time.monotonic_ns()}", store.keys)

        (place / "sshd").mkdir()
        (place / "s3").mkdir()
        plain: dict[str, tuple[Callable[[int], object], Callable[[int], object]]] = {
            "directory": (
                lambda _: flushed(["cp", str(pages), str(place / "up")], place / "up"),
                lambda _: flushed(["cp", str(place / "up"), str(place / "down")], place / "down"),
            )
        }
        ours: dict[str, tuple[str, dict[str, Any]]] = {"directory": (f"file://{place}/shared", {})}
        if sftp := started(stack, sftp_server(place / "sshd")):
            keys, known = sftp["options"]["client_keys"][0], sftp["options"]["known_hosts"]
            tool = ["sftp", "-q", "-b", "-", "-i", keys, "-P", str(sftp["port"]), "-o", f"UserKnownHostsFile={known}"]
            host = f"{getpass.getuser()}@127.0.0.1"

            def by_sftp(line: str, result: Path) -> None:
                flushed([*tool, host], result, input=line, text=True)

            plain["sftp"] = (
                lambda _: by_sftp(f"put {pages} {place}/sup", place / "sup"),
                lambda _: by_sftp(f"get {place}/sup {place}/sdown", place / "sdown"),
            )
            ours["sftp"] = f"sftp://{host}:{sftp['port']}{place}/sftp", sftp["options"]
        if s3 := started(stack, s3_server(place / "s3")):
            import boto3

            endpoint = s3["options"]["client_kwargs"]["endpoint_url"]
            secrets = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
            client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **secrets)
            client.create_bucket(Bucket="bench")
            plain["s3"] = (
                lambda _: client.upload_file(str(pages), "bench", "plain"),
                lambda _: client.download_file("bench", "plain", str(place / "s3down")),
            )
            ours["s3"] = "s3://bench/images", s3["options"]
        missed = False
        print(f"{'':10} {'':5} {'plain tool':>12} {'here':>12}   share (limit {LIMIT:.0%})")
        for name, (url, options) in ours.items():

            def push(number: int, url: str = url, options: dict[str, Any] = options) -> None:
                Remote(f"{url}-{number}", **options).push(image)  # connects first, as the plain tool does

            def pull(number: int, url: str = url, options: dict[str, Any] = options) -> Path:
                store = far(number)
                Remote(f"{url}-{number}", **options).pull(image.id, store, keep=True)
                return store.root

            for verb, tools, work in (("push", plain[name][0], push), ("pull", plain[name][1], pull)):
                theirs, mine = rates(place, tools, work, size)
                missed |= mine < LIMIT * theirs
                print(f"{name:10} {verb:5} {theirs:7.0f} MB/s {mine:7.0f} MB/s   {mine / theirs:.0%}", flush=True)
        return MISSED if missed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 512))
