"""Fetch CRIU from a Debian archive without changes to the system, and unpack the files needed to run it.

apt itself does the work - sources, proxy, signatures, hashes, dependencies - in a private state directory: an empty
``status`` makes it download the whole closure down to libc, so that the result runs beside any older distribution's
libraries.  No root is needed.  Standard library only.

Suites are tried newest first.  ``sid`` always has the latest CRIU; that it is Debian's unstable does not matter here,
because its libraries come along and nothing is installed.  The others are for days on which CRIU's dependencies cannot
be fulfilled in ``sid``, and for mirrors without it.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import CriuMissing
from ..subprocesses import CLEAN_ENVIRONMENT, Completed, run

SUITES = ("sid", "testing", "stable-backports", "stable")

#: Debian's keys in the package ``debian-archive-keyring``; the second name since Debian 13.
KEYRINGS = (
    Path("/usr/share/keyrings/debian-archive-keyring.gpg"),
    Path("/usr/share/keyrings/debian-archive-keyring.pgp"),
)

BY_HAND = (
    "Install CRIU >= 4.2.1 by hand: from your distribution, or from its sources (https://criu.org/Installation), "
    "and name it in $JUPYTER_GPU_CKPT_CRIU if it is not on PATH."
)

#: Seconds for one apt or dpkg call; an index is about 10 MB, the packages together about 8 MB.
APT_TIMEOUT_S = 180.0

#: apt's settings for the private state; ``{}`` are filled in by `PrivateApt`.  Read after the machine's own
#: configuration (apt.conf(5), ``-c``): its proxies and transports stay in force, its hooks and pins must not.
_CONFIGURATION = """\
Dir::State "{directory}/state";
Dir::State::status "{directory}/status";
Dir::Cache "{directory}/cache";
Dir::Etc::sourcelist "{directory}/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Acquire::Languages "none";
Acquire::Retries "1";
Acquire::http::Timeout "30";
Acquire::https::Timeout "30";
Acquire::AllowInsecureRepositories "false";
Acquire::AllowWeakRepositories "false";
Acquire::AllowDowngradeToInsecureRepositories "false";
APT::Get::AllowUnauthenticated "false";
APT::Update::Error-Mode "any";
APT::Keep-Downloaded-Packages "true";
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Pre-Install-Pkgs;
#clear DPkg::Pre-Invoke;
#clear DPkg::Post-Invoke;
"""


@dataclass(frozen=True)
class Fetched:
    """An unpacked CRIU: the tree (``usr/sbin/criu``, ``usr/lib/<triplet>/``) and its packages' versions by name."""

    tree: Path
    packages: dict[str, str]
    suite: str


def require_tools() -> None:
    """Raise `CriuMissing` with a hint for an installation by hand unless apt and dpkg are here."""
    missing = [name for name in ("apt-get", "apt-cache", "dpkg", "dpkg-deb") if shutil.which(name) is None]
    if missing:
        message = f"CRIU can be unpacked only on Debian, Ubuntu and kin ({', '.join(missing)} not found)."
        raise CriuMissing(message, hint=BY_HAND)


def archive_keyring() -> Path:
    """Return the file of the Debian archive's keys; metadata without their signature is refused."""
    for keyring in KEYRINGS:
        if keyring.is_file():
            return keyring
    message = "The keys of the Debian archive are not on this machine, so its packages cannot be verified."
    hint = "apt-get install debian-archive-keyring (as root), or give the keys with --keyring FILE."
    raise CriuMissing(message, hint=hint)


def mirrors() -> list[str]:
    """Return the Debian mirrors of the machine's own apt sources, those known to be Debian's first.

    apt reads its sources itself (``apt-get indextargets``), so both formats are understood.  Where the package lists
    were deleted, as in container images, apt does not know the origin of a source; then the archive keyring decides.
    """
    origins: dict[str, str] = {}
    # with release information apt lists only downloaded indexes, without it all
    for option in ("--release-info", "--no-release-info"):
        everything = ("-o", "APT::Get::IndexTargets::Filtered=false")
        listed = _apt("apt-get", "indextargets", option, *everything, "Created-By: Packages", what="apt's sources")
        for stanza in listed.out.split("\n\n"):
            fields = dict(line.split(": ", 1) for line in stanza.splitlines() if ": " in line)
            uri = fields.get("Repo-URI", "cdrom:")
            if fields.get("Component") == "main" and not uri.startswith("cdrom:"):
                # the security archive has only suites of its own
                security = "security" in fields.get("Release", "")
                origins.setdefault(uri, "security" if security else fields.get("Origin", ""))
    return [uri for wanted in ("Debian", "") for uri, origin in origins.items() if origin == wanted]


def fetch(
    work: Path, floor: tuple[int, ...], report: Callable[[str], None], *, mirror: str | None, keyring: Path | None
) -> Fetched:
    """Download CRIU >= ``floor`` and its dependencies into ``work``, and unpack them there.

    ``report`` gets progress lines.  Raises `CriuMissing` when no mirror and suite has it, with each one's reason in the
    details.  The caller removes ``work``.
    """
    require_tools()
    keys = keyring or archive_keyring()
    uris = [mirror] if mirror else mirrors()
    if not uris:
        hint = f"Give one with --mirror URL (the keys: package debian-archive-keyring). Or: {BY_HAND}"
        raise CriuMissing("This machine's apt sources name no Debian mirror.", hint=hint)
    tried: list[str] = []
    for (number, uri), suite in itertools.product(enumerate(uris, 1), SUITES):
        apt = PrivateApt(work / f"apt-{number}-{suite}", uri, suite, keys)
        report(f"Looking for CRIU in Debian {suite} (mirror {number} of {len(uris)}) ...")
        try:
            apt.update()
            version = apt.candidate()
            if version is None or not at_least(version, floor):
                raise CriuMissing(f"has {version or 'none'}")
            report(f"Downloading CRIU {version} and its libraries ...")
            packages = apt.download()
        except CriuMissing as error:
            tried.append(f"mirror {number}, {suite}: {error.message}")
            continue
        tree = work / "unpacked"
        for package in packages:
            _checked(["dpkg-deb", "-x", package, tree], f"unpack {package.name}")
        return Fetched(tree, dict(_name_and_version(package) for package in packages), suite)
    wanted = ".".join(map(str, floor))
    why = " | ".join(tried)
    raise CriuMissing(f"No Debian suite with CRIU >= {wanted} could be used: {why}", hint=BY_HAND, tried=tried)


class PrivateApt:
    """apt with a state of its own, one suite of one mirror as its only source, and no installed packages."""

    def __init__(self, directory: Path, mirror: str, suite: str, keyring: Path) -> None:
        self._directory = directory
        self._mirror = mirror
        for name in ("state/lists/partial", "cache/archives/partial"):
            (directory / name).mkdir(parents=True)
        # apt started by root downloads as the user _apt, who must reach the lists; nothing here is secret but a
        # password that the mirror's address may contain
        for parent in (directory.parent, directory):
            parent.chmod(0o755)
        (directory / "status").touch()
        architecture = _checked(["dpkg", "--print-architecture"], "ask dpkg for the architecture").out.strip()
        sources = directory / "sources.list"
        sources.touch(mode=0o600)
        sources.write_text(f"deb [target=Packages arch={architecture} signed-by={keyring}] {mirror} {suite} main\n")
        (directory / "apt.conf").write_text(_CONFIGURATION.format(directory=directory))

    def update(self) -> None:
        self._run("apt-get", "update", what="the package list cannot be fetched or verified")

    def candidate(self) -> str | None:
        """Return the Debian version of the suite's ``criu``; ``None`` without one."""
        return candidate(self._run("apt-cache", "policy", "criu", what="the package list cannot be read").out)

    def download(self) -> list[Path]:
        """Download and verify the packages of CRIU's dependency closure."""
        install = ("install", "--yes", "--download-only", "--no-install-recommends", "criu")
        self._run("apt-get", *install, what="the packages cannot be downloaded")
        return sorted((self._directory / "cache/archives").glob("*.deb"))

    def _run(self, program: str, *arguments: str, what: str) -> Completed:
        try:
            return _apt(program, "-c", str(self._directory / "apt.conf"), *arguments, what=what)
        except CriuMissing as error:  # the address may contain a password, and the user knows the mirror
            raise CriuMissing(error.message.replace(self._mirror.rstrip("/"), "<mirror>")) from None


def candidate(policy: str) -> str | None:
    """Return the candidate version in the output of ``apt-cache policy``."""
    match = re.search(r"^\s*Candidate:\s*(\S+)", policy, re.MULTILINE)
    return None if match is None or match.group(1) == "(none)" else match.group(1)


def at_least(version: str, floor: tuple[int, ...]) -> bool:
    """Return whether a Debian version is that upstream release or newer, by dpkg's own rules."""
    return run(["dpkg", "--compare-versions", version, "ge", ".".join(map(str, floor))], timeout_s=10).status == 0


def copy_runtime(tree: Path, destination: Path) -> None:
    """Copy CRIU, its loader and the libraries that the loader lists, in the same layout."""
    try:
        criu, loader = program_and_loader(tree)
    except FileNotFoundError:
        message = "The downloaded packages contain no CRIU and libc where Debian has them."
        raise CriuMissing(message, hint=BY_HAND) from None
    libraries = loader.parent
    listed = _checked([loader, "--library-path", libraries, "--list", criu], "list CRIU's libraries")
    needed = {Path(path) for path in re.findall(r"=> (\S+) \(0x", listed.out)} - {loader}
    outside = sorted(str(path) for path in needed if path.parent != libraries)
    if outside or "not found" in listed.out:
        raise CriuMissing(f"The unpacked CRIU is not complete: {', '.join(outside) or listed.tail()}")
    for source in (criu, loader, *sorted(needed)):
        target = destination / source.relative_to(tree)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)  # follows the link: the file must have the name that the loader uses


def program_and_loader(tree: Path) -> tuple[Path, Path]:
    """Return CRIU and the dynamic loader of an unpacked tree; raises `FileNotFoundError` if ``tree`` is none."""
    criu = tree / "usr/sbin/criu"
    loaders = sorted(tree.glob("usr/lib/*/ld-linux-*.so.*"))
    if not criu.is_file() or not loaders:
        raise FileNotFoundError(f"no unpacked CRIU in {tree}")
    return criu, loaders[0]


def _name_and_version(package: Path) -> tuple[str, str]:
    """Parse ``name_version_arch.deb``, apt's name of a downloaded package (a ``:`` is written ``%3a``)."""
    name, version, _ = package.stem.split("_")
    return name, version.replace("%3a", ":")


def _apt(program: str, *arguments: str, what: str) -> Completed:
    # the machine reaches its mirror by these
    own = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy") or name == "APT_CONFIG"}
    return _checked([program, *arguments], what, CLEAN_ENVIRONMENT | own)


def _checked(argv: list[str | Path], what: str, env: dict[str, str] | None = None) -> Completed:
    """Run a program that must succeed; raises `CriuMissing` with the end of its output."""
    try:
        done = run([str(word) for word in argv], timeout_s=APT_TIMEOUT_S, env=env)
    except (TimeoutError, OSError) as error:
        why = str(error)
    else:
        if done.status == 0:
            return done
        complaints = [line.removeprefix("E: ") for line in done.err.splitlines() if line.startswith("E: ")]
        why = "; ".join(complaints) or done.tail()
    raise CriuMissing(f"{what}: {why}")
