"""Published files: versions, metadata, sdist, wheel, bill of materials, recipe; built once for all tests here."""

from __future__ import annotations

import configparser
import email
import hashlib
import json
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from jupyter_gpu_ckpt import __version__
from jupyter_gpu_ckpt.doctor.checks import NATIVE_PARTS

ROOT = Path(__file__).resolve().parents[1]
URL = "https://example.org/owner/project"
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]


def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(inline_comment_prefixes=("#",))
    parser.read(ROOT / "setup.cfg")
    return parser


def run(*command, cwd=ROOT, timeout=200, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=timeout, **more)


# -- one version


@pytest.fixture
def versions(tmp_path):
    """The script with copies of the files that it changes."""
    names = runpy.run_path(str(ROOT / "scripts" / "set-version"))["FILES"]
    for name in ["scripts/set-version", *names]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_all_files_have_one_version():
    done = run(ROOT / "scripts" / "set-version", "--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("given", "npm"), [("1.20.3", "1.20.3"), ("2.0.0rc1", "2.0.0-rc.1")])
def test_a_version_is_set_everywhere_and_nothing_else_changes(versions, given, npm):
    assert run(versions / "scripts/set-version", given).returncode == 0
    assert run(versions / "scripts/set-version", "--check").returncode == 0
    package = json.loads((versions / "labextension/package.json").read_text())
    assert package == json.loads((ROOT / "labextension/package.json").read_text()) | {"version": npm}
    assert f'__version__ = "{given}"' in (versions / "jupyter_gpu_ckpt/_version.py").read_text()
    for name in ("CITATION.cff", "packaging/conda/recipe.yaml"):
        changed = (versions / name).read_text()
        assert changed.replace(given, __version__) == (ROOT / name).read_text()


def test_versions_that_differ_are_found_and_odd_ones_are_refused(versions):
    (versions / "jupyter_gpu_ckpt/_version.py").write_text('__version__ = "9.9.9"\n')
    done = run(versions / "scripts/set-version", "--check")
    assert done.returncode == 1 and "9.9.9  jupyter_gpu_ckpt/_version.py" in done.stderr
    for odd in ("1.2", "v1.2.3", "1.2.3.dev4"):
        assert run(versions / "scripts/set-version", odd).returncode == 1
    assert "9.9.9" in (versions / "jupyter_gpu_ckpt/_version.py").read_text()


# -- the recipe for conda


def recipe():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    text = (ROOT / "packaging/conda/recipe.yaml").read_text()
    return yaml.safe_load(text), text


def test_the_recipe_needs_what_the_package_needs():
    document, _ = recipe()
    wanted = setup()
    pip = [*wanted["options"]["install_requires"].split(), *wanted["options.extras_require"]["server"].split()]
    names = {"blake3": "python-blake3"}  # as conda-forge has it
    split = [re.split(r"(?=>=)", one) for one in pip]
    expected = {" ".join([names.get(name, name), *bounds]) for name, *bounds in split}
    python = f"python {wanted['options']['python_requires']}"
    assert {*document["requirements"]["run"]} == expected | {python}
    scripts = wanted["options.entry_points"]["console_scripts"].strip()
    assert document["build"]["python"]["entry_points"] == [scripts]


def test_the_recipe_can_be_rendered():
    """By the tool that builds it, which needs no package of a channel for that."""
    rattler = pytest.importorskip("rattler_build", reason="py-rattler-build is not installed (extra `build`)")
    _, text = recipe()
    stage = rattler.Stage0Recipe.from_yaml(text)
    variants = rattler.VariantConfig.from_file(ROOT / "packaging/conda/variants.yaml")
    (variant,) = stage.render(variants)
    rendered = variant.recipe.to_dict()
    assert rendered["package"] == {"name": "jupyter_gpu_ckpt", "version": __version__}
    assert f"jupyter_gpu_ckpt-{__version__}.tar.gz" in str(rendered["source"])


# -- what `make release` makes


@pytest.fixture(scope="module")
def front_end():
    if not (ROOT / "labextension/dist/package.json").is_file():
        pytest.skip("the JupyterLab front end is not built: `make labextension` (needs Node)")


@pytest.fixture(scope="module")
def release(front_end, tmp_path_factory) -> Path:
    """The directory with all files, without the bill of materials, whose making downloads packages.

    In a network namespace without interfaces: the wheel is built from the sdist, which needs no network.
    """
    output = tmp_path_factory.mktemp("release") / "dist"
    alone = ["unshare", "--map-root-user", "--net", sys.executable]
    online = run(*alone, "-c", "import socket; socket.create_connection(('192.0.2.1', 9), 5)")
    assert "unreachable" in online.stderr, online
    done = run(*alone, ROOT / "scripts/release", "--output", output, "--url", URL, "--no-bill")
    assert done.returncode == 0, done.stderr
    return output


def build_the_recipe(release: Path, place: Path, changed: str = "", into: str = "") -> subprocess.CompletedProcess[str]:
    """By its own tool, in a network namespace without interfaces; with this machine's Python, compiler and packages."""
    if shutil.which("gcc") is None:
        pytest.skip("there is no C compiler on this machine")
    shutil.copytree(ROOT / "packaging/conda", place / "packaging/conda")
    shutil.copytree(release, place / "dist")
    recipe = place / "packaging/conda/recipe.yaml"
    assert changed in recipe.read_text()
    recipe.write_text(recipe.read_text().replace(changed, into) if changed else recipe.read_text())
    wanted = setup()
    server = wanted["options.extras_require"]["server"].split()
    program = [sys.executable, ROOT / "tests/support/conda_channel.py", place]
    alone = ["unshare", "--map-root-user", "--net"]
    return run(*alone, *program, *wanted["options"]["install_requires"].split(), *server, timeout=600)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_recipe_builds_without_a_network_and_its_tests_pass(release, tmp_path):
    rattler = pytest.importorskip("rattler_build", reason="py-rattler-build is not installed (extra `build`)")
    done = build_the_recipe(release, tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    package = Path(done.stdout.splitlines()[-1])
    assert package.name.startswith(f"jupyter_gpu_ckpt-{__version__}-") and package.parent.name == "linux-64"
    names = rattler.Package.from_file(package).files
    for part in NATIVE_PARTS:
        assert [name for name in names if re.search(rf"/native/_{part}\b.*\.so$", name)], part
    assert "bin/jupyter-gpu-ckpt" in names
    assert "etc/jupyter/jupyter_server_config.d/jupyter_gpu_ckpt.json" in names
    assert [name for name in names if re.match(r"share/jupyter/labextensions/jupyter-gpu-ckpt/static/.*\.js$", name)]


@pytest.mark.torture
@pytest.mark.timeout(900)
def test_a_recipe_whose_package_lacks_something_does_not_pass(release, tmp_path):
    pytest.importorskip("rattler_build", reason="py-rattler-build is not installed (extra `build`)")
    done = build_the_recipe(
        release, tmp_path, "    - jupyter_gpu_ckpt.server.app\n", "    - jupyter_gpu_ckpt.no_such\n"
    )
    assert done.returncode != 0 and "Test failed" in done.stderr, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(release) -> Path:
    (wheel,) = release.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_the_wheel_suits_every_python_and_c_libraries_from_2_34_on(wheel):
    name, version, python, abi, platforms = wheel.stem.split("-")
    assert (name, version, python, abi) == ("jupyter_gpu_ckpt", __version__, "cp310", "abi3")
    glibc = re.fullmatch(r"manylinux_2_(\d+)_x86_64", platforms.split(".")[0])
    assert glibc is not None and int(glibc[1]) <= 34
    assert "linux_x86_64" not in platforms.split("."), "an index refuses it"


@pytest.mark.slow
def test_the_wheel_has_all_its_parts(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for part in NATIVE_PARTS:
        assert [name for name in names if re.search(rf"/native/_{part}\b.*\.so$", name)], part
    assert "jupyter_gpu_ckpt/py.typed" in names
    assert "jupyter_gpu_ckpt/locale/de_DE/LC_MESSAGES/jupyter_gpu_ckpt.json" in names
    assert [name for name in names if name.endswith("jupyter_server_config.d/jupyter_gpu_ckpt.json")]
    assert [name for name in names if re.search(r"labextensions/jupyter-gpu-ckpt/static/.*\.js$", name)]
    assert [name for name in names if name.endswith("quickstart.ipynb")]
    assert [name for name in names if name.endswith("licenses/LICENSE")]
    assert [name for name in names if name.endswith((".c", ".h", ".ts")) or "/tests/" in name] == []


@pytest.mark.slow
def test_the_metadata_names_the_projects_pages(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    pages = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert {*pages} == {"Source", "Documentation", "Changelog", "Issues"}
    assert all(page.startswith(URL) for page in pages.values())
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License"] == "BSD-3-Clause"
    (title,) = re.findall(r"^# (.+)", metadata.get_payload(), re.MULTILINE)[:1]
    assert title == "jupyter_gpu_ckpt"


@pytest.mark.slow
def test_the_sums_are_those_of_the_files(release):
    lines = (release / "SHA256SUMS").read_text().splitlines()
    listed = {line[66:]: line[:64] for line in lines}
    assert {*listed} == {path.name for path in release.iterdir()} - {"SHA256SUMS"}
    for name, digest in listed.items():
        assert hashlib.sha256((release / name).read_bytes()).hexdigest() == digest


def python(version: str) -> str:
    """Return a Python of a version, this one or another of the machine; skips the test where there is none."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    candidates = [shutil.which(f"python{version}"), *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    for candidate in candidates:
        if candidate and run(candidate, "-c", "import pip").returncode == 0:
            return str(candidate)
    pytest.skip(f"there is no Python {version} with pip on this machine")


@pytest.mark.slow
@pytest.mark.parametrize("version", PYTHONS)
def test_each_python_installs_the_wheel_and_compiles_it(version, wheel, tmp_path):
    """Without what it requires, which takes a network: all modules compile, and those that need nothing else import."""
    target = tmp_path / "site"
    program = python(version)
    install = ["-m", "pip", "install", "--no-index", "--no-deps", "--no-compile", "--target", target, wheel]
    done = run(program, *install, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    code = (
        "import compileall, sys; sys.path.insert(0, 'site'); "
        "import jupyter_gpu_ckpt.errors, jupyter_gpu_ckpt.capsule.init, jupyter_gpu_ckpt.process.syscalls as one; "
        "assert one.__file__.startswith(sys.argv[1]), one; "
        "sys.exit(not compileall.compile_dir('site/jupyter_gpu_ckpt', quiet=1))"
    )
    done = run(program, "-I", "-c", code, target, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_one_command_uninstalls_the_package_and_leaves_nothing(wheel, tmp_path, monkeypatch):
    """From an environment that shares the packages it requires, and pip, with that of the tests."""
    env = tmp_path / "env"
    assert run(sys.executable, "-m", "venv", "--without-pip", env).returncode == 0
    (packages,) = env.glob("lib/python*/site-packages")
    (packages / "required.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    installed = run(env / "bin/python", "-m", "pip", "install", "--no-index", "--no-deps", "--ignore-installed", wheel)
    assert installed.returncode == 0, installed.stderr
    for name in ("data", "config", "run"):
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    for name in ("JUPYTER_GPU_CKPT_KEYS", "JUPYTER_GPU_CKPT_IMAGES", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    command = env / "bin/jupyter-gpu-ckpt"
    assert run(command, "keys", "--rotate", cwd=tmp_path).returncode == 0
    assert [*(tmp_path / "data").rglob("*")]
    before = {path for path in env.rglob("*") if re.search(r"gpu.ckpt", path.name)}
    assert len(before) > 3
    done = run(command, "uninstall", cwd=tmp_path)
    assert done.returncode == 0 and "Removed: the package jupyter_gpu_ckpt" in done.stdout, done.stdout + done.stderr
    assert [path for path in before if path.exists()] == []
    assert [*packages.glob("jupyter_gpu_ckpt*")] == [] and not command.exists()
    assert [path for name in ("data", "config", "run") for path in (tmp_path / name).rglob("*")] == []


@pytest.mark.torture
@pytest.mark.parametrize("version", PYTHONS)
def test_each_python_builds_the_sdist_and_runs_the_command(version, release, tmp_path):
    """With what it requires, from the index of packages."""
    (sdist,) = release.glob("*.tar.gz")
    assert run(python(version), "-m", "venv", tmp_path / "env").returncode == 0
    done = run(tmp_path / "env/bin/pip", "install", f"jupyter_gpu_ckpt[server,widgets] @ {sdist.as_uri()}", "ipykernel")
    assert done.returncode == 0, done.stderr[-2000:]
    everything = (
        "import importlib, pkgutil, jupyter_gpu_ckpt as package\n"
        "for module in pkgutil.walk_packages(package.__path__, 'jupyter_gpu_ckpt.'):\n"
        "    if module.name.split('.')[1] not in ('hub', '__main__') and 'native' not in module.name:\n"
        "        importlib.import_module(module.name)\n"
    )
    done = run(tmp_path / "env/bin/python", "-c", everything, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(run(tmp_path / "env/bin/jupyter", "gpu-ckpt", "doctor", "--json", cwd=tmp_path).stdout)
    (parts,) = (one for one in found["findings"] if one["check"] == "native-parts")
    assert parts["ok"], parts


@pytest.mark.torture
def test_the_bill_of_materials_is_valid_and_names_what_is_inside(front_end, tmp_path):
    done = run(sys.executable, ROOT / "scripts/release", "--output", tmp_path / "dist")
    assert done.returncode == 0, done.stderr
    (bill,) = (tmp_path / "dist").glob("*.cdx.json")
    assert bill.name in (tmp_path / "dist/SHA256SUMS").read_text()
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(bill.read_text()) is None
    document = json.loads(bill.read_text())
    assert document["metadata"]["component"]["version"] == __version__
    purls = {one.get("purl", "").partition("@")[0] for one in document["components"]}
    assert {"pkg:pypi/jupyter-server", "pkg:pypi/blake3"} <= purls
    assert [purl for purl in purls if purl.startswith("pkg:npm/")]


def test_a_release_does_not_mix_with_what_is_in_its_directory(front_end, tmp_path):
    (tmp_path / "old.whl").touch()
    done = run(sys.executable, ROOT / "scripts/release", "--output", tmp_path)
    assert done.returncode == 1 and "is not empty" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["old.whl"]
