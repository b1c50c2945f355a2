"""Helpers of the tests of the copy that host memory keeps of device memory."""

from __future__ import annotations

from pathlib import Path

from programs import Programs
from subject import MIB, Control, Subject

OUT = "cuMemcpyDtoHAsync_v2"
ENOUGH = 1 << 30
EXTENT = 16 * MIB
#: Fresh device memory holds what somebody else has left.
DIRTY = {"DOUBLE_DIRTY": "1"}
#: Files of /proc and /sys where memory is short for that reason, and where it just is not.
SHORT = {
    "of the machine": {"/proc/meminfo": "MemTotal: 8000 kB\nMemFree: 0 kB\nMemAvailable:  900 kB\n"},
    "of the cgroup": {
        "/sys/fs/cgroup/memory.max": "8000\n",
        "/sys/fs/cgroup/memory.current": "7900\n",
        "/sys/fs/cgroup/memory.stat": "anon 5\ninactive_file 800\n",
    },
    "others wait for it": {"/proc/pressure/memory": "some avg10=12.00 avg60=1.00 avg300=0.00 total=5\n"},
    "others in the cgroup wait": {"/sys/fs/cgroup/memory.pressure": "some avg10=10.00 avg60=1.00 total=5\n"},
}
ENOUGH_OF_ALL = {
    "/proc/meminfo": "MemTotal: 8000 kB\nMemFree: 0 kB\nMemAvailable:  1000 kB\n",
    "/sys/fs/cgroup/memory.max": "max\n",
    "/sys/fs/cgroup/memory.current": "7900\n",
    "/proc/pressure/memory": "some avg10=9.99 avg60=90.00 avg300=0.00 total=5\n",
}


def extents(subject: Subject) -> Path:
    return subject.path.parent / "host-memory" / "gpu-ckpt-extents"


def swap(subject: Subject, control: Control) -> int:
    """Swap out and in; return how many parts were copied out.  Every byte is as it was."""
    before = subject.ask("sum")
    subject.fail()
    control.must("copy_out", "free")
    copied = subject.calls().get(OUT, 0)
    sizes = [each.stat().st_size for each in sorted(extents(subject).iterdir())]
    assert all(size == EXTENT for size in sizes[:-1])
    assert sum(sizes) == control.ask("status")["swapped_out"]
    control.must("swap_in")
    assert subject.ask("sum") == before
    return copied


def write_files(programs: Programs, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = programs.directory / name[1:]
        path.parent.mkdir(parents=True, exist_ok=True)
        (draft := path.with_name("draft")).write_text(content)
        draft.rename(path)
