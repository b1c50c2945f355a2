"""Images that are kept: by name, whatever other images their kernel has, and as often as they are restored."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from images import FACTS, publish

from jupyter_gpu_ckpt.errors import (
    BadRequest,
    ImageArchived,
    ImageForged,
    ImageStale,
    NoSpace,
    SavePointExists,
    SavePointNotFound,
)
from jupyter_gpu_ckpt.files import clone
from jupyter_gpu_ckpt.image import kept_files, layout, save_point
from jupyter_gpu_ckpt.image.quota import used
from jupyter_gpu_ckpt.image.retention import Limits, choose
from jupyter_gpu_ckpt.image.save_point import SavePoint
from jupyter_gpu_ckpt.image.store import Image
from jupyter_gpu_ckpt.kernel import automatic_saves
from jupyter_gpu_ckpt.kernel.orphans import newest_images, only_copy
from jupyter_gpu_ckpt.node.facts import file_facts

POINT = SavePoint("before", cell=7, variables=[{"name": "x", "type": "int", "bytes": 28}])


def kept(store, point: SavePoint = POINT, **facts) -> Image:
    return publish(store, save_point=point.as_dict(), **facts)


def test_a_save_point_is_found_by_its_name_with_its_summary(store):
    image, other = kept(store), kept(store, replace(POINT, name="after"))
    kept(store, kernel_id="another")
    publish(store)
    assert save_point.of_kernel(store.images(), FACTS.kernel_id) == {"before": image, "after": other}
    assert save_point.of_image(store.get(image.id)) == POINT
    assert save_point.find(store.images(), FACTS.kernel_id, "before") == image
    with pytest.raises(SavePointNotFound, match="it has: after, before") as caught:
        save_point.find(store.images(), FACTS.kernel_id, "x")
    assert caught.value.details["names"] == ["after", "before"]


def test_a_save_point_is_current_whatever_its_kernel_does_and_an_image_beside_it_is_not(store):
    image, asleep = kept(store, generation=1), publish(store, generation=2)
    store.check(image)
    store.check(asleep)
    store.generations.record_restored(FACTS.kernel_id, 2)
    store.check(image)
    assert [one.manifest.generation for one in store.images() if one.is_save_point] == [1]


SESSION = {
    "session.json": b'{"version": 1, "kernel_id": "k", "kernel_name": "", "runtime_dir": "/nowhere", '
    b'"has_agent": true, "path": "", "front": {}}'
}


def test_a_kernel_that_runs_on_sleeps_in_no_image_once_it_has_ended(store):
    """Its last server may have been killed before it had deleted the image that the kernel had come back from."""
    publish(store, SESSION, generation=1)
    assert FACTS.kernel_id in newest_images(store)
    store.generations.record_restored(FACTS.kernel_id)
    store.supersede(FACTS.kernel_id)
    assert newest_images(store) == {}


def test_no_server_attaches_the_kernel_of_a_save_point_unless_it_sleeps_in_it(store):
    image = publish(store, SESSION, save_point=POINT.as_dict())
    assert image.retired
    assert newest_images(store) == {}
    assert only_copy(image, "") is None
    assert used(store.images()).kernels == frozenset()
    image.unretire()
    assert newest_images(store)[FACTS.kernel_id].image == image
    assert only_copy(image, "") is not None
    store.supersede(FACTS.kernel_id)
    assert image.retired
    assert store.images() == [image]


def test_an_image_that_a_kernel_slept_in_becomes_a_save_point(store):
    image = publish(store, generation=1)
    image.retire()
    manifest, seal = ((image.path / name).read_bytes() for name in (layout.MANIFEST, layout.SEAL))
    made = save_point.of_sleep(store, image, POINT, b"{}", 0)
    assert store.images() == [made]
    assert (made.id, save_point.of_image(made), made.retired) == (image.id, POINT, True)
    assert save_point.notebook(store, made) == b"{}"
    store.check(made)
    assert {path.name for path in store.root.iterdir()} == {image.id, f".{image.id}{layout.LOCK}"}
    (image.path / layout.MANIFEST).write_bytes(manifest)  # somebody puts back what it was
    (image.path / layout.SEAL).write_bytes(seal)
    with pytest.raises(ImageStale):
        store.generations.require_current(store.get(image.id).manifest)


def sleeping(store, tmp_path: Path) -> tuple[Image, Path]:
    """An image with a file that its kernel has open for writing."""
    log = tmp_path / "log"
    log.write_text("as it was when the kernel fell asleep")
    facts = file_facts(str(log))
    return publish(store, generation=1, fingerprint={"files": {str(log): {**(facts or {}), "writes": True}}}), log


def test_an_image_that_a_kernel_sleeps_in_on_is_a_save_point_that_the_next_server_attaches(store, tmp_path):
    image, log = sleeping(store, tmp_path)
    made = save_point.of_sleep(store, image, POINT, b"{}", 0, [str(log), str(tmp_path / "gone")])
    assert (made.id, save_point.of_image(made), made.retired) == (image.id, POINT, False)
    assert [*kept_files.of_image(made)] == [str(log)], "what is to be replaced is kept, whatever it costs"
    store.check(made)
    made.lease().release()
    made.retire()
    assert save_point.of_kernel(store.images(), FACTS.kernel_id) == {POINT.name: made}


def test_a_file_that_cannot_be_kept_leaves_the_image_as_it_was(store, tmp_path, monkeypatch):
    image, log = sleeping(store, tmp_path)
    monkeypatch.setattr(clone, "copy", lambda *_: None)
    with pytest.raises(NoSpace):
        save_point.of_sleep(store, image, POINT, b"{}", 0, [str(log)])
    store.check(store.get(image.id))
    assert not image.retired


def test_a_process_that_is_killed_as_an_image_becomes_a_save_point_leaves_one_that_its_kernel_sleeps_in(
    store, tmp_path
):
    """Before each file that it opens for writing, makes, renames or removes, and behind the last of them."""
    reached = set()
    for moment in itertools.count():
        image, log = sleeping(store, tmp_path)
        if (pid := os.fork()) == 0:
            moments = itertools.count()

            def die(event: str, facts: tuple, moment=moment, moments=moments) -> None:
                writes = event == "open" and facts[2] & (os.O_WRONLY | os.O_RDWR)
                changes = writes or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link")
                if changes and next(moments) == moment:
                    os._exit(9)

            sys.addaudithook(die)
            save_point.of_sleep(store, image, POINT, b"{}", 0, [str(log)])
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        store.check(left := store.get(image.id))
        assert not left.retired, moment
        left.lease().release()
        reached.add(left.is_save_point)
        if not left.is_save_point:  # and it can become one after that
            left = save_point.of_sleep(store, left, POINT, b"{}", 0, [str(log)])
            store.check(left)
        assert kept_files.of_image(left)[str(log)].kept
        store.remove(left)
        store.forget(FACTS.kernel_id)
        shutil.rmtree(store.generations.directory)  # each is another kernel's
        if status == 0:
            break
    assert reached == {False, True}
    assert moment > 20


def test_an_image_that_another_wrote_or_that_lies_elsewhere_becomes_none(store):
    image = publish(store)
    image.mark_archived(True)
    with pytest.raises(ImageArchived):
        save_point.of_sleep(store, image, POINT, None, 0)
    image.mark_archived(False)
    (image.path / layout.SEAL).write_text("{}")
    with pytest.raises(ImageForged):
        save_point.of_sleep(store, image, POINT, None, 0)
    assert not store.get(image.id).is_save_point


def test_the_links_of_a_save_point_leave_their_names_to_the_next_dump_and_go_with_it(store, tmp_path):
    file, link = tmp_path / "kept", tmp_path / "link_remap.7"
    file.write_text("content")
    link.hardlink_to(file)
    facts = {"files": {str(link): {**(file_facts(str(link)) or {}), "made": True}}}
    image = kept(store, fingerprint=facts)
    second = Path(f"{link}.{image.id}")
    assert (link.exists(), second.read_text()) == (False, "content")

    link.hardlink_to(file)  # as the next dump does
    asleep = publish(store, fingerprint=facts, generation=2)
    store.remove(image)
    assert (link.exists(), second.exists()) == (True, False), "it is the other image's"
    store.remove(asleep)
    assert not link.exists()


def test_a_comparison_says_only_what_the_summaries_prove():
    def point(left_out: int = 0, **variables: str) -> SavePoint:
        """A summary of variables, each by its type, bytes and digest; a digest that ends with ~ is weak."""
        found = []
        for name, text in variables.items():
            kind, bytes, *digest = text.split()
            facts = {"digest": digest[0], "weak": digest[0].endswith("~")} if digest else {}
            found.append({"name": name, "type": kind, "bytes": int(bytes), **facts})
        return save_point.from_summary({"variables": found, "left_out": left_out})

    before = point(
        gone="int 28 a", same="list 56 b", other="list 56 c", type="int 28", size="ndarray 80", grown="list 56",
        weak="Tensor 40 d~", written="Tensor 40 e~", unread="Lock 40",
    )  # fmt: skip
    after = point(
        added="int 28 a", same="list 88 b", other="list 56 x", type="str 28", size="ndarray 88", grown="list 88",
        weak="Tensor 40 d~", written="Tensor 40 f~", unread="Lock 40",
    )  # fmt: skip
    found = save_point.compare(before, after)
    names = {kind: [each["name"] for each in found[kind]] for kind in ("added", "gone", "changed", "unknown")}
    assert names == {
        "added": ["added"],
        "gone": ["gone"],
        "changed": ["other", "size", "type", "written"],
        "unknown": ["grown", "unread", "weak"],
    }
    assert (found["same"], found["complete"]) == (1, True)
    assert found["changed"][2] == {
        "name": "type",
        "before": {"type": "int", "bytes": 28},
        "after": {"type": "str", "bytes": 28},
    }
    assert found["gone"][0]["after"] is None

    more = save_point.compare(point(1), after)
    assert more["added"] == [], "it may be among those that were left out"
    assert len(more["unknown"]) == 9
    assert not more["complete"]


#: A lone surrogate, marks of direction, a blank without width, separators of lines, a byte of a file's name.
UNSEEN = ["\ud800", "a\udfff", "\u202eevil", "a\u2066b", "a\u200bb", "a\ufeff", "a\u2028b", "a\u2029b", "\udcff"]


@pytest.mark.parametrize("name", ["", " x", "x ", "a/b", "a\\b", "a\nb", ".a", "a\x9b", "x" * 81, *UNSEEN])
def test_names_that_save_points_cannot_have(store, name):
    with pytest.raises(BadRequest):
        save_point.require_free_name(store.images(), FACTS.kernel_id, name)


@pytest.mark.parametrize("name", ["résumé", "保存点 1", "step_3 (lr=1e-3)", "🚀"])
def test_names_in_any_language(store, name):
    save_point.require_free_name(store.images(), FACTS.kernel_id, name)


def test_a_name_is_used_once_by_each_kernel(store):
    image = kept(store)
    with pytest.raises(SavePointExists) as caught:
        save_point.require_free_name(store.images(), FACTS.kernel_id, "before")
    assert caught.value.details["image"] == image.id
    save_point.require_free_name(store.images(), "another", "before")
    store.remove(image)
    save_point.require_free_name(store.images(), FACTS.kernel_id, "before")


@pytest.mark.parametrize("facts", [{}, {"name": 3, "automatic": 1, "cell": "x", "variables": [3]}])
def test_a_summary_of_another_shape_is_one_without_facts(store, facts):
    found = save_point.of_image(publish(store, save_point=facts))
    assert found == SavePoint(str(facts.get("name", "")))


def test_of_automatic_save_points_some_are_kept_and_others_all(store):
    point = replace(POINT, automatic=True)
    images = [kept(store, replace(point, name=str(number)), created=float(number)) for number in range(6)]
    kept(store, created=0.0)
    images[0].unretire()
    assert save_point.surplus(store.images(), FACTS.kernel_id, 1) == images[1:5]
    assert save_point.surplus(store.images(), FACTS.kernel_id, 2) == images[1:4]
    assert save_point.surplus(store.images(), FACTS.kernel_id, 3) == images[2:4], "1 is the oldest that may go"
    assert save_point.surplus(store.images(), FACTS.kernel_id, 5) == []


PROPERTY = settings(deadline=None, database=None)
TIMES = st.lists(st.floats(0, 1e9), max_size=40).map(sorted)


@PROPERTY
@given(TIMES, st.integers(0, 12))
def test_of_many_moments_the_newest_two_and_the_oldest_stay_and_never_more_than_may(times, keep):
    kept = save_point.thinned(times, keep)
    assert kept <= set(range(len(times)))
    assert len(kept) == min(keep, len(times))
    newest = list(range(len(times)))[-2:]
    assert set(newest[-min(keep, 2) :] if keep else []) <= kept
    assert keep < 3 or not times or 0 in kept
    # Whether they are thinned out one after the other or at once: what had to go first goes first.
    assert save_point.thinned(times, keep + 1) >= kept


@PROPERTY
@given(st.floats(5, 86400), st.integers(5, 9), st.integers(1, 200))
def test_moments_at_equal_intervals_are_dense_lately_and_sparse_before(interval, keep, number):
    times: list[float] = []
    for turn in range(number):
        times.append(turn * interval)
        times = [times[index] for index in sorted(save_point.thinned(times, keep))]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert all(older > 0.8 * younger for older, younger in itertools.pairwise(gaps)), gaps
    assert number == 1 or gaps[-1] == pytest.approx(interval)
    assert number <= 4 * keep or gaps[0] > 0.25 * times[-1], "the last cells have no more than their share"


def test_prune_counts_save_points_apart_from_images_of_sleeping_kernels(store):
    old, new, asleep = kept(store, created=1.0), kept(store, created=2.0), publish(store, created=3.0)
    assert choose(store.images(), Limits(keep_last=1), 10.0, lambda _: False) == [old]
    assert choose(store.images(), Limits(max_age=7.5), 10.0, lambda _: False) == [old, new]
    assert asleep in store.images()


def test_files_that_would_have_to_be_copied_are_not_tried_one_by_one(tmp_path, monkeypatch):
    tried = []

    def refuse(source: Path, target: Path, most: int) -> None:
        tried.append(source.name)

    monkeypatch.setattr(clone, "copy", refuse)
    for name in ("one", "two", "log"):
        (tmp_path / name).write_text("content")
    files = {str(tmp_path / name): {"code": True} for name in ("one", "two")}
    found = kept_files.keep({**files, str(tmp_path / "log"): {"writes": True}}, (), tmp_path / "kept", 100, 1 << 30)
    assert tried == ["log"], "what the kernel writes to comes first; where that is no reflink, program code is none"
    assert [(Path(path).name, file.kept) for path, file in found.items()] == [("log", False)]
    assert not (tmp_path / "kept").exists(), "an image has no empty directories"


def test_a_kernel_without_an_agent_has_no_magic_to_go_back_by(store):
    image = kept(store)
    with_agent = automatic_saves.offer(store, FACTS.kernel_id, -9, has_magic=True)
    assert with_agent.endswith("to go back to it: %gpu_checkpoint --back before")
    without = automatic_saves.offer(store, FACTS.kernel_id, -9, has_magic=False)
    assert without.endswith(f'POST gpu-ckpt/kernels/{FACTS.kernel_id}/back with {{"name": "before"}}')
    assert "%" not in without
    store.remove(image)
    assert automatic_saves.offer(store, FACTS.kernel_id, -9, has_magic=False) == ""


def test_a_manifest_without_a_parent_or_with_one_of_another_type_has_none():
    assert save_point.from_summary({"variables": []}).parent == ""
    assert save_point.from_summary({"parent": 7}).parent == ""
