"""Find a fit CRIU, or install one: `find`, `check`, `install`.

Standard library only, and importable before anything is pip-installed: ``scripts/install-criu`` starts here.

Fit means release `FLOOR` or newer: older ones lack the fix for a forged-credentials hole, and Debian 12's 3.17.1
does not start on kernels from 6.13 on ("Unexpected rt vDSO area bounds").
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import CriuMissing, GpuCkptError
from ..paths import data_directory
from ..subprocesses import CLEAN_ENVIRONMENT, run
from . import debian

#: The oldest release that is fit.
FLOOR = (4, 2, 1)

#: A path to a CRIU program, to an unpacked tree, or to a directory of such trees.
VARIABLE = "JUPYTER_GPU_CKPT_CRIU"

#: Searched after PATH: an ordinary user's PATH often lacks them.
SYSTEM_DIRECTORIES = ("/usr/local/sbin", "/usr/sbin")

VERSION_TIMEOUT_S = 10.0
CHECK_TIMEOUT_S = 30.0
SYSTEM_INSTALL_TIMEOUT_S = 600.0

Origin = Literal["system", "unpacked", "environment"]


@dataclass(frozen=True)
class CriuBinary:
    """A CRIU that starts.  ``argv``: its path, or a loader with its library path and CRIU's path."""

    argv: tuple[str, ...]
    version: tuple[int, ...]
    origin: Origin

    @property
    def fit(self) -> bool:
        return self.version >= FLOOR

    def as_dict(self) -> dict[str, Any]:
        return {"argv": list(self.argv), "version": dotted(self.version), "origin": self.origin}


@dataclass(frozen=True)
class Check:
    """The result of ``criu check``."""

    ok: bool
    what: str


def dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def default_prefix() -> Path:
    """Return the directory of unpacked trees, one for each release."""
    return data_directory("criu")


# -- finding ----------------------------------------------------------------------------------------------------------


def find() -> CriuBinary:
    """Find the CRIU to use: that of ``$JUPYTER_GPU_CKPT_CRIU``, else a fit one of the system, else an unpacked one.

    Each candidate is started once (``--version``, about 5 ms).  Raises `CriuMissing` with the unfit candidates; an
    unfit CRIU that was named explicitly is never silently replaced by another.
    """
    unfit: list[str] = []
    named = os.environ.get(VARIABLE)
    for argv, origin in _candidates(named):
        try:
            binary = CriuBinary(argv, version_of(argv), origin)
        except CriuMissing as error:
            unfit.append(error.message)
            continue
        if binary.fit:
            return binary
        unfit.append(f"{argv[-1]} is {dotted(binary.version)}")
    if named:
        message = f"${VARIABLE} names no CRIU >= {dotted(FLOOR)}: {'; '.join(unfit) or 'there is none at ' + named}."
        raise CriuMissing(message, hint=f"Unset ${VARIABLE}, or let it name another one.", unfit=unfit, named=named)
    found = f" ({'; '.join(unfit)})" if unfit else ""
    raise CriuMissing(f"No CRIU >= {dotted(FLOOR)} was found{found}.", unfit=unfit)


def version_of(argv: Sequence[str]) -> tuple[int, ...]:
    """Return the release of the CRIU at ``argv``; raises `CriuMissing` if it does not start or is no CRIU."""
    try:
        done = run([*argv, "--version"], timeout_s=VERSION_TIMEOUT_S)
    except (OSError, TimeoutError) as error:
        raise CriuMissing(f"{argv[-1]} does not start: {error}") from None
    match = re.search(r"^Version: (\d+(?:\.\d+)*)", done.out, re.MULTILINE)
    if done.status != 0 or match is None:
        raise CriuMissing(f"{argv[-1]} reports no version: {done.tail(1)}")
    return tuple(map(int, match.group(1).split(".")))


def _candidates(named: str | None) -> Iterator[tuple[tuple[str, ...], Origin]]:
    if named:
        yield from ((argv, "environment") for argv in _started_by(Path(named)))
        return
    if system := _system():
        yield (system,), "system"
    yield from ((argv, "unpacked") for argv in _started_by(default_prefix()))


def _system() -> str | None:
    return shutil.which("criu", path=os.pathsep.join((os.environ.get("PATH", ""), *SYSTEM_DIRECTORIES)))


def _started_by(path: Path) -> Iterator[tuple[str, ...]]:
    """Argument lists for the CRIUs at ``path``: a program, an unpacked tree (or its program), or trees by release."""
    path = path.absolute()
    if path.is_file():
        # the program of an unpacked tree needs that tree's libraries, unless it is the system's own
        trees, programs = [path.parents[2]] if len(path.parents) > 3 else [], [path]
    else:
        trees = [path, *_releases(path)]
        programs = [path / "usr/sbin/criu", path / "sbin/criu"]
    unpacked = False
    for tree in trees:
        with contextlib.suppress(FileNotFoundError):
            criu, loader = debian.program_and_loader(tree)
            if path.is_dir() or criu == path:
                unpacked = True
                yield str(loader), "--library-path", str(loader.parent), str(criu)
    if not unpacked:
        yield from ((str(program),) for program in programs if program.is_file())


def _releases(path: Path) -> list[Path]:
    """Return the directories that are named after releases, the newest first."""
    try:
        found = [entry for entry in path.iterdir() if entry.is_dir() and _release(entry.name)]
    except OSError:  # missing or unreadable
        return []
    return sorted(found, key=lambda tree: _release(tree.name), reverse=True)


def _release(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.split("."))) if re.fullmatch(r"\d+(\.\d+)*", name) else ()


# -- checking ---------------------------------------------------------------------------------------------------------


def check(binary: CriuBinary) -> Check:
    """Run ``criu check`` with the rights that CRIU will have in a capsule.

    Directly as root; else, as an ordinary user has CRIU's rights in a user namespace only, inside throw-away
    namespaces, with ``--unprivileged`` and a capsule's capabilities.  CRIU checks features of Linux, not whether a
    given process can be dumped.  Never raises; at most `CHECK_TIMEOUT_S` seconds.
    """
    if os.geteuid() == 0:
        try:
            done = run([*binary.argv, "check", "--no-default-config"], timeout_s=CHECK_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            return Check(False, str(error))
        return Check(done.status == 0, "Looks good" if done.status == 0 else done.tail())
    try:
        answers = probe_namespaces((*binary.argv, "check", "--unprivileged", "--no-default-config"))
    except (OSError, TimeoutError, ValueError) as error:
        return Check(False, str(error))
    if "run" not in answers:
        refused = [f"{step}: {answer['message']}" for step, answer in answers.items() if answer]
        return Check(False, f"cannot run: the namespaces that CRIU needs are refused ({', '.join(refused)})")
    done_inside = answers["run"]
    errors = [line for line in done_inside["output"].splitlines() if "Error" in line]
    good = done_inside["status"] == 0
    return Check(good, "Looks good" if good else "; ".join(errors[-3:]) or done_inside["output"].strip()[-300:])


def probe_namespaces(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run ``namespace_probe.py``, and ``argv`` inside it.  Raises `OSError`, `TimeoutError`, `ValueError`."""
    order = {"user": os.geteuid() != 0, "argv": list(argv), "seconds": CHECK_TIMEOUT_S}
    script = Path(__file__).parents[1] / "doctor" / "namespace_probe.py"
    # a longer deadline than the one inside, which has the better answer
    done = run(
        [sys.executable, "-I", "-S", script, json.dumps(order)], timeout_s=CHECK_TIMEOUT_S + 10, env=CLEAN_ENVIRONMENT
    )
    try:
        answers: dict[str, Any] = json.loads(done.out)
    except ValueError:
        raise ValueError(f"the trial of the namespaces failed: {done.tail()}") from None
    return answers


# -- installing -------------------------------------------------------------------------------------------------------


def install(
    prefix: Path | None = None,
    *,
    force_unpack: bool = False,
    allow_system_install: bool = True,
    mirror: str | None = None,
    keyring: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> CriuBinary:
    """Return a fit CRIU, the first of these that works:

    1. The one that ``$JUPYTER_GPU_CKPT_CRIU`` names, or the system's, if ``criu check`` succeeds.
    2. As root: the distribution's own package, if that is new enough.
    3. Debian's package with its libraries, unpacked under ``prefix`` (default: `default_prefix`), which needs no root.

    ``force_unpack`` skips 1 and 2 (and finds an earlier run's tree).  ``report`` gets progress lines.  Raises
    `CriuMissing`.  *After failure* nothing is left behind.
    """
    prefix = (prefix or default_prefix()).absolute()
    if not force_unpack:
        if os.environ.get(VARIABLE):
            try:
                return find()
            except CriuMissing as error:  # it may name a tree that is to be unpacked now
                report(error.message)
        if system := _fit_system(report):
            return system
        if allow_system_install and os.geteuid() == 0 and _system_install(report) and (system := _fit_system(report)):
            return system
    for argv in _started_by(prefix):
        with contextlib.suppress(CriuMissing):
            there = CriuBinary(argv, version_of(argv), "unpacked")
            if there.fit:
                report(f"CRIU {dotted(there.version)} is already there.")
                return there
    return _unpack(prefix, report, mirror, keyring)


def _fit_system(report: Callable[[str], None]) -> CriuBinary | None:
    if (system := _system()) is None:
        return None
    try:
        binary = CriuBinary((system,), version_of((system,)), "system")
    except CriuMissing as error:
        report(error.message)
        return None
    if not binary.fit:
        report(f"The system's CRIU is {dotted(binary.version)}; {dotted(FLOOR)} is needed.")
    elif (answer := check(binary)).ok:
        report(f"The system's CRIU {dotted(binary.version)} is fit.")
        return binary
    else:
        report(f"The system's CRIU {dotted(binary.version)} does not work here: {answer.what}")
    return None


def _system_install(report: Callable[[str], None]) -> bool:
    """Install the distribution's package if apt knows a new one; the administrator's package lists stay as they are."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return False
    try:
        version = debian.candidate(run(["apt-cache", "policy", "criu"], timeout_s=60).out)
        if version is None or not debian.at_least(version, FLOOR):
            report(f"The distribution's CRIU is {version or 'not known to apt'}; {dotted(FLOOR)} is needed.")
            return False
        report(f"Installing the distribution's CRIU {version} ...")
        done = run(
            ["apt-get", "install", "--yes", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=60", "criu"],
            timeout_s=SYSTEM_INSTALL_TIMEOUT_S,
            env={**CLEAN_ENVIRONMENT, "DEBIAN_FRONTEND": "noninteractive"},
        )
    except (OSError, TimeoutError) as error:
        report(f"The distribution's CRIU was not installed: {error}")
        return False
    if done.status != 0:
        report(f"The distribution's CRIU was not installed: {done.tail()}")
    return done.status == 0


def _unpack(prefix: Path, report: Callable[[str], None], mirror: str | None, keyring: Path | None) -> CriuBinary:
    """Fetch, prune, try, and only then rename into ``prefix``, which has a complete tree at all times, or none."""
    debian.require_tools()
    try:
        prefix.mkdir(parents=True, exist_ok=True)
        # in the same file system as ``prefix``, or the rename would not be atomic
        fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=prefix))
    except OSError as error:
        hint = "Name another directory with --prefix."
        raise CriuMissing(f"{prefix} cannot be written: {error.strerror}", hint=hint) from error
    try:
        with tempfile.TemporaryDirectory(prefix="gpu-ckpt-criu-") as work:
            fetched = debian.fetch(Path(work), FLOOR, report, mirror=mirror, keyring=keyring)
            debian.copy_runtime(fetched.tree, fresh)
        (argv,) = _started_by(fresh)
        version = version_of(argv)
        if version < FLOOR:
            raise CriuMissing(f"The unpacked CRIU says it is {dotted(version)}.")
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        about = {"version": dotted(version), "created": created, "suite": fetched.suite, "packages": fetched.packages}
        (fresh / "criu.json").write_text(json.dumps(about, indent=1) + "\n")
        fresh.chmod(0o755)
        final = prefix / dotted(version)
        _rename_tree(fresh, final)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    report(f"CRIU {dotted(version)} is unpacked.")
    (argv,) = _started_by(final)
    return CriuBinary(argv, version_of(argv), "unpacked")


def _rename_tree(fresh: Path, final: Path) -> None:
    """Rename ``fresh`` to ``final``, and replace a broken tree there; one that works may be in use, and stays."""
    for argv in _started_by(final):
        with contextlib.suppress(CriuMissing):
            version_of(argv)
            return
    if final.exists():
        broken = fresh.with_name(fresh.name.replace(".new-", ".old-"))
        final.rename(broken)
        shutil.rmtree(broken, ignore_errors=True)
    fresh.rename(final)


def _is_used(binary: CriuBinary) -> bool:
    with contextlib.suppress(CriuMissing):
        return find().argv == binary.argv
    return False


# -- command line -----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """``install-criu``: exit status 0, or the error's own."""
    parser = argparse.ArgumentParser(
        prog="install-criu", description=f"Find or install CRIU {dotted(FLOOR)} or newer; works without root."
    )
    parser.add_argument("--prefix", type=Path, help="where to unpack (default: the user's Jupyter data directory)")
    parser.add_argument("--force-unpack", action="store_true", help="unpack even if the system has a fit CRIU")
    parser.add_argument(
        "--no-system", action="store_true", help="do not install the distribution's package, even as root"
    )
    parser.add_argument("--mirror", metavar="URL", help="Debian mirror (default: the machine's own apt sources)")
    parser.add_argument("--keyring", type=Path, metavar="FILE", help="keys that sign the mirror (default: Debian's)")
    parser.add_argument("--check", action="store_true", help="only report the CRIU that is there")
    parser.add_argument("--json", action="store_true", help="the result as JSON on standard output")
    options = parser.parse_args(argv)

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    flags = {"force_unpack": options.force_unpack, "allow_system_install": not options.no_system}
    sources = {"mirror": options.mirror, "keyring": options.keyring}
    try:
        binary = find() if options.check else install(options.prefix, **flags, **sources, report=report)
    except GpuCkptError as error:
        if options.json:
            print(json.dumps({"error": error.as_dict()}))
        else:
            report(str(error))
        return error.exit_status
    answer = check(binary)
    if options.json:
        print(json.dumps(binary.as_dict() | {"check": {"ok": answer.ok, "what": answer.what}}))
    else:
        print(f"CRIU {dotted(binary.version)} ({binary.origin}): {' '.join(binary.argv)}\ncriu check: {answer.what}")
    if not options.check and not _is_used(binary):
        report(f"To use it, set {VARIABLE}={(options.prefix or default_prefix()).absolute()}")
    return 0 if answer.ok or not options.check else CriuMissing.exit_status


if __name__ == "__main__":
    sys.exit(main())
