"""One row of the table: a framework or a habit, as two cells."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A framework or a habit.

    ``setup``: a cell that uses it.  ``check``: a cell that uses it again and leaves in ``seen`` what must be the same
    after everything.  ``packages``: distributions without which it cannot be tried.  ``instead``: what a user does
    where it is refused.  ``gpu``: whether it needs a GPU.
    """

    key: str
    title: str
    setup: str
    check: str
    packages: str = ""
    instead: str = ""
    gpu: bool = False

    def versions(self) -> dict[str, str]:
        """The version of each package.  Raises `importlib.metadata.PackageNotFoundError` where one is missing."""
        return {name: importlib.metadata.version(name) for name in self.packages.split()}

    def lacking(self) -> list[str]:
        """Packages that are not installed here."""
        installed = {one.metadata["Name"].lower().replace("_", "-") for one in importlib.metadata.distributions()}
        return [name for name in self.packages.split() if name.lower().replace("_", "-") not in installed]
