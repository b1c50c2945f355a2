"""Deleted files with long names: a restore gives them longer ones, and there may be no space for that."""

from __future__ import annotations

import pytest

from jupyter_gpu_ckpt.criu import images

#: How a file that was deleted is in use; ``path`` is its name.
USES = {
    "open": "fd = os.open(path, os.O_RDWR | os.O_CREAT); os.write(fd, b'data')",
    "a named pipe": "os.mkfifo(path); fd = os.open(path, os.O_RDWR)",
    "mapped": "import mmap\nopen(path, 'wb').write(bytes(4096))\n"
    "with open(path, 'rb') as file: memory = mmap.mmap(file.fileno(), 4096, mmap.MAP_PRIVATE)",
    "with another name": "fd = os.open(path, os.O_RDWR | os.O_CREAT); os.link(path, 'other')",
    "a program": "import shutil\nshutil.copy('/bin/sleep', path)\n"
    "child = subprocess.Popen([path, '600'])\nwhile os.readlink(f'/proc/{child.pid}/exe') != path: pass",
}


@pytest.mark.parametrize("use", USES)
async def test_a_name_that_is_too_long_is_refused_while_the_kernel_runs(subject, use):
    length = 246 if use == "with another name" else 245
    await subject.run(f"path = os.path.abspath('n' * {length})\n{USES[use]}\nos.unlink(path)")
    error = await subject.fails(subject.provisioner.checkpoint, "FILE_UNSUPPORTED", "DELETED_MAPPING")
    assert "n" * length in error.message
    await subject.runs_on(error)


async def test_the_longest_name(subject):
    """CRIU numbers the deleted files, in hexadecimal: the first fifteen, with those of the kernel's own, if any."""
    await subject.provisioner.checkpoint()
    own = len(images.ghost_names(subject.kernel.lifecycle.image.criu_directory))
    await subject.wakes()
    await subject.run(
        f"import fcntl\nfiles = []\nfor number in range({15 - own}):\n"
        "    path = str(number).zfill(244); files.append(open(path, 'w+')); os.unlink(path)\n"
        # Numbers follow descriptors: that of the directory is above, whatever other threads close meanwhile.
        "os.mkdir('d' * 255); opened = os.open('d' * 255, os.O_RDONLY); os.rmdir('d' * 255)\n"
        "directory = fcntl.fcntl(opened, fcntl.F_DUPFD, 200); os.close(opened)"
    )
    await subject.leaves_and_wakes()
    assert await subject.run("print(len(files[-1].name), os.listdir(directory))") == "244 []"
    await subject.run("files.append(open('g' * 244, 'w')); os.unlink(files[-1].name)")
    error = await subject.fails(subject.provisioner.checkpoint, "FILE_UNSUPPORTED")
    assert "The kernel has deleted files open whose names are too long to be made again: " in error.message
    await subject.runs_on(error)
    await subject.run("files.pop().close()")
    await subject.leaves_and_wakes()
