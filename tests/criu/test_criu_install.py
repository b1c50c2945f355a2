"""Finding CRIU among fit and unfit ones, and getting one from a real archive; `test_debian` has forged ones."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ordinary_user import ordinary_user

from jupyter_gpu_ckpt import subprocesses
from jupyter_gpu_ckpt.criu import debian
from jupyter_gpu_ckpt.criu import install as criu_install
from jupyter_gpu_ckpt.criu.install import FLOOR, VARIABLE, CriuBinary, check, find, install
from jupyter_gpu_ckpt.errors import CriuMissing
from jupyter_gpu_ckpt.subprocesses import Completed

pytestmark = pytest.mark.slow  # installs CRIU

REPOSITORY = Path(__file__).parents[2]
needs_apt = pytest.mark.skipif(shutil.which("apt-get") is None, reason="no apt here: run these on Debian or Ubuntu")
online = pytest.mark.skipif("GPU_CKPT_OFFLINE" in os.environ, reason="no Debian mirror: unset GPU_CKPT_OFFLINE")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: run the tests as root too")


@pytest.fixture(autouse=True)
def bare_host(tmp_path, monkeypatch):
    """A host without any CRIU, and a user with an empty data directory."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(criu_install, "SYSTEM_DIRECTORIES", (str(tmp_path / "sbin"),))
    tools = tmp_path / "tools"  # the rest of PATH, without a criu
    tools.mkdir()
    for name in ("apt-get", "apt-cache", "dpkg", "dpkg-deb", "sh", "tar"):
        if program := shutil.which(name):
            (tools / name).symlink_to(program)
    monkeypatch.setenv("PATH", str(tools))


def fake_criu(path: Path, version: str, *, status: int = 0, check_status: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'#!/bin/sh\ncase "$1" in\n--version) echo "Version: {version}"; echo "GitID: v{version}"; exit {status};;\n'
        f"check) echo 'Error (criu/fake.c:1): no luck' >&2; exit {check_status};;\nesac\n"
    )
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def unpacked(public_directory):
    """A real CRIU from a real mirror: (the prefix, what was said)."""
    said: list[str] = []
    install(public_directory / "criu", force_unpack=True, report=said.append)
    return public_directory / "criu", said


# -- finding ----------------------------------------------------------------------------------------------------------


def test_nothing_there():
    with pytest.raises(CriuMissing) as caught:
        find()
    assert caught.value.message == "No CRIU >= 4.2.1 was found."
    assert "install-criu" in caught.value.hint


def test_a_fit_system_one_is_preferred_to_an_unpacked_one(tmp_path):
    system = fake_criu(tmp_path / "sbin/criu", "4.3")
    fake_criu(tmp_path / "data/gpu-ckpt/criu/4.4/usr/sbin/criu", "4.4")
    assert find() == CriuBinary((str(system),), (4, 3), "system")


def test_an_old_system_one_is_named_and_passed_over(tmp_path):
    system = fake_criu(tmp_path / "sbin/criu", "3.17.1")
    with pytest.raises(CriuMissing) as caught:
        find()
    assert caught.value.details["unfit"] == [f"{system} is 3.17.1"]
    assert "3.17.1" in caught.value.message


@pytest.mark.parametrize(("version", "fit"), [("4.2", False), ("4.2.1", True), ("4.2.0.9", False), ("4.10", True)])
def test_releases_are_compared_as_numbers(tmp_path, version, fit):
    fake_criu(tmp_path / "sbin/criu", version)
    if fit:
        assert criu_install.dotted(find().version) == version
    else:
        with pytest.raises(CriuMissing):
            find()


@pytest.mark.parametrize(
    ("content", "why"),
    [("#!/bin/sh\nexit 127\n", "reports no version"), ("\x7fELF nonsense", "does not start"), ("", "")],
)
def test_one_that_does_not_start_is_unfit(tmp_path, content, why):
    broken = tmp_path / "sbin/criu"
    broken.parent.mkdir()
    broken.write_text(content)
    broken.chmod(0o755)
    with pytest.raises(CriuMissing) as caught:
        find()
    assert why in caught.value.message


def test_one_that_hangs_is_unfit(tmp_path, monkeypatch):
    monkeypatch.setattr(criu_install, "VERSION_TIMEOUT_S", 0.3)
    hanging = fake_criu(tmp_path / "sbin/criu", "4.2.1")
    hanging.write_text("#!/bin/sh\nwhile :; do :; done\n")
    with pytest.raises(CriuMissing, match="did not end within"):
        find()


def test_the_variable_rules(tmp_path, monkeypatch):
    fake_criu(tmp_path / "sbin/criu", "4.3")
    mine = fake_criu(tmp_path / "mine", "4.2.1")
    monkeypatch.setenv(VARIABLE, str(mine))
    assert find() == CriuBinary((str(mine),), (4, 2, 1), "environment")


@pytest.mark.parametrize("version", ["3.17.1", None])
def test_an_unfit_one_in_the_variable_is_not_replaced_silently(tmp_path, monkeypatch, version):
    fake_criu(tmp_path / "sbin/criu", "4.3")
    if version:
        fake_criu(tmp_path / "mine", version)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine"))
    with pytest.raises(CriuMissing) as caught:
        find()
    assert VARIABLE in caught.value.message and str(version or "there is none") in caught.value.message
    assert VARIABLE in caught.value.hint


# -- checking ---------------------------------------------------------------------------------------------------------


@as_root
def test_check_says_why(tmp_path):
    binary = CriuBinary((str(fake_criu(tmp_path / "criu", "4.2.1", check_status=1)),), (4, 2, 1), "system")
    answer = check(binary)
    assert not answer.ok and "no luck" in answer.what


def test_check_never_raises():
    answer = check(CriuBinary(("/nonexistent/criu",), (4, 2, 1), "system"))
    assert not answer.ok and "No such file" in answer.what


def test_check_says_which_namespace_is_refused(monkeypatch):
    refused = {"user": {"errno": 1, "message": "Operation not permitted"}}
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(criu_install, "run", lambda *_, **__: Completed(0, json.dumps(refused), ""))
    assert "user: Operation not permitted" in check(CriuBinary(("/criu",), FLOOR, "system")).what


# -- installing -------------------------------------------------------------------------------------------------------


def test_install_is_content_with_a_fit_system_one(tmp_path):
    fake_criu(tmp_path / "sbin/criu", "4.2.1")
    if os.geteuid() == 0:
        assert install().origin == "system"
    assert not (tmp_path / "data").exists()


@as_root
@pytest.mark.parametrize("installs", [True, False])
def test_the_distributions_package_is_preferred_if_new_enough(tmp_path, monkeypatch, installs):
    calls: list[list[str]] = []

    def run(argv, **options):
        calls.append([str(word) for word in argv])
        assert options["timeout_s"] > 0
        if argv[0] == "apt-cache":
            return Completed(0, "criu:\n  Candidate: 4.3-1\n", "")
        if argv[0] == "apt-get":
            if installs:
                fake_criu(tmp_path / "sbin/criu", "4.3")
            return Completed(0 if installs else 100, "", "E: no luck")
        return subprocesses.run(argv, **options)

    monkeypatch.setattr(criu_install, "run", run)
    monkeypatch.setattr(debian, "at_least", lambda version, floor: version == "4.3-1")
    unpacked = CriuBinary(("/unpacked",), (4, 2, 1), "unpacked")
    monkeypatch.setattr(criu_install, "_unpack", lambda *arguments: unpacked)
    said: list[str] = []
    assert install(report=said.append).origin == ("system" if installs else "unpacked")
    (order,) = [argv for argv in calls if argv[0] == "apt-get"]
    assert order[1:3] == ["install", "--yes"] and order[-1] == "criu"
    assert installs or any("no luck" in line for line in said)

    calls.clear()
    (tmp_path / "sbin/criu").unlink(missing_ok=True)
    assert install(allow_system_install=False).origin == "unpacked"
    assert not [argv for argv in calls if argv[0] == "apt-get"]


def test_install_without_apt_says_what_to_do_by_hand(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(CriuMissing) as caught:
        install(tmp_path / "prefix")
    assert "by hand" in caught.value.hint
    assert not (tmp_path / "prefix").exists()


@needs_apt
def test_install_into_an_unwritable_place():
    with pytest.raises(CriuMissing, match="cannot be written"):
        install(Path("/proc/nowhere"), force_unpack=True)


@needs_apt
@online
def test_real_install_runs_and_is_small(unpacked):
    prefix, said = unpacked
    (tree,) = prefix.iterdir()  # nothing half-made stays
    about = json.loads((tree / "criu.json").read_text())
    assert about["version"] == tree.name and about["packages"]["criu"].startswith(tree.name)
    assert criu_install._release(tree.name) >= FLOOR
    assert sum(path.stat().st_size for path in tree.rglob("*")) < 25 << 20
    assert any("Downloading" in line for line in said)
    assert not any("://" in line for line in said)


@needs_apt
@online
def test_second_install_finds_the_first(unpacked):
    prefix, _ = unpacked
    said: list[str] = []
    binary = install(prefix, force_unpack=True, report=said.append)
    assert binary.origin == "unpacked" and "already there" in said[0]


@needs_apt
@online
def test_an_unpacked_one_can_be_moved_and_named(unpacked, tmp_path, monkeypatch):
    prefix, _ = unpacked
    moved = tmp_path / "elsewhere"
    shutil.copytree(prefix, moved)
    (tree,) = moved.iterdir()
    for named in (moved, tree, tree / "usr/sbin/criu"):
        monkeypatch.setenv(VARIABLE, str(named))
        found = find()
        assert found.fit and found.origin == "environment"
        assert all(str(tree) in word for word in found.argv if word.startswith("/"))


@needs_apt
@online
def test_a_damaged_tree_is_replaced(unpacked, public_directory):
    prefix, _ = unpacked
    damaged = public_directory / "damaged"
    shutil.copytree(prefix, damaged)
    (tree,) = damaged.iterdir()
    for library in tree.glob("usr/lib/*/libprotobuf-c.so.*"):
        library.unlink()
    assert install(damaged, force_unpack=True).fit
    assert [path.name for path in damaged.iterdir()] == [tree.name]


@needs_apt
@online
def test_criu_check_passes_as_the_user_of_the_tests(unpacked, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(unpacked[0]))
    assert check(find()) == criu_install.Check(True, "Looks good")


@needs_apt
@online
def test_an_ordinary_user_installs_and_checks():
    with ordinary_user() as user:
        script = [user.python, "-m", "jupyter_gpu_ckpt.criu.install", "--force-unpack", "--json"]
        done = user.run(script, timeout_s=300)
        assert done.status == 0, done.err
        answer = json.loads(done.out)
        assert answer["origin"] == "unpacked" and answer["check"] == {"ok": True, "what": "Looks good"}
        assert f"{user.home}/.local/share/jupyter/gpu-ckpt/criu/{answer['version']}/" in answer["argv"][0]


@needs_apt
@online
def test_the_script_works_without_the_packages_dependencies(unpacked):
    python = [sys.executable, "-I", "-S"]  # no site-packages
    script = [*python, str(REPOSITORY / "scripts/install-criu"), "--check", "--json"]
    done = subprocess.run(script, env={VARIABLE: str(unpacked[0])}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["origin"] == "environment"


def test_the_command_line_reports_an_error_as_data(capsys):
    assert criu_install.main(["--check", "--json"]) == CriuMissing.exit_status
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "CRIU_MISSING"
