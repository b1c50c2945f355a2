"""Commands look where kernels put their images: both read the same configuration."""

from __future__ import annotations

import io
import sys

import pytest
from images import FILES
from images import publish as publish_files

from jupyter_gpu_ckpt.cli import demo
from jupyter_gpu_ckpt.cli.command import CONFIG_FILES, Configured
from jupyter_gpu_ckpt.doctor import checks
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.kernel.directories import make_runtime_dir
from jupyter_gpu_ckpt.kernel.provisioner import GpuCkptProvisioner
from jupyter_gpu_ckpt.kernel.registry import Registration
from jupyter_gpu_ckpt.server.app import GpuCkptApp


def publish(store):
    """An image that no server brings back, so that it may be deleted."""
    return publish_files(store, {name: content for name, content in FILES.items() if name != "session.json"})


FOUND = {
    "inspect": lambda document, id: document["id"] == id,
    "verify": lambda document, id: document["id"] == id,
    "seal": lambda document, id: document["sealed"] == id,
    "break-claim": lambda document, id: document == {"broken": False},
    "match": lambda document, id: document["id"] == id,
    "rm": lambda document, id: set(document["removed"]) == {id},
}


@pytest.mark.parametrize("command", FOUND)
def test_a_command_finds_an_image_in_the_configured_directory(store, run, command):
    image = publish(store)
    done = run(command, image.id, "--json")
    assert done.status in (0, 66 if command == "match" else 0), done.out
    assert FOUND[command](done.document, image.id)


def test_list_and_check_show_what_is_in_the_configured_directory(store, run):
    image = publish(store)
    assert [one["id"] for one in run("list", "--json").document["images"]] == [image.id]
    assert [one["id"] for one in run("check", "--json").document["images"]] == [image.id]
    assert image.id in run("list").out


def test_prune_deletes_from_the_configured_directory(store, run):
    image = publish(store)
    assert set(run("prune", "--keep-last", "0", "--json").document["removed"]) == {image.id}
    assert store.images() == []


def test_push_takes_from_the_configured_directory_and_pull_puts_there(store, run, tmp_path):
    image, depot = publish(store), tmp_path / "depot"
    depot.mkdir()
    assert run("push", image.id, str(depot)).status == 0
    assert store.images() == []
    refused = run("pull", str(depot), image.id, "--json", "--GpuCkptProvisioner.image_quota=1")
    assert (refused.status, refused.document["error"]["code"]) == (75, "QUOTA_EXCEEDED")
    assert run("pull", str(depot), image.id, "--json").document["path"] == str(store.root / image.id)
    assert [one.id for one in store.images()] == [image.id]


def test_the_doctor_examines_the_configured_directory(store, run):
    findings = run("doctor", "--json").document["findings"]
    (finding,) = (one for one in findings if one["check"] == "image-directory")
    assert str(store.named) in finding["message"]


def test_the_kernel_of_the_demo_is_configured_as_others_are(store, run, configuration, monkeypatch):
    (configuration / "jupyter_config.py").write_text("c.GpuCkptProvisioner.slowest_rate = 7.0\n")
    asked = []

    async def run_nothing(self):
        asked.append(GpuCkptProvisioner(config=self.kernel_config, kernel_id="k"))
        return {"intact": True}

    monkeypatch.setattr(demo.DemoCommand, "demonstrate", run_nothing)
    assert run("demo", "--json").status == 0
    assert (asked[0].image_dir, asked[0].slowest_rate) == (str(store.named), 7.0)


def test_list_searches_kernels_in_the_configured_runtime_base(run, configuration, runtime_base):
    base = runtime_base / "kernels"
    (configuration / "jupyter_config.py").write_text(f"c.GpuCkptProvisioner.runtime_base = {str(base)!r}\n")
    registration = Registration(make_runtime_dir(base))
    registration.write(kernel_id="k", kernel_name="python3", state="running", pid=1, image=None)
    try:
        assert [kernel["kernel_id"] for kernel in run("list", "--json").document["kernels"]] == ["k"]
        assert run("list", "--json", "--runtime-base", str(runtime_base)).document["kernels"] == []
    finally:
        registration.remove()


@pytest.mark.parametrize("accepts", [True, False])
def test_match_accepts_changed_files_where_kernels_do(store, run, configuration, monkeypatch, accepts):
    given = []
    monkeypatch.setattr(
        "jupyter_gpu_ckpt.lifecycle.compatibility.mismatches", lambda *_, **options: given.append(options) or []
    )
    (configuration / "jupyter_config.py").write_text(f"c.GpuCkptProvisioner.accept_changed_files = {accepts}\n")
    image = publish(store)
    assert run("match", image.id).status == 0
    assert given[0]["accept_changed_files"] is accepts
    assert not store.get(image.id).accepts_changed_files, "only the option is remembered in the image"


def test_match_counts_the_memory_that_an_encrypted_image_takes(store, run, configuration, monkeypatch):
    vaults = []
    monkeypatch.setattr(
        "jupyter_gpu_ckpt.lifecycle.compatibility.mismatches",
        lambda _, opened, *__, **___: vaults.append(opened.vault) or [],
    )
    image = publish(store)
    assert run("match", image.id).status == 0
    (configuration / "jupyter_config.py").write_text("c.GpuCkptProvisioner.encryption_key = 'env:KEY'\n")
    assert run("match", image.id).status == 0
    assert [vault.encrypts for vault in vaults] == [False, True]


def test_other_traits_of_the_provisioner_cause_no_warning(run, configuration, recwarn):
    (configuration / "jupyter_config.py").write_text("c.GpuCkptProvisioner.slowest_rate = 7.0\n")
    assert run("list", "--json").err == ""
    assert not recwarn.list


# -- the files --------------------------------------------------------------------------------------------------------


def image_dir(run, *arguments: str) -> str:
    """The image directory by which ``list`` explains that it is empty."""
    return run("list", *arguments).out.rsplit(" ", 1)[1].strip().rstrip(".")


@pytest.mark.parametrize("name", CONFIG_FILES)
@pytest.mark.parametrize("suffix", [".py", ".json"])
def test_every_file_of_an_application_that_starts_kernels_counts(run, configuration, name, suffix):
    text = '{"GpuCkptProvisioner": {"image_dir": "/set"}}'
    (configuration / f"{name}{suffix}").write_text(text if suffix == ".json" else f"c.merge({text})\n")
    assert image_dir(run) == "/set"


def test_a_later_file_overrides_an_earlier_one_and_the_command_line_all(run, configuration, monkeypatch):
    monkeypatch.setenv("JUPYTER_GPU_CKPT_IMAGES", "/variable")
    assert image_dir(run) == "/variable"
    for name in CONFIG_FILES:
        (configuration / f"{name}.py").write_text(f"c.GpuCkptProvisioner.image_dir = '/{name}'\n")
        assert image_dir(run) == f"/{name}"
    assert image_dir(run, "--GpuCkptProvisioner.image_dir=/trait") == "/trait"
    assert image_dir(run, "--image-dir", "/option") == "/option"


def test_the_server_extension_reads_the_own_file_of_the_command_line_too():
    assert GpuCkptApp().config_file_name == CONFIG_FILES[-1]


def test_a_named_file_stands_for_those_of_the_applications(store, run, tmp_path, configuration):
    (tmp_path / "other.py").write_text("c.GpuCkptProvisioner.image_dir = '/other'\n")
    assert image_dir(run, "--config", str(tmp_path / "other.py")) == "/other"
    (tmp_path / "empty.py").write_text("")
    assert image_dir(run, "--config", str(tmp_path / "empty.py")) != str(store.named)
    done = run("list", "--json", "--config", str(tmp_path / "none.py"))
    assert (done.status, done.document["error"]["code"]) == (64, "BAD_REQUEST")
    assert str(tmp_path / "none.py") in done.document["error"]["message"]


def test_a_file_that_fails_is_skipped_as_servers_skip_it_and_prints_nothing_into_the_answer(store, run, configuration):
    (configuration / "jupyter_lab_config.py").write_text("print('hello')\n1 / 0\n")
    done = run("list", "--json")
    assert done.document["images"] == []
    assert "hello" in done.err
    assert "jupyter_lab_config.py is not used: ZeroDivisionError: division by zero" in done.err


def test_a_value_of_a_wrong_type_is_named(run, configuration):
    (configuration / "jupyter_config.py").write_text("c.GpuCkptProvisioner.image_dir = 5\n")
    done = run("list", "--json")
    assert (done.status, done.document["error"]["code"]) == (64, "BAD_REQUEST")
    assert "GpuCkptProvisioner.image_dir: expected a unicode string" in done.document["error"]["message"]


def test_the_configuration_and_its_files_are_shown(store, run, configuration):
    shown = run("list", "--show-config").out
    assert str(configuration / "jupyter_server_config.py") in shown
    assert str(configuration / "jupyter_server_config.py") in run("list", "--debug").err
    assert str(store.named) in shown


def test_a_file_with_all_defaults_is_written_and_can_be_read(run, configuration, monkeypatch):
    done = run("--generate-config")
    path = configuration / "jupyter_gpu_ckpt_config.py"
    assert done.status == 0
    assert str(path) in done.out
    text = path.read_text()
    for name in GpuCkptProvisioner.class_own_traits(config=True):
        assert f"# c.GpuCkptProvisioner.{name} = " in text
    assert run("list").status == 0
    path.write_text("c.GpuCkptProvisioner.image_dir = '/kept'\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    done = run("--generate-config")
    assert (done.status, "-y" in done.err) == (64, True)
    assert image_dir(run) == "/kept"
    assert run("prune", "--generate-config", "-y").status == 0
    assert "# c.PruneCommand.max_age = " in path.read_text()


def test_a_file_with_all_defaults_is_written_to_a_new_path_that_is_named(run, tmp_path):
    path = tmp_path / "own_config.py"
    done = run("list", "--generate-config", "--config", str(path))
    assert (done.status, str(path) in done.out) == (0, True), done.err
    assert "# c.GpuCkptProvisioner.image_dir = " in path.read_text()
    assert run("list", "--config", str(tmp_path / "missing.py")).status == 64


def test_the_traits_that_commands_read_are_the_provisioners():
    theirs = GpuCkptProvisioner.class_own_traits(config=True)
    for name, trait in Configured.class_own_traits(config=True).items():
        assert type(trait) is type(theirs[name]), name
        assert trait.default_value == theirs[name].default_value, name


def test_the_doctor_reports_the_configured_fast_path(run, configuration, monkeypatch):
    given = []
    monkeypatch.setattr(checks, "diagnose", lambda _, *, fast_path, extensions: given.append(fast_path) or [])
    run("doctor")
    (configuration / "jupyter_config.py").write_text("c.GpuCkptProvisioner.fast_path = 'off'\n")
    run("doctor")
    assert given == ["auto", "off"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {}),
        ("c.ServerApp.jpserver_extensions = {'jupyter_gpu_ckpt': True}", {"jupyter_gpu_ckpt": True}),
        ("c.ServerApp.jpserver_extensions.update({'jupyter_gpu_ckpt': False})", {"jupyter_gpu_ckpt": False}),
    ],
)
def test_the_doctor_knows_the_extensions_that_the_configuration_names(run, configuration, monkeypatch, line, expected):
    given = []
    monkeypatch.setattr(checks, "diagnose", lambda _, *, fast_path, extensions: given.append(extensions) or [])
    (configuration / "jupyter_server_config.py").write_text(f"{line}\n")
    run("doctor")
    assert given == [expected]


def test_the_computed_defaults_are_the_provisioners(configuration):
    provisioner = GpuCkptProvisioner(kernel_id="k")
    assert Configured().image_dir == provisioner.image_dir
    assert Configured().runtime_base == provisioner.runtime_base


def test_an_image_directory_that_is_shared_is_entered_by_uid(run, configuration, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (configuration / "jupyter_config.py").write_text(f"c.GpuCkptProvisioner.image_dir = {str(shared)!r}\n")
    assert image_dir(run) == str(Store(shared).root) != str(shared)
