"""The control socket of the library: permissions, requests, and the end of a connection."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

import pytest
from programs import build_c_library, build_doubles
from subject import MIB, SOCKET_VARIABLE, listening, running
from waiting import until

from jupyter_gpu_ckpt.cuda import fastpath
from jupyter_gpu_ckpt.errors import ProtocolVersion

INVALID_VALUE = 1


@pytest.fixture
def listener(subject):
    """A subject with three blocks, that listens."""
    subject.alloc(3, 2 * MIB, density="full")
    listening(subject)
    return subject


def test_a_connection_that_ends_after_a_swap_out_discards_the_copy(listener):
    with listener.control() as control:
        control.must("copy_out")
    with listener.control() as control:
        control.must("free")  # there is no copy to free
        assert control.ask("status")["swapped_out"] == 0
    assert listener.outstanding()["mappings"] == 3
    listener.intact(3)


def test_swapped_out_memory_outlives_the_connection(listener):
    with listener.control() as control:
        control.must("copy_out", "free")
    with listener.control() as control:
        assert control.ask("status")["swapped_out"] == 6 * MIB
        control.must("swap_in")
    listener.intact(3)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\n",
        b"copy_out it\n",
        b"COPY_OUT\n",
        b"free\0\n",
        b"\0copy_out\n",
        b"\xff" * 300 + b"\n",
        b"x" * 63 + b"free\n",
    ],
    ids=["empty", "more", "capitals", "zero", "leading zero", "bytes", "long, with a verb at its end"],
)
def test_garbage_is_refused_and_nothing_is_done(listener, garbage):
    with listener.control() as control:
        control.must("copy_out")
        control.send(garbage)
        answer = control.answer()
        assert (answer["cuda"], answer["swapped_out"]) == (INVALID_VALUE, 0)
        assert control.ask("status")["cuda"] == 0
    assert listener.outstanding()["mappings"] == 3


def test_a_request_without_an_end_is_not_done(listener):
    with listener.control() as control:
        control.must("copy_out")
        control.send(b"free")
        control.socket.shutdown(socket.SHUT_WR)
        assert control.socket.recv(100) == b""
    assert listener.outstanding()["mappings"] == 3


def test_requests_in_pieces_and_several_at_once(listener):
    with listener.control() as control:
        for piece in (b"cop", b"y_o", b"ut\nfree\nswap_in\nsta", b"tus\n"):
            control.send(piece)
        assert [control.answer()["swapped_out"] for _ in range(4)] == [0, 6 * MIB, 0, 0]
    listener.intact(3)


def test_who_does_not_wait_for_the_answer(listener):
    with listener.control() as control:
        control.send(b"status\n" * 100)
    with listener.control() as control:
        control.must("status")
    listener.intact(3)


def test_a_second_connection_waits_for_the_first(listener):
    with listener.control() as first, listener.control() as second:
        second.send(b"swap_in\nstatus\n")
        first.must("copy_out", "free")
        assert first.ask("status")["swapped_out"] == 6 * MIB, "the second one's return is not done yet"
        first.socket.shutdown(socket.SHUT_RDWR)
        assert [second.answer()["swapped_out"] for _ in range(2)] == [0, 0]
    listener.intact(3)


def test_every_answer_says_of_which_version_it_is(listener):
    with listener.control() as control:
        assert {control.ask(verb)["version"] for verb in ("status", "copy_out", "nonsense", "free", "swap_in")} == {
            fastpath._VERSION
        }


def test_a_library_of_another_version_gets_no_other_request(kernel, monkeypatch):
    before, version = kernel.state, fastpath._VERSION
    with monkeypatch.context() as patch:
        patch.setattr(fastpath, "_VERSION", version + 1)
        words = f"version {version} of its protocol, this release version {version + 1}"
        for ask in (kernel.path.amounts, kernel.swap_out):
            with pytest.raises(ProtocolVersion, match=words) as caught:
                ask()
            assert (caught.value.code, caught.value.details) == ("PROTOCOL_VERSION", {"version": version})
        assert kernel.path.why_slow(1 << 40) == ""
        assert not kernel.path.mirrored()
    assert kernel.state == before
    kernel.runs_on()
    kernel.lock()
    assert kernel.swap_out() == kernel.path.amounts().swapped_out
    with monkeypatch.context() as patch:
        patch.setattr(fastpath, "_VERSION", version + 1)
        with pytest.raises(ProtocolVersion):
            kernel.swap_in()
    kernel.swap_in()
    kernel.runs_on()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try as another user")
def test_another_user_is_refused(listener):
    listener.path.chmod(0o777)
    listener.path.parent.chmod(0o755)
    child = os.fork()
    if child == 0:
        said = b""
        try:
            os.setuid(65534)
            other = socket.socket(socket.AF_UNIX)
            other.settimeout(60)
            other.connect(str(listener.path))
            with contextlib.suppress(ConnectionError):
                other.sendall(b"copy_out\nfree\n")
                said = other.recv(100)
            os._exit(len(said))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with listener.control() as control:
        assert control.ask("status")["swapped_out"] == 0


def all_from_the_original(subject, count: int = 1) -> None:
    for api in ("cuda", "cu"):
        number = subject.alloc(count, 4 * MIB, api, "full")
    out = subject.outstanding()
    assert (out["allocations"], out["mappings"], out["reservations"]) == (2 * count, 0, 0)
    subject.intact(2 * count)
    subject.free(number)


def test_without_a_socket_path(programs, doubles):
    with running(programs, doubles, environment={SOCKET_VARIABLE: ""}) as subject:
        all_from_the_original(subject)


def test_a_path_that_is_too_long(programs, doubles, tmp_path):
    path = tmp_path / ("x" * 120)
    with running(programs, doubles, path=path) as subject:
        all_from_the_original(subject)
        assert not path.exists()


def test_a_path_of_the_greatest_length(programs, doubles, runtime_base):
    path = runtime_base / ("x" * (106 - len(str(runtime_base))))
    assert len(str(path)) == 107
    with running(programs, doubles, path=path) as subject:
        subject.alloc(1, 2 * MIB)
        with subject.control() as control:
            control.must("copy_out", "free", "swap_in")


def test_a_path_where_something_is(programs, doubles, runtime_base):
    path = runtime_base / "fast"
    path.write_text("mine")
    with running(programs, doubles, path=path) as subject:
        all_from_the_original(subject)
    assert path.read_text() == "mine"


def test_a_directory_that_is_not_there(programs, doubles, runtime_base):
    with running(programs, doubles, path=runtime_base / "nowhere" / "fast") as subject:
        all_from_the_original(subject)


@pytest.mark.parametrize("devices", [{"DOUBLE_DEVICES": "17"}, {"DOUBLE_DEVICES": "2", "DOUBLE_STRANGERS": "1"}])
def test_devices_that_are_not_served(programs, doubles, devices):
    """Too many, or such as cannot use each other's memory: the driver copies between those through the host."""
    with running(programs, doubles, environment=devices) as subject:
        all_from_the_original(subject)


@pytest.mark.parametrize("function", ["cuMemAddressReserve", "cuMemSetAccess"])
def test_a_driver_without_a_function(programs, function):
    with running(programs, build_doubles(without=function)) as subject:
        all_from_the_original(subject)


OTHER_C_LIBRARIES = {
    "too old": '-DVERSION="2.24"',
    "newer than any that was looked at": '-DVERSION="2.99"',
    "a greater one": '-DVERSION="3.0"',
    "none": '-DVERSION="a"',
    "locks of another layout": "-DOTHER_LOCKS",
}


@pytest.mark.parametrize("definition", OTHER_C_LIBRARIES.values(), ids=OTHER_C_LIBRARIES)
def test_a_c_library_whose_locks_are_not_known_leaves_all_to_the_driver(programs, doubles, tmp_path, definition):
    """The library writes to words of theirs that are private to the C library."""
    other = str(build_c_library(tmp_path, definition))
    with running(programs, doubles, preload=[other, str(programs.library)]) as subject:
        all_from_the_original(subject)
        assert not subject.path.exists()
    tried = [sys.executable, "-I", "-S", "-c", fastpath._TRY, str(programs.library)]
    preloaded = {**os.environ, "LD_PRELOAD": f"{other}:{programs.library}"}
    assert subprocess.run(tried, env=preloaded, timeout=60).returncode == fastpath._UNKNOWN_LOCKS
    assert subprocess.run(tried, timeout=60).returncode == 0, "this host's own is known"


@pytest.mark.parametrize("with_library", [True, False])
def test_no_driver_at_all(programs, doubles, tmp_path, with_library):
    (tmp_path / "libcudart.so.13").symlink_to(doubles / "libcudart.so.13")
    with running(programs, tmp_path, preload=None if with_library else []) as subject:
        assert subject.ask("alloc", 1, 4 * MIB, "cuda", "full") == "error 35"
        assert not subject.path.exists()


def test_a_child_is_served_by_the_original(listener):
    assert listener.ask("fork") == "3 original"
    listener.intact(3)
    with listener.control() as control:
        control.must("copy_out", "free", "swap_in")


def test_what_the_program_starts_has_neither_the_library_nor_the_socket(programs, doubles):
    print_both = 'echo "${LD_PRELOAD-none} ${' + SOCKET_VARIABLE + '-none}"'
    with running(programs, doubles) as subject:
        assert subject.ask("shell", print_both) == "none none"
    before, after = (str(doubles / "libcuda.so.1"), str(doubles / "libcudart.so.13"))
    for separator in (":", " "):
        preload = [separator.join([before, str(programs.library), after])]
        with running(programs, doubles, preload=preload) as subject:
            assert subject.ask("shell", print_both) == f"{before}:{after} none"


def test_it_listens_only_once_it_serves(subject):
    assert not subject.path.exists()
    subject.alloc(1, 2 * MIB)
    until(subject.path.exists)


def test_a_child_has_no_socket_of_ours_not_even_of_a_connection(listener):
    with listener.control() as control:
        control.must("status")
        assert listener.ask("child-sockets") == "0"
        control.must("copy_out", "free", "swap_in")
    listener.intact(3)


def test_children_are_refused_whatever_another_thread_was_at(programs, doubles):
    """Forked while threads allocate and free: in the child, a thread that had a lock does not exist to release it."""
    with running(programs, doubles) as subject:
        subject.alloc(1, 2 * MIB)
        assert subject.ask("churn", 4) == "ok"
        assert subject.ask("forks", 300) == "300 refused, 0 hung"
        assert subject.ask("end") == "0"
        subject.intact(1)
