"""Debian archives as a source of CRIU: forged and useless ones, and those that the machine itself names."""

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.criu import debian
from jupyter_gpu_ckpt.criu.install import FLOOR, install
from jupyter_gpu_ckpt.errors import CriuMissing

GPG = shutil.which("gpg")
needs_apt = pytest.mark.skipif(shutil.which("apt-get") is None, reason="no apt here: run these on Debian or Ubuntu")
needs_gpg = pytest.mark.skipif(GPG is None, reason="no gpg on this machine: install gnupg to forge archives")


# -- archives that must not be trusted, or do not help ----------------------------------------------------------------


@pytest.fixture(scope="module")
def archive(public_directory):
    """Makes a local archive of one suite, ``sid``, with a package ``criu`` of a given version; signed or not."""
    keys = public_directory / "gnupg"
    keys.mkdir(mode=0o700)

    def gpg(*arguments):
        words = [
            GPG,
            "--homedir",
            keys,
            "--batch",
            "--yes",
            "--pinentry-mode",
            "loopback",
            "--passphrase",
            "",
            *arguments,
        ]
        subprocess.run(words, check=True, capture_output=True, timeout=60)

    keyring = public_directory / "test-archive-keyring.gpg"
    gpg("--quick-gen-key", "Test archive <test@example.invalid>", "rsa2048", "sign", "never")
    gpg("--output", keyring, "--export")

    def make(name: str, version: str, *, signed: bool, altered: bool = False) -> tuple[str, Path]:
        root = public_directory / name
        content = root / "content"
        (content / "DEBIAN").mkdir(parents=True)
        architecture = subprocess.check_output(["dpkg", "--print-architecture"], text=True, timeout=60).strip()
        control = (
            f"Package: criu\nVersion: {version}\nArchitecture: {architecture}\nMaintainer: nobody\nDescription: fake\n"
        )
        (content / "DEBIAN/control").write_text(control)
        package = root / "pool/criu.deb"
        package.parent.mkdir()
        subprocess.run(
            ["dpkg-deb", "--root-owner-group", "-b", content, package], check=True, capture_output=True, timeout=60
        )
        data = package.read_bytes()
        index = root / f"dists/sid/main/binary-{architecture}/Packages"
        index.parent.mkdir(parents=True)
        digest = hashlib.sha256(data).hexdigest()
        index.write_text(f"{control}Filename: pool/criu.deb\nSize: {len(data)}\nSHA256: {digest}\n\n")
        listed = index.read_bytes()
        release = root / "dists/sid/Release"
        release.write_text(
            f"Origin: Debian\nSuite: unstable\nCodename: sid\nArchitectures: {architecture}\nComponents: main\n"
            "Date: Thu, 01 Jan 2026 00:00:00 UTC\n"
            f"SHA256:\n {hashlib.sha256(listed).hexdigest()} {len(listed)} main/binary-{architecture}/Packages\n"
        )
        if signed:
            gpg("--clearsign", "--output", root / "dists/sid/InRelease", release)
        if altered:
            package.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        return root.as_uri(), keyring

    return make


def refused(tmp_path, mirror: str, keyring: Path | None) -> str:
    prefix = tmp_path / "prefix"
    with pytest.raises(CriuMissing) as caught:
        install(prefix, force_unpack=True, mirror=mirror, keyring=keyring)
    assert list(prefix.iterdir()) == []
    assert mirror not in str(caught.value)
    return next(why for why in caught.value.details.get("tried", [caught.value.message]) if ", testing:" not in why)


@needs_gpg
@needs_apt
@pytest.mark.parametrize(
    ("name", "version", "how", "why"),
    [
        ("unsigned", "9.9-1", {"signed": False}, "not signed"),
        ("altered", "9.9-1", {"signed": True, "altered": True}, "Hash Sum mismatch"),
        ("old", "4.1.1-1", {"signed": True}, "sid: has 4.1.1-1"),
        ("without a CRIU in it", "9.9-1", {"signed": True}, "contain no CRIU"),
    ],
)
def test_a_package_that_is_refused(archive, tmp_path, name, version, how, why):
    mirror, keyring = archive(name.replace(" ", "-"), version, **how)
    assert why in refused(tmp_path, mirror, keyring)


@needs_gpg
@needs_apt
def test_metadata_signed_by_a_stranger_is_refused(archive, tmp_path):
    mirror, _ = archive("stranger", "9.9-1", signed=True)
    assert "cannot be fetched or verified" in refused(tmp_path, mirror, debian.archive_keyring())


@needs_apt
def test_without_debians_keys_nothing_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr(debian, "KEYRINGS", (tmp_path / "none.gpg",))
    assert "keys of the Debian archive are not on this machine" in refused(tmp_path, "http://archive.invalid", None)


# -- the machine's own sources ----------------------------------------------------------------------------------------


@pytest.fixture
def apt_sources(tmp_path, monkeypatch):
    """Replaces the machine's apt sources by files of the given names."""

    def write(**files: str) -> None:
        parts = tmp_path / "sources.list.d"
        parts.mkdir()
        for name, text in files.items():
            (parts / name.replace("_", ".")).write_text(text)
        settings = (
            f'Dir::Etc::sourcelist "/dev/null";\nDir::Etc::sourceparts "{parts}";\nDir::State "{tmp_path}/state";\n'
        )
        (tmp_path / "apt.conf").write_text(settings)
        monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))

    return write


@needs_apt
def test_mirrors_of_both_formats(apt_sources):
    apt_sources(
        one_list="deb [trusted=yes] http://one.invalid/debian trixie main contrib\n"
        "# deb http://off.invalid/debian sid main\n",
        two_sources="Types: deb deb-src\nURIs: http://two.invalid/debian\nSuites: sid sid-updates\nComponents: main\n\n"
        "Types: deb\nURIs: http://three.invalid/debian-security\nSuites: trixie-security\nComponents: main\n\n"
        "Types: deb\nEnabled: no\nURIs: http://four.invalid/debian\nSuites: sid\nComponents: main\n",
    )
    assert debian.mirrors() == ["http://one.invalid/debian/", "http://two.invalid/debian/"]


@needs_apt
def test_without_a_mirror_the_hint_names_the_option(apt_sources, tmp_path):
    apt_sources(none_list="deb http://apps.invalid/deb stable extra\n")
    with pytest.raises(CriuMissing) as caught:
        install(tmp_path / "prefix", force_unpack=True, keyring=tmp_path / "any.gpg")
    assert "--mirror URL" in caught.value.hint


def test_candidate_of_apt_cache_policy():
    assert debian.candidate("criu:\n  Installed: (none)\n  Candidate: 4.2.1-1\n") == "4.2.1-1"
    assert debian.candidate("criu:\n  Installed: (none)\n  Candidate: (none)\n") is None
    assert debian.candidate("N: Unable to locate package criu\n") is None


@needs_apt
@pytest.mark.parametrize(
    ("version", "enough"), [("4.2.1-1", True), ("4.2.1-1~bpo13+1", True), ("4.2.1~rc1-1", False), ("3.17.1-2", False)]
)
def test_debian_versions(version, enough):
    assert debian.at_least(version, FLOOR) is enough
