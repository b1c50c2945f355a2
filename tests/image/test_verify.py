"""An image that is not exactly what a checkpoint of this user wrote is refused before anything interprets it."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import stat
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from blake3 import blake3
from images import FACTS, FILES, publish

from jupyter_gpu_ckpt.errors import ImageDamaged, ImageError, ImageForged, ImageStale
from jupyter_gpu_ckpt.files import clone
from jupyter_gpu_ckpt.image import verify
from jupyter_gpu_ckpt.image.generations import Generations
from jupyter_gpu_ckpt.image.keys import Keyring
from jupyter_gpu_ckpt.image.layout import MANIFEST, SEAL
from jupyter_gpu_ckpt.image.store import Store


def refused(store, id) -> str:
    """The code with which a restore would be refused."""
    with pytest.raises(ImageError) as caught:
        store.check(store.get(id))
    assert caught.value.hint
    return caught.value.code


def test_a_whole_image_is_proved_and_every_byte_was_looked_at(store, image):
    seen = []
    store.check(image, seen.append)
    assert sum(seen) == image.manifest.bytes == sum(map(len, FILES.values()))
    for path in [image.path, *image.path.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize("umask", [0, 0o277], ids=oct)
def test_modes_are_the_same_whatever_the_umask(store, umask):
    before = os.umask(umask)
    try:
        image = publish(store)
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o7777 for path in image.path.rglob("*") if path.is_file()}
    assert modes == {0o600}
    assert {path.stat().st_mode & 0o7777 for path in (store.root, image.path, image.criu_directory)} == {0o700}


# -- the seal


def test_an_edited_manifest(store, image):
    text = (image.path / MANIFEST).read_text().replace('"pid": 8192', '"pid": 8193')
    (image.path / MANIFEST).write_text(text)
    assert refused(store, image.id) == "IMAGE_FORGED"


def test_the_manifest_of_another_image_with_its_seal(store, image):
    other = publish(store)
    for name in (MANIFEST, SEAL):
        shutil.copy(other.path / name, image.path / name)
    assert refused(store, image.id) == "IMAGE_FORMAT"


def test_the_seal_of_another_image(store, image):
    shutil.copy(publish(store).path / SEAL, image.path / SEAL)
    assert refused(store, image.id) == "IMAGE_FORGED"


def test_an_image_of_another_user(store, image, tmp_path):
    """Whole and sealed, but by a key that is not ours: somebody else's image in our directory."""
    foreign = Store(store.root, Keyring(tmp_path / "keys of another"))
    foreign.keys.current()
    with pytest.raises(ImageForged, match="not one of yours"):
        foreign.check(image)
    key = store.keys.current()
    shutil.copy(store.keys.directory / key.id, foreign.keys.directory / key.id)
    foreign.check(image)


def test_a_deleted_key_seals_nothing_any_more(store, image):
    old = store.keys.current()
    store.keys.rotate()
    store.check(image)
    (store.keys.directory / old.id).unlink()
    assert refused(store, image.id) == "IMAGE_FORGED"


SEALS = {
    "none": None,
    "empty": b"",
    "no object": b"[]",
    "deep": b"[" * 4000,
    "without a mac": {"mac": ...},
    "of another algorithm": {"algorithm": "none"},
    "with an empty mac": {"mac": ""},
    "with a mac that is no text": {"mac": None},
    "with a key that is a path": {"key": "../../../etc/hostname"},
    "with a key that is no text": {"key": 7},
    "not of ASCII": {"mac": "ä\ud800"},
    "a gigabyte": 1 << 30,
}


@pytest.mark.parametrize("damage", SEALS.values(), ids=SEALS)
def test_a_seal_that_is_none(store, image, damage):
    path = image.path / SEAL
    if isinstance(damage, dict):
        document = {**json.loads(path.read_bytes()), **damage}
        path.write_text(json.dumps({name: value for name, value in document.items() if value is not ...}))
    elif isinstance(damage, bytes):
        path.write_bytes(damage)
    elif damage is None:
        path.unlink()
    else:
        os.truncate(path, damage)
    assert refused(store, image.id) == "IMAGE_FORGED"


# -- replays


def test_an_older_image_put_back(store, tmp_path):
    first = publish(store, generation=1)
    shutil.copytree(first.path, tmp_path / "copy")
    store.remove(first)
    second = publish(store, generation=2)
    store.check(second)
    shutil.copytree(tmp_path / "copy", first.path)
    with pytest.raises(ImageStale, match="number 1") as caught:
        store.check(store.get(first.id))
    assert caught.value.code == "IMAGE_STALE"


def test_the_last_image_put_back_after_its_kernel_continued(store, image, tmp_path):
    shutil.copytree(image.path, tmp_path / "copy")
    store.remove(image)
    store.generations.record_restored(image.manifest.kernel_id, image.manifest.generation)
    shutil.copytree(tmp_path / "copy", image.path)
    assert refused(store, image.id) == "IMAGE_STALE"


def test_a_machine_that_never_saw_the_kernel_takes_what_is_sealed(store, image, tmp_path):
    shutil.copytree(store.keys.directory, tmp_path / "elsewhere", ignore=lambda *_: ["generations"])
    Store(store.root, Keyring(tmp_path / "elsewhere")).check(image)


def test_the_record_of_a_kernel_that_has_ended_is_archived_complete(store, tmp_path):
    """One file for all of them; an old image that is put back is refused as before."""
    generations = store.generations
    old, new = publish(store, generation=1), publish(store, generation=2)
    shutil.copytree(old.path, tmp_path / "copy")
    kernel_id = old.manifest.kernel_id
    generations.record_restored(kernel_id, new.manifest.generation)
    store.remove(old)
    store.remove(new)
    for other in ("a", "b"):
        generations._raise_to(other, published=3)
        generations.close(other)
    for _ in range(2):
        generations.close(kernel_id)
    assert list(generations.directory.glob("*.json")) == []
    assert stat.S_IMODE((generations.directory / "ended").stat().st_mode) == 0o600
    (tmp_path / "copy").rename(old.path)
    with pytest.raises(ImageStale):
        store.check(store.get(old.id))
    assert generations.next_generation(kernel_id, 0) == new.manifest.generation + 1
    assert (generations.next_generation("a", 0), generations.next_generation("c", 0)) == (4, 1)
    # The same id again: its own file, and nothing below what is known.
    generations._raise_to("a", published=4)
    generations.close("a")
    assert generations.next_generation("a", 0) == 5


def test_a_line_that_a_crash_cut_off_hides_none_of_the_others(store):
    generations = store.generations
    generations._raise_to("a", published=3)
    generations.close("a")
    with (generations.directory / "ended").open("a") as file:
        file.write("b 7")
    generations._raise_to("c", published=9)
    generations.close("c")
    assert [generations.next_generation(id, 0) for id in ("a", "b", "c")] == [4, 1, 10]


def test_generations_continue_from_the_image_a_kernel_was_restored_from(store):
    generations = store.generations
    assert generations.next_generation("k", 0) == 1
    assert generations.next_generation("k", 7) == 8
    publish(store, kernel_id="k", generation=9)
    assert generations.next_generation("k", 7) == 10
    generations.record_restored("k")
    assert generations.next_generation("k", 0) == 10
    (generations.directory / "k.json").write_text('{"published": "many"}')
    with pytest.raises(ImageError) as caught:
        generations.next_generation("k", 0)
    assert caught.value.code == "KEY_UNUSABLE"


def test_an_empty_record_is_none(store):
    publish(store, kernel_id="k", generation=9)
    (store.generations.directory / "k.json").write_text("")
    assert store.generations.next_generation("k", 0) == 1
    store.check(publish(store, kernel_id="k", generation=1))


def test_two_that_write_one_record_lose_nothing(store):
    records = [Generations(store.generations.directory) for _ in range(8)]
    images = [replace(FACTS, kernel_id="k", generation=number + 1) for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(records[at % 8].record_published, image) for at, image in enumerate(images)]
        calls += [pool.submit(records[at % 8].record_restored, "k", at + 1) for at in range(30)]
    assert [one.exception() for one in calls] == [None] * 70
    assert json.loads((store.generations.directory / "k.json").read_text()) == {"published": 40, "spent": 30}


# -- hostile directories


def _fifo(path):
    path.unlink()
    os.mkfifo(path)


def _socket(path):
    path.unlink()
    with socket.socket(socket.AF_UNIX) as end:
        directory = os.open(path.parent, os.O_PATH)
        end.bind(f"/proc/self/fd/{directory}/{path.name}")
        os.close(directory)


def _link(path, target):
    path.unlink()
    path.symlink_to(target)


def _moved(path):
    outside = path.parent.parent.parent / ".outside"
    path.rename(outside)
    path.symlink_to(outside)


def _hard_link(path):
    os.link(path, path.parent.parent.parent / "outside")


def _swap(path):
    other = path.with_name("core-1.img")
    path.rename(path.with_name("x"))
    other.rename(path)
    path.with_name("x").rename(other)


def _sparse(path):
    size = path.stat().st_size
    path.unlink()
    path.touch()
    os.truncate(path, size)


def _as_directory(path):
    path.unlink()
    path.mkdir()


def _directory_link(path):
    path.parent.rename(path.parent.with_name("elsewhere"))
    path.parent.symlink_to("elsewhere")


def _linked_outside(path):
    moved = path.parent.parent.parent / ".moved"
    path.parent.rename(moved)
    path.parent.symlink_to(moved)


DAMAGE = {
    "a link to the same content": _moved,
    "a link to a secret": lambda path: _link(path, "/etc/shadow"),
    "a link to itself": lambda path: _link(path, path),
    "a link to nothing": lambda path: _link(path, "/nowhere"),
    "a link to a device that never ends": lambda path: _link(path, "/dev/zero"),
    "a second name outside": _hard_link,
    "a second name inside": lambda path: os.link(path, path.with_name("more.img")),
    "a pipe": _fifo,
    "a socket": _socket,
    "a directory in its place": _as_directory,
    "a hole of the same size": _sparse,
    "a terabyte of nothing": lambda path: os.truncate(path, 1 << 40),
    "one byte more": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "one byte less": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "nothing in it": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
    "another's content": _swap,
    "one file more": lambda path: path.with_name("extra.img").touch(),
    "one hidden file more": lambda path: path.with_name(".extra").touch(),
    "one file more at the top": lambda path: (path.parent.parent / "extra").touch(),
    "an empty directory more": lambda path: (path.parent / "more").mkdir(),
    "ten thousand files more": lambda path: [path.with_name(f"x{number}").touch() for number in range(10_000)],
    "a deep directory": lambda path: (path.parent / "/".join("d" * 50)).mkdir(parents=True),
    "a name with an escape in it": lambda path: path.with_name("\x1b[2J").touch(),
    "a name that is no text": lambda path: open(os.fsencode(path.parent) + b"/\xff\xfe", "w").close(),
    "a name of the greatest length": lambda path: path.with_name("x" * 255).touch(),
    "a file of another name": lambda path: path.rename(path.with_name("pages-2.img")),
    "a file in another case": lambda path: path.rename(path.with_name("PAGES-1.IMG")),
    "a directory that is a link": _directory_link,
    "a directory that is a link to outside": _linked_outside,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_hostile_directory(store, image, damage):
    """With the forty hostile manifests of test_manifest.py and the seals above, the sweep of hostile images."""
    DAMAGE[damage](image.criu_directory / "pages-1.img")
    with pytest.raises(ImageDamaged) as caught:
        store.check(store.get(image.id))
    json.dumps(caught.value.as_dict())
    assert len(caught.value.details.get("files", [])) <= 100


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make devices and give files away")
@pytest.mark.parametrize("kind", ["device", "owner"])
def test_a_hostile_directory_made_by_root(store, image, kind):
    path = image.criu_directory / "pages-1.img"
    if kind == "device":
        path.unlink()
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
    else:
        os.chown(path, 54321, 54321)
    assert refused(store, image.id) == "IMAGE_DAMAGED"


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_lease_that_is_no_directory_leads_nowhere(store, image, tmp_path, kind):
    place = image.path / "lease"
    place.symlink_to(tmp_path) if kind == "link" else place.touch()
    before = sorted(tmp_path.iterdir())
    with image.lease():
        assert sorted(tmp_path.iterdir()) == before
    store.check(image)


# -- flips and truncations


@pytest.fixture(scope="module")
def victim(tmp_path_factory):
    """One image for all flips: each is taken back."""
    place = tmp_path_factory.mktemp("flips")
    store = Store(place / "images", Keyring(place / "keys"))
    content = random.Random(1)
    files = {f"pages-{number}.img": content.randbytes(1 << (4 * number)) for number in range(1, 5)}
    return store, publish(store, {**files, "session.json": b"{}"})


def test_512_flipped_bits_are_all_refused(victim):
    store, image = victim
    chance, codes = random.Random(512), Counter()
    files = [path for path in image.path.rglob("*") if path.is_file()]
    for _ in range(512):
        path = chance.choice(files)
        place, bit = chance.randrange(path.stat().st_size), 1 << chance.randrange(8)
        whole = path.read_bytes()
        path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        codes[refused(store, image.id)] += 1
        path.write_bytes(whole)
    store.check(store.get(image.id))
    assert codes.keys() <= {"IMAGE_DAMAGED", "IMAGE_FORGED", "IMAGE_FORMAT"}
    assert codes["IMAGE_DAMAGED"] > 100
    assert codes["IMAGE_FORGED"] > 50


def test_128_truncations_are_all_refused(victim):
    store, image = victim
    chance = random.Random(128)
    files = [path for path in image.path.rglob("*") if path.is_file()]
    for _ in range(128):
        path = chance.choice(files)
        whole = path.read_bytes()
        os.truncate(path, chance.randrange(len(whole)))
        refused(store, image.id)
        path.write_bytes(whole)
    store.check(store.get(image.id))


# -- hashing


SIZES = [0, 1, verify.BLOCK - 1, verify.BLOCK, verify.BLOCK + 1, verify.DEPTH * verify.BLOCK + 7]


@pytest.mark.parametrize("size", SIZES)
def test_a_hash_is_that_of_the_file_whatever_its_size(tmp_path, size):
    path = tmp_path / "file"
    content = random.Random(size).randbytes(size)
    path.write_bytes(content)
    with verify._Readers() as readers:
        assert verify._digest(path, size, readers) == blake3(content).hexdigest()


def test_hashes_of_files_one_after_the_other_are_each_file_s_own(tmp_path):
    """They are read into the same buffers."""
    with verify._Readers() as readers:
        for size in [*reversed(SIZES), *SIZES]:
            content = random.Random(size).randbytes(size)
            (tmp_path / "file").write_bytes(content)
            assert verify._digest(tmp_path / "file", size, readers) == blake3(content).hexdigest()


@pytest.mark.parametrize("pieces", [[1], [verify.BLOCK], [verify.BLOCK + 1, 3 * verify.BLOCK - 1, 1], [5 << 20] * 9])
def test_files_that_grow_between_reads_have_the_entries_that_they_have_afterwards(tmp_path, pieces):
    grown, expected, content = tmp_path / "grown", tmp_path / "expected", random.Random(3)
    for directory in (grown, expected):
        directory.mkdir()
        (directory / "inventory.img").write_bytes(b"not pages")
    with verify.GrowingFiles(grown, "pages-*.img") as files:
        for name in ("pages-1.img", "pages-2.img"):  # one after the other, as CRIU does
            for number, size in enumerate(pieces):
                piece = bytes(size) if number % 2 else content.randbytes(size)
                for directory in (grown, expected):
                    with open(directory / name, "ab") as file:
                        file.write(piece)
                files.advance(lambda: None)
        found = files.finish(lambda: None)
    same = verify.entries(expected, punch=True)
    assert {path.name: entry for path, entry in found.items()} == {
        name: same[name] for name in same.keys() - {"inventory.img"}
    }
    for path in found:
        assert path.read_bytes() == (expected / path.name).read_bytes()
        assert holes(path) == holes(expected / path.name)


def holes(path) -> list[tuple[int, int]]:
    with open(path, "rb") as file:
        return list(clone.data_ranges(file.fileno()))


def test_of_a_file_that_grows_no_block_is_hashed_before_it_is_whole(tmp_path):
    path = tmp_path / "pages-1.img"
    path.write_bytes(bytes(verify.BLOCK) + b"half")
    with verify.GrowingFiles(tmp_path, path.name) as files:
        files.advance(lambda: None)
        path.write_bytes(bytes(verify.BLOCK) + b"whole")
        assert files.finish(lambda: None) == {path: verify.entries(tmp_path)[path.name]}


@pytest.mark.parametrize("change", ["shorter", "replaced", "removed"])
def test_a_file_that_is_not_the_one_that_was_hashed_has_no_entry(tmp_path, change):
    path, other = tmp_path / "pages-1.img", tmp_path / "other"
    path.write_bytes(bytes(2 * verify.BLOCK))
    with verify.GrowingFiles(tmp_path, path.name) as files:
        files.advance(lambda: None)
        if change == "shorter":
            os.truncate(path, verify.BLOCK)
        elif change == "replaced":
            other.write_bytes(b"\1" * 2 * verify.BLOCK)
            other.replace(path)
        else:
            path.unlink()
        assert files.finish(lambda: None) == {}


def test_the_hashing_of_files_that_grow_ends_where_it_is_asked_to(tmp_path):
    (tmp_path / "pages-1.img").write_bytes(bytes(3 * verify.BLOCK))
    checked = []

    def check() -> None:
        checked.append(True)
        if checked[1:]:
            raise KeyError

    with verify.GrowingFiles(tmp_path, "pages-*.img") as files, pytest.raises(KeyError):
        files.advance(check)
    assert len(checked) == 2
    assert not [number for number in os.listdir("/proc/self/fd") if is_open_below(tmp_path, number)]


def is_open_below(directory, descriptor: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{directory}/")
    except FileNotFoundError:  # of the listing itself
        return False


def test_files_are_hashed_by_one_thread_where_others_cannot_be_started(tmp_path, monkeypatch):
    """BLAKE3's threads are started once in a process; if that fails each use of them is a panic, no `Exception`."""

    class PanicException(BaseException):
        pass

    def hasher(*data: bytes, max_threads: int) -> Any:
        if max_threads == blake3.AUTO:
            raise PanicException("The global thread pool has not been initialized.")
        return blake3(*data, max_threads=max_threads)

    hasher.AUTO = blake3.AUTO  # type: ignore[attr-defined]
    monkeypatch.setattr(verify, "blake3", hasher)
    verify._hashing_threads.cache_clear()
    try:
        (tmp_path / "file").write_bytes(b"content")
        with verify._Readers() as readers:
            assert verify._digest(tmp_path / "file", 7, readers) == blake3(b"content").hexdigest()
    finally:
        verify._hashing_threads.cache_clear()


def test_a_file_that_is_cut_short_while_it_is_hashed_is_refused_and_ends_no_process(store, monkeypatch):
    """Why files are read and not mapped: a mapping would raise SIGBUS."""
    image = publish(store, {"pages-1.img": bytes(3 * verify.BLOCK)})
    monkeypatch.setattr(verify, "DEPTH", 1)

    def cut(_: int) -> None:
        os.truncate(image.criu_directory / "pages-1.img", verify.BLOCK)

    with pytest.raises(ImageDamaged) as caught:
        store.check(image, cut)
    assert caught.value.details["files"] == ["criu/pages-1.img"]


def test_a_proof_that_nobody_wants_any_more_ends_in_the_middle_of_a_file(store, monkeypatch):
    image = publish(store, {"pages-1.img": bytes(64 * verify.BLOCK)})
    read, stopped, blocks_read = verify._read_block, threading.Event(), []

    def slow(*arguments):
        blocks_read.append(arguments)
        assert stopped.wait(60)
        return read(*arguments)

    monkeypatch.setattr(verify, "_read_block", slow)
    proof = store.begin_check(image)
    proof.cancel()
    stopped.set()
    assert not proof.wait()
    assert len(blocks_read) < 64


def test_zeros_are_not_stored_and_read_the_same(tmp_path):
    path, content = tmp_path / "pages", random.Random(3)
    parts = [bytes(3 << 20), content.randbytes(1 << 20), bytes(9 << 20), content.randbytes(100), bytes(70_000)]
    whole = b"".join(parts)
    path.write_bytes(whole)
    before = path.stat().st_blocks * 512
    assert verify.entries(tmp_path, punch=True)["pages"].bytes == len(whole)
    assert path.read_bytes() == whole
    assert before - path.stat().st_blocks * 512 >= 11 << 20


def test_a_file_system_without_holes_keeps_the_zeros(tmp_path, monkeypatch):
    path = tmp_path / "pages"
    path.write_bytes(bytes(1 << 20))
    monkeypatch.setattr(verify._libc, "fallocate", lambda *_: -1)
    assert verify.entries(tmp_path, punch=True)["pages"].bytes == 1 << 20
    assert path.stat().st_blocks * 512 >= 1 << 20
