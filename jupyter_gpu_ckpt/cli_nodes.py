"""The commands about other nodes: match, push, pull, node-features."""

from __future__ import annotations

import argparse
import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .errors import BadRequest, CriuMissing, ImageBusy, ImageError
from .terminal_text import printable

if TYPE_CHECKING:
    from .engine.gpus import Gpus
    from .image.remote import Remote
    from .image.store import Image, Store

Command = Callable[[argparse.Namespace], int]
#: Makes a subcommand: name, help, what runs it.
Add = Callable[[str, str, Command], argparse.ArgumentParser]


def register(add: Add, store_of: Callable[[argparse.Namespace], Store]) -> None:
    """Add the commands.  Called from `cli`."""

    def run(command: Callable[[argparse.Namespace, Store], int]) -> Command:
        return lambda options: command(options, store_of(options))

    match = add("match", "What this node lacks of the one an image was made on.", run(_match))
    match.add_argument("image")
    match.add_argument(
        "--accept-changed-files",
        action="store_true",
        help="from now on the image's kernel may wake with files as they are now",
    )
    match.add_argument("--gpu-map", metavar="JSON", type=json.loads, help='{"UUID there": "UUID here"}')
    push = add("push", "Move an image to a shared directory, an object store or a server.", run(_push))
    push.add_argument("image")
    push.add_argument("url", help="a directory, or a URL such as s3://bucket/images or sftp://host/path")
    push.add_argument("--keep", action="store_true", help="keep the image here too")
    pull = add("pull", "Fetch an image from there; without a name, list what is there.", run(_pull))
    pull.add_argument("url")
    pull.add_argument("image", nargs="?")
    pull.add_argument("--keep", action="store_true", help="only copy it")
    add("node-features", "This node's features for slurm.conf, by which the hub's placement chooses it.", _features)


def _match(options: argparse.Namespace, store: Store) -> int:
    from .engine.gpus import Gpus
    from .fit import mismatches

    image = store.get(options.image)
    with Gpus() as gpus:
        try:
            found = mismatches(
                image.manifest,
                _Node(_criu_version(), gpus, store),
                accept_changed_files=options.accept_changed_files or image.accepts_changed_files,
                gpu_map=options.gpu_map,
            )
        except ValueError as error:
            raise BadRequest(f"The GPU mapping cannot be used: {error}.") from error
    hard = [mismatch for mismatch in found if mismatch.hard]
    if options.accept_changed_files and not hard:
        image.accept_changed_files()
    if options.json:
        print(json.dumps({"id": image.id, "fits": not hard, "mismatches": [dataclasses.asdict(one) for one in found]}))
    else:
        for mismatch in found:
            print(f"{'refused' if mismatch.hard else 'warning'}  {mismatch}")
        print(f"{image.id} {'does not fit' if hard else 'fits'} this node")
    return ImageError.exit_status if hard else 0


def _features(options: argparse.Namespace) -> int:
    from .engine.gpus import Gpus
    from .errors import GpuCkptError
    from .hub.slurm import features
    from .image.fingerprint import fingerprint
    from .image.requirements import of

    with Gpus() as gpus:
        try:
            found = [dataclasses.asdict(gpu) for gpu in gpus.list()]
        except GpuCkptError:
            found = []  # a node without GPUs, or without their driver
    # That of a kernel which used all of it.
    here = of(fingerprint(files=(), ports=(), criu=_criu_version(), gpus=found, cuda=bool(found)))
    print(json.dumps({"features": features(here)}) if options.json else ",".join(features(here)))
    return 0


@dataclasses.dataclass
class _Node:
    """This node, for `fit.mismatches`."""

    criu_version: str
    gpus: Gpus
    store: Store


def _criu_version() -> str:
    from .engine.criu_install import dotted, find

    try:
        return dotted(find().version)
    except CriuMissing:
        return "none"


def _push(options: argparse.Namespace, store: Store) -> int:
    image = store.get(options.image)
    if not options.keep:
        _require_unowned(image)
    with _Bar(image.manifest.bytes, quiet=options.json) as bar:
        sent = _remote(options.url).push(image, take_from=None if options.keep else store, progress=bar.add)
    if options.json:
        print(json.dumps({"id": image.id, "bytes": image.manifest.bytes, "sent": sent, "moved": not options.keep}))
    else:
        print(f"{'copied' if options.keep else 'moved'} {image.id}: {bar}")
    return 0


def _require_unowned(image: Image) -> None:
    """A server that still has the kernel would look for its image here."""
    from .kernel.registry import owned_kernel

    kernel = owned_kernel(Path(image.manifest.runtime_dir))
    if kernel is not None and kernel["image"] == image.id:
        raise ImageBusy(
            f"Kernel {image.manifest.kernel_id} belongs to a server that runs here.",
            hint="Stop that server first: its kernels stay asleep. Or push a copy with --keep.",
        )


def _pull(options: argparse.Namespace, store: Store) -> int:
    remote = _remote(options.url)
    if options.image is None:
        return _list(options, remote)
    total = remote.manifest(options.image).bytes
    with _Bar(total, quiet=options.json) as bar:
        image = remote.pull(options.image, store, keep=options.keep, progress=bar.add)
    if options.json:
        print(json.dumps({"id": image.id, "path": str(image.path), "bytes": image.manifest.bytes}))
    else:
        print(f"{'copied' if options.keep else 'moved'} {image.id}, proved: {bar}")
    return 0


def _list(options: argparse.Namespace, remote: Remote) -> int:
    from .cli import size

    found: list[dict[str, Any]] = [
        {
            "id": manifest.id,
            "bytes": manifest.bytes,
            "kernel_id": manifest.kernel_id,
            "hostname": manifest.hostname,
            "claimed": remote.claimed(manifest.id),
        }
        for manifest in remote.images()
    ]
    if options.json:
        print(json.dumps({"images": found}))
        return 0
    print(f"{'IMAGE':32} {'SIZE':>10}  {'FROM':16} KERNEL")
    for image in found:
        taken = f"  (taken by {image['claimed']})" if image["claimed"] else ""
        shown = f"{image['id']:32} {size(image['bytes']):>10}  {image['hostname']:16} {image['kernel_id']}{taken}"
        print(printable(shown))
    return 0


def _remote(url: str) -> Remote:
    from .image.remote import Remote

    return Remote(url if "://" in url else f"file://{Path(url).absolute()}")


class _Bar:
    """How far a transfer is, on a terminal; afterwards the sum."""

    def __init__(self, total: int, *, quiet: bool) -> None:
        import sys
        import time

        self._clock = time.monotonic
        self._stream = None if quiet or not sys.stderr.isatty() else sys.stderr
        self._total, self._done, self._seconds = total, 0, 0.0
        self._lock = threading.Lock()

    def __enter__(self) -> _Bar:
        self._began = self._clock()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._seconds = self._clock() - self._began
        if self._stream is not None:
            print(file=self._stream)

    def add(self, count: int) -> None:
        """Called from the threads that transfer."""
        with self._lock:
            self._done += count
            if self._stream is not None:
                part = self._done / max(self._total, 1)
                rate = self._done / max(self._clock() - self._began, 1e-3) / 1e6
                bar = f"\r[{'#' * int(30 * part):30}] {part:4.0%}  {rate:.0f} MB/s "
                print(bar, end="", file=self._stream, flush=True)

    def __str__(self) -> str:
        from .cli import size

        return f"{size(self._total)} in {self._seconds:.1f} s, {self._total / max(self._seconds, 1e-3) / 1e6:.0f} MB/s"
