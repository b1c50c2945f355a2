"""A conda channel of stand-ins, for machines that reach no real one: this machine's Python, compiler and packages.

What it has is this machine's own, so that a build and its tests use real programs; that conda-forge's packages fit
together is not to be seen with it.  ``python conda_channel.py DIRECTORY REQUIREMENT ...`` makes such a channel in
DIRECTORY, builds the recipe DIRECTORY/packaging/conda with it, runs the recipe's tests, and prints the package's path.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import tarfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

PLATFORM = "linux-64"
SITE = Path(f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages")
PYTHON = ".".join(map(str, sys.version_info[:3]))
#: Names of the index that differ in conda-forge.
NAMES = {"blake3": "python-blake3"}


class Channel:
    """A channel in a directory; packages are files there."""

    def __init__(self, directory: Path, work: Path) -> None:
        self.directory = directory
        self._work = work
        self._records: dict[str, dict[str, Any]] = {}
        (directory / PLATFORM).mkdir(parents=True)
        (directory / "noarch").mkdir()

    def add(self, name: str, version: str, files: dict[str, str | Path], depends: Iterable[str] = ()) -> None:
        """Add a package; its files are text, or copies of this machine's files and of their links."""
        from rattler_build import ArchiveType, assemble_package

        stage = self._work / name
        for relative, content in files.items():
            target = stage / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                shutil.copy2(content, target, follow_symlinks=False)
            else:
                target.write_text(content)
                if content.startswith("#!"):
                    target.chmod(0o755)
        made = assemble_package(
            name,
            version,
            PLATFORM,
            "0",
            self.directory / PLATFORM,
            files_dir=stage,
            depends=list(depends),
            archive_type=ArchiveType.TarBz2,
            compression_level=1,
            detect_prefix=False,
        )
        package = Path(made.path)
        with tarfile.open(package) as archive:
            index = archive.extractfile("info/index.json")
            assert index is not None
            record = json.load(index)
        content_of = package.read_bytes()
        sums = {"sha256": hashlib.sha256(content_of).hexdigest(), "md5": hashlib.md5(content_of).hexdigest()}
        self._records[package.name] = {**record, **sums, "size": len(content_of)}

    def write_index(self) -> None:
        """Write what solvers read."""
        for subdir in (PLATFORM, "noarch"):
            packages = self._records if subdir == PLATFORM else {}
            index = {"info": {"subdir": subdir}, "packages": packages, "packages.conda": {}, "repodata_version": 1}
            (self.directory / subdir / "repodata.json").write_text(json.dumps(index))


def files_of(distribution: metadata.Distribution) -> dict[str, Path]:
    """Return the files of an installed package, by their path in an environment; programs are left out."""
    found = {}
    for file in distribution.files or ():
        path = Path(str(file.locate()))
        if ".." not in file.parts and path.is_file() and path.suffix != ".pyc":
            found[str(SITE / file)] = path
    return found


def closure(names: Iterable[str]) -> dict[str, metadata.Distribution]:
    """Return the installed packages of these names, and those that they need here, by normal name."""
    from packaging.requirements import Requirement

    found: dict[str, metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        requirement = Requirement(waiting.pop())
        normal = re.sub(r"[-_.]+", "-", requirement.name).lower()
        extras = requirement.extras or {""}
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not applies or (normal in found and not requirement.extras):
            continue
        found[normal] = distribution = metadata.distribution(requirement.name)
        for line in distribution.requires or ():
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                needed.marker = None
                waiting.append(str(needed))
    return found


def stand_ins(channel: Channel, requirements: list[str]) -> None:
    """Add Python, pip, setuptools, the compiler, and what pip's requirements name."""
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    link = channel.directory.parent / "python"
    link.symlink_to(base)
    home = f"home = {base.parent}\ninclude-system-site-packages = false\nversion = {PYTHON}\n"
    programs: dict[str, str | Path] = {f"bin/{name}": link for name in ("python", "python3", base.name)}
    channel.add("python", PYTHON, {**programs, "pyvenv.cfg": home})
    for name in ("pip", "setuptools"):
        distribution = metadata.distribution(name)
        # Without its program a recipe's `pip check` would run this machine's pip.
        program = {"bin/pip": '#!/bin/sh\nexec "${0%/*}/python" -m pip "$@"\n'} if name == "pip" else {}
        channel.add(name, distribution.version, {**files_of(distribution), **program}, ["python"])
    activate = {"etc/conda/activate.d/gcc.sh": f"export CC={shutil.which('gcc')}\n"}
    channel.add("gcc_linux-64", "12.0", dict(activate))
    channel.add("sysroot_linux-64", "2.34", {"share/stand-in/sysroot": "this machine's\n"})
    direct = {re.sub(r"[-_.]+", "-", re.split("[>=<]", line)[0]).lower(): line for line in requirements}
    needed = closure(requirements)
    others = [each for name, each in needed.items() if name not in {*direct, "pip", "setuptools"}]
    channel.add("others", "1.0", {path: file for each in others for path, file in files_of(each).items()}, ["python"])
    for normal, line in direct.items():
        name = re.split("[>=<]", line)[0]
        distribution = needed[normal]
        channel.add(NAMES.get(name, name), distribution.version, dict(files_of(distribution)), ["python", "others"])
    channel.write_index()


def build(directory: Path, requirements: list[str]) -> Path:
    """Build the recipe and run its tests.  Return the package; raises rattler-build's error."""
    import rattler_build

    stage = directory / "stage"
    stage.mkdir()
    channel = Channel(directory / "channel", stage)
    stand_ins(channel, requirements)
    recipe = directory / "packaging/conda"
    variants = rattler_build.VariantConfig.from_file(recipe / "variants.yaml")
    (variant,) = rattler_build.Stage0Recipe.from_file(recipe / "recipe.yaml").render(variants)
    tool = rattler_build.ToolConfiguration(test_strategy="native")
    made = variant.run_build(tool, output_dir=directory / "output", channels=[channel.directory.as_uri()])
    (package,) = made.packages
    return Path(package)


if __name__ == "__main__":
    print(build(Path(sys.argv[1]), sys.argv[2:]))
