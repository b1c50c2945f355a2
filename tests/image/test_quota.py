"""Limits on what one user's sleeping kernels take: who is refused, what is promised, and that nothing is deleted."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from images import FACTS, publish

from jupyter_gpu_ckpt.errors import QuotaExceeded
from jupyter_gpu_ckpt.image.quota import Quota, Used, refusal
from jupyter_gpu_ckpt.image.store import Store

SEVEN = {"core-1.img": b"1234567"}


def limited(store: Store, **quota: int) -> Store:
    return Store(store.root, store.keys, quota=Quota(**quota))


@pytest.mark.parametrize(
    ("quota", "needed", "limit"),
    [
        (Quota(), 1 << 50, None),
        (Quota(bytes=100), 40, None),
        (Quota(bytes=100), 41, "bytes"),
        (Quota(kernels=3), 1 << 50, None),
        (Quota(kernels=2), 1, "kernels"),
        (Quota(bytes=100, kernels=2), 41, "bytes"),
    ],
)
def test_who_is_refused(quota, needed, limit):
    error = refusal(quota, Used(60, frozenset("ab")), "c", needed)
    assert (error and error.details["limit"]) == limit


def test_a_kernel_that_is_counted_already_is_not_counted_twice():
    assert refusal(Quota(kernels=1), Used(0, frozenset("a")), "a", 1) is None


def test_the_refusal_says_what_there_is_and_what_can_be_done(store):
    publish(store, SEVEN)
    with pytest.raises(QuotaExceeded) as caught:
        limited(store, bytes=10).begin("another", 4)
    error = caught.value
    assert (error.code, error.exit_status) == ("QUOTA_EXCEEDED", 75)
    assert error.details == {"limit": "bytes", "allowed": 10, "used": 7, "needed": 4}
    assert "prune" in error.hint


def test_nothing_is_written_and_nothing_deleted(store):
    image = publish(store, SEVEN)
    for bounded in (limited(store, bytes=10), limited(store, kernels=1)):
        before = sorted(path for path in store.root.rglob("*"))
        assert bounded.over_quota("another", 4) is not None
        with pytest.raises(QuotaExceeded):
            bounded.begin("another", 4)
        assert sorted(path for path in store.root.rglob("*") if path.name != ".quota.lock") == before
        bounded.check(image)
        (store.root / ".quota.lock").unlink(missing_ok=True)


def test_without_a_limit_no_lock_is_made(store):
    publish(store, SEVEN)
    assert not (store.root / ".quota.lock").exists()


def test_the_image_of_a_kernel_that_was_shut_down_counts_for_its_bytes_alone(store):
    publish(store, SEVEN).retire()
    assert limited(store, kernels=1).over_quota("another", 1) is None
    assert limited(store, bytes=7).over_quota("another", 1) is not None


def test_a_damaged_image_counts_in_the_quota(store):
    image = publish(store, SEVEN)
    manifest = image.path / "manifest.json"
    manifest.write_text("{")
    assert limited(store, bytes=8).over_quota("another", 1) is not None


def test_of_two_checkpoints_at_once_one_reserves_the_space(store):
    bounded = limited(store, bytes=10)
    first = bounded.begin("first", 6)
    with pytest.raises(QuotaExceeded) as caught:
        limited(store, bytes=10).begin("second", 6)
    assert caught.value.details["used"] == 6
    first.discard()
    limited(store, bytes=10).begin("second", 6).discard()
    assert not list(store.root.glob(".draft-*"))


def test_of_two_checkpoints_at_once_one_is_the_last_kernel(store):
    bounded = limited(store, kernels=1)
    first = bounded.begin("first", 1)
    with pytest.raises(QuotaExceeded):
        bounded.begin("second", 1)
    first.publish(FACTS)
    with pytest.raises(QuotaExceeded):
        bounded.begin("second", 1)


def test_twenty_at_once_never_pass_the_limit(store):
    """A server that stops: each checkpoint comes on a thread of its own."""
    store.prepare()
    drafts, refused, begun = [], [], threading.Barrier(20)

    def begin(number: int) -> None:
        begun.wait()
        try:
            drafts.append(limited(store, bytes=50).begin(f"k{number}", 10))
        except QuotaExceeded as error:
            refused.append(error)

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(drafts), len(refused)) == (5, 15)
    for draft in drafts:
        draft.discard()


def test_an_image_that_grew_past_its_reservation_and_the_limit_is_not_published(store):
    draft = limited(store, bytes=10).begin("kernel", 5)
    (draft.criu_directory / "ghost.img").write_bytes(b"12345678901")
    with pytest.raises(QuotaExceeded):
        draft.publish(FACTS)
    draft.discard()
    assert store.images() == []
    draft = limited(store, bytes=10).begin("kernel", 5)
    (draft.criu_directory / "ghost.img").write_bytes(b"1234567890")
    draft.publish(FACTS)
    assert [image.manifest.bytes for image in store.images()] == [10]


def test_a_reservation_ends_with_its_draft(store):
    bounded = limited(store, bytes=10)
    draft = bounded.begin("kernel", 9)
    reservation = store.root / f"{draft.path.name}.reservation"
    assert reservation.exists()
    draft.unlock()  # as when its writer is killed
    assert bounded.sweep() == 1
    assert not reservation.exists()
    reservation.write_text('{"kernel_id": "kernel", "bytes": 9}')  # a writer that was killed just after its rename
    bounded.begin("kernel", 9).discard()
    bounded.sweep()
    assert not reservation.exists()


CHECKPOINT = """
import sys, time
from pathlib import Path
from jupyter_gpu_ckpt.image.keys import Keyring
from jupyter_gpu_ckpt.image.quota import Quota
from jupyter_gpu_ckpt.image.store import Store

draft = Store(Path(sys.argv[1]), Keyring(Path(sys.argv[2])), quota=Quota(bytes=10, kernels=1)).begin("first", 9)
print("begun", flush=True)
time.sleep(600)
"""


def test_the_reservation_of_a_killed_server_is_free_at_once(store):
    bounded = limited(store, bytes=10, kernels=1)
    argv = [sys.executable, "-c", CHECKPOINT, str(store.root), str(store.keys.directory)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None and server.stdout.readline() == b"begun\n"
        try:
            assert bounded.over_quota("second", 2) is not None
            with pytest.raises(QuotaExceeded):
                bounded.begin("second", 2)
        finally:
            server.kill()
    (reservation,) = store.root.glob("*.reservation")
    assert bounded.over_quota("second", 2) is None
    bounded.begin("second", 2).discard()
    assert not reservation.exists()
    assert bounded.sweep() == 1, "its draft is the next server's to remove"
    assert [path.name for path in store.root.glob(".draft-*")] == []


def test_a_reservation_whose_lock_cannot_be_tried_counts(store):
    """A file system that is read only just now is such a case."""
    bounded = limited(store, bytes=10)
    draft = bounded.begin("first", 9)
    draft.unlock()
    lock = draft._lock
    lock.unlink(missing_ok=True)
    lock.mkdir()
    assert bounded.over_quota("second", 2) is not None
    lock.rmdir()
    assert bounded.over_quota("second", 2) is None
