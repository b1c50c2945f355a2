"""Templates: kernelspecs whose kernels start from an image in place of a launch.

A template is a kernelspec of this user, which launchers show, and an image that is kept for it: a copy, so that neither
the kernel it comes from nor one that starts from it changes it.  The kernelspec names the image, so there is no other
record of templates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpecManager

from ..errors import (
    BadRequest,
    BranchDiffers,
    BranchUnsafe,
    GpuCkptError,
    ImageBusy,
    ImageNotFound,
    StateError,
    TemplateNotFound,
)
from ..image import branch
from ..image.branch import NewKernel
from ..image.save_point import SavePoint
from ..image.store import Image, Store
from ..lifecycle import going_back
from . import branching, kernelspecs
from .agent_injection import PROVISIONER
from .branching import BranchPlan

#: The names of kernelspecs that jupyter_client knows, but for those that begin with a dot: it installs one at that path
#: below its directory, and removes what is there before.
_NAME = re.compile(r"[a-z0-9_-][a-z0-9._-]*")


@dataclass(frozen=True)
class Template:
    """A template: ``name`` of its kernelspec, ``display_name`` in launchers, id of its ``image``."""

    name: str
    display_name: str
    image: str


def templates() -> list[Template]:
    """Return the templates of this user, by name."""
    return sorted(_found(), key=lambda each: each.name)


def refusal(image: Image, insist: str) -> ImageBusy | None:
    """Return the refusal to take an image away that a template is made of; None if it is of none.

    ``insist`` says how to do it all the same.
    """
    name = next((each.name for each in _found() if each.image == image.id), "")
    if not name:
        return None
    return ImageBusy(
        f"Image {image.id} is that of template {name!r}, whose kernels would start without it.",
        hint=f"`jupyter gpu-ckpt template remove {name}` removes both; or {insist}.",
        left=f"the image is kept as {image.id}",
    )


def _found() -> Iterator[Template]:
    manager = KernelSpecManager()
    for name, found in manager.get_all_specs().items():
        spec = found["spec"]
        provisioner: Any = spec.get("metadata", {}).get("kernel_provisioner", {})
        image = provisioner.get("config", {}).get("template")
        if provisioner.get("provisioner_name") == PROVISIONER and isinstance(image, str):
            yield Template(name, str(spec["display_name"]), image)


def create(store: Store, source: Image, name: str, *, accept_differences: bool = False) -> Template:
    """Make a template from an image; its kernelspec is that of the image's kernel, by another name.

    After failure there is neither a kernelspec nor an image.  Raises `BadRequest` for a name that is taken or that no
    kernelspec can have, a kernelspec that is not here, or an image from which its kernels could not start, and as
    `branching.plan` and `branch.copy`.
    """
    manager, name = KernelSpecManager(), name.lower()  # as it is installed, in the place of one with the same name
    if not _NAME.fullmatch(name):
        hint = "It has letters, digits, and the characters `.`, `_` and `-`, and does not begin with a dot."
        raise BadRequest(f"A template cannot have the name {name!r}.", hint=hint)
    if name in manager.find_kernel_specs():
        raise BadRequest(f"There is a kernelspec {name!r} already.", hint="Choose another name.")
    plan = branching.plan(store, source)
    try:  # of a template's kernel: not that template's, so that either can be removed without the other
        used = kernelspecs.choose(manager, plan.session.fallback_name, source.manifest.kernel_name)
    except StateError as error:
        hint = "Install it first: kernels start by it where the template cannot be used."
        raise BadRequest(error.message, hint=hint) from error
    spec = manager.get_kernel_spec(used)
    _require_usable(store, source, plan, accept_differences)
    key = plan.session.kernel_key if source.manifest.branched_from else str(plan.session.front["key"])
    session = dataclasses.replace(plan.session, kernel_id=str(uuid.uuid4()), notebook="", kernel_key=key)
    session = dataclasses.replace(session, kernel_name=used, fallback_name="", private=plan.private)
    kernel = NewKernel(session.kernel_id, used, session.write, is_template=True)
    image = branch.copy(store, source, kernel, SavePoint(name))
    try:
        shown = f"{name} (template of {spec.display_name})"
        config = {"provisioner_name": PROVISIONER, "config": {"template": image.id, "template_kernelspec": used}}
        document = {**spec.to_dict(), "display_name": shown}
        document["metadata"] = {**spec.metadata, "kernel_provisioner": config}
        _install(manager, name, document, Path(spec.resource_dir))
    except BaseException as error:
        store.remove(image)
        if isinstance(error, ValueError):
            raise BadRequest(f"{error}") from error
        raise
    return Template(name, shown, image.id)


def _require_usable(store: Store, source: Image, plan: BranchPlan, accept_differences: bool) -> None:
    """Raise `BadRequest` for an image from which kernels cannot start, or only if their differences are accepted."""
    left = f"the image is kept as {source.id}"
    try:
        plan.require(accept_differences)
    except BranchUnsafe as error:
        message = f"No kernels can start from this image: it has {'; '.join(plan.unsafe)}."
        hint = "End it in the kernel, save again, and make the template of that."
        raise BadRequest(message, hint=hint, left=left, **error.details) from error
    except BranchDiffers as error:
        otherwise = "; ".join(f"{each.what} ({each.becomes})" for each in plan.differs if each.kind != "connection")
        message = f"This cannot exist twice, and is otherwise in each kernel of a template: {otherwise}."
        hint = "Close it in the kernel and save again, or make the template all the same: `--accept-differences`."
        raise BadRequest(message, hint=hint, left=left, **error.details) from error
    if unusable := going_back.unusable_files(store, source):
        first, *others = unusable
        more = f" (and {len(others)} more: `jupyter gpu-ckpt match {source.id}` lists them)" if others else ""
        message = f"No kernels could start from this image, as {first.what} is not as it was"
        message = f"{message}: wanted {first.wanted}, found {first.found}{more}."
        hint = "Put it back as it was (program code: install that version), or make the template of a newer image."
        raise BadRequest(message, hint=hint, left=left, mismatches=[str(each) for each in unusable])


def _install(manager: KernelSpecManager, name: str, document: dict[str, Any], resources: Path) -> None:
    """Install a kernelspec for this user, with the logos of another one.  Raises `ValueError` for an unusable name."""
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory) / "spec"
        if resources.is_dir():
            shutil.copytree(resources, made)
        else:
            made.mkdir()
        (made / "kernel.json").write_text(json.dumps(document, indent=1))
        manager.install_kernel_spec(str(made), name, user=True)


def remove(store: Store, name: str) -> Template:
    """Remove a template, its kernelspec and its image; kernels that have started from it are not changed.

    Raises `TemplateNotFound`, and as `Store.remove`; the kernelspec is removed first.  An image that was deleted
    before, as by `prune`, is not missed.
    """
    found, name = {each.name: each for each in templates()}, name.lower()
    if name not in found:
        there = ", ".join(sorted(found)) or "none"
        raise TemplateNotFound(f"There is no template {name!r}; there are: {there}.")
    KernelSpecManager().remove_kernel_spec(name)
    try:
        with contextlib.suppress(ImageNotFound):
            store.remove(store.get(found[name].image))
    except GpuCkptError as error:
        error.left = "the kernelspec is removed, the image is not"
        raise
    return found[name]
