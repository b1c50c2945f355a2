"""A secret in a kernel's memory is found nowhere but in its image; encrypted, not even there.

Looked at is every file that anything of this project wrote: below the test's own directory (images, runtime directory,
connection file, logs, keys, the place in memory) and what the server printed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from pathlib import Path

import pytest
from harness import notebook

# Joined inside the kernel, so the cell that is sent and the history that keeps it do not hold the secret itself.
PARTS = os.urandom(16).hex(), os.urandom(16).hex()
CANARY = "".join(PARTS).encode()
CELL = f"secret = {PARTS[0]!r} + {PARTS[1]!r}; held = [secret.encode() * 1000, bytearray(secret.encode())]"


def holders(*directories: Path) -> set[Path]:
    """The files in which the secret lies plainly."""
    found = set()
    for directory in directories:
        for place, _, names in os.walk(directory):  # it passes over what goes meanwhile: others work there, too
            for path in (Path(place, name) for name in names):
                with contextlib.suppress(FileNotFoundError):
                    # What is another user's, in /dev/shm, this one cannot have written to.
                    facts = path.lstat()
                    if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and CANARY in path.read_bytes():
                        found.add(path)
    return found


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
async def test_a_secret_is_in_the_image_alone(
    tmp_path, runtime_base, criu_binary, keys, monkeypatch, caplog, capfd, encrypted
):
    caplog.set_level(logging.DEBUG)
    memory = Path("/dev/shm")
    monkeypatch.setenv("KEY_OF_IMAGES", "0f" * 32)
    traits = {"encryption_key": "env:KEY_OF_IMAGES", "memory_dir": str(memory)} if encrypted else {}
    places = [tmp_path, runtime_base, keys.parent, memory]
    async with notebook(tmp_path, runtime_base, **traits) as kernel:
        await kernel.run(CELL)
        assert await kernel.run("import os; print('KEY_OF_IMAGES' in os.environ)") == str(not encrypted)
        image = await kernel.provisioner.checkpoint()
        found = holders(*places)
        if encrypted:
            assert image.manifest.encryption is not None
            assert found == set()
        else:
            assert found, "the search finds nothing: it proves nothing"
            assert {image.criu_directory} == {path.parent for path in found}
        assert await kernel.run("print(secret == held[1].decode())") == "True"
        await kernel.settled("running")
        assert holders(*places) == set()
    printed = capfd.readouterr()
    assert CANARY.decode() not in caplog.text + printed.out + printed.err
