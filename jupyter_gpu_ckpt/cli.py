"""``jupyter gpu-ckpt``: doctor, demo, list, inspect, rm, install-criu; and those of `cli_trust` and
`cli_nodes`.

Every command takes ``--json`` and then prints one JSON document.  Exit statuses are those of `errors`; 0 means done.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from .errors import GpuCkptError
from .terminal_text import printable

if TYPE_CHECKING:
    from .errors import ImageFormat
    from .image.store import Image, Store


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # These two have options of their own, and must run where the package's dependencies are not installed yet.
    if arguments[:1] == ["install-criu"]:
        from .engine import criu_install

        return criu_install.main(arguments[1:])
    if arguments[:1] == ["doctor"]:
        from . import doctor

        return doctor.main(arguments[1:])
    options = _parser().parse_args(arguments)
    try:
        command: Callable[[argparse.Namespace], int] = options.command
        return command(options)
    except GpuCkptError as error:
        print(json.dumps({"error": error.as_dict()}) if options.json else str(error), file=sys.stderr)
        return error.exit_status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jupyter gpu-ckpt", description="Checkpoint Jupyter kernels with CUDA state.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, help: str, command: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.add_argument("--json", action="store_true", help="print one JSON document")
        sub.add_argument("--image-dir", type=Path, help="directory of the images")
        sub.set_defaults(command=command)
        return sub

    add("doctor", "Can this host checkpoint kernels, and if not, what mends it?", _elsewhere)
    add("install-criu", "Find a fitting CRIU or install one.", _elsewhere)
    listing = add("list", "Kernels of this user on this host, and images.", _list)
    listing.add_argument("--runtime-base", type=Path, help="directory of the kernels' sockets")
    inspect = add("inspect", "Everything the manifest of an image says.", _inspect)
    inspect.add_argument("image")
    remove = add("rm", "Delete images.", _rm)
    remove.add_argument("image", nargs="+")
    remove.add_argument("--force", action="store_true", help="also the only copy of a kernel, or of a newer release")
    demo = add("demo", "Run a notebook with a checkpoint in its middle and compare every value.", _demo)
    demo.add_argument("notebook", nargs="?", type=Path, help="default: the quickstart")
    demo.add_argument("--kernel", default="python3", help="kernelspec to use (default: %(default)s)")
    demo.add_argument("--timeout", type=float, default=300.0, help="seconds a cell may take (default: %(default)g)")
    from . import cli_nodes, cli_trust

    cli_trust.register(add, _store)
    cli_nodes.register(add, _store)
    return parser


def _elsewhere(options: argparse.Namespace) -> int:
    raise AssertionError(f"dispatched in main: {options}")


def _image_dir(options: argparse.Namespace) -> Path:
    from .kernel.places import default_image_dir

    directory: Path | None = options.image_dir
    return directory or default_image_dir()


def _store(options: argparse.Namespace) -> Store:
    from .image.store import Store

    return Store(_image_dir(options))


def _list(options: argparse.Namespace) -> int:
    from .image.store import Store
    from .kernel.places import default_runtime_base
    from .kernel.registry import kernels

    store = Store(_image_dir(options))
    images: list[dict[str, Any]] = [
        {
            "id": image.id,
            "path": str(image.path),
            "bytes": image.manifest.bytes,
            "created": image.manifest.created,
            "kernel_id": image.manifest.kernel_id,
            "kernel_name": image.manifest.kernel_name,
            "hostname": image.manifest.hostname,
            "device_bytes": sum(image.manifest.device_bytes.values()),
        }
        for image in store.images()
    ]
    damaged = [{"id": id, "code": error.code, "message": error.message} for id, error in store.damaged().items()]
    records = kernels(options.runtime_base or default_runtime_base())
    if options.json:
        print(json.dumps({"kernels": records, "images": images, "damaged": damaged}))
        return 0
    print(f"{'KERNEL':38} {'STATE':13} {'PID':>8}  IMAGE")
    for record in records:
        state = record["state"] if record["owned"] else "abandoned"
        print(printable(f"{record['kernel_id']:38} {state:13} {record['pid'] or '-':>8}  {record['image'] or '-'}"))
    print(f"\n{'IMAGE':32} {'SIZE':>10} {'ON GPU':>10} {'AGE':>8}  KERNEL")
    for image in images:
        age = time.time() - image["created"]
        shown = f"{image['id']:32} {size(image['bytes']):>10} {size(image['device_bytes']):>10} {duration(age):>8}  "
        print(printable(f"{shown}{image['kernel_id']}"))
    for image in damaged:
        print(printable(f"{image['id']:32} {'-':>10} {'-':>10} {'-':>8}  {image['message']}"))
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from .image.store import Store

    image = Store(_image_dir(options)).get(options.image)
    manifest = image.manifest
    facts: dict[str, Any] = {"path": str(image.path), "bytes": manifest.bytes, **manifest.to_dict()}
    if options.json:
        print(json.dumps(facts))
        return 0
    for name, value in facts.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for key, entry in value.items():
                print(printable(f"  {key:28} {json.dumps(entry)}"))
        else:
            print(printable(f"{name:30} {value}"))
    return 0


def _rm(options: argparse.Namespace) -> int:
    from .errors import ImageFormat
    from .image.store import Store
    from .kernel.adoption import only_copy

    store = Store(_image_dir(options))
    found: dict[str, Image | None] = {}
    for id in dict.fromkeys(options.image):  # all of them exist and may go, or none is deleted
        try:
            found[id] = image = store.get(id)
            if not options.force and (refusal := only_copy(image, "use --force")) is not None:
                raise refusal
        except ImageFormat as error:
            found[id] = None
            if not options.force:
                _require_unusable(store.root / id, error)
    freed = {id: store.remove(image) if image else store.remove_damaged(id) for id, image in found.items()}
    if options.json:
        print(json.dumps({"removed": freed}))
    else:
        for id, count in freed.items():
            print(printable(f"removed {id}, {size(count)}"))
    return 0


def _require_unusable(path: Path, error: ImageFormat) -> None:
    """A damaged image may go, but not one that somebody could still make something of."""
    from .errors import ImageBusy
    from .kernel.adoption import Session
    from .kernel.registry import owned_kernel

    if "version" in error.details:
        raise ImageBusy(f"Image {path.name}: {error.message}", hint="A newer release reads it; use --force to lose it.")
    session = Session.read(path)
    kernel = owned_kernel(Path(session.runtime_dir)) if session else None
    if session and kernel and kernel["image"] == path.name:
        raise ImageBusy(
            f"Image {path.name} is damaged, and the only copy of kernel {session.kernel_id}, which sleeps.",
            hint="Put it right if you can, or use --force to lose it.",
        )


def _demo(options: argparse.Namespace) -> int:
    from . import demo

    return demo.run(
        options.notebook,
        kernel_name=options.kernel,
        image_dir=_image_dir(options),
        timeout=options.timeout,
        as_json=options.json,
    )


def size(count: float) -> str:
    """Bytes for people: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def duration(seconds: float) -> str:
    """Seconds for people: ``3 h``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
