"""A checkpoint that cannot be: the kernel runs on, untouched, and says why it stayed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest
import sweeps
from family import alone_and_with_family
from faulty import Subject, under_way
from harness import alive, notebook, until

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.criu import criu
from jupyter_gpu_ckpt.errors import CriuKilled, CriuTimeout
from jupyter_gpu_ckpt.lifecycle.preflight import read_process


@pytest.mark.parametrize("enough", [0, 1, 100_000_000], ids=["at once", "first page", "in the middle"])
async def test_criu_killed_in_the_middle_of_a_dump(heavy, enough):
    async with heavy.at("dump") as dumping:
        failing = asyncio.create_task(heavy.fails(heavy.provisioner.checkpoint, "CRIU_KILLED"))
        await dumping.wait()
        heavy.send()
        await heavy.kill_when(heavy.criu, lambda: under_way(heavy.images, enough))
        error = await failing
    assert error.details["status"] == -signal.SIGKILL
    await heavy.runs_on(error)
    await heavy.leaves_and_wakes()


THREADS = """
import hashlib, random, sys, threading, time
sys.setswitchinterval(0.0005)
text, beats, wrong = b'text' * 50_000, [0] * 30, []
digest, idle = hashlib.sha256(text).digest(), threading.Event()
works = [
    lambda: sum(k * k for k in range(100)) == 328350,
    lambda: hashlib.sha256(text).digest() == digest,
    lambda: time.sleep(0.01) is None,
    lambda: not idle.wait(0.02),
    lambda: time.sleep(0.001) is None and sorted(range(200), reverse=True)[0] == 199,
]
def work(number):
    while True:
        if not works[number % 5]():
            wrong.append(number)
        beats[number] += 1
        if number >= 5:  # one of each kind never rests
            time.sleep(0.02)
for number in range(30):
    threading.Thread(target=work, args=(number,), daemon=True).start()
numbers, same = random.Random(7), random.Random(7)
def well():
    before, deadline = list(beats), time.monotonic() + 60
    while any(map(int.__eq__, beats, before)) and time.monotonic() < deadline:
        time.sleep(0.01)
    still = [number for number in range(30) if beats[number] == before[number]]
    return still, wrong, numbers.random() == same.random(), ballast.count(b'x') == len(ballast)
"""


@alone_and_with_family("heavy")
@pytest.mark.parametrize("kills", [5, pytest.param(200, marks=pytest.mark.torture)])
async def test_criu_killed_at_any_moment_of_a_dump(heavy, kills):
    """From before CRIU has touched the kernel to the last page: it runs on, and each of its threads."""
    await heavy.run(THREADS)
    chance = random.Random(f"{os.environ[sweeps.SEED]} {kills}")
    for _ in range(kills):
        delay = chance.uniform(0.0, 0.6)
        async with heavy.at("dump") as dumping:
            leaving, reached = asyncio.create_task(heavy.provisioner.checkpoint()), asyncio.create_task(dumping.wait())
            await asyncio.wait([leaving, reached], return_when=asyncio.FIRST_COMPLETED)
            assert reached.done(), leaving.exception()
            await asyncio.sleep(delay)  # the moment is the point of this test
            for pid in heavy.criu() if heavy.kernel.lifecycle.capsule else []:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(CriuKilled):
                await leaving
        assert await heavy.run("print(x, well())") == "41 ([], [], True, True)", delay
        await heavy.kernel.settled("running")
        assert heavy.drafts() == []
    await heavy.leaves_and_wakes()
    assert await heavy.run("print(well())") == "([], [], True, True)"


@pytest.mark.torture
async def test_deadlines_at_any_moment_of_a_dump(heavy, monkeypatch):
    """Not one of a hundred harms the kernel: an overdue CRIU is made to fail, and takes everything back."""
    chance, settings = random.Random(21), heavy.kernel.lifecycle.kernel.settings
    for _ in range(100):
        seconds = chance.uniform(0.0, 0.4)
        monkeypatch.setattr(
            heavy.kernel.lifecycle.kernel, "settings", replace(settings, base=seconds, slowest_rate=1e15)
        )
        with contextlib.suppress(CriuTimeout):
            await heavy.provisioner.checkpoint()
        monkeypatch.setattr(heavy.kernel.lifecycle.kernel, "settings", settings)
        assert await heavy.run("print(x)") == "41", seconds
        await heavy.kernel.settled("running")


async def test_criu_that_meets_its_deadline(heavy, monkeypatch):
    """CRIU stopped by a signal stands for one whose disk hangs: not even an error ends it, so it is killed."""
    monkeypatch.setattr(criu, "GRACE", 1.0)
    settings = heavy.kernel.lifecycle.kernel.settings
    monkeypatch.setattr(heavy.kernel.lifecycle.kernel, "settings", replace(settings, base=1.0, slowest_rate=1e12))
    async with heavy.at("dump") as dumping:
        failing = asyncio.create_task(heavy.fails(heavy.provisioner.checkpoint, "CRIU_TIMEOUT"))
        await dumping.wait()
        heavy.send()
        await until(lambda: under_way(heavy.images, 1_000_000), 60)
        for pid in heavy.criu():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        error = await failing
    monkeypatch.setattr(heavy.kernel.lifecycle.kernel, "settings", settings)
    await heavy.runs_on(error)
    await heavy.leaves_and_wakes()


async def test_the_kernel_killed_in_the_middle_of_a_dump(heavy):
    pid = heavy.capsule.host_pid
    async with heavy.at("dump") as dumping:
        failing = asyncio.create_task(heavy.fails(heavy.provisioner.checkpoint, "KERNEL_LOST"))
        await dumping.wait()
        await until(lambda: under_way(heavy.images, 1_000_000), 60)
        os.kill(pid, signal.SIGKILL)
        error = await failing
    assert error.left == "the kernel is gone"
    assert heavy.kernel.state == "dead"
    assert await heavy.provisioner.poll() == -signal.SIGKILL
    assert alive([pid]) == []
    assert heavy.drafts() == []
    await heavy.kernel.manager.restart_kernel()
    await heavy.kernel.client.wait_for_ready(timeout=60)
    assert await heavy.run("print('x' in globals())") == "False"


@pytest.mark.parametrize("step", ["drain", "quiesce", "disconnect", "publish"])
async def test_the_kernel_killed_just_before_a_step(subject, step):
    """All who wait for an answer of the kernel hear of its end at once; a published image outlives its process."""
    pid = subject.capsule.host_pid

    def kill(event) -> None:
        if (event.kind, event.step) == ("started", step):
            os.kill(pid, signal.SIGKILL)

    subject.provisioner.sinks.append(kill)
    if step == "publish":
        await subject.provisioner.checkpoint()
        subject.provisioner.sinks.remove(kill)
        await subject.wakes()
        return
    began = asyncio.get_running_loop().time()
    error = await subject.fails(subject.provisioner.checkpoint, "KERNEL_LOST")
    assert asyncio.get_running_loop().time() - began < 60
    assert error.left == "the kernel is gone"
    assert subject.kernel.state == "dead"
    assert subject.drafts() == []


async def test_a_shutdown_in_the_middle_of_a_dump_is_quick(heavy):
    pids = heavy.capsule.processes()
    async with heavy.at("dump") as dumping:
        failing = asyncio.create_task(heavy.fails(heavy.provisioner.checkpoint, "KERNEL_LOST"))
        await dumping.wait()
        await until(lambda: under_way(heavy.images, 1_000_000), 60)
        await asyncio.wait_for(heavy.kernel.manager.shutdown_kernel(now=True), 60)
        await failing
    assert alive(pids) == []
    assert heavy.drafts() == []


async def test_a_busy_kernel_is_left_alone(subject):
    await subject.run("import pathlib, time")
    message = subject.kernel.client.execute(
        "while not pathlib.Path('go').exists(): time.sleep(0.01)\nprint('finished')"
    )
    await until(lambda: subject.provisioner.gate.pending == ["execute_request"])
    error = await subject.fails(subject.provisioner.checkpoint, "KERNEL_BUSY")
    assert error.details["pending"] == ["execute_request"]
    (subject.directory / "go").touch()
    while True:
        reply = await subject.kernel.client.get_shell_msg(timeout=60)
        if reply["parent_header"].get("msg_id") == message:
            break
    assert reply["content"]["status"] == "ok"
    await subject.runs_on(error)
    await subject.leaves_and_wakes()


DAEMON = """
import time
if not (middle := os.fork()):
    os.setsid()
    if not os.fork():
        open('daemon', 'w').write('there')
        os.execvp('sleep', ['sleep', '1000'])
    os._exit(0)
os.waitpid(middle, 0)
while not os.path.exists('daemon'): time.sleep(0.01)
"""


async def test_a_process_that_has_lost_its_parent(subject):
    await subject.run(DAEMON)
    await subject.leaves_and_wakes()
    assert ("sleep", "1000") in map(procfs.arguments, subject.capsule.other_processes())


async def test_a_process_that_has_lost_its_parent_and_the_root_process(subject):
    await subject.run(DAEMON)
    os.kill(subject.capsule.root(), signal.SIGKILL)

    def commands() -> list[str]:
        return [process.command for process in map(read_process, subject.capsule.other_processes()) if process]

    await until(lambda: "sleep 1000" in commands())
    error = await subject.fails(subject.provisioner.checkpoint, "CHILD_PROCESSES")
    assert "sleep 1000" in error.message
    await subject.runs_on(error)
    assert alive(error.details["pids"]) == error.details["pids"]
    for pid in error.details["pids"]:
        os.kill(pid, signal.SIGKILL)
    await until(lambda: alive(error.details["pids"]) == [])
    await subject.leaves_and_wakes()


class Debugger:
    """Debugs as JupyterLab does."""

    def __init__(self, client) -> None:
        self.client, self.sequence = client, 0

    async def ask(self, command: str, arguments: dict) -> dict:
        self.sequence += 1
        content = {"type": "request", "seq": self.sequence, "command": command, "arguments": arguments}
        message = self.client.session.msg("debug_request", content)
        self.client.control_channel.send(message)
        while True:
            reply = await self.client.get_control_msg(timeout=60)
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                return reply["content"]

    async def begin(self) -> None:
        arguments = {"clientID": "test", "adapterID": "", "pathFormat": "path", "linesStartAt1": True}
        assert (await self.ask("initialize", arguments))["success"]
        assert (await self.ask("attach", {}))["success"]

    async def stop_in_a_cell(self) -> None:
        """Run a cell that stops at a breakpoint, and let it continue."""
        code = "a = 1\nb = a + 1\nc = b + 1"
        path = (await self.ask("dumpCell", {"code": code}))["body"]["sourcePath"]
        where = {"source": {"path": path}, "breakpoints": [{"line": 2}], "sourceModified": False}
        assert (await self.ask("setBreakpoints", where))["success"]
        assert (await self.ask("configurationDone", {}))["success"]
        cell = self.client.execute(code)
        while (event := await self.client.get_iopub_msg(timeout=60))["content"].get("event") != "stopped":
            pass
        assert (await self.ask("continue", {"threadId": event["content"]["body"]["threadId"]}))["success"]
        while (await self.client.get_shell_msg(timeout=60))["parent_header"]["msg_id"] != cell:
            pass

    async def end(self) -> None:
        assert (await self.ask("disconnect", {"restart": False, "terminateDebuggee": False}))["success"]


@pytest.fixture
def traced(strace):
    """Trace all threads of a process while the body runs; yields the tracer's pid."""

    @contextlib.contextmanager
    def tracing(pid: int) -> Iterator[int]:
        command = [strace, "-f", "-o", "/dev/null", "-p", str(pid)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
            assert "attached" in tracer.stderr.readline()
            try:
                yield tracer.pid
            finally:
                tracer.terminate()

    return tracing


async def test_a_debugger_attached_as_jupyterlab_does_it(subject):
    await Debugger(subject.kernel.client).begin()
    error = await subject.fails(subject.provisioner.checkpoint, "DEBUGGER_ATTACHED")
    assert "bug button" in error.hint
    await subject.runs_on(error)


async def test_a_tracer_outside_keeps_the_kernel_and_is_named(subject, traced):
    """strace, gdb -p, py-spy: CRIU cannot attach, and the threads cannot be stopped."""
    with traced(subject.capsule.host_pid) as tracer:
        error = await subject.fails(subject.provisioner.checkpoint, "UNPROVEN_STATE")
        assert f"process {tracer}" in error.message and "strace" in error.message
        assert error.left == "the kernel runs on"
        assert await subject.run("print(x)") == "41"
    await subject.leaves_and_wakes()


async def test_a_debugger_that_was_turned_off_keeps_nobody_and_can_be_turned_on_again(subject):
    debugger = Debugger(subject.kernel.client)
    for _ in range(2):
        await debugger.begin()
        await debugger.stop_in_a_cell()
        await debugger.end()
        await subject.leaves_and_wakes()
    assert await subject.run("import subprocess; print(subprocess.run(['true']).returncode)") == "0"


#: A program that listens for an editor, and an editor that comes and goes.  debugpy's adapter accepts nobody any more,
#: with no checkpoint near it, where an editor has gone before it was sent all of its welcome, which ends with the event
#: `debugpySockets`.
#: The reset at the end (SO_LINGER 0) spares the adapter's port the minute of TIME_WAIT that a wake would wait for.
EDITOR = """
import debugpy, json, socket, struct
at = debugpy.listen(("127.0.0.1", 0))

def said(file):
    length = int(file.readline().split()[1])
    file.readline()
    return json.loads(file.read(length))

def ask(file, seq, command, arguments, *events):
    body = json.dumps({"seq": seq, "type": "request", "command": command, "arguments": arguments})
    file.write(f"Content-Length: {len(body)}\\r\\n\\r\\n{body}".encode())
    file.flush()
    success, missing = None, set(events)
    while success is None or missing:
        message = said(file)
        missing.discard(message.get("event"))
        if message.get("command") == command:
            success = message["success"]
    return success

def edit():
    with socket.create_connection(at, 20) as editor, editor.makefile("rwb") as file:
        editor.settimeout(60)
        editor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        done = ask(file, 1, "initialize", {"adapterID": "x"}, "debugpySockets"), ask(file, 2, "disconnect", {})
        while file.read(1000):
            pass
        return done
"""


async def test_a_debugger_that_a_program_listens_with(subject):
    """`debugpy.listen` starts an adapter as a daemon; it comes back, and so does its connection to the program."""
    await subject.run(EDITOR)
    for _ in range(2):
        assert await subject.run("print(edit())") == "(True, True)"
        await subject.leaves_and_wakes()
    assert await subject.run("print(edit())") == "(True, True)"


async def test_a_unix_socket_to_somebody_outside(subject, runtime_base):
    path = runtime_base / "outside"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        await subject.run(f"s = socket.socket(socket.AF_UNIX); s.connect({str(path)!r})")
        peer, _ = listener.accept()
        with peer:
            error = await subject.fails(subject.provisioner.checkpoint, "SOCKET_UNSUPPORTED")
            await subject.runs_on(error)
            await subject.run("s.sendall(b'still here')")
            assert peer.recv(100) == b"still here"
            await subject.run("s.close()")
    await subject.leaves_and_wakes()


@pytest.mark.parametrize("kind", ["MAP_SHARED", "MAP_PRIVATE"])
async def test_a_mapping_of_a_deleted_file(subject, kind):
    """A private one can be saved by root's CRIU only."""
    await subject.run(
        "import mmap\nf = open('gone', 'w+b'); _ = f.write(b'y' * 4096); f.flush()\n"
        f"m = mmap.mmap(f.fileno(), 4096, flags=mmap.{kind}); f.close(); os.unlink('gone')"
    )
    if os.geteuid() == 0 or kind == "MAP_SHARED":
        await subject.leaves_and_wakes()
        assert await subject.run("print(m[:3], len(m))") == "b'yyy' 4096"
        return
    error = await subject.fails(subject.provisioner.checkpoint, "DELETED_MAPPING")
    assert str(subject.directory / "gone") in error.message
    await subject.runs_on(error)
    await subject.run("m.close()")
    await subject.leaves_and_wakes()


async def test_a_full_disk_is_refused_before_anything_is_stopped(subject, monkeypatch):
    monkeypatch.setattr(subject.kernel.lifecycle.engine.store, "free", lambda: 1000)
    error = await subject.fails(subject.provisioner.checkpoint, "NO_SPACE")
    assert "drain" not in subject.kernel.steps.seconds()
    await subject.runs_on(error)
    monkeypatch.undo()
    await subject.leaves_and_wakes()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 60 MB at ``tmp_path/images``; what an ordinary user cannot make is made by a limit on files."""
    if os.geteuid() != 0:
        pytest.skip("an ordinary user can mount no file system that fills up: run as root")
    directory = tmp_path / "images"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60m,mode=0700", "tmpfs", directory], check=True, timeout=60)
    yield directory
    subprocess.run(["umount", "--lazy", directory], check=True, timeout=60)


async def test_the_disk_fills_while_the_image_is_written(small_disk, tmp_path, runtime_base, criu_binary, monkeypatch):
    async with notebook(tmp_path, runtime_base) as kernel:
        subject = await Subject.of(kernel, tmp_path, "ballast = bytearray(b'x') * 100_000_000")
        # Preflight would have said so; others may fill the disk after it looked.
        monkeypatch.setattr(kernel.lifecycle.engine.store, "free", lambda: 1 << 40)
        async with subject.at("dump") as dumping:
            failing = asyncio.create_task(subject.fails(subject.provisioner.checkpoint, "NO_SPACE"))
            await dumping.wait()
            subject.send()
            error = await failing
        await subject.runs_on(error)
        assert [path.name for path in small_disk.iterdir()] == []
        await subject.run("del ballast")
        subprocess.run(["mount", "-o", "remount,size=400m", small_disk], check=True, timeout=60)
        await subject.leaves_and_wakes()
        subject.close()


@contextlib.contextmanager
def unwritable(directory):
    """A directory that cannot be written: by its mode, or for root (who ignores modes) by a mount over it."""
    directory.mkdir(mode=0o700)
    if os.geteuid() != 0:
        directory.chmod(0o500)
        yield
        directory.chmod(0o700)
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,mode=0700", "tmpfs", directory], check=True, timeout=60)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", directory], check=True, timeout=60)


async def test_an_image_directory_that_cannot_be_written(subject):
    with unwritable(subject.images):
        error = await subject.fails(subject.provisioner.checkpoint, "STORE_UNWRITABLE")
        await subject.runs_on(error)
    await subject.leaves_and_wakes()


async def test_an_image_directory_that_others_can_enter(subject):
    subject.images.mkdir()
    subject.images.chmod(0o755)
    error = await subject.fails(subject.provisioner.checkpoint, "STORE_SHARED")
    await subject.runs_on(error)
    assert subject.images.stat().st_mode & 0o777 == 0o755
    subject.images.chmod(0o700)
    await subject.leaves_and_wakes()


async def test_a_connection_that_is_about_to_be_accepted_is_no_reason_to_refuse(subject):
    await subject.run("""
import select, socket, threading, time
listener = socket.socket(socket.AF_UNIX)
listener.bind("listener")
listener.listen()
def serve():
    select.select([listener], [], [])
    time.sleep(0.15)
    listener.accept()[0].close()
threading.Thread(target=serve).start()""")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(subject.directory / "listener"))
        await subject.provisioner.checkpoint()
    await subject.wakes()
