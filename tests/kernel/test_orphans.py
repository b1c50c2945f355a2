"""A server goes and another comes: the same kernel, the same id, the same ports and key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import waiting
from harness import CellFailed, Notebook, alive, until
from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from traitlets.config import Config

from jupyter_gpu_ckpt.errors import CriuMissing, HelperGone, ProtocolVersion
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.kernel import provisioner
from jupyter_gpu_ckpt.kernel.orphans import VERSION, Session, find_orphans, only_copy
from jupyter_gpu_ckpt.kernel.provisioner import GpuCkptProvisioner
from jupyter_gpu_ckpt.kernel.registry import reap
from jupyter_gpu_ckpt.lifecycle.lifecycle import Lifecycle
from jupyter_gpu_ckpt.node import hashes
from jupyter_gpu_ckpt.node.facts import file_facts
from jupyter_gpu_ckpt.node.hashes import Hashes
from jupyter_gpu_ckpt.process import descriptors

KERNEL_ID = "0c0ffee0-0000-4000-8000-000000000001"


class Server:
    """One manager at a time for one kernel id, as servers come and go."""

    def __init__(self, place: Path, base: Path) -> None:
        self.place, self.base = place, base
        self.store = Store(place / "images")
        self.config = Config()
        self.config.KernelProvisionerFactory.default_provisioner_name = "gpu-ckpt-provisioner"
        self.config.GpuCkptProvisioner.image_dir = str(place / "images")
        self.config.GpuCkptProvisioner.runtime_base = str(base)
        self.started: list[Notebook] = []
        self.kernel_id = KERNEL_ID

    async def start(self, **traits) -> Notebook:
        self.config.GpuCkptProvisioner.update(traits)
        KernelProvisionerFactory.clear_instance()
        KernelProvisionerFactory.instance(config=self.config)
        file = self.place / f"connection-{len(self.started)}.json"
        manager = AsyncKernelManager(kernel_name="python3", config=self.config, connection_file=str(file))
        environment = dict(os.environ, IPYTHONDIR=str(self.place / "ipython"))
        environment.pop("PYTEST_CURRENT_TEST", None)
        await manager.start_kernel(kernel_id=self.kernel_id, env=environment, cwd=str(self.place))
        client = manager.client()
        client.start_channels()
        await client.wait_for_ready(timeout=60)
        self.started.append(Notebook(manager, client))
        return self.started[-1]

    def orphans(self):
        return find_orphans(self.base, self.store).orphans


@pytest.fixture
async def server(tmp_path, runtime_base, criu_binary):
    server = Server(tmp_path, runtime_base)
    yield server
    for kernel in server.started:
        kernel.client.stop_channels()
        await kernel.manager.shutdown_kernel(now=True)
    KernelProvisionerFactory.clear_instance()


async def test_a_kernel_left_by_a_stopping_server_sleeps_until_a_request_to_the_next_server(server):
    first = await server.start()
    await first.run("x = 41; import os; pid = os.getpid()")
    ports = first.manager.shell_port, first.manager.session.key
    await first.provisioner.detach()
    assert not first.manager.has_kernel
    (orphan,) = server.orphans()
    assert orphan.session.kernel_id == KERNEL_ID
    assert orphan.image is not None

    second = await server.start()
    assert second.state == "checkpointed", "neither attaching nor a client that only reads the state wakes a kernel"
    assert (second.manager.shell_port, second.manager.session.key) == ports
    assert server.orphans() == []
    assert await second.run("print(x + 1, os.getpid() == pid)") == "42 True"
    await second.settled("running")
    assert server.store.images() == []


async def test_the_next_server_hashes_large_files_that_the_last_one_had_no_time_for(server, monkeypatch):
    data = server.place / "data"
    data.write_bytes(b"x" * (hashes.AT_ONCE + 1))
    first = await server.start()
    await first.run("file = open('data', 'rb'); x = 41")
    with monkeypatch.context() as stopped:
        stopped.setattr(Hashes, "begin", lambda _: None)
        await first.provisioner.detach()
    facts = file_facts(str(data))
    assert not Hashes(server.store.root).known(facts)
    second = await server.start()
    await until(lambda: Hashes(server.store.root).known(facts))
    data.with_name("link").hardlink_to(data)
    assert await second.run("print(x)") == "41"


async def test_a_client_of_the_old_server_continues_with_the_new_one(server):
    """The same sockets and the same session: what a browser tab has that reconnects by itself."""
    first = await server.start()
    await first.run("x = 1")
    client = AsyncKernelClient()
    client.load_connection_info(first.manager.get_connection_info(session=False))
    client.start_channels()
    await client.wait_for_ready(timeout=60)
    await first.provisioner.detach()
    second = await server.start()
    printed = []
    await client.execute_interactive(
        "x += 1; print(x)", timeout=60, output_hook=lambda message: printed.append(message["content"].get("text"))
    )
    assert "2\n" in printed
    client.stop_channels()
    await second.settled("running")


async def busy(kernel: Notebook, server: Server, then: str = "") -> Callable[[], None]:
    """Begin a cell that ends, with ``then``, once what is returned has been called."""
    go = server.place / "go"
    kernel.client.execute(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n{then}")
    await until(lambda: kernel.provisioner.gate.pending == ["execute_request"])
    return go.touch


async def test_a_kernel_that_cannot_be_checkpointed_runs_on_and_is_attached_alive(server):
    first = await server.start(drain_timeout=0.2)
    end_cell = await busy(first, server, "x = 40")
    (pid,) = first.lifecycle.capsule.processes()
    await first.provisioner.detach()
    assert alive([pid]) == [pid]
    (orphan,) = server.orphans()
    assert orphan.directory is not None
    asyncio.get_running_loop().call_later(0.5, end_cell)
    second = await server.start(drain_timeout=10.0)
    assert second.state == "running"
    assert second.lifecycle.capsule.processes() == [pid]
    assert await second.run("print(x)") == "40"
    await second.provisioner.checkpoint()
    assert await second.run("print(x)") == "40"


@pytest.mark.parametrize("limit", ["soft", "hard"])
async def test_a_kernel_that_has_opened_all_files_it_may_is_attached_alive(server, monkeypatch, limit):
    """A connection that it cannot accept would end it; a message connects to it once it has closed some."""
    first = await server.start(drain_timeout=0.2)
    stop = server.place / "stop"
    code = f"""
import os, resource, time
x = 5
limit = max(map(int, os.listdir("/proc/self/fd"))) + 20
hard = limit if {limit == "hard"} else resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
taken = []
while not os.path.exists({str(stop)!r}):
    try:
        taken.append(os.dup(0))
    except OSError:
        time.sleep(0.01)
for descriptor in taken:
    os.close(descriptor)
"""
    first.client.execute(code)
    await until(lambda: first.provisioner.gate.pending == ["execute_request"])
    pid = first.lifecycle.capsule.host_pid
    await until(lambda: descriptors.free(pid) == 0)
    await first.provisioner.detach()
    await until(lambda: descriptors.free(pid) == 0)  # those of the gate's connections, too
    if limit == "hard":
        monkeypatch.setattr(descriptors, "_raised_limit", contextlib.nullcontext)  # which root can
    second = await server.start(start_timeout=0.5, wake_timeout=60.0)
    assert second.state == "running"
    if limit == "hard":
        await until(lambda: second.provisioner.gate.state == "asleep")
        assert alive([pid]) == [pid]
    stop.touch()
    assert await second.run("print(x)") == "5"
    assert second.provisioner.gate.state == "open"


OWNER = """
import asyncio, os, sys
from collections.abc import Callable
from pathlib import Path
sys.path[:0] = [sys.argv[1], str(Path(sys.argv[1]).parent / "support")]
from test_orphans import Server
async def main():
    server = Server(Path(sys.argv[2]), Path(sys.argv[3]))
    kernel = await server.start(outlive_server=True)
    await kernel.run("x = 7")
    if sys.argv[4] == "suspended":
        await kernel.provisioner.suspend()
    print(*kernel.lifecycle.capsule.processes(), flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


@pytest.mark.parametrize("state", ["running", "suspended", "woken by it"])
async def test_after_kill_9_of_the_server_the_living_kernel_is_attached_with_nothing_lost(server, state):
    if state == "woken by it":  # the server that is killed has a kernel of the one before
        first = await server.start()
        await first.provisioner.detach()
        assert reap(server.base) != [], "the next directory is a new one"
    arguments = [str(Path(__file__).parent), str(server.place), str(server.base), state]
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *arguments], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in owner.stdout.readline().split()]
    owner.kill()
    owner.wait(60)
    owner.stdout.close()
    assert alive(pids) == pids
    kernel = await server.start()
    assert kernel.lifecycle.capsule.processes() == pids
    assert await kernel.run("print(x)") == "7"
    await kernel.manager.shutdown_kernel(now=True)
    assert alive(pids) == []


@pytest.mark.parametrize("now", [False, True])
async def test_a_kernel_that_is_shut_down_while_it_sleeps_goes_with_its_image(server, caplog, now):
    """A user who shuts a kernel down does not want it any more; the log says so."""
    first = await server.start()
    image = await first.provisioner.checkpoint()
    with caplog.at_level("INFO"):
        await first.manager.shutdown_kernel(now=now)
    assert server.store.images() == []
    assert f"its image {image.id} is deleted" in caplog.text
    assert not (server.store.generations.directory / f"{KERNEL_ID}.json").exists(), "put away"
    assert server.store.generations.next_generation(KERNEL_ID, 0) > image.manifest.generation, "and not forgotten"


async def test_a_shutdown_by_message_while_it_sleeps_deletes_the_image_too(server):
    first = await server.start()
    await first.provisioner.checkpoint()
    first.client.shutdown()
    await until(lambda: first.state == "dead", 60)
    await until(lambda: server.store.images() == [], 60)


async def test_a_kernel_that_its_user_protected_is_shut_down_but_kept(server):
    first = await server.start()
    image = await first.provisioner.checkpoint()
    first.provisioner.agent_requests.protect(3600)
    await first.manager.shutdown_kernel()
    assert [(one.id, one.retired) for one in server.store.images()] == [(image.id, True)]


@pytest.mark.parametrize("which", ["same id", "same notebook"])
async def test_a_kernel_that_ended_together_with_its_server_is_not_replaced_without_a_word(
    server, monkeypatch, caplog, which
):
    """The next one says so in its first cell, and in the log, also where another kernel was started in between."""
    monkeypatch.setenv("JPY_SESSION_NAME", str(server.place / "a.ipynb"))
    arguments = [str(Path(__file__).parent), str(server.place), str(server.base), "running"]
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *arguments], stdout=subprocess.PIPE, text=True)
    pids = [int(word) for word in owner.stdout.readline().split()]
    os.kill(owner.pid, signal.SIGSTOP)  # it must not see its kernel die, as in a power cut
    os.kill(pids[0], signal.SIGKILL)
    owner.kill()
    owner.wait(60)
    owner.stdout.close()
    await until(lambda: alive(pids) == [])
    await until(lambda: reap(server.base))  # as the start of any other kernel does; the capsule's init ends last
    if which == "same notebook":
        server.kernel_id = KERNEL_ID[:-1] + "2"
    with caplog.at_level("WARNING"):
        second = await server.start()
    notice = await said(second, "print('x' in globals())")
    assert notice.startswith("This is a fresh kernel, without the variables of the one before: that one ended")
    assert "together with its server" in notice
    assert notice.strip() in caplog.text
    await second.manager.shutdown_kernel(now=True)
    third = await server.start()
    assert await said(third, "pass") == "", "said once"


async def test_a_kernel_that_was_ended_in_order_is_replaced_without_a_notice(server, monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", str(server.place / "a.ipynb"))
    first = await server.start()
    await first.manager.shutdown_kernel(now=True)
    second = await server.start()
    assert await said(second, "pass") == ""


async def test_a_kernel_that_was_shut_down_is_nobodys_orphan_where_its_image_is_kept(server, caplog):
    first = await server.start(keep_image_on_shutdown=True)
    image = await first.provisioner.checkpoint()
    with caplog.at_level("INFO"):
        await first.manager.shutdown_kernel()
    assert f"was shut down; its image is kept as {image.id}" in caplog.text
    assert "died" not in caplog.text
    assert server.orphans() == []
    assert [image.retired for image in server.store.images()] == [True]
    second = await server.start()
    with pytest.raises(CellFailed, match="NameError"):
        await second.run("x")
    server.store.remove(server.store.images()[0])
    assert [path.name for path in server.store.root.iterdir() if path.name != hashes.FILE] == []


async def said(kernel: Notebook, code: str) -> str:
    """Return the text that a cell printed on stderr."""
    printed = []

    def collect(message) -> None:
        if message["msg_type"] == "stream" and message["content"]["name"] == "stderr":
            printed.append(message["content"]["text"])

    await kernel.client.execute_interactive(code, timeout=60, output_hook=collect)
    return "".join(printed)


@pytest.mark.parametrize("image", [False, True], ids=["no image", "an older image"])
async def test_a_kernel_that_ended_as_it_was_about_to_be_attached(server, monkeypatch, caplog, image):
    """A fresh kernel under the id, checkpointable, that says what it is; what there is on disk is kept and named."""
    first = await server.start(drain_timeout=0.2)
    kept = None
    if image:
        await first.run("pass")  # it has answered all that was asked before
        kept = await first.provisioner.checkpoint()
        shutil.copytree(kept.path, server.place / "copy")
        await first.run("x = 1")
        await first.settled("running")
        (server.place / "copy").rename(kept.path)
    first.client.execute("import time\nwhile True: time.sleep(0.05)")
    await until(lambda: first.provisioner.gate.pending == ["execute_request"])
    pids = first.lifecycle.capsule.processes()
    await first.provisioner.detach()
    find = GpuCkptProvisioner._find_orphan

    def found_and_killed(self):
        found = find(self)
        assert found.directory is not None
        os.kill(pids[0], signal.SIGKILL)
        # Reaped: before that, one of its threads may be on its way out.
        waiting.until(lambda: not Path(f"/proc/{pids[0]}").exists(), "the end of the kernel", 60)
        return found

    monkeypatch.setattr(GpuCkptProvisioner, "_find_orphan", found_and_killed)
    with caplog.at_level("WARNING"):
        second = await server.start(drain_timeout=10.0)
    assert second.lifecycle is not None, "the host is as fit as it was"
    notice = await said(second, "print('x' in globals())")
    assert notice.startswith("This is a fresh kernel, without the variables of the one before: that one ended")
    assert notice.strip() in caplog.text
    assert await said(second, "pass") == "", "said once"
    if kept:
        assert f"kept as image {kept.id}" in notice
        assert [(one.id, one.retired) for one in server.store.images()] == [(kept.id, True)]
    await second.provisioner.checkpoint()
    assert await said(second, "import os; assert 'x' not in globals(); print(os.environ)") == ""
    assert "JUPYTER_GPU_CKPT_NOTICE" not in await second.run("import os; print(dict(os.environ))")


async def test_a_sleeping_kernel_on_a_host_that_has_become_unfit(server, monkeypatch, caplog):
    """A plain kernel under the id says so; the image waits for a server that can."""
    first = await server.start()
    await first.run("x = 41")
    await first.provisioner.detach()
    (image,) = server.store.images()

    def unfit(_):
        raise CriuMissing("No CRIU of a version that works was found.")

    with monkeypatch.context() as patched, caplog.at_level("WARNING"):
        patched.setattr(provisioner, "shared_engine", unfit)
        second = await server.start()
        assert (second.lifecycle, second.state) == (None, "running")
        notice = await said(second, "print('x' in globals())")
        for words in ("fresh kernel", "CRIU_MISSING", image.id, "install-criu"):
            assert words in notice
        assert notice.strip() in caplog.text
    await second.manager.restart_kernel()
    await second.client.wait_for_ready(timeout=60)
    assert await second.run("print('x' in globals())") == "False"
    await second.manager.shutdown_kernel(now=True)
    assert [(one.id, one.retired) for one in server.store.images()] == [(image.id, False)]
    third = await server.start()
    assert await third.run("print(x)") == "41"
    await third.settled("running")


@pytest.mark.parametrize("asleep", [False, True], ids=["alive", "asleep"])
async def test_an_attach_that_fails_leaves_the_kernel_to_the_next_try(server, monkeypatch, asleep):
    first = await server.start(drain_timeout=0.2)
    await first.run("x = 41")
    if not asleep:
        end_cell = await busy(first, server)
    await first.provisioner.detach()

    def fails(self, **_):
        raise HelperGone("The helper ended.")

    with monkeypatch.context() as patched, pytest.raises(HelperGone):
        patched.setattr(Lifecycle, "attach", fails)
        await server.start()
    (orphan,) = server.orphans()
    assert (orphan.image is not None) == asleep
    if not asleep:
        asyncio.get_running_loop().call_later(0.5, end_cell)
    second = await server.start(drain_timeout=10.0)
    assert await second.run("print(x)") == "41"
    await second.settled("running")


async def test_the_session_is_private_and_not_listed(server):
    first = await server.start()
    image = await first.provisioner.checkpoint()
    for directory in (image.path, first.lifecycle.home.runtime_dir):
        assert (directory / "session.json").stat().st_mode & 0o777 == 0o600
        session = Session.read(directory)
        assert session is not None
        assert session.front["key"]
    assert session.front["key"] not in (image.path / "manifest.json").read_text()
    assert session.front["key"] not in (first.lifecycle.home.runtime_dir / "kernel.json").read_text()


def change_session(directory: Path, **facts) -> None:
    file = directory / "session.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **facts}))


@pytest.mark.parametrize("asleep", [True, False], ids=["asleep", "alive"])
async def test_a_kernel_of_another_release_is_refused_by_name_and_left_as_it_is(server, asleep, caplog):
    first = await server.start(outlive_server=True)
    await first.run("x = 41")
    if asleep:
        await first.provisioner.detach()
        place = server.store.images()[0].path
    else:
        place, lifecycle = first.lifecycle.home.runtime_dir, first.lifecycle
        pids = lifecycle.capsule.processes()
        await asyncio.to_thread(first.provisioner._host.detach)
    change_session(place, version=VERSION + 1)
    before = server.store.images()
    assert server.orphans() == []
    (refusal,) = find_orphans(server.base, server.store).refused.values()
    assert (refusal.code, refusal.details) == ("PROTOCOL_VERSION", {"version": VERSION + 1})
    with pytest.raises(ProtocolVersion, match=f"of version {VERSION + 1}; this release knows version {VERSION}"):
        await server.start()
    if asleep:
        assert "A server of the release that wrote it brings it back" in only_copy(before[0], "").hint
    else:
        assert reap(server.base) == []
        assert alive(pids) == pids
    assert server.store.images() == before
    change_session(place, version=VERSION)
    second = await server.start()
    assert await second.run("print(x)") == "41"
    await second.settled("running")


def test_what_a_later_release_adds_to_a_session_is_ignored(tmp_path):
    written = Session("k", "python3", "/nowhere", True, "/home", {})
    written.write(tmp_path)
    change_session(tmp_path, colour="blue")
    assert Session.read(tmp_path) == written


def test_a_session_that_cannot_be_read_is_none(tmp_path):
    assert Session.read(tmp_path) is None
    for text in ("[]", '{"version": 1', '{"version": 1}'):
        (tmp_path / "session.json").write_text(text)
        assert Session.read(tmp_path) is None
