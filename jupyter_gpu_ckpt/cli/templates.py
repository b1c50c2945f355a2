"""``jupyter gpu-ckpt template``: kernelspecs whose kernels start from an image."""

from __future__ import annotations

import dataclasses
from typing import Any

from traitlets import Bool, Unicode

from ..errors import BadRequest, SavePointNotFound
from ..image import save_point
from ..image.store import Image, Store
from ..units import size
from .command import ImageCommand, Result, suggestion
from .terminal import Column

_ACTIONS = ["create", "list", "remove"]


class TemplateCommand(ImageCommand):
    description = (
        "Make a template of an image: a kernelspec whose kernels start from it, with everything imported and loaded "
        "that was there. The image is copied. ACTION is create, list or remove; --from is for create, and names an "
        "image or a save point. A kernel that cannot start from its template starts as usual, and says so."
    )
    arguments = ("ACTION", "[NAME]")
    examples = """
    jupyter gpu-ckpt template create torch-ready --from 20261120T153012-0c0ffee0-a97839
    jupyter gpu-ckpt template list
    jupyter gpu-ckpt template remove torch-ready
    """

    source = Unicode("", help="The image, or the name of a save point, that the template is made of.").tag(
        option="IMAGE", option_name="from"
    )
    accept_differences = Bool(
        False, help="Do so although its kernels cannot have all of it, such as ports and locks."
    ).tag(option=True)

    def run(self) -> Result:
        from ..kernel import templates

        action, *names = self.extra_args
        if action not in _ACTIONS:
            raise BadRequest(f"There is no action {action!r}.", hint=suggestion(action, _ACTIONS))
        if bool(names) is (action == "list") or bool(self.source) is not (action == "create"):
            raise BadRequest(f"{action} has other arguments.", hint="See --help for examples.")
        store = self.store()
        if action == "create":
            source = _image(store, self.source)
            made = templates.create(store, source, names[0], accept_differences=self.accept_differences)
            return {"created": dataclasses.asdict(made), "bytes": store.get(made.image).manifest.bytes}, 0
        if action == "remove":
            return {"removed": dataclasses.asdict(templates.remove(store, names[0]))}, 0
        usable = {image.id for image in store.images()}
        return {
            "templates": [
                {**dataclasses.asdict(each), "usable": each.image in usable} for each in templates.templates()
            ]
        }, 0

    def show(self, document: dict[str, Any]) -> None:
        if made := document.get("created"):
            self.terminal.line(f"Made template {made['name']} of {size(document['bytes'])}: {made['image']}.")
        elif gone := document.get("removed"):
            self.terminal.line(f"Removed template {gone['name']}, and its image {gone['image']}.")
        else:
            rows = [
                [each["name"], each["display_name"], each["image"], "" if each["usable"] else ("no image", "red")]
                for each in document["templates"]
            ]
            columns = [Column("TEMPLATE"), Column("SHOWN AS"), Column("IMAGE"), Column("")]
            self.terminal.table(columns, rows, otherwise="There are no templates.")

    def complete(self, given: list[str]) -> list[str]:
        """Return the actions, or the names of templates to remove."""
        from ..kernel import templates

        if not given:
            return _ACTIONS
        return [each.name for each in templates.templates()] if given == ["remove"] else []


def _image(store: Store, name: str) -> Image:
    """Return the image of this id, or the newest save point of this name.  Raises `ImageNotFound`."""
    images = store.images()
    if (found := next((each for each in images if each.id == name), None)) is not None:
        return found
    points = [each for each in images if (point := save_point.of_image(each)) is not None and point.name == name]
    if not points:
        raise SavePointNotFound(f"There is no image and no save point {name!r}.")
    return points[-1]
