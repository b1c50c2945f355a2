"""The cold tier: content goes, the image stays, and a wake has it back."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
from images import FACTS, publish

from jupyter_gpu_ckpt.errors import ImageArchived, ImageBusy, RemoteFailed
from jupyter_gpu_ckpt.image import layout
from jupyter_gpu_ckpt.image import lease as leases
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.transfer import archive
from jupyter_gpu_ckpt.transfer import remote as remote_module
from jupyter_gpu_ckpt.transfer.remote import Remote
from jupyter_gpu_ckpt.transfer.storage import Storage


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "images")


@pytest.fixture
def remote(tmp_path):
    return Remote(f"file://{tmp_path}/cold")


def files(image) -> list[str]:
    return sorted(str(path.relative_to(image.path)) for path in image.path.rglob("*") if path.is_file())


def test_an_archived_image_is_there_but_for_its_content(store, remote):
    image = publish(store)
    before = files(image)
    assert archive.archive(image, store, remote) == 5004
    assert [one.id for one in store.images()] == [image.id]
    assert files(image) == ["manifest.json", "manifest.mac", "session.json"]
    with pytest.raises(ImageArchived):
        store.check(image)
    with image.lease():
        archive.fetch_content(image, store, remote)
    assert files(image) == before
    store.check(image)
    assert remote.images() == []
    assert not image.archived


def test_an_archived_image_is_not_sealed_or_pushed_without_its_content(store, remote, tmp_path):
    image = publish(store)
    archive.archive(image, store, remote)
    with pytest.raises(ImageArchived):
        store.seal(image)
    with pytest.raises(ImageArchived, match="Wake its kernel"):
        Remote(f"file://{tmp_path}/elsewhere").push(image, remove_from=store)
    with image.lease():
        archive.fetch_content(image, store, remote)
    store.check(image)


def test_only_old_images_go_and_each_once(store, remote):
    old = publish(store)  # of the year 1970
    assert list(archive.archive_old(store, remote, 60.0)) == [(old, 5004)]
    assert list(archive.archive_old(store, remote, 60.0)) == []
    fresh = publish(store, kernel_id="another", created=4e9)
    assert list(archive.archive_old(store, remote, 60.0)) == []
    store.check(fresh)


def test_the_image_of_a_template_stays(store, remote):
    """No wake would fetch it: the template's kernels would start without it."""
    template = publish(store, kernel_id="template", branched_from={"is_template": True}, save_point={"name": "torch"})
    kernel = publish(store, kernel_id="kernel", branched_from={"is_template": True})
    assert [image for image, _ in archive.archive_old(store, remote, 60.0)] == [kernel]
    assert not template.archived


def test_one_that_cannot_be_sent_stays_whole(store, remote, monkeypatch):
    image = publish(store)

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Storage, "write", fail)
    with pytest.raises(RemoteFailed):
        archive.archive(image, store, remote)
    store.check(image)
    ((same, error),) = archive.archive_old(store, remote, 60.0)
    assert (same, error.code) == (image, "REMOTE_FAILED")


def test_content_that_is_gone_is_reported(store, remote):
    image = publish(store)
    archive.archive(image, store, remote)
    remote.remove(image.id)
    with image.lease(), pytest.raises(ImageArchived):
        archive.fetch_content(image, store, remote)


def test_a_removed_image_takes_along_what_a_wake_had_fetched_of_it(store, remote, monkeypatch):
    image = publish(store)
    archive.archive(image, store, remote)
    with monkeypatch.context() as patch, image.lease(), pytest.raises(RemoteFailed):
        patch.setattr(remote.storage, "sizes", mock.Mock(side_effect=OSError))
        archive.fetch_content(image, store, remote)
    assert (store.root / layout.INCOMING / image.id).exists()
    store.remove(image)
    assert not (store.root / layout.INCOMING / image.id).exists()


def test_a_removed_image_takes_its_mark_along(store, remote):
    image = publish(store)
    archive.archive(image, store, remote)
    store.remove(image)
    assert not list(store.root.glob(".*archived"))


def test_a_piece_that_lies_there_is_read_before_the_content_goes(store, remote, tmp_path):
    image = publish(store, {"pages-1.img": b"pages" * 1000, "zeros.img": bytes(100)})
    before = {name: (image.path / name).read_bytes() for name in image.manifest.files}
    place = tmp_path / "cold" / image.id
    place.mkdir(parents=True)
    for number, name in enumerate(sorted(before)):
        (place / f"{number:04d}-000000").write_bytes(b"q" * len(before[name]))
    archive.archive(image, store, remote)
    with image.lease():
        archive.fetch_content(image, store, remote)
    store.check(image)
    assert {name: (image.path / name).read_bytes() for name in before} == before


def test_a_way_back_that_broke_off_between_two_files_is_gone_again(store, remote, monkeypatch):
    image = publish(store)
    archive.archive(image, store, remote)
    replace, replaced = Path.replace, []

    def break_off(path, target):
        if path.parent.name == "criu":
            replaced.append(target)
            if len(replaced) == 2:
                raise OSError(5, "Input/output error")
        return replace(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", break_off)
        with image.lease(), pytest.raises(OSError):
            archive.fetch_content(image, store, remote)
    assert image.archived
    with image.lease():
        archive.fetch_content(image, store, remote)
    store.check(image)


@pytest.fixture
def interrupted(store, monkeypatch):
    """Runs ``meanwhile`` once, just after the first piece of an image was sent, or before it is one there."""

    def interrupt(remote, verb, meanwhile):
        owner = remote.storage if verb == "sizes" else remote
        real = getattr(owner, verb)

        def then(*args, **kwargs):
            monkeypatch.setattr(owner, verb, real)
            done = real(*args, **kwargs)
            meanwhile()
            return done

        monkeypatch.setattr(owner, verb, then)

    return interrupt


@pytest.mark.parametrize("verb", ["sizes", "send", "complete"])
def test_a_wake_does_not_wait_for_an_image_that_is_being_sent(store, remote, interrupted, verb):
    image = publish(store)

    def wake():
        with image.lease():
            store.check(image)
            store.remove(image, leased=True)

    interrupted(remote, verb, wake)
    with pytest.raises(ImageBusy):
        archive.archive(image, store, remote)
    assert remote.images() == []
    assert not (Path(remote.storage.root) / image.id).exists(), "what was sent is given up"
    assert not list(store.root.iterdir())


@pytest.mark.parametrize("then", ["sleeps on", "wakes"])
def test_a_wake_that_is_under_way_keeps_the_content(store, remote, interrupted, then):
    image = publish(store)
    leased = []
    interrupted(remote, "complete", lambda: leased.append(image.lease()))
    with pytest.raises(ImageBusy):
        archive.archive(image, store, remote)
    assert remote.claimed(image.id), "nobody can pull what was sent"
    store.check(image)
    if then == "wakes":
        store.remove(image, leased=True)
    leased[0].release()
    assert list(archive.sweep(store, remote)) == ([] if then == "sleeps on" else [(image.id, None)])
    assert there(remote, image) == (then == "sleeps on")
    if then == "sleeps on":
        assert archive.archive(image, store, remote) == 5004


def test_the_image_is_not_locked_during_requests_to_the_other_side(store, remote, monkeypatch, interrupted):
    """The next wake has a moment's patience, and networks have none."""
    image = publish(store)
    real, small, held = leases.acquire, remote.storage.read_small, []

    def busy(*_, **__):
        monkeypatch.setattr(leases, "acquire", real)
        raise ImageBusy("A wake has it, and fails soon.")

    def ask(*args):
        try:
            image.lease().release()
        except ImageBusy as error:
            held.append(error)
        return small(*args)

    interrupted(remote, "complete", lambda: monkeypatch.setattr(leases, "acquire", busy))
    monkeypatch.setattr(remote.storage, "read_small", ask)
    with pytest.raises(ImageBusy):
        archive.archive(image, store, remote)
    assert held == []
    assert there(remote, image), "it is of use as long as the image is there"


@pytest.mark.parametrize("then", ["busy", "archived"])
def test_a_server_of_another_host_that_was_faster_keeps_what_it_sent(store, remote, interrupted, then):
    """Its content here is gone by then, so what lies there is all there is."""
    image = publish(store)
    other = Remote(remote.storage.fs.unstrip_protocol(remote.storage.root))

    def overtake():
        archive.archive(image, store, other)
        if then == "busy":  # and woken: its content is on its way back
            leased.append(image.lease())

    leased = []
    interrupted(remote, "complete", overtake)
    with pytest.raises(ImageBusy if then == "busy" else ImageArchived):
        archive.archive(image, store, remote)
    for lease in leased:
        lease.release()
    with image.lease():
        archive.fetch_content(image, store, remote)
    store.check(image)


def test_an_image_that_was_moved_to_the_same_place_meanwhile_stays_there(store, remote, interrupted, tmp_path):
    image = publish(store)
    other = Remote(remote.storage.fs.unstrip_protocol(remote.storage.root))
    interrupted(remote, "send", lambda: other.push(image, remove_from=store))
    with pytest.raises(ImageBusy):
        archive.archive(image, store, remote)
    elsewhere = Store(tmp_path / "elsewhere", store.keys)
    elsewhere.check(remote.pull(image.id, elsewhere))


def test_a_kernel_that_lives_keeps_its_image(store, remote):
    draft = store.begin("kernel")
    image = draft.publish(FACTS, claim_pid=os.getpid())
    with pytest.raises(ImageBusy):
        archive.archive(image, store, remote)
    assert remote.images() == []


def test_no_other_host_takes_what_is_archived(store, remote, tmp_path, monkeypatch):
    """Its manifest is here: the kernel wakes here."""
    image = publish(store)
    archive.archive(image, store, remote)
    elsewhere = Store(tmp_path / "elsewhere", store.keys)
    with monkeypatch.context() as another:
        another.setattr(remote_module.socket, "gethostname", lambda: "another")
        with pytest.raises(ImageBusy, match="was claimed by"):
            remote.pull(image.id, elsewhere)
    with image.lease():
        archive.fetch_content(image, store, remote)
    store.check(image)


@pytest.mark.parametrize("name", ["rename", "mkdir"])
def test_a_crash_while_the_content_is_set_aside_loses_nothing(store, remote, monkeypatch, name):
    image = publish(store)
    real = getattr(Path, name)

    def crash(path, *args, **options):
        if path == image.criu_directory:
            raise KeyboardInterrupt
        return real(path, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, name, crash)
        with pytest.raises(KeyboardInterrupt):
            archive.archive(image, store, remote)
    store.sweep()
    with image.lease():
        archive.fetch_content(image, store, remote)
    store.check(image)
    assert store.remove(image)
    assert list(store.root.glob(".draft*")) == []


@pytest.fixture
def broken_off(store, remote, monkeypatch):
    """An image whose sender was killed after its first piece."""
    image = publish(store)
    real, sent = Storage.write, []

    def die(self, id, name, data, **options):
        if "-" in name:
            if sent:
                raise KeyboardInterrupt
            sent.append(name)
        real(self, id, name, data, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Storage, "write", die)
        with pytest.raises(KeyboardInterrupt):
            archive.archive(image, store, Remote(remote.storage.fs.unstrip_protocol(remote.storage.root), workers=1))
    assert there(remote, image)
    return image


def there(remote, image) -> bool:
    return (Path(remote.storage.root) / image.id).exists()


def test_what_was_sent_of_a_kernel_that_woke_before_the_next_round_is_removed(store, remote, broken_off):
    with broken_off.lease():
        store.remove(broken_off, leased=True)
    assert list(archive.sweep(store, remote)) == [(broken_off.id, None)]
    assert not there(remote, broken_off)
    assert not list(store.root.iterdir())


def test_what_was_sent_of_a_kernel_that_sleeps_on_is_used(store, remote, broken_off):
    assert list(archive.archive_old(store, remote, 60.0)) == [(broken_off, 5004)]
    with broken_off.lease():
        archive.fetch_content(broken_off, store, remote)
    store.check(broken_off)


def test_the_content_of_an_archived_image_that_was_removed_goes_too(store, remote):
    image = publish(store)
    archive.archive(image, store, remote)
    store.remove(image)
    assert list(archive.sweep(store, remote)) == [(image.id, None)]
    assert not there(remote, image)


def test_a_request_to_a_server_that_does_not_answer_is_repeated(store, remote, broken_off):
    store.remove(broken_off)
    with mock.patch.object(Remote, "remove", side_effect=RemoteFailed("It is away.")):
        ((id, error),) = archive.sweep(store, remote)
    assert (id, error.code) == (broken_off.id, "REMOTE_FAILED")
    assert there(remote, broken_off)
    assert list(archive.sweep(store, remote)) == [(broken_off.id, None)]
    assert not there(remote, broken_off)


def test_a_copy_that_a_wake_could_not_remove_goes_later(store, remote):
    image = publish(store)
    archive.archive(image, store, remote)
    with mock.patch.object(Remote, "remove", side_effect=RemoteFailed("It is away.")), image.lease():
        archive.fetch_content(image, store, remote)
        store.remove(image, leased=True)
    assert there(remote, image)
    assert list(archive.sweep(store, remote)) == [(image.id, None)]
    assert not there(remote, image)


@pytest.mark.parametrize("theirs", ["pieces", "pieces of a push", "an image", "an image that is being pulled"])
def test_what_another_host_has_there_by_now_stays(store, remote, broken_off, tmp_path, monkeypatch, theirs):
    """The image there may be all there is of the kernel."""
    if theirs.startswith("pieces"):  # of a copy, which its own cold tier or its user sends there
        elsewhere, other = Store(tmp_path / "elsewhere", store.keys), Remote(f"file://{tmp_path}/other")
        other.push(broken_off)
        store.remove(broken_off)
        copy = other.pull(broken_off.id, elsewhere)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Remote, "complete", mock.Mock(side_effect=KeyboardInterrupt))
            remote.push(copy) if "push" in theirs else archive.archive(copy, elsewhere, remote)
    else:
        remote.push(broken_off)
        store.remove(broken_off)
        if theirs == "an image that is being pulled":
            monkeypatch.setattr(remote_module.socket, "gethostname", lambda: "another")
            remote._claim(broken_off.id)
    before = names(remote, broken_off)
    assert list(archive.sweep(store, remote)) == [(broken_off.id, None)]
    assert names(remote, broken_off) == before
    assert not list(store.root.glob(".*sent"))


def test_what_was_sent_of_an_image_that_was_moved_is_its_new_owners(store, remote, broken_off, tmp_path):
    Remote(f"file://{tmp_path}/other").push(broken_off, remove_from=store)
    assert list(archive.sweep(store, remote)) == []
    assert there(remote, broken_off)


def names(remote, image) -> list[str]:
    return sorted(path.name for path in (Path(remote.storage.root) / image.id).iterdir())
