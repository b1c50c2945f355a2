"""The commands that say whether images can be trusted, and which of them may go: verify, check, seal, keys, prune."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import time
from collections.abc import Callable
from typing import Any

from .errors import BadRequest, GpuCkptError, ImageArchived, ImageBusy, ImageError, ImageNotFound
from .image.store import Image, Store
from .terminal_text import printable

Command = Callable[[argparse.Namespace], int]
#: Makes a subcommand: name, help, what runs it.
Add = Callable[[str, str, Command], argparse.ArgumentParser]

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_AGES = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400}


def register(add: Add, store_of: Callable[[argparse.Namespace], Store]) -> None:
    """Add the commands.  Called from `cli`."""

    def run(command: Callable[[argparse.Namespace, Store], int]) -> Command:
        return lambda options: command(options, store_of(options))

    verify = add("verify", "Prove that an image is whole, yours, and the last of its kernel.", run(_verify))
    verify.add_argument("image")
    add("check", "The same for every image there is.", run(_check))
    seal = add("seal", "Vouch for an image as it is, for instance one whose key is lost.", run(_seal))
    seal.add_argument("image")
    claim = add("break-claim", "Say that the host an image's kernel ran on is gone for good.", run(_break_claim))
    claim.add_argument("image")
    keys = add("keys", "The keys that seal images.", run(_keys))
    keys.add_argument("--rotate", action="store_true", help="make a new one, which seals from now on")
    prune = add("prune", "Delete images that are too many, old or large; never a kernel's only copy.", run(_prune))
    prune.add_argument("--keep-last", type=int, metavar="N", help="images to keep of each kernel")
    prune.add_argument("--max-age", metavar="AGE", help="such as 12h or 30d")
    prune.add_argument("--max-bytes", metavar="SIZE", help="of all images together, such as 500M or 20G")
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")


def _verify(options: argparse.Namespace, store: Store) -> int:
    image = store.get(options.image)
    began = time.monotonic()
    with _bar(image.manifest.bytes, shown=not options.json) as progress:
        store.check(image, progress)
    seconds = time.monotonic() - began
    facts = {"id": image.id, "bytes": image.manifest.bytes, "files": len(image.manifest.files), "seconds": seconds}
    rate = image.manifest.bytes / max(seconds, 1e-9) / 1e6
    told = f"{image.id} is whole: {facts['bytes']} bytes in {facts['files']} files, {rate:.0f} MB/s"
    print(json.dumps(facts) if options.json else told)
    return 0


def _check(options: argparse.Namespace, store: Store) -> int:
    found: list[dict[str, Any]] = []
    broken: dict[str, ImageError] = dict(store.damaged())
    for image in store.images():
        try:
            store.check(image)
        except ImageNotFound:  # removed meanwhile
            continue
        except ImageArchived:  # proved when it comes back
            found.append({"id": image.id, "ok": True, "archived": True})
        except ImageError as error:
            broken[image.id] = error
        else:
            found.append({"id": image.id, "ok": True})
    found += [{"id": id, "ok": False, "error": error.as_dict()} for id, error in broken.items()]
    found.sort(key=lambda each: str(each["id"]))
    if options.json:
        print(json.dumps({"images": found}))
    else:
        for each in found:
            why = each.get("error")
            print(printable(f"{each['id']:32} " + ("ok" if why is None else f"{why['code']}: {why['message']}")))
    return ImageError.exit_status if broken else 0


def _seal(options: argparse.Namespace, store: Store) -> int:
    image = store.seal(store.get(options.image))
    print(json.dumps({"sealed": image.id}) if options.json else f"sealed {image.id} as it is")
    return 0


def _break_claim(options: argparse.Namespace, store: Store) -> int:
    from .image import leases

    broken = leases.break_claim(store.get(options.image).path)
    if options.json:
        print(json.dumps({"broken": broken}))
    else:
        print("the image can be restored again" if broken else "nobody claims that image")
    return 0


def _keys(options: argparse.Namespace, store: Store) -> int:
    if options.rotate:
        store.keys.rotate()
    ids = store.keys.ids()
    if options.json:
        print(json.dumps({"directory": str(store.keys.directory), "keys": ids}))
    else:
        print(store.keys.directory)
        for id in ids:
            print(f"  {id}{'  seals' if id == ids[-1] else ''}")
    return 0


def _prune(options: argparse.Namespace, store: Store) -> int:
    from .image.retention import Limits, choose
    from .kernel.adoption import only_copy

    limits = Limits(
        options.keep_last,
        None if options.max_age is None else _amount(options.max_age, _AGES),
        None if options.max_bytes is None else int(_amount(options.max_bytes, _UNITS)),
    )
    if limits == Limits():
        raise BadRequest("Name at least one limit.", hint="See --help.")
    if limits.keep_last is not None and limits.keep_last < 0:
        raise BadRequest("--keep-last cannot be negative.")

    def protected(image: Image) -> bool:
        try:
            return only_copy(image, "") is not None
        except GpuCkptError:  # what cannot be judged stays
            return True

    removed: dict[str, int] = {}
    for image in choose(store.images(), limits, time.time(), protected):
        with contextlib.suppress(ImageBusy, ImageNotFound):
            # Asked again: deleting the others took its time, and this one may have become a kernel's only copy.
            if options.dry_run:
                removed[image.id] = image.manifest.bytes
            elif not protected(image):
                removed[image.id] = store.remove(image)
    if options.json:
        print(json.dumps({"removed": removed, "dry_run": options.dry_run}))
    else:
        for id, count in removed.items():
            print(f"{'would remove' if options.dry_run else 'removed'} {id}, {count} bytes")
    return 0


def _amount(text: str, units: dict[str, int]) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*?)(?:ib|b)?", text.strip().lower())
    if match is None or match.group(2) not in units:
        raise BadRequest(f"{text!r} is no amount.", hint=f"A number and one of: {', '.join(filter(None, units))}.")
    return float(match.group(1)) * units[match.group(2)]


@contextlib.contextmanager
def _bar(total: int, shown: bool) -> Any:
    """A line that says how much was read, where somebody sees it."""
    done = 0
    shown = shown and sys.stderr.isatty()

    def progress(count: int) -> None:
        nonlocal done
        done += count
        if shown:
            print(f"\r{done * 100 // max(total, 1):3d} %", end="", file=sys.stderr, flush=True)

    try:
        yield progress
    finally:
        if shown:
            print("\r     \r", end="", file=sys.stderr, flush=True)
