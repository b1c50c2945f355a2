"""Branches: kernels that start from the image of another one, which sleeps, lives, or has continued since."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import sqlite3
from pathlib import Path

import pytest
from harness import Notebook, alive, branch_of, descendants, notebook
from jupyter_client.multikernelmanager import AsyncMultiKernelManager
from jupyter_client.provisioning import KernelProvisionerFactory
from traitlets.config import Config

from jupyter_gpu_ckpt.cli import main
from jupyter_gpu_ckpt.errors import BranchDiffers, BranchUnsafe, CriuError, GpuCkptError
from jupyter_gpu_ckpt.image.branch import NewKernel, copy
from jupyter_gpu_ckpt.image.save_point import SavePoint
from jupyter_gpu_ckpt.kernel import branching
from jupyter_gpu_ckpt.kernel.agent_injection import PROVISIONER

pytestmark = pytest.mark.asyncio(loop_scope="function")

#: Everything that must differ in a branch, as one line of JSON.
IDENTITY = """
import json, os, ssl, tempfile, uuid
from multiprocessing import current_process
_kernel = get_ipython().kernel
with tempfile.NamedTemporaryFile() as _file: _name = _file.name
print(json.dumps({
    "session": _kernel.session.session, "key": _kernel.session.key.decode(), "topic": _kernel.ident,
    "history": get_ipython().history_manager.session_number, "temporary": _name, "tls": ssl.RAND_bytes(16).hex(),
    "uuid1": str(uuid.uuid1()), "uuid4": str(uuid.uuid4()), "pipe": _kernel.iopub_thread._pipe_port,
}))
"""
#: The user's own state, as one line.
STATE = "print(len(pages), sum(pages[7]), random.random(), numpy.random.rand(), torch.rand(1).item(), os.getcwd())"
#: Beside the user's sockets one as the driver of CUDA makes in each process: nobody has to consent to its other name.
SERVER = """
import fcntl, os, socket, struct, threading
path, lock = {!r}, {!r}
listener = socket.create_server(("127.0.0.1", 0))
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); datagrams.bind(("127.0.0.1", 0))
named = socket.socket(socket.AF_UNIX); named.bind(path); named.listen()
namespace = os.stat("/proc/self/ns/pid").st_ino
driver = socket.socket(socket.AF_UNIX); driver.bind(f"\\0cuda-uvmfd-{{namespace}}-{{os.getpid()}}")
locked = open(lock, "w"); fcntl.flock(locked, fcntl.LOCK_EX)
posix = open(lock + ".posix", "w"); fcntl.lockf(posix, fcntl.LOCK_EX)
whole = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
ofd = open(lock + ".ofd", "w"); fcntl.fcntl(ofd, fcntl.F_OFD_SETLK, whole)
answers = []
def serve():
    while True:
        connection, _ = listener.accept()
        answers.append(connection.recv(100)); connection.close()
server = threading.Thread(target=serve, daemon=True); server.start()
ports = [listener.getsockname()[1], datagrams.getsockname()[1]]
print(*ports)
"""
#: A file without a name, and one whose own name was deleted.
DELETED = """
import os
gone = open("gone", "w+"); print("gone", end="", file=gone, flush=True); os.unlink("gone")
other = open("own", "w+"); print("other", end="", file=other, flush=True); os.link("own", "second"); os.unlink("own")
"""
#: A forked child, and the means to fork others.
CHILDREN = """
import multiprocessing, time
fork = multiprocessing.get_context("fork")
worker = fork.Process(target=time.sleep, args=(1000,), daemon=True); worker.start()
"""
#: UDP sockets with a peer in the same kernel: of both families, bound to one address or to all, and two to each other.
CONNECTED = """
import socket
def pair(family, address, there):
    receiver, sender = (socket.socket(family, socket.SOCK_DGRAM) for _ in range(2))
    receiver.settimeout(5); receiver.bind((address, 0)); sender.connect((there, receiver.getsockname()[1]))
    return sender, receiver
pairs = [
    pair(socket.AF_INET, "127.0.0.1", "127.0.0.1"), pair(socket.AF_INET, "0.0.0.0", "127.0.0.1"),
    pair(socket.AF_INET6, "::1", "::1"), pair(socket.AF_INET, "127.0.0.1", "127.0.0.1"),
]
pairs[3][1].connect(pairs[3][0].getsockname())
def sent(word):
    for sender, receiver in pairs:
        sender.send(word.encode())
        yield receiver.recv(9).decode()
"""
#: Whether another process has locked the file.
LOCKED = """
with open(lock, "r+") as _other:
    try: fcntl.flock(_other, fcntl.LOCK_EX | fcntl.LOCK_NB); print(False)
    except BlockingIOError: print(True)
"""


async def message_ids(kernel: Notebook, cells: int) -> list[str]:
    """The ids of all messages by which a kernel answers so many cells that print."""
    found = []
    for _ in range(cells):
        reply = await kernel.client.execute_interactive(
            "for _ in range(20): print(_, flush=True)",
            output_hook=lambda message: found.append(message["header"]["msg_id"]),
            timeout=60,
        )
        found.append(reply["header"]["msg_id"])
    return found


async def test_two_branches_of_a_point_are_equal_there_and_share_nothing_that_must_be_unique(kernel, tmp_path):
    """Two branches and the kernel itself, all three at once, before and after they have slept again."""
    await kernel.run("import os, random, numpy, torch, ssl, tempfile; pages = [bytes([n]) * 4096 for n in range(200)]")
    await kernel.run("random.seed(7); numpy.random.seed(7); torch.manual_seed(7); ssl.RAND_bytes(8)")
    await kernel.run(IDENTITY)
    image = await kernel.provisioner.save("point")
    async with (
        branch_of(image.id, kernel, tmp_path / "one") as one,
        branch_of(image.id, kernel, tmp_path / "two") as two,
    ):
        three = [kernel, one, two]
        states = [await each.run(STATE) for each in three]
        assert states[0] == states[1] == states[2], "they are not equal at the point"
        async with branch_of(image.id, kernel, tmp_path / "reseeded", reseed=True) as reseeded:
            pairs = [*zip(states[0].split(), (await reseeded.run(STATE)).split(), strict=True)]
        assert [mine == theirs for mine, theirs in pairs] == [True, True, False, False, False, True]
        found = [json.loads(await each.run(IDENTITY)) for each in three]
        same = {name for name in found[0] if len({each[name] for each in found}) < len(three)}
        assert same == set()
        for each, facts in zip(three, found, strict=True):
            front = json.loads(Path(each.manager.connection_file).read_text())
            assert facts["key"] == front["key"] == each.manager.session.key.decode()
        for number, each in enumerate(three):
            await each.run(f"mine = {number}; pages.append(bytes(10))")
        await asyncio.gather(*(each.provisioner.checkpoint() for each in three))
        assert [await each.run("print(mine, len(pages))") for each in three] == ["0 201", "1 201", "2 201"]
        again = [json.loads(await each.run(IDENTITY)) for each in three]
        assert [each["session"] for each in again] == [each["session"] for each in found]
        answered = await asyncio.gather(*(message_ids(each, 15) for each in three))
        ids = [id for each in answered for id in each]
        assert len(ids) > 1000
        assert len(set(ids)) == len(ids)


async def test_what_cannot_exist_twice_is_named_before_and_is_otherwise_in_a_branch(kernel, tmp_path, runtime_base):
    """Also where the kernel itself continues beside the branch: with its ports, its socket and its locks."""
    path, lock = str(runtime_base / "named"), str(tmp_path / "lock")
    ports = list(map(int, (await kernel.run(SERVER.format(path, lock))).split()))
    image = await kernel.provisioner.checkpoint()
    plan = branching.plan(kernel.lifecycle.engine.store, image)
    assert sorted(each.kind for each in plan.differs) == ["lock", "lock", "lock", "port", "port", "socket"]
    locks = {each.what for each in plan.differs if each.kind == "lock"}
    assert locks == {f"an exclusive lock on {name}" for name in (lock, f"{lock}.posix", f"{lock}.ofd")}
    assert {lock, f"{lock}.posix", f"{lock}.ofd"} <= set(plan.shared)
    with pytest.raises(BranchDiffers) as refused:
        async with branch_of(image.id, kernel, tmp_path / "refused"):
            pass
    assert all(word in refused.value.message for word in (str(ports[0]), str(ports[1]), path, lock))
    assert image.id in refused.value.left
    assert "accept" in refused.value.hint
    await kernel.run("print(posix.fileno())")  # it is back, with all of it
    await kernel.provisioner.checkpoint()
    image = kernel.lifecycle.image
    await_kernel = kernel.run("print(*ports)")
    async with branch_of(image.id, kernel, tmp_path / "branch", accept_differences=True) as branch:
        assert (await await_kernel).split() == list(map(str, ports))
        notice = await branch.run("print(server.is_alive(), answers)", stream="stderr")
        assert f"127.0.0.1:{ports[0]}" in notice
        assert path in notice
        assert f"an exclusive lock on {lock} (not locked)" in notice
        assert "cuda-uvmfd" not in notice
        names = "listener.getsockname()[1], datagrams.getsockname()[1], named.getsockname()"
        own = (await branch.run(f"print({names})")).split()
        assert int(own[0]) != ports[0]
        assert int(own[1]) != ports[1]
        assert own[2] != path
        for port, owner, other in ((ports[0], kernel, branch), (int(own[0]), branch, kernel)):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                connection.sendall(b"hello")
                connection.recv(1)
            assert await owner.run("print(answers)") == "[b'hello']"
            assert await other.run("print(answers)") in ("[]", "[b'hello']")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            assert await kernel.run("print(named.accept()[0].getsockname())") == path
        assert await branch.run(LOCKED) == "True"  # by the kernel
        await kernel.run("locked.close()")
        assert await branch.run(LOCKED) == "False"
        await branch.provisioner.checkpoint()
        assert await branch.run("print(server.is_alive())") == "True"


async def test_there_is_no_branch_in_the_middle_of_a_transaction(kernel, tmp_path):
    path = tmp_path / "data.sqlite"
    sqlite3.connect(path).execute("create table t (n)").connection.commit()
    await kernel.run(f"import sqlite3; data = sqlite3.connect({str(path)!r})")
    await kernel.run("_ = data.execute('insert into t values (1)')")
    image = await kernel.provisioner.checkpoint()
    with pytest.raises(BranchUnsafe, match="transaction"):
        async with branch_of(image.id, kernel, tmp_path / "branch", accept_differences=True):
            pass
    assert await kernel.run("data.commit(); print(data.execute('select n from t').fetchall())") == "[(1,)]"


async def test_a_branch_that_cannot_be_restored_leaves_only_the_image_it_came_from(kernel, tmp_path, runtime_base):
    await kernel.run(f"x = 41; log = open({str(tmp_path / 'log')!r}, 'w+')")
    image = await kernel.provisioner.checkpoint()
    images = [each.id for each in kernel.lifecycle.engine.store.images()]
    processes = len(alive(descendants(os.getpid())))
    directories = sorted(runtime_base.iterdir())
    (tmp_path / "log").write_text("others write to it")
    with pytest.raises(CriuError) as refused:
        async with branch_of(image.id, kernel, tmp_path / "branch"):
            pass
    assert refused.value.left == f"the image is kept as {image.id}"
    assert "`--accept-changed-files`" in refused.value.hint
    assert [each.id for each in kernel.lifecycle.engine.store.images()] == images == [image.id]
    assert not [*(tmp_path / "images").glob(".draft-*")]
    assert sorted(runtime_base.iterdir()) == directories
    assert len(alive(descendants(os.getpid()))) <= processes
    async with branch_of(image.id, kernel, tmp_path / "branch", accept_changed_files=True) as branch:
        assert await branch.run("print(x, log.read())") == "41 others write to it"


async def test_changed_files_of_a_save_point_are_accepted_for_a_branch_by_itself_or_for_all(kernel, tmp_path):
    """The error names the save point, never the image of the branch, which is deleted."""
    await kernel.run("logs = [open(name, 'w+') for name in ('one', 'two')]; x = 41")
    image = await kernel.provisioner.save("point")
    for name in ("one", "two"):
        (tmp_path / name).write_text("others write to it")
    with pytest.raises(CriuError) as refused:
        async with branch_of(image.id, kernel, tmp_path / "branch"):
            pass
    error = refused.value
    assert error.hint.endswith("Or accept it as it is: begin the branch with `--accept-changed-files`.")
    assert f"(and 1 more: `jupyter gpu-ckpt match {image.id}` lists them)" in error.message
    named = re.findall(r"[0-9]{8}T[0-9]{6}-[0-9a-f-]+", json.dumps(error.as_dict()))
    assert set(named) == {image.id}
    async with branch_of(image.id, kernel, tmp_path / "branch", accept_changed_files=True) as branch:
        assert await branch.run("print(x, logs[0].read())") == "41 others write to it"
    images = ["--image-dir", str(tmp_path / "images")]
    assert await asyncio.to_thread(main, ["match", image.id, "--accept-changed-files", *images]) == 0
    async with branch_of(image.id, kernel, tmp_path / "branch") as branch:
        assert await branch.run("print(x, logs[1].read())") == "41 others write to it"


async def test_a_branch_keeps_its_directory_when_the_other_kernel_ends_and_leaves_none(kernel, tmp_path, runtime_base):
    """A branch knows its directory by the path of the other kernel's, where it is mounted."""
    lists = "import os; print(sorted(os.listdir(os.path.dirname(get_ipython().kernel.parent.ip))))"
    image = await kernel.provisioner.save("point")
    async with branch_of(image.id, kernel, tmp_path / "branch") as branch:
        before = await branch.run(lists)
        assert "connection.json" in before
        await kernel.manager.shutdown_kernel(now=True)
        assert await branch.run(lists) == before
    async with branch_of(image.id, kernel, tmp_path / "branch") as branch:  # nobody has that directory now
        assert "connection.json" in await branch.run(lists)
    assert list(runtime_base.iterdir()) == []


async def test_a_manager_of_kernels_does_not_count_a_refused_branch(tmp_path, runtime_base, criu_binary):
    config = Config()
    config.KernelProvisionerFactory.default_provisioner_name = PROVISIONER
    config.GpuCkptProvisioner = Config(image_dir=str(tmp_path / "images"), runtime_base=str(runtime_base))
    KernelProvisionerFactory.clear_instance()
    KernelProvisionerFactory.instance(config=config)
    kernels = AsyncMultiKernelManager(config=config, connection_dir=str(tmp_path))
    try:
        first = await kernels.start_kernel()
        provisioner = kernels.get_kernel(first).provisioner
        await provisioner.checkpoint()
        shutil.rmtree(provisioner.lifecycle.image.path / "criu")
        with pytest.raises(GpuCkptError):
            await provisioner.branch()
        assert (kernels.list_kernel_ids(), kernels._pending_kernels) == ([first], {})
        assert [path.name for path in tmp_path.glob("kernel-*.json")] == [f"kernel-{first}.json"]
    finally:
        await kernels.shutdown_all(now=True)
        KernelProvisionerFactory.clear_instance()


async def test_three_branches_at_once_have_deleted_files_and_those_of_a_save_point(kernel, tmp_path):
    """CRIU makes a deleted file for a moment under a name that the image has, the same for all three."""
    await kernel.run(DELETED)
    image = await kernel.provisioner.save("point")
    async with contextlib.AsyncExitStack() as stack:
        ways = [branch_of(image.id, kernel, tmp_path / f"branch{number}") for number in range(3)]
        branches = await asyncio.gather(*map(stack.enter_async_context, ways))
        for each in (kernel, *branches):
            assert await each.run("print(gone.seek(0), gone.read(), other.seek(0), other.read())") == "0 gone 0 other"
    assert not [*tmp_path.glob("link_remap.?")], "a link of the save point is under its first name"
    async with branch_of(image.id, kernel, tmp_path / "late") as late:
        assert await late.run("print(other.seek(0), other.read())") == "0 other"


async def test_a_branch_of_an_encrypted_image(tmp_path, runtime_base, criu_binary):
    (tmp_path / "key").write_text("17" * 32)
    (tmp_path / "key").chmod(0o600)
    async with notebook(tmp_path, runtime_base, encryption_key=f"file:{tmp_path / 'key'}") as kernel:
        await kernel.run("import socket; listener = socket.create_server(('127.0.0.1', 0)); x = 41")
        image = await kernel.provisioner.save("point")
        assert image.manifest.encryption
        async with branch_of(image.id, kernel, tmp_path / "branch", accept_differences=True) as branch:
            assert await branch.run("print(x)") == "41"
            ports = {await each.run("print(listener.getsockname()[1])") for each in (kernel, branch)}
            assert len(ports) == 2


async def test_a_branch_of_an_image_from_before_encryption_was_configured(kernel, tmp_path):
    await kernel.run("x = 41")
    image = await kernel.provisioner.save("point")
    (tmp_path / "key").write_text("17" * 32)
    (tmp_path / "key").chmod(0o600)
    kernel.manager.config.GpuCkptProvisioner.encryption_key = f"file:{tmp_path / 'key'}"
    async with branch_of(image.id, kernel, tmp_path / "branch") as branch:
        assert await branch.run("print(x)") == "41"
        assert (await branch.provisioner.checkpoint()).manifest.encryption
        assert await branch.run("print(x)") == "41"
        copied = copy(branch.lifecycle.engine.store, image, NewKernel("t", "python3", lambda _: None), SavePoint("t"))
        assert copied.manifest.encryption is None
        branch.lifecycle.engine.store.check(copied)


async def test_children_that_a_branch_forks_print_in_its_notebook(kernel, tmp_path):
    """The kernel's own port is in the image where a forked child has it, too; nobody is asked about it."""
    await kernel.run(CHILDREN)
    image = await kernel.provisioner.save("point")
    assert branching.plan(kernel.lifecycle.engine.store, image).differs == []
    async with branch_of(image.id, kernel, tmp_path / "branch") as branch:
        assert await branch.run("print(worker.is_alive())") == "True"
        fork = "child = fork.Process(target=print, args=({!r},)); child.start(); child.join(); time.sleep(1)"
        printed = await asyncio.gather(*(each.run(fork.format(who)) for who, each in (("a", branch), ("b", kernel))))
        assert printed == ["a", "b"]
        await branch.run("worker.terminate(); worker.join()")
        assert await kernel.run("print(worker.is_alive())") == "True"
    await kernel.run("worker.terminate(); worker.join()")


async def test_a_semaphore_that_would_be_one_for_both_kernels_is_named_before(kernel, tmp_path):
    """A pool of spawned processes, as joblib's, breaks in each; a lock of `fork`'s has no name."""
    await kernel.run("import multiprocessing as m; own = m.get_context('fork').Lock()")
    await kernel.run("%gpu_checkpoint --save without")
    plan = await kernel.provisioner.branch_plan("without")
    assert plan.differs == []
    name = await kernel.run("lock = m.get_context('spawn').Lock(); print(lock._semlock.name)")
    await kernel.run("%gpu_checkpoint --save with")
    image = await kernel.provisioner.branch_image("with")
    with pytest.raises(BranchDiffers, match=f"semaphore /dev/shm/sem.{name.removeprefix('/')}"):
        async with branch_of(image.id, kernel, tmp_path / "refused"):
            pass
    async with branch_of(image.id, kernel, tmp_path / "branch", accept_differences=True) as branch:
        assert await branch.run("print(lock.acquire(timeout=10)); lock.release()") == "True"


async def test_a_named_pipe_that_would_be_one_for_both_kernels_is_named_before(kernel, tmp_path):
    await kernel.run("import os; os.mkfifo('pipe'); pipe = os.open('pipe', os.O_RDWR); _ = os.write(pipe, b'old')")
    image = await kernel.provisioner.save("point")
    with pytest.raises(BranchDiffers, match=r"named pipe .*pipe \(one for both kernels"):
        async with branch_of(image.id, kernel, tmp_path / "refused"):
            pass
    assert await kernel.run("print(os.read(pipe, 9))") == "b'old'"


#: What is removed as a process ends, made before a branch; and its paths.
REMOVED_AT_THE_END = """
import glob, os, tempfile
from multiprocessing import shared_memory
directory = tempfile.TemporaryDirectory(); file = tempfile.NamedTemporaryFile()
memory = shared_memory.SharedMemory(create=True, size=9); memory.buf[0] = 7
paths = [directory.name, file.name, f'/dev/shm/{memory.name}']
"""


async def test_what_a_branch_would_remove_at_its_end_is_left_to_the_other_kernel(kernel, tmp_path):
    await kernel.run(REMOVED_AT_THE_END)
    image = await kernel.provisioner.save("point")
    async with branch_of(image.id, kernel, tmp_path / "branch") as branch:
        await kernel.provisioner.checkpoint()
        own = await branch.run("own = tempfile.TemporaryDirectory(); print(own.name)")
        await branch.run("file.close(); del file, directory; memory.close(); import gc; _ = gc.collect()")
        assert await branch.run("print(*map(os.path.exists, paths))") == "True True True"
        asleep = await branch.provisioner.checkpoint()
        assert asleep.manifest.report["tracked"] == [], "what is removed with the image of a kernel that never wakes"
        assert await branch.run("print(*map(os.path.exists, paths))") == "True True True"
        branch.client.shutdown()
        while await branch.manager.is_alive():
            await asyncio.sleep(0.05)
    assert not os.path.exists(own), "what it has made itself is removed"
    assert await kernel.run("print(*map(os.path.exists, paths), memory.buf[0])") == "True True True 7"
    await kernel.run("directory.cleanup(); file.close(); memory.close(); memory.unlink()")
    assert await kernel.run("print(*map(os.path.exists, paths))") == "False False False"


async def test_memory_that_a_branch_opens_anew_by_its_name_is_left_to_the_other_kernel(kernel, tmp_path):
    """Python before 3.13 has each program that opens a block remove it at its end."""
    await kernel.run("from multiprocessing import shared_memory")
    await kernel.run("memory = shared_memory.SharedMemory(create=True, size=9); memory.buf[0] = 7")
    image = await kernel.provisioner.save("point")
    async with branch_of(image.id, kernel, tmp_path / "branch") as branch:
        await branch.run("again = shared_memory.SharedMemory(memory.name); again.close()")
        own = await branch.run("own = shared_memory.SharedMemory(create=True, size=9); print(own.name)")
        await branch.run("from multiprocessing.resource_tracker import _resource_tracker; _resource_tracker._stop()")
        assert not os.path.exists(f"/dev/shm/{own}"), "its tracker removes what is left at its end"
    assert await kernel.run("there = shared_memory.SharedMemory(memory.name); print(there.buf[0])") == "7"
    await kernel.run("there.close(); memory.unlink()")


async def test_udp_sockets_that_are_connected_with_each_other_are_so_in_a_branch(kernel, tmp_path):
    await kernel.run(CONNECTED)
    image = await kernel.provisioner.save("point")
    async with branch_of(image.id, kernel, tmp_path / "branch", accept_differences=True) as branch:
        for owner, word in ((branch, "branch"), (kernel, "kernel"), (branch, "again")):
            assert await owner.run(f"print(*sent({word!r}))") == " ".join([word] * 4)


async def test_a_branch_unlinks_memory_that_both_have_and_its_new_tracker_knows_its_own(kernel, tmp_path):
    """A tracker prints an error for a name that it does not know, and removes what it knows."""
    await kernel.run("from multiprocessing import resource_tracker, shared_memory")
    await kernel.run("memory = shared_memory.SharedMemory(create=True, size=9)")
    image = await kernel.provisioner.save("point")
    async with branch_of(image.id, kernel, tmp_path / "branch") as branch:
        await branch.run("own = shared_memory.SharedMemory(create=True, size=9); sent = []")
        # Its errors go where nobody reads them, so what is written to it counts.
        await branch.run(
            "import os; write = os.write\n"
            "def note(fd, text):\n"
            "    if fd == resource_tracker._resource_tracker._fd: sent.append(text.decode())\n"
            "    return write(fd, text)\n"
            "os.write = note; name = memory.name"
        )
        await branch.run("memory.close(); memory.unlink(); own.close(); own.unlink()")
        await branch.run("again = shared_memory.SharedMemory(name, create=True, size=9); again.close(); again.unlink()")
        unregistered = await branch.run("print([each.split(':')[1] for each in sent if each.startswith('UNREGISTER')])")
        assert unregistered == await branch.run("print([own._name, again._name])")


async def test_keys_of_the_cryptography_package_are_not_the_same_in_both_kernels(kernel, tmp_path):
    """A copy of OpenSSL is linked into its own library."""
    await kernel.run(
        "from cryptography.hazmat.primitives.asymmetric import ec\n"
        "def key():\n"
        "    private = ec.generate_private_key(ec.SECP256R1())\n"
        "    return hex(private.private_numbers().private_value)\n"
        "key()"
    )
    image = await kernel.provisioner.save("point")
    async with branch_of(image.id, kernel, tmp_path / "one") as one, branch_of(image.id, kernel, tmp_path / "b") as two:
        keys = [await each.run("print(key())") for each in (kernel, one, two)]
    assert len({*keys}) == 3


async def test_a_branch_s_manager_is_its_own_whatever_becomes_of_the_other(kernel, tmp_path):
    """Its server listens at a path that the other kernel's has, too, in a directory that the program removes."""
    await kernel.run("import multiprocessing; manager = multiprocessing.Manager(); shared = manager.dict(x=1)")
    await kernel.run("import os, threading; path = manager.address; print(path)")
    await kernel.run("%gpu_checkpoint --save point")
    assert (await kernel.provisioner.branch_plan("point")).differs == []
    image = await kernel.provisioner.branch_image("point")
    # A new thread connects anew: by the path.
    write = "thread = threading.Thread(target=shared.update, kwargs={{'x': {0}}}); thread.start(); thread.join()"
    read = "seen = []; thread = threading.Thread(target=lambda: seen.append(shared.copy())); thread.start()\n"
    read += "thread.join(); print(seen[0], os.path.exists(path))"
    async with (
        branch_of(image.id, kernel, tmp_path / "one") as one,
        branch_of(image.id, kernel, tmp_path / "two") as two,
    ):
        for number, each in enumerate((kernel, one, two)):
            await each.run(write.format(number + 10))
        assert [await each.run(read) for each in (kernel, one, two)] == [f"{{'x': {n}}} True" for n in (10, 11, 12)]
        await one.provisioner.checkpoint()
        assert await one.run(read) == "{'x': 11} True"
        async with branch_of((await one.provisioner.save("again")).id, one, tmp_path / "three") as three:
            await three.run(write.format(13))
            assert [await each.run(read) for each in (one, three)] == ["{'x': 11} True", "{'x': 13} True"]
        assert await one.run(read) == "{'x': 11} True", "the branch's end has taken its source's"
        # Its server removes the directory, the branches' capsules make it again, and the program removes that, too.
        await kernel.run("process = manager._process; manager.shutdown(); process.join(); import shutil, time")
        await kernel.run("while not os.path.exists(os.path.dirname(path)): time.sleep(0.01)")
        await kernel.run("shutil.rmtree(os.path.dirname(path))")
        for each in (one, two):  # Linux has unmounted theirs, and they get it back in some milliseconds
            await each.run("import time\nwhile not os.path.exists(path): time.sleep(0.01)")
        await one.run(write.format(21))
        assert [await each.run(read) for each in (one, two)] == ["{'x': 21} True", "{'x': 12} True"]
        await two.provisioner.checkpoint()
        assert await two.run(read) == "{'x': 12} True"


async def test_a_kernel_from_a_template_has_the_tokens_of_its_own_start(
    tmp_path, runtime_base, criu_binary, monkeypatch
):
    """Not those of the kernel that the template was made of, which may be revoked, or another user's."""
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "of the template")
    monkeypatch.setenv("STORAGE_TOKEN", "of the template")
    monkeypatch.setenv("OLD_TOKEN", "of the template")
    show = (
        "import os; print(*(os.environ.get(name) for name in ('JUPYTERHUB_API_TOKEN', 'STORAGE_TOKEN', 'OLD_TOKEN')))"
    )
    async with notebook(tmp_path, runtime_base) as kernel:
        assert await kernel.run(show) == "of the template of the template of the template"
        point = await kernel.provisioner.save("ready")
        monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "of the start")
        monkeypatch.setenv("STORAGE_TOKEN", "of the start")
        monkeypatch.delenv("OLD_TOKEN")
        async with branch_of(point.id, kernel, tmp_path / "new", is_template=True) as new:
            assert await new.run(show) == "of the start of the start None"
            await new.provisioner.checkpoint()
            assert await new.run(show) == "of the start of the start None"
            child = (
                f"import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', {show!r}], text=True))"
            )
            assert await new.run(child) == "of the start of the start None"
