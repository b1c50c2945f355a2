"""The commands on images: list, inspect, verify, check, rm, prune, keys, seal, break-claim."""

from __future__ import annotations

import contextlib
import json
import re
import time
from pathlib import Path
from typing import Any

from traitlets import Bool, Int, Unicode

from ..errors import (
    BadRequest,
    GpuCkptError,
    ImageArchived,
    ImageBusy,
    ImageError,
    ImageFormat,
    ImageNotFound,
    StoreShared,
)
from ..image import lease, save_point
from ..image.keys import Keyring
from ..image.retention import Limits, choose
from ..image.shared_chunks import bytes_alone
from ..image.store import Image, Store
from ..kernel.orphans import Session, only_copy
from ..kernel.registry import kernels, owned_by_id
from ..units import duration, rate, size
from .command import GpuCkptCommand, ImageCommand, Result
from .terminal import Column, Part, Terminal, progress

_SIZES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_AGES = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400}

#: The colours of a kernel's states.
_STATES = {"running": "green", "checkpointed": "cyan", "suspended": "cyan", "dead": "red"}


class ListCommand(ImageCommand):
    description = "List your kernels on this host, and your images."
    arguments = ()
    aliases: dict[str, Any] = {
        "runtime-base": (
            "GpuCkptProvisioner.runtime_base",
            "The directory of the kernels' sockets (default: the one that Jupyter's configuration sets).",
        )
    }
    examples = """
    jupyter gpu-ckpt list
    jupyter gpu-ckpt list --json
    jupyter gpu-ckpt list --image-dir /scratch/images
    """

    def run(self) -> Result:
        store = self.store()
        names = ("id", "bytes", "created", "kernel_id", "kernel_name", "hostname")
        images = [
            {
                **{name: getattr(image.manifest, name) for name in names},
                "path": str(image.path),
                "bytes_alone": bytes_alone(image),
                "device_bytes": sum(image.manifest.device_bytes.values()),
                "save_point": point.as_dict() if (point := save_point.of_image(image)) is not None else None,
            }
            for image in store.images()
        ]
        damaged = [{"id": id, "code": error.code, "message": error.message} for id, error in store.damaged().items()]
        found = kernels(Path(self.configured.runtime_base))
        return {"kernels": found, "images": images, "damaged": damaged, "refused": _refused(store)}, 0

    def show(self, document: dict[str, Any]) -> None:
        terminal = self.terminal
        rows: list[list[Part]] = []
        for kernel in document["kernels"]:
            state, style = kernel["state"], _STATES.get(kernel["state"], "yellow")
            if not kernel["owned"]:
                state, style = f"{state}, no server", "yellow"
            rows.append([kernel["kernel_id"], (state, style), str(kernel["pid"] or "-"), kernel["image"] or "-"])
        columns = [Column("KERNEL"), Column("STATE"), Column("PID", number=True), Column("IMAGE")]
        terminal.table(columns, rows, otherwise="No kernel of yours runs or sleeps on this host.")
        if not all(kernel["owned"] for kernel in document["kernels"]):
            terminal.line("A kernel without a server runs on; the next server that you start attaches to it.")
        terminal.line()
        rows = [
            [
                each["id"],
                size(each["bytes"]),
                size(each["device_bytes"]),
                duration(time.time() - each["created"]),
                each["kernel_id"],
            ]
            for each in document["images"]
        ]
        sizes = [Column(title, number=True) for title in ("SIZE", "ON GPU", "AGE")]
        none = f"There are no images in {self.store().root}."
        terminal.table([Column("IMAGE"), *sizes, Column("KERNEL")], rows, otherwise=none)
        rows = [
            [
                each["save_point"]["name"],
                str(each["save_point"]["cell"] or "-"),
                size(each["bytes_alone"]),
                each["kernel_id"],
                each["id"],
            ]
            for each in document["images"]
            if each["save_point"]
        ]
        if rows:
            terminal.line()
            numbers = [Column(title, number=True) for title in ("CELL", "ALONE")]
            columns = [Column("SAVE POINT"), *numbers, Column("KERNEL"), Column("IMAGE")]
            terminal.table(columns, rows)
        if document["damaged"]:
            terminal.line()
            rows = [[one["id"], (one["message"], "red")] for one in document["damaged"]]
            terminal.table([Column("DAMAGED IMAGE"), Column("WHAT IS WRONG")], rows)
        _show_refused(terminal, document)


def _refused(store: Store) -> dict[str, Any] | None:
    """Return the error by which wakes from this directory are refused, as JSON-serialisable data; None if none is."""
    error = store.obstacle()
    return error.as_dict() if error is not None else None


def _show_refused(terminal: Terminal, document: dict[str, Any]) -> None:
    if error := document["refused"]:
        terminal.line()
        terminal.line((f"{error['code']}: No kernel wakes from {error['details']['directory']}.", "red"))
        terminal.line(f"{error['message']} {error['hint']}")


class InspectCommand(ImageCommand):
    description = "Show everything that the manifest of an image says."
    examples = "jupyter gpu-ckpt inspect 20261120T153012-0c0ffee0-a97839"

    def run(self) -> Result:
        image = self.store().get(self.extra_args[0])
        return {"path": str(image.path), "bytes": image.manifest.bytes, **image.manifest.to_dict()}, 0

    def show(self, document: dict[str, Any]) -> None:
        terminal = self.terminal
        for name, value in document.items():
            if isinstance(value, dict):
                terminal.line((f"{name}:", "bold"))
                for key, entry in value.items():
                    terminal.line(f"  {key:28} {json.dumps(entry)}")
            else:
                terminal.line((f"{name:30} ", "bold"), str(value))


class VerifyCommand(ImageCommand):
    description = "Check that an image is whole, yours, and the newest of its kernel. All of it is read."
    examples = "jupyter gpu-ckpt verify 20261120T153012-0c0ffee0-a97839"

    def run(self) -> Result:
        store = self.store()
        image = store.get(self.extra_args[0])
        count, began = image.manifest.bytes, time.monotonic()
        with progress(count, "Verifying", quiet=self.as_json) as advance:
            store.check(image, advance)
        seconds = time.monotonic() - began
        return {"id": image.id, "bytes": count, "files": len(image.manifest.files), "seconds": seconds}, 0

    def show(self, document: dict[str, Any]) -> None:
        count, speed = document["bytes"], rate(document["bytes"], document["seconds"])
        what = f": {size(count)} in {document['files']} files, {speed}."
        self.terminal.line(f"{document['id']} is ", ("whole", "green"), what)


class CheckCommand(ImageCommand):
    description = (
        "Verify every image, and that only you can enter their directory. All of them are read; an archived one is "
        "verified when it comes back."
    )
    arguments = ()
    examples = "jupyter gpu-ckpt check"

    def run(self) -> Result:
        store = self.store()
        found: list[dict[str, Any]] = []
        broken: dict[str, ImageError] = dict(store.damaged())
        images = store.images()
        with progress(sum(image.manifest.bytes for image in images), "Verifying", quiet=self.as_json) as advance:
            for image in images:
                try:
                    store.check(image, advance)
                except ImageNotFound:  # removed meanwhile
                    continue
                except ImageArchived:
                    found.append({"id": image.id, "ok": True, "archived": True})
                except ImageError as error:
                    broken[image.id] = error
                else:
                    found.append({"id": image.id, "ok": True})
        found += [{"id": id, "ok": False, "error": error.as_dict()} for id, error in broken.items()]
        found.sort(key=lambda each: str(each["id"]))
        refused = _refused(store)
        status = ImageError.exit_status if broken else StoreShared.exit_status if refused else 0
        return {"images": found, "refused": refused}, status

    def show(self, document: dict[str, Any]) -> None:
        rows: list[list[Part]] = []
        for each in document["images"]:
            if error := each.get("error"):
                rows.append([each["id"], (f"{error['code']}: {error['message']}", "red")])
            else:
                rows.append([each["id"], ("archived" if each.get("archived") else "ok", "green")])
        none = f"There are no images in {self.store().root}."
        self.terminal.table([Column("IMAGE"), Column("RESULT")], rows, otherwise=none)
        _show_refused(self.terminal, document)


class RemoveCommand(ImageCommand):
    description = (
        "Delete images, damaged ones, too. The only copy of a sleeping kernel and the image of a template are deleted "
        "with --force only. If one of several may not be deleted, none is."
    )
    arguments = ("IMAGE...",)
    examples = "jupyter gpu-ckpt rm 20261120T153012-0c0ffee0-a97839"

    force = Bool(False, help="Delete also a kernel's only copy, a template's image, and one of a newer release.").tag(
        option=True
    )

    def run(self) -> Result:
        from ..kernel import templates

        insist = "use --force"
        store = self.store()
        found: dict[str, Image | None] = {}
        for id in dict.fromkeys(self.extra_args):  # all of them exist and may go, or none is deleted
            try:
                found[id] = image = store.get(id)
                refusal = None if self.force else only_copy(image, insist) or templates.refusal(image, insist)
                if refusal is not None:
                    raise refusal
            except ImageFormat as error:
                found[id] = None
                if not self.force:
                    _require_unusable(store.root / id, error)
        freed = {id: store.remove(image) if image else store.remove_damaged(id) for id, image in found.items()}
        return {"removed": freed}, 0

    def show(self, document: dict[str, Any]) -> None:
        for id, count in document["removed"].items():
            self.terminal.line(f"Deleted {id}, {size(count)}.")


def _require_unusable(path: Path, error: ImageFormat) -> None:
    """Refuse to delete a damaged image that can still be of use."""
    if "version" in error.details:
        raise ImageBusy(
            f"Image {path.name}: {error.message}", hint="A newer release can read it. Use --force to delete it."
        )
    session = Session.read(path)
    kernel = owned_by_id(Path(session.runtime_dir), session.kernel_id) if session else None
    if session and kernel and kernel["image"] == path.name:
        raise ImageBusy(
            f"Image {path.name} is damaged, and the only copy of kernel {session.kernel_id}, which sleeps.",
            hint="Repair it if you can (from a backup), or use --force to delete it.",
        )


class PruneCommand(ImageCommand):
    description = (
        "Delete images that are too many, too old or too large, the oldest first. The only copy of a sleeping kernel "
        "and the image of a template are never deleted. At least one limit must be given."
    )
    arguments = ()
    examples = """
    jupyter gpu-ckpt prune --max-age 30d --dry-run
    jupyter gpu-ckpt prune --keep-last 1 --max-bytes 20G
    """

    keep_last = Int(None, allow_none=True, help="Keep this many images of each kernel.").tag(option="N")
    max_age = Unicode(help="Delete images that are older, such as 12h or 30d.").tag(option="AGE")
    max_bytes = Unicode(help="Keep all images together below this size, such as 500M or 20G.").tag(option="SIZE")
    dry_run = Bool(False, help="Only say what would be deleted.").tag(option=True)

    def run(self) -> Result:
        limits = Limits(
            self.keep_last,
            amount(self.max_age, _AGES) if self.max_age else None,
            int(amount(self.max_bytes, _SIZES)) if self.max_bytes else None,
        )
        if limits == Limits():
            raise BadRequest("No limit is given.", hint="Give --keep-last, --max-age or --max-bytes.")
        if limits.keep_last is not None and limits.keep_last < 0:
            raise BadRequest("--keep-last cannot be negative.")
        from ..kernel import templates

        of_templates = {each.image for each in templates.templates()}

        def protected(image: Image) -> bool:
            if image.id in of_templates:
                return True
            try:
                return only_copy(image, "") is not None
            except GpuCkptError:  # unknown: keep it
                return True

        store = self.store()
        removed: dict[str, int] = {}
        for image in choose(store.images(), limits, time.time(), protected):
            with contextlib.suppress(ImageBusy, ImageNotFound):
                if self.dry_run:
                    removed[image.id] = bytes_alone(image)
                # Checked again: deleting the others took its time, and this one may be a kernel's only copy by now.
                elif not protected(image):
                    removed[image.id] = store.remove(image)
        return {"removed": removed, "dry_run": self.dry_run}, 0

    def show(self, document: dict[str, Any]) -> None:
        verb = "Would delete" if document["dry_run"] else "Deleted"
        for id, count in document["removed"].items():
            self.terminal.line(f"{verb} {id}, {size(count)}.")
        if not document["removed"]:
            self.terminal.line(
                "Nothing to delete: every image is within the limits, in use, a template's, or a kernel's only copy."
            )


class KeysCommand(GpuCkptCommand):
    description = (
        "List the keys that seal images. The newest one seals; all of them verify. An image on another machine needs "
        "its key there."
    )
    examples = """
    jupyter gpu-ckpt keys
    jupyter gpu-ckpt keys --rotate
    """

    rotate = Bool(False, help="Make a new key, which seals from now on.").tag(option=True)

    def run(self) -> Result:
        keys = Keyring()
        if self.rotate:
            keys.rotate()
        return {"directory": str(keys.directory), "keys": keys.ids()}, 0

    def show(self, document: dict[str, Any]) -> None:
        self.terminal.line(document["directory"])
        for id in document["keys"]:
            self.terminal.line(f"  {id}", ("  seals", "green") if id == document["keys"][-1] else "")


class SealCommand(ImageCommand):
    description = (
        "Vouch for an image as it is now, for instance one whose key is lost. Do it only if you know who wrote it: "
        "once it is restored, it can do anything that you can."
    )
    examples = "jupyter gpu-ckpt seal 20261120T153012-0c0ffee0-a97839"

    def run(self) -> Result:
        store = self.store()
        return {"sealed": store.seal(store.get(self.extra_args[0])).id}, 0

    def show(self, document: dict[str, Any]) -> None:
        self.terminal.line(f"Sealed {document['sealed']} as it is now.")


class BreakClaimCommand(ImageCommand):
    description = (
        "Free an image that a kernel on another host has claimed, if that host is gone for good. If the kernel still "
        "runs there, restoring the image makes a second one."
    )
    examples = "jupyter gpu-ckpt break-claim 20261120T153012-0c0ffee0-a97839"

    def run(self) -> Result:
        return {"broken": lease.break_claim(self.store().get(self.extra_args[0]).path)}, 0

    def show(self, document: dict[str, Any]) -> None:
        broken = document["broken"]
        self.terminal.line("The image can be restored again." if broken else "No kernel has claimed that image.")


def amount(text: str, units: dict[str, int]) -> float:
    """Return a number with a unit, such as 30d or 20G, in seconds or bytes.  Raises `BadRequest`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*?)(?:ib|b)?", text.strip().lower())
    if match is None or match.group(2) not in units:
        wanted = ", ".join(filter(None, units))
        raise BadRequest(f"{text!r} cannot be understood.", hint=f"Give a number and one of {wanted}, without a space.")
    return float(match.group(1)) * units[match.group(2)]
