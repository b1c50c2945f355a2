"""Files with names that Linux writes in ways of its own come back, open and mapped, or are refused by their name.

``/proc`` writes a line break in a name as ``\\012`` in some tables, and adds `` (deleted)`` to that of a deleted file.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from round_trip import Subject, image

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.criu.criu import Criu

ROOT = os.geteuid() == 0

NAMES = {
    "a line break": b"one\ntwo",
    "a line break as proc writes it": b"one\\012two",
    "an ending as of a deleted file": b"file (deleted)",
    "such an ending twice": b"file (deleted) (deleted)",
    "such an ending before its end": b"file (deleted) too",
    "blanks at its end": b"file  ",
    "a carriage return": b"one\rtwo",
    "a form feed": b"one\x0ctwo",
    "a line separator": "one\u2028two".encode(),
    "bytes that are no text": b"one\xfftwo",
}
#: How a file is used, and what must be the same afterwards; ``place`` is its path.
USES = {
    "open": (
        "fd = os.open(place, os.O_RDWR); os.lseek(fd, 2, 0)",
        "answer = os.readlink(f'/proc/self/fd/{fd}'), os.pread(fd, 9, 0), os.lseek(fd, 0, 1)",
    ),
    "mapped": (
        "fd = os.open(place, os.O_RDWR); m = mmap.mmap(fd, 4096); os.close(fd)",
        "m[5:6] = b'x'; answer = m[:9], open(place, 'rb').read(9)",
    ),
    "mapped for itself": (
        "fd = os.open(place, os.O_RDONLY); m = mmap.mmap(fd, 4096, mmap.MAP_PRIVATE, 1); os.close(fd)",
        "answer = m[:9]",
    ),
    "mapped, of several, and deleted": (
        "fd = os.open(place, os.O_RDWR); m = mmap.mmap(fd, 4096); os.unlink(place)\n"
        "open(place + b' (deleted)', 'wb').write(b'wrong')",
        "m[5:6] = b'x'; answer = m[:9], os.pread(fd, 9, 0)",
    ),
    "the directory of the process": ("os.mkdir(place + b'.d'); os.chdir(place + b'.d')", "answer = os.getcwdb()"),
}
#: An ordinary user's CRIU opens a mapped file by the name that ``/proc/PID/smaps`` shows.
UNMAPPABLE = {"a line break"}


@pytest.mark.sweep(1 / 5)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", NAMES)
def test_a_file_with_such_a_name_comes_back_or_is_refused_by_it(criu_binary, name, use):
    criu, home = Criu(criu_binary.argv), Path(tempfile.mkdtemp(prefix="gc-"))
    make, read = USES[use]
    capsule = Capsule.create(home)
    try:
        subject = Subject(capsule)
        place = os.fsencode(home) + b"/" + NAMES[name]
        # A file whose name is what another one's would be if it were deleted, or unescaped.
        for path in (place, place.replace(b" (deleted)", b""), place.replace(b"\\012", b"\n")):
            with open(path, "wb") as file:
                file.write(b"hello\n" + bytes(8192) if path == place else b"wrong")
        assert subject.tell(f"import mmap, os; place = {place!r}; {make}") == "None"
        before = subject.tell(read)
        refusals = capsule.inspect()["refusals"]
        if use in ("mapped", "mapped for itself") and name in UNMAPPABLE and not ROOT:
            (refusal,) = refusals
            assert refusal["what"] == f"memory of a file with a line break in its name ({os.fsdecode(place)})"
            return
        for _ in range(2):
            inner, pipes = capsule.inner_pid, capsule.pipes
            assert capsule.inspect()["refusals"] == []
            criu.dump(capsule, image(home), timeout=60)
            state = capsule.inspect()
            assert state["refusals"] == []
            capsule.close()
            capsule = Capsule.create(home)
            notes = state["notes"]
            restored = criu.restore(capsule, image(home), pid=inner, pipes=pipes, timeout=60, notes=notes)
            assert restored.changed == []
            assert subject.tell(read) == before
            shutil.rmtree(image(home))
    finally:
        capsule.close()
        shutil.rmtree(home)
