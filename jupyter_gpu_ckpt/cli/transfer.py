"""The commands about other nodes: match, push, pull, node-features."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from traitlets import Bool, Unicode

from ..criu.install import dotted, find
from ..cuda.gpus import Gpus
from ..errors import BadRequest, CriuMissing, GpuCkptError, ImageBusy, ImageError, ImageNotFound
from ..hub.slurm import features
from ..image.store import Image
from ..kernel import templates
from ..kernel.registry import owned_by_id
from ..lifecycle import compatibility
from ..node.fingerprint import fingerprint
from ..node.match import Mismatch
from ..node.requirements import of
from ..transfer.remote import Remote
from ..units import duration, rate, size
from .command import GpuCkptCommand, ImageCommand, Result
from .terminal import Column, Part, progress


class MatchCommand(ImageCommand):
    description = "Compare this node with what an image needs: files, programs, GPUs, ports, memory."
    examples = """
    jupyter gpu-ckpt match 20261120T153012-0c0ffee0-a97839
    jupyter gpu-ckpt match 20261120T153012-0c0ffee0-a97839 --accept-changed-files
    """

    accept_changed_files = Bool(False, help="From now on the image's kernel may wake with files as they are now.").tag(
        option=True
    )
    gpu_map = Unicode(help='Which GPU here each GPU there becomes: {"UUID there": "UUID here"}.').tag(option="JSON")

    def run(self) -> Result:
        gpu_map = self._gpu_map()
        configured = self.configured
        store = self.store()
        store.require_private()
        image = store.get(self.extra_args[0])
        accepted = self.accept_changed_files or image.accepts_changed_files or configured.accept_changed_files
        with Gpus() as gpus:
            found = compatibility.mismatches(
                image.manifest, store, gpus, _criu_version(), accept_changed_files=accepted, gpu_map=gpu_map
            )
        hard = [mismatch for mismatch in found if mismatch.hard]
        if self.accept_changed_files and not hard:
            image.accept_changed_files()
        document = {"id": image.id, "fits": not hard, "mismatches": [dataclasses.asdict(one) for one in found]}
        return document, ImageError.exit_status if hard else 0

    def _gpu_map(self) -> dict[str, str] | None:
        if not self.gpu_map:
            return None
        try:
            found = json.loads(self.gpu_map)
        except ValueError as error:
            raise BadRequest(f"--gpu-map is not JSON: {error}.") from error
        if not isinstance(found, dict) or not all(isinstance(uuid, str) for uuid in found.values()):
            raise BadRequest("--gpu-map must be an object of UUIDs.", hint='Such as {"GPU-there": "GPU-here"}.')
        return found

    def show(self, document: dict[str, Any]) -> None:
        terminal = self.terminal
        words: dict[bool, Part] = {True: ("refused", "red"), False: ("warning", "yellow")}
        terminal.rows([[words[one["hard"]], str(Mismatch(**one))] for one in document["mismatches"]])
        fits: Part = ("fits", "green") if document["fits"] else ("does not fit", "red")
        terminal.line(f"{document['id']} ", fits, " this node")


class PushCommand(ImageCommand):
    description = "Move an image to a shared directory, an object store or a server, from where another node pulls it."
    arguments = ("IMAGE", "URL")
    examples = """
    jupyter gpu-ckpt push 20261120T153012-0c0ffee0-a97839 /depot
    jupyter gpu-ckpt push 20261120T153012-0c0ffee0-a97839 s3://bucket/images --keep
    """

    keep = Bool(False, help="Copy the image: keep it here, too.").tag(option=True)

    def run(self) -> Result:
        store = self.store()
        id, url = self.extra_args
        image = store.get(id)
        if not self.keep:
            _require_unneeded(image)
        count, began = image.manifest.bytes, time.monotonic()
        with progress(count, "Sending", quiet=self.as_json) as advance:
            sent = _remote(url).push(image, remove_from=None if self.keep else store, progress=advance)
        seconds = time.monotonic() - began
        return {"id": image.id, "bytes": count, "sent": sent, "moved": not self.keep, "seconds": seconds}, 0

    def show(self, document: dict[str, Any]) -> None:
        self.terminal.line(f"{'Moved' if document['moved'] else 'Copied'} {document['id']}: {_rate(document)}.")


def _require_unneeded(image: Image) -> None:
    """Refuse to move the image of a template, or of a kernel whose server runs: both would look for it here."""
    if (refusal := templates.refusal(image, "push a copy with --keep")) is not None:
        raise refusal
    kernel = owned_by_id(Path(image.manifest.runtime_dir), image.manifest.kernel_id)
    if kernel is not None and kernel["image"] == image.id:
        raise ImageBusy(
            f"Kernel {image.manifest.kernel_id} belongs to a server that runs here.",
            hint="Stop that server first: its kernels stay asleep. Or push a copy with --keep.",
        )


class PullCommand(ImageCommand):
    description = "Fetch an image that was pushed, and verify it; without an image, list the images there."
    arguments = ("URL", "[IMAGE]")
    examples = """
    jupyter gpu-ckpt pull /depot
    jupyter gpu-ckpt pull /depot 20261120T153012-0c0ffee0-a97839
    """

    keep = Bool(False, help="Copy the image: keep it there, too.").tag(option=True)

    def run(self) -> Result:
        remote = _remote(self.extra_args[0])
        if len(self.extra_args) == 1:
            names = ("id", "bytes", "kernel_id", "hostname")
            facts = ({name: getattr(manifest, name) for name in names} for manifest in remote.images())
            return {"images": [{**each, "claimed": remote.claimed(each["id"])} for each in facts]}, 0
        id = self.extra_args[1]
        began, count = time.monotonic(), 0
        with contextlib.suppress(ImageNotFound):  # its manifest is removed first, and `pull` removes the rest
            count = remote.manifest(id).bytes
        with progress(count, "Fetching", quiet=self.as_json) as advance:
            image = remote.pull(id, self.store(), keep=self.keep, progress=advance)
        document = {"id": image.id, "path": str(image.path), "bytes": image.manifest.bytes, "moved": not self.keep}
        return {**document, "seconds": time.monotonic() - began}, 0

    def show(self, document: dict[str, Any]) -> None:
        terminal = self.terminal
        if "id" in document:
            verb = "Moved" if document["moved"] else "Copied"
            terminal.line(f"{verb} {document['id']} and verified it: {_rate(document)}.")
            return
        rows: list[list[Part]] = [
            [each["id"], size(each["bytes"]), each["hostname"], each["kernel_id"], (each["claimed"] or "-", "yellow")]
            for each in document["images"]
        ]
        columns = [Column("IMAGE"), Column("SIZE", number=True), Column("FROM"), Column("KERNEL"), Column("CLAIMED BY")]
        terminal.table(columns, rows, otherwise=f"There are no images in {self.extra_args[0]}.")


class NodeFeaturesCommand(GpuCkptCommand):
    description = "Print the features of this node for slurm.conf, by which the hub's placement chooses a node."
    examples = "jupyter gpu-ckpt node-features"

    def run(self) -> Result:
        with Gpus() as gpus:
            try:
                found = [dataclasses.asdict(gpu) for gpu in gpus.list()]
            except GpuCkptError:
                found = []  # a node without GPUs, or without their driver
        # As of a kernel that uses the whole node.
        here = of(fingerprint(files=(), ports=(), criu=_criu_version(), gpus=found, cuda=bool(found)))
        return {"features": features(here)}, 0

    def show(self, document: dict[str, Any]) -> None:
        self.terminal.line(",".join(document["features"]))


def _criu_version() -> str:
    try:
        return dotted(find().version)
    except CriuMissing:
        return "none"


def _remote(url: str) -> Remote:
    return Remote(url if "://" in url else f"file://{Path(url).absolute()}")


def _rate(document: dict[str, Any]) -> str:
    count, seconds = document["bytes"], document["seconds"]
    return f"{size(count)} in {duration(seconds)}, {rate(count, seconds)}"
