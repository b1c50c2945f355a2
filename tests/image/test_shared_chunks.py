"""Chunks that save points share: equal ones have one file, whatever is deleted, counted, encrypted or moved."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from images import FACTS, FILES, publish

from jupyter_gpu_ckpt.criu.images import encode, rewrite
from jupyter_gpu_ckpt.criu.pagemaps import ADDRESS, FLAGS, HEAD_NUMBER, IN_PARENT, PAGEMAP_MAGIC, PAGES, PRESENT
from jupyter_gpu_ckpt.errors import ImageDamaged, ImageNotFound
from jupyter_gpu_ckpt.files import clone
from jupyter_gpu_ckpt.image import branch, device_memory, layout, shared_chunks
from jupyter_gpu_ckpt.image.branch import NewKernel
from jupyter_gpu_ckpt.image.encryption import Vault
from jupyter_gpu_ckpt.image.quota import used
from jupyter_gpu_ckpt.image.retention import Limits, choose
from jupyter_gpu_ckpt.image.save_point import SavePoint, described
from jupyter_gpu_ckpt.image.shared_chunks import Together, bytes_alone
from jupyter_gpu_ckpt.image.store import Image, Store
from jupyter_gpu_ckpt.process import syscalls
from jupyter_gpu_ckpt.transfer.remote import Remote

PAGE, CHUNK = 4096, 4 * 4096
#: Bytes of an image of `FILES` but for its pages.
REST = sum(map(len, FILES.values())) - len(FILES["pages-1.img"])


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Chunks of four pages, of files of any size."""
    monkeypatch.setattr(shared_chunks, "WINDOW", CHUNK)
    monkeypatch.setattr(shared_chunks, "SMALLEST", 2 * CHUNK)


def memory(*windows: int, seed: int = 1) -> dict[int, bytes]:
    """Return pages by address, of whole windows."""
    dice = random.Random(seed)
    return {window * CHUNK + at: dice.randbytes(PAGE) for window in windows for at in range(0, CHUNK, PAGE)}


def content(pages: Mapping[int, bytes]) -> bytes:
    """Return a file of pages as CRIU writes it."""
    return b"".join(pages[at] for at in sorted(pages))


def save(store: Store, pages: Mapping[int, bytes], name: str, **facts) -> Image:
    """Make a save point of a process with these pages, as CRIU dumps it."""
    draft = store.begin(FACTS.kernel_id, shares=True)
    for other, data in {**FILES, "pages-1.img": content(pages)}.items():
        (draft.criu_directory / other if other != "session.json" else draft.path / other).write_bytes(data)
    entries = [((ADDRESS, 0, at), (PAGES, 0, 1), (FLAGS, 0, PRESENT)) for at in sorted(pages)]
    entries.append(((ADDRESS, 0, 1 << 40), (PAGES, 0, 3), (FLAGS, 0, IN_PARENT)))
    records = [b"".join(map(encode, fields)) for fields in [((HEAD_NUMBER, 0, 1),), *entries]]
    rewrite(draft.criu_directory / "pagemap-7.img", PAGEMAP_MAGIC, records)
    return draft.publish(replace(FACTS, save_point=SavePoint(name).as_dict(), **facts))


def new_kernel(name: str) -> NewKernel:
    return NewKernel(name, "python3", lambda path: None)


def whole(store: Store, image: Image) -> bytes:
    """Return what CRIU would read of the process's memory."""
    store.check(image)
    with (
        store.readable(image) as files,
        shared_chunks.whole(store.root, files.criu_directory) as directory,
    ):
        assert (directory / "core-1.img").read_bytes() == FILES["core-1.img"]
        return (directory / "pages-1.img").read_bytes()


def on_disk(images: list[Image]) -> int:
    """Return the bytes of chunks of these images, each file once."""
    files = [path for image in images for path in image.criu_directory.glob("pages-1/*")]
    return sum({path.stat().st_ino: path.stat().st_size for path in files}.values())


def test_unchanged_memory_is_on_the_disk_once_though_other_memory_grew_before_it(store):
    first = memory(3, 4, 5, 8)
    second = {0: b"n" * PAGE, **first, **memory(5, seed=2)}
    one, two = save(store, first, "one"), save(store, second, "two")
    assert on_disk([one]) == 4 * CHUNK
    assert on_disk([one, two]) == 5 * CHUNK + PAGE
    assert (bytes_alone(one), bytes_alone(two)) == (one.manifest.bytes - 3 * CHUNK, two.manifest.bytes - 3 * CHUNK)
    assert described(two)["bytes_alone"] == bytes_alone(two)
    assert (whole(store, one), whole(store, two)) == (content(first), content(second))
    assert not list(store.root.glob(".draft*"))

    assert store.remove(one) == one.manifest.bytes - 3 * CHUNK
    assert whole(store, two) == content(second)
    assert bytes_alone(two) == two.manifest.bytes


def test_ten_save_points_cost_twice_the_bytes_of_one_and_any_can_be_deleted(store):
    windows = list(range(10))
    states = [memory(*windows)]
    for number in range(1, 10):
        states.append({**states[-1], **memory(number, seed=number + 1)})
    images = [save(store, state, str(number)) for number, state in enumerate(states)]
    assert on_disk(images) <= 2 * on_disk(images[:1])
    for deleted in random.Random(3).sample(images, 9):
        store.remove(deleted)
        left = [(image, state) for image, state in zip(images, states, strict=True) if image.path.exists()]
        assert all(whole(store, image) == content(state) for image, state in left)


def test_pages_that_change_in_every_chunk_are_all_that_is_written(store):
    first = memory(*range(8))
    second = {**first, **{window * CHUNK: os.urandom(PAGE) for window in range(8)}}
    third = {**second, **{window * CHUNK + PAGE: os.urandom(PAGE) for window in range(8)}}
    images = [save(store, state, str(number)) for number, state in enumerate((first, second, third, third))]
    assert on_disk(images[:2]) == 8 * CHUNK + 8 * PAGE
    assert on_disk(images[:3]) == 8 * CHUNK + 8 * PAGE + 8 * 2 * PAGE, "the third has no part of the second"
    assert on_disk(images) == on_disk(images[:3]), "what has not changed since the last one is not written again"
    store.remove(images[0])
    store.remove(images[2])
    assert whole(store, images[1]) == content(second)
    assert whole(store, images[3]) == content(third)
    most = {**first, **{window * CHUNK + at * PAGE: os.urandom(PAGE) for window in range(8) for at in range(3)}}
    anew = save(store, most, "most")
    assert bytes_alone(anew) == anew.manifest.bytes, "too many for a chunk to be shared"
    (anew.criu_directory / "pages-1" / "000000.img").write_bytes(bytes(CHUNK))  # the disk's fault
    again = save(store, {**most, 0: bytes(PAGE)}, "again")
    assert whole(store, again) == content({**most, 0: bytes(PAGE)})
    assert on_disk([again]) == 8 * CHUNK, "a chunk that is not what it was is not built upon"


@pytest.mark.parametrize("full", [False, True])
def test_in_memory_they_are_read_into_a_mapping(store, monkeypatch, full):
    """By several threads at once.  A page that memory has no space for is EFAULT; a write says what that is."""
    monkeypatch.setattr(device_memory, "_IN_MEMORY", {syscalls.file_system(str(store.root.parent))})
    read, calls = clone.read_into, list[Path]()

    def noted(source: Path, target: memoryview) -> None:
        calls.append(source)
        if full:
            raise OSError(errno.EFAULT, "full")
        read(source, target)

    monkeypatch.setattr(clone, "read_into", noted)
    first = memory(*range(8)) | {at: bytes(PAGE) for at in range(9 * CHUNK, 10 * CHUNK, PAGE)}
    second = {**first, CHUNK: os.urandom(PAGE)}
    for state in (first, second):
        image = save(store, state, f"{len(calls)}")
        assert whole(store, image) == content(state)
    assert len(calls) == 9 + 8, "but for the one that has parts"


@pytest.mark.parametrize("seed", range(4))
def test_memory_that_grows_shrinks_and_changes_at_random_comes_back_whatever_is_deleted(store, seed):
    dice = random.Random(seed)
    pages, kept = memory(*range(8)), []
    for number in range(8):
        for at in dice.sample(range(0, 10 * CHUNK, PAGE), dice.choice([0, 3, 20])):
            if at in pages and dice.random() < 0.3:
                del pages[at]
            else:
                pages[at] = dice.choice([bytes(PAGE), dice.randbytes(PAGE)])
        kept.append((save(store, pages, str(number)), content(pages)))
        if len(kept) > 3:
            store.remove(kept.pop(dice.randrange(4))[0])
        assert all(whole(store, image) == had for image, had in kept)
    assert not list(store.root.glob(".draft*"))


def test_an_index_that_is_not_what_it_was_is_damage(store):
    image = save(store, memory(1, 2), "one")
    (image.criu_directory / "pages-1.json").write_text('{"pagemap": "pagemap-7.img", "windows": [1]}')
    with pytest.raises(ImageDamaged):
        store.check(image)
    with (
        pytest.raises(ImageDamaged, match=r"pages-1\.json"),
        shared_chunks.whole(store.root, image.criu_directory),
    ):
        pass
    assert whole(store, save(store, memory(1, 2), "two")) == content(memory(1, 2))


def test_zeros_take_no_space_and_equal_chunks_of_one_image_are_counted_as_they_are(store):
    pages = {**memory(1), **dict.fromkeys(memory(2, 3), bytes(PAGE))}
    one, two = save(store, pages, "one"), save(store, pages, "two")
    zeros = one.criu_directory / "pages-1" / "000001.img"
    assert (zeros.stat().st_size, zeros.stat().st_blocks) == (CHUNK, 0)
    assert whole(store, two) == content(pages)
    assert Together([one, two]).bytes == used([one, two]).bytes == one.manifest.bytes + two.manifest.bytes - 3 * CHUNK
    counted = Together([one, two])
    counted.remove(one)
    assert counted.bytes == Together([two]).bytes
    assert store.remove(one) == one.manifest.bytes - 2 * CHUNK, "its other chunk of zeros was its own"
    assert store.remove(two) == two.manifest.bytes - CHUNK, "it had one file for both"


def test_prune_knows_that_a_save_point_frees_what_it_has_alone(store):
    pages = memory(*range(8))
    images = [save(store, pages, str(number), created=float(number)) for number in range(3)]
    rest = images[0].manifest.bytes - 8 * CHUNK
    most = 8 * CHUNK + 2 * rest
    assert choose(store.images(), Limits(max_bytes=most), 10.0, lambda _: False) == images[:1]
    assert choose(store.images(), Limits(max_bytes=most - 1), 10.0, lambda _: False) == images[:2]


def test_a_chunk_that_is_gone_or_cut_short_is_written_again(store):
    pages = memory(1, 2)
    one = save(store, pages, "one")
    os.truncate(one.criu_directory / "pages-1" / "000000.img", 5)
    (one.criu_directory / "pages-1" / "000001.img").unlink()
    two = save(store, pages, "two")
    assert whole(store, two) == content(pages)
    assert bytes_alone(two) == two.manifest.bytes
    with pytest.raises(ImageDamaged):
        store.check(one)


def test_only_chunks_may_have_other_names(store, tmp_path):
    image = save(store, memory(1, 2), "one")
    (tmp_path / "chunk").hardlink_to(image.criu_directory / "pages-1" / "000000.img")
    store.check(image)
    (tmp_path / "core").hardlink_to(image.criu_directory / "core-1.img")
    with pytest.raises(ImageDamaged, match="core-1"):
        store.check(image)


def test_an_encrypted_save_point_shares_nothing(store, tmp_path, monkeypatch):
    monkeypatch.setenv("KEY_OF_IMAGES", "ab" * 32)
    pages = memory(1, 2)
    plain = save(store, pages, "plain")
    (tmp_path / "memory").mkdir()
    encrypted = Store(store.root, store.keys, Vault("env:KEY_OF_IMAGES", tmp_path / "memory"))
    images = [save(encrypted, pages, name) for name in ("one", "two")]
    assert [whole(encrypted, image) for image in images] == [content(pages)] * 2
    assert [bytes_alone(image) for image in (plain, *images)] == [each.manifest.bytes for each in (plain, *images)]
    assert whole(store, save(store, pages, "again")) == content(pages)


def test_a_save_point_is_moved_with_its_chunks_and_those_of_others_stay(store, tmp_path):
    pages, there = memory(1, 2), Store(tmp_path / "there", store.keys)
    one, two = save(store, pages, "one"), save(store, pages, "two")
    remote = Remote(f"file://{tmp_path}/depot")
    remote.push(one, remove_from=store)
    assert whole(store, two) == content(pages)
    moved = remote.pull(one.id, there)
    assert whole(there, moved) == content(pages)
    with pytest.raises(ImageNotFound):
        store.get(one.id)


def test_an_image_for_a_branch_shares_the_chunks_of_its_save_point(store):
    pages = memory(1, 2)
    one = save(store, pages, "one")
    copied = branch.copy(store, one, new_kernel("another"))
    assert whole(store, copied) == content(pages)
    assert bytes_alone(copied) == copied.manifest.bytes - 2 * CHUNK
    store.remove(one)
    assert whole(store, copied) == content(pages)


def test_a_template_has_whole_files_which_the_images_that_start_from_it_share(store):
    pages = memory(1, 2)
    point = save(store, pages, "one")
    template = branch.copy(store, point, new_kernel("template"), SavePoint("template"))
    assert template.criu_directory.joinpath("pages-1.img").read_bytes() == content(pages)
    assert not [name for name in template.manifest.files if layout.is_page_chunk(name) or name.endswith("pages-1.json")]
    store.remove(point)
    started = [branch.copy(store, template, new_kernel(name)) for name in ("first", "second")]
    for image in (template, *started):
        store.check(image)
        with shared_chunks.whole(store.root, image.criu_directory) as view:
            assert view == image.criu_directory, "nothing is joined"
        assert bytes_alone(image) == image.manifest.bytes - len(content(pages))
    store.remove(template)
    assert whole(store, started[0]) == content(pages)
    store.remove(started[0])
    assert bytes_alone(started[1]) == started[1].manifest.bytes


@pytest.mark.parametrize("name", ["pages-1/000001.img", "pages-1.json"])
def test_what_is_damaged_in_a_save_point_is_not_right_in_a_template(store, name):
    point = save(store, memory(1, 2), "one")
    path = point.criu_directory / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ImageDamaged):
        branch.copy(store, point, new_kernel("template"), SavePoint("template"))
    assert store.images() == [point] and not list(store.root.glob(".draft*"))


def test_only_a_template_and_what_starts_from_it_may_have_files_of_pages_with_several_names(store, tmp_path):
    point = save(store, memory(1, 2), "one")
    template = branch.copy(store, point, new_kernel("template"), SavePoint("template"))
    os.link(template.criu_directory / "pages-1.img", tmp_path / "another")
    store.check(template)
    small = publish(store, {"pages-1.img": b"x" * 4096})
    os.link(small.criu_directory / "pages-1.img", tmp_path / "small")
    with pytest.raises(ImageDamaged):
        store.check(small)


def test_the_view_of_a_restore_that_was_killed_is_swept(store):
    image = save(store, memory(1, 2), "one")
    if not (pid := os.fork()):
        with shared_chunks.whole(store.root, image.criu_directory):
            os._exit(0)
    os.waitpid(pid, 0)
    assert list(store.root.glob(".draft-pages-*"))
    with shared_chunks.whole(store.root, image.criu_directory) as living:
        store.sweep()
        assert [path for path in store.root.glob(".draft-pages-*") if path.is_dir()] == [Path(living)]
    assert not list(store.root.glob(".draft*"))
