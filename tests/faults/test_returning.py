"""A wake that cannot be: the image is kept, and once the cause is gone the next try brings everything back."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import re
import signal
import socket
import struct
import threading
from pathlib import Path

import pytest
from faulty import send_when, under_way
from harness import CellFailed, alive, until

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.errors import CapsuleGone
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.lifecycle import restore
from jupyter_gpu_ckpt.lifecycle.context import Reason
from jupyter_gpu_ckpt.lifecycle.preflight import read_process


async def test_an_open_log_that_grew_while_the_kernel_slept(subject):
    """The error names the file; cut back to what it was, the kernel wakes, and continues writing where it was."""
    log = subject.directory / "training.log"
    await subject.run("log = open('training.log', 'w'); _ = log.write('epoch 1\\n'); log.flush()")
    await subject.provisioner.checkpoint()
    with log.open("a") as other:
        other.write("rotated\n")
    error = await subject.fails(subject.provisioner.restore, "FILE_CHANGED")
    assert error.details["culprit"] == str(log)
    assert str(log) in error.message
    await subject.stays_away(error)
    # A client's cell hears the same, instead of waiting for ever.
    with pytest.raises(CellFailed, match="FILE_CHANGED"):
        await subject.run("log.write('too early')")
    os.truncate(log, len("epoch 1\n"))
    await subject.wakes()
    await subject.run("_ = log.write('epoch 2\\n'); log.close()")
    assert log.read_text() == "epoch 1\nepoch 2\n"


async def test_an_open_file_that_was_moved_away(subject):
    data = subject.directory / "data.bin"
    data.write_bytes(b"data")
    await subject.run("f = open('data.bin', 'rb'); _ = f.read(2)")
    await subject.provisioner.checkpoint()
    data.rename(subject.directory / "elsewhere")
    error = await subject.fails(subject.provisioner.restore, "FILE_MISSING")
    assert error.details["culprit"] == str(data)
    await subject.stays_away(error)
    (subject.directory / "elsewhere").rename(data)
    await subject.wakes()
    assert await subject.run("print(f.read())") == "b'ta'"


async def test_a_lock_that_somebody_else_has(subject):
    """The error names the file; once it is unlocked the kernel wakes, and has its lock again."""
    path = subject.directory / "locked"
    path.write_bytes(b"x" * 100)
    await subject.run(
        "import fcntl, mmap\n"
        "f = open('locked', 'r+'); m = mmap.mmap(f.fileno(), 100); fcntl.lockf(f, fcntl.LOCK_EX, 10)"
    )
    await subject.provisioner.checkpoint()
    with path.open("r+") as other:
        fcntl.lockf(other, fcntl.LOCK_EX, 1, 5)
        error = await subject.fails(subject.provisioner.restore, "LOCK_TAKEN")
        assert str(path) in error.message
        await subject.stays_away(error)
        fcntl.lockf(other, fcntl.LOCK_UN)
        await subject.wakes()
        with pytest.raises(BlockingIOError):
            fcntl.lockf(other, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 5)


@pytest.mark.parametrize("own", ["EX", "SH"])
async def test_a_lock_on_a_whole_file_that_somebody_else_has(subject, own):
    """CRIU would wait for it until its deadline."""
    path = subject.directory / "locked"
    path.touch()
    await subject.run(f"import fcntl; f = open('locked', 'r+'); fcntl.flock(f, fcntl.LOCK_{own})")
    await subject.provisioner.checkpoint()
    with path.open("r+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        error = await subject.fails(subject.provisioner.restore, "LOCK_TAKEN")
        assert str(path) in error.message
        await subject.stays_away(error)
        fcntl.flock(other, fcntl.LOCK_UN)
        await subject.wakes()
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


async def test_a_lock_of_an_open_file_description_that_somebody_else_has(subject):
    def lock(kind: int, start: int) -> bytes:
        return struct.pack("hhqqi4x", kind, os.SEEK_SET, start, 10, 0)

    path = subject.directory / "locked"
    path.write_bytes(b"x" * 100)
    code = f"import fcntl; f = open('locked', 'r+'); _ = fcntl.fcntl(f, fcntl.F_OFD_SETLK, {lock(fcntl.F_WRLCK, 5)})"
    await subject.run(code)
    await subject.provisioner.checkpoint()
    with path.open("r+") as other:
        fcntl.fcntl(other, fcntl.F_OFD_SETLK, lock(fcntl.F_WRLCK, 14))
        error = await subject.fails(subject.provisioner.restore, "LOCK_TAKEN")
        assert str(path) in error.message
        fcntl.fcntl(other, fcntl.F_OFD_SETLK, lock(fcntl.F_UNLCK, 14))
        fcntl.fcntl(other, fcntl.F_OFD_SETLK, lock(fcntl.F_WRLCK, 15))
        await subject.wakes()


async def test_a_port_that_somebody_else_took(subject):
    await subject.run("s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()")
    port = int(await subject.run("print(s.getsockname()[1])"))
    await subject.provisioner.checkpoint()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        error = await subject.fails(subject.provisioner.restore, "PORT_TAKEN")
        await subject.stays_away(error)
    await subject.wakes()
    with socket.create_connection(("127.0.0.1", port), timeout=60):
        await subject.run("s.accept()[0].close()")


async def test_a_damaged_image_is_reported_and_not_restored(subject):
    image = await subject.provisioner.checkpoint()
    victim = max(image.criu_directory.iterdir(), key=lambda path: path.stat().st_size)
    content = victim.read_bytes()
    os.truncate(victim, len(content) - 1)
    error = await subject.fails(subject.provisioner.restore, "IMAGE_DAMAGED")
    assert error.left == f"the image is kept as {image.id}"
    assert subject.kernel.state == "checkpointed"
    victim.write_bytes(content)
    await subject.wakes()


async def test_an_image_that_was_removed_is_not_said_to_be_kept(subject):
    image = await subject.provisioner.checkpoint()
    image.path.rename(subject.directory / "moved")
    error = await subject.fails(subject.provisioner.restore, "IMAGE_NOT_FOUND")
    assert "kept" not in error.left
    assert subject.kernel.state == "checkpointed"
    (subject.directory / "moved").rename(image.path)
    await subject.wakes()


async def test_an_image_another_process_is_restoring(subject):
    image = await subject.provisioner.checkpoint()
    with image.lease():
        error = await subject.fails(subject.provisioner.restore, "IMAGE_BUSY")
        await subject.stays_away(error)
    await subject.wakes()


class Created:
    """Capsules as they are made: a restore's is not known to the lifecycle before it is done."""

    def __init__(self, monkeypatch) -> None:
        self.capsules: list[Capsule] = []
        create = Capsule.create

        def noted(*args, **options) -> Capsule:
            self.capsules.append(create(*args, **options))
            return self.capsules[-1]

        monkeypatch.setattr(restore.Capsule, "create", noted)

    def criu(self) -> list[int]:
        """CRIU itself, in the newest capsule."""
        return [pid for pid in self._inside() if (found := read_process(pid)) and "--images-dir" in found.command][:1]

    def process(self, inner_pid: int) -> list[int]:
        """The process that has ``inner_pid`` in the newest capsule."""
        found = []
        for pid in self._inside():
            with contextlib.suppress(OSError):
                (numbers,) = re.findall(r"^NSpid:\s+(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
                if int(numbers.split()[-1]) == inner_pid:
                    found.append(pid)
        return found

    def _inside(self) -> list[int]:
        return self.capsules[-1].other_processes() if self.capsules else []


@pytest.mark.parametrize("victim", ["criu", "kernel"])
async def test_a_kill_in_the_middle_of_a_restore(heavy, monkeypatch, victim):
    """CRIU, or the half-restored kernel, ended by SIGKILL, also at the second try, which comes by itself: nothing of
    the attempts is left, the image is."""
    image = await heavy.provisioner.checkpoint()
    created = Created(monkeypatch)
    expected = "CRIU_KILLED" if victim == "criu" else "CRIU_FAILED"
    heavy.send()  # wakes it
    killed: list[int] = []
    for tries in (1, 2):
        await until(lambda tries=tries: len(created.capsules) == tries, 60)
        victims = created.criu if victim == "criu" else lambda: created.process(image.manifest.pid)
        killed.append(await heavy.kill_when(victims))
    reply = await heavy.reply()
    assert reply["status"] == "error"
    assert expected in str(reply)
    assert f"the image is kept as {image.id}" in str(reply)
    assert "It was tried twice" in str(reply)
    await heavy.kernel.settled("checkpointed")
    await heavy.stays_away()
    assert alive(killed) == []
    assert len(created.capsules) == 2
    await heavy.wakes()
    assert await heavy.run("print(ran)") == "[]"


@pytest.mark.parametrize("victim", ["criu", "kernel"])
async def test_a_kill_in_the_middle_of_a_restore_is_made_good_by_a_second_try(heavy, monkeypatch, caplog, victim):
    """Once, by chance: the cell that woke the kernel runs all the same, and the log says what was the matter."""
    image = await heavy.provisioner.checkpoint()
    created = Created(monkeypatch)
    heavy.send()
    pid = await heavy.kill_when(created.criu if victim == "criu" else lambda: created.process(image.manifest.pid))
    assert (await heavy.reply())["status"] == "ok"
    await heavy.kernel.settled("running")
    assert alive([pid]) == []
    assert len(created.capsules) == 2
    assert "criu_restore failed (CRIU_" in caplog.text
    assert await heavy.run("print(x, ran)") == "41 [0]"


async def test_an_error_that_a_second_try_cannot_fix_is_not_tried_again(subject, monkeypatch):
    await subject.run("log = open('training.log', 'w'); _ = log.write('epoch 1\\n'); log.flush()")
    await subject.provisioner.checkpoint()
    (subject.directory / "training.log").unlink()
    created = Created(monkeypatch)
    await subject.fails(subject.provisioner.restore, "FILE_MISSING")
    assert [event.step for event in subject.kernel.steps.events if event.kind == "failed"] == ["match"]
    assert len(created.capsules) <= 1, "one is made while the image is matched, and none for a second try"
    assert created.criu() == []
    for capsule in created.capsules:
        with pytest.raises(CapsuleGone):
            capsule.require_alive()
    (subject.directory / "training.log").write_text("epoch 1\n")
    await subject.wakes()


async def test_a_client_that_shuts_the_kernel_down_in_the_middle_of_a_restore(subject, monkeypatch):
    """By a message, as a console does: the gate takes it, and it does not wait behind the wake either."""
    await subject.provisioner.checkpoint()
    created = Created(monkeypatch)
    subject.send()
    await until(lambda: bool(created.criu()), 60)
    (pid,) = created.criu()
    os.kill(pid, signal.SIGSTOP)
    inside = created._inside()
    subject.kernel.client.shutdown()
    await until(lambda: subject.kernel.state == "dead", 60)
    assert alive([pid, *inside]) == []


@pytest.mark.parametrize("how", ["manager", "message"])
async def test_an_interrupt_in_the_middle_of_a_wake_ends_the_cell_and_the_kernel_comes_back(subject, how):
    """The cell that waits is answered as an interrupted one; it never runs, and the next one finds everything."""
    await subject.provisioner.checkpoint()
    proceed = threading.Event()

    def stop(event) -> None:
        assert (event.kind, event.step) != ("started", "criu_restore") or proceed.wait(60)

    subject.provisioner.faults.append(stop)
    subject.send()  # wakes it
    await until(lambda: subject.kernel.state == "restoring")
    if how == "manager":
        await subject.kernel.manager.interrupt_kernel()
    else:
        message = subject.kernel.client.session.msg("interrupt_request", {})
        subject.kernel.client.control_channel.send(message)
    reply = await subject.reply()
    assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt")
    assert subject.kernel.state == "restoring", "answered at once, not when the kernel is back"
    proceed.set()
    await subject.kernel.settled("running")
    assert await subject.run("print(x, ran)") == "41 []"


async def test_a_bug_in_a_wake_is_logged_and_reported_in_the_cell(subject, monkeypatch, caplog):
    await subject.provisioner.checkpoint()

    def broken() -> None:
        raise RuntimeError("a fault")

    with monkeypatch.context() as patched:
        patched.setattr(subject.kernel.lifecycle, "wake", broken)
        with pytest.raises(CellFailed, match="INTERNAL: RuntimeError: a fault"):
            await subject.run("x")
    (record,) = [record for record in caplog.records if record.exc_info and record.exc_info[0] is RuntimeError]
    assert record.levelname == "ERROR"
    await subject.wakes()


async def test_restores_to_different_gpus_are_not_one(subject):
    """A second request joins the first only if it asks for the same; a mapping is never dropped in silence."""
    await subject.provisioner.checkpoint()
    verb = subject.provisioner.restore
    proceed = threading.Event()

    def stop(event) -> None:
        assert event.step != "match" or proceed.wait(60)

    subject.provisioner.faults.append(stop)
    first = asyncio.create_task(verb())
    await until(lambda: subject.kernel.state == "restoring")
    error = await subject.fails(lambda: verb({"GPU-a": "GPU-b"}), "WRONG_STATE")
    assert "not the same" in error.message
    second = asyncio.create_task(verb({}))
    proceed.set()
    await asyncio.gather(first, second)
    subject.provisioner.faults.remove(stop)
    error = await subject.fails(lambda: verb({"GPU-a": "GPU-b"}), "WRONG_STATE")
    assert error.left == "the kernel runs on"
    await verb()
    await subject.wakes()


@pytest.mark.parametrize("ending", ["shutdown", "restart"])
async def test_a_shutdown_in_the_middle_of_a_restore_does_not_wait_for_it(heavy, monkeypatch, ending):
    """CRIU hangs, as on a file system that does not answer; its deadline is a minute away."""
    image = await heavy.provisioner.checkpoint()
    created = Created(monkeypatch)
    heavy.send()
    pid = await asyncio.to_thread(send_when, signal.SIGSTOP, created.criu)
    inside = created._inside()
    manager = heavy.kernel.manager
    await asyncio.wait_for(
        manager.shutdown_kernel(now=True) if ending == "shutdown" else manager.restart_kernel(now=True), 20
    )
    assert alive([pid, *inside]) == []
    assert (await heavy.reply())["status"] == "error"
    assert Store(heavy.images).images() == []
    assert not image.path.exists()
    if ending == "restart":
        await heavy.kernel.client.wait_for_ready(timeout=60)
        assert await heavy.run("print('x' in globals())") == "False"


@pytest.mark.sweep
@pytest.mark.parametrize("edge", ["started", "completed"])
@pytest.mark.parametrize("step", ["match", "reserve", "criu_restore", "connect", "thaw"])
async def test_a_shutdown_at_any_step_of_a_restore(subject, step, edge):
    """The verb takes no further step, and no process is left."""
    image = await subject.provisioner.checkpoint()
    ended: list[asyncio.Future[None]] = []
    loop = asyncio.get_running_loop()

    def end(event) -> None:
        if (event.kind, event.step) == (edge, step):
            lifecycle = subject.kernel.lifecycle
            ended.append(asyncio.run_coroutine_threadsafe(asyncio.to_thread(lifecycle.terminate), loop))
            assert lifecycle.kernel.cancellation.wait(60, Reason.END)

    subject.provisioner.faults.append(end)
    await subject.fails(subject.provisioner.restore, "KERNEL_LOST", "CAPSULE_GONE")
    await asyncio.wait_for(asyncio.wrap_future(ended[0]), 60)
    assert subject.kernel.state == "dead"
    assert subject.kernel.lifecycle.capsule is None
    subject.kernel.lifecycle.engine.store.check(image)
    assert subject.kernel.lifecycle.image == image, "what becomes of it is its owner's to say"


@pytest.mark.parametrize(
    ("end", "now"),
    [
        *itertools.product(["shut down", "shut down, kept"], [False, True]),
        ("restarted", False),
        ("restarted, too large", False),
    ],
)
async def test_the_kernel_is_ended_while_it_returns(subject, end, now):
    """The error says whether the image is there: its owner decides that when the verb has ended."""
    subject.provisioner.keep_image_on_shutdown = end.endswith("kept")
    subject.provisioner.save_before_restarts = 1 if end.endswith("large") else 1 << 30
    image, lifecycle, manager = await subject.provisioner.checkpoint(), subject.kernel.lifecycle, subject.kernel.manager
    loop, ended = asyncio.get_running_loop(), []
    await subject.provisioner.save_before_restart()  # as the server does

    def stop(event) -> None:
        if (event.kind, event.step) == ("completed", "criu_restore"):
            call = manager.restart_kernel if end.startswith("restarted") else manager.shutdown_kernel
            ended.append(asyncio.run_coroutine_threadsafe(call(now=now), loop))
            assert lifecycle.kernel.cancellation.wait(60, Reason.END)

    subject.provisioner.faults.append(stop)
    error = await subject.fails(subject.provisioner.restore, "KERNEL_LOST")
    subject.provisioner.faults.remove(stop)
    await asyncio.wait_for(asyncio.wrap_future(ended[0]), 60)
    kept = [each.id for each in lifecycle.engine.store.images()]
    assert kept == [image.id] * (end in ("restarted", "shut down, kept"))
    if kept:
        assert error.left == f"the image is kept as {image.id}"
        assert error.details["image"] == image.id
        assert "The image is an earlier state of it" in error.hint
    else:
        assert error.left == "the kernel is gone, and its image is deleted"
        assert "image" not in {*error.details, *error.hint.split()}


@pytest.mark.parametrize("outlive", [False, True])
@pytest.mark.parametrize("step", ["release", "discard_image"])
async def test_the_kernel_killed_just_before_its_image_is_deleted(subject, step, outlive):
    """The error says that the image is kept, and so it is: also after the restart that jupyter_client then does."""
    subject.kernel.lifecycle.home.outlive = outlive
    image = await subject.provisioner.checkpoint()

    def kill(event) -> None:
        if (event.kind, event.step) == ({"release": "completed", "discard_image": "started"}[step], step):
            pid = subject.capsule.host_pid
            os.kill(pid, signal.SIGKILL)
            assert subject.capsule.wait(60) is not None

    subject.provisioner.faults.append(kill)
    error = await subject.fails(subject.provisioner.restore, "KERNEL_LOST")
    assert error.left == f"the kernel is gone; the image is kept as {image.id}"
    assert await subject.provisioner.poll() == -signal.SIGKILL
    subject.provisioner.faults.remove(kill)
    await subject.kernel.manager.restart_kernel()
    await subject.kernel.client.wait_for_ready(timeout=60)
    assert await subject.run("print('x' in globals())") == "False"
    store = subject.kernel.lifecycle.engine.store
    store.check(store.get(image.id))
    assert store.get(image.id).retired, "the fresh kernel is not replaced by it when the next server starts"


@pytest.mark.parametrize("step", ["connect", "thaw"])
async def test_the_kernel_killed_before_it_answered(subject, step):
    """The kernel was restored, then ended before a client had heard of it: its image is there, and tried again."""
    await subject.provisioner.checkpoint()

    def kill(event) -> None:
        if (event.kind, event.step) == ("started", step):
            os.kill(subject.capsule.host_pid, signal.SIGKILL)

    subject.provisioner.faults.append(kill)
    began = asyncio.get_running_loop().time()
    error = await subject.fails(subject.provisioner.restore, "CAPSULE_GONE")
    assert asyncio.get_running_loop().time() - began < 60
    await subject.stays_away(error)
    subject.provisioner.faults.remove(kill)
    await subject.wakes()


@pytest.mark.parametrize("state", ["running", "suspended"])
async def test_a_kernel_killed_by_somebody(subject, state):
    """jupyter_client learns it by polling, as of any kernel; verbs say so; a restart gives a fresh one."""
    if state == "suspended":
        await subject.provisioner.suspend()
    pids = subject.capsule.processes()
    os.kill(subject.capsule.host_pid, signal.SIGKILL)
    await until(lambda: alive(pids) == [])
    error = await subject.fails(
        subject.provisioner.checkpoint if state == "running" else subject.provisioner.resume, "KERNEL_LOST"
    )
    assert error.left == "the kernel is gone"
    assert await subject.provisioner.poll() == -signal.SIGKILL
    await subject.fails(subject.provisioner.checkpoint, "WRONG_STATE")
    await subject.kernel.manager.restart_kernel()
    await subject.kernel.client.wait_for_ready(timeout=60)
    assert await subject.run("print('x' in globals())") == "False"
    await subject.run("x = 41; ran = []")
    await subject.leaves_and_wakes()


async def test_a_kernel_killed_while_suspended_is_seen_by_polling_alone(subject):
    await subject.provisioner.suspend()
    os.kill(subject.capsule.host_pid, signal.SIGKILL)
    await until(lambda: subject.kernel.lifecycle.poll() is not None)
    assert await subject.provisioner.poll() == -signal.SIGKILL
    assert subject.kernel.state == "dead"


async def test_the_rest_of_the_directory_stays_small(subject):
    """A failed restore may leave the logs of its capsule, nothing that grows."""
    await subject.run("log = open('grows.log', 'w'); _ = log.write('1'); log.flush()")
    await subject.provisioner.checkpoint()
    log = subject.directory / "grows.log"
    log.write_text("12")
    runtime = subject.kernel.lifecycle.home.runtime_dir
    await subject.fails(subject.provisioner.restore, "FILE_CHANGED")
    before = sorted(path.name for path in runtime.iterdir())
    for _ in range(3):
        await subject.fails(subject.provisioner.restore, "FILE_CHANGED")
    assert sorted(path.name for path in runtime.iterdir()) == before
    log.write_text("1")
    await subject.wakes()
    assert under_way(subject.images, 1) is False
