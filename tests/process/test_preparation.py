"""Changes to processes for a dump that could not be undone are named, whatever the dump was refused for."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from unittest import mock

import pytest

from jupyter_gpu_ckpt.process import connections, preparation, watched_files
from jupyter_gpu_ckpt.process.preparation import Preparation
from jupyter_gpu_ckpt.process.watched_files import UnsavableWatch, WatchedFiles


def full() -> None:
    raise OSError(errno.ENOBUFS, "3 of 5 unread bytes did not fit")


def test_a_refused_dump_names_the_connection_that_its_undo_has_closed(monkeypatch, tmp_path):
    broken = SimpleNamespace(sender=(1, 7), put_back=full)
    monkeypatch.setattr(preparation, "Terminals", lambda: mock.Mock(restore=str))  # not those of this machine
    monkeypatch.setattr(connections, "save", lambda *_: [broken])
    monkeypatch.setattr(watched_files, "remove", mock.Mock(side_effect=UnsavableWatch(errno.EBUSY, "unread events")))
    with pytest.raises(UnsavableWatch) as caught:
        Preparation([], str(tmp_path / "terminals.json"), WatchedFiles())
    assert caught.value.strerror.startswith("unread events; closed: a TCP connection of ")
    assert caught.value.strerror.endswith("(descriptor 7) (3 of 5 unread bytes did not fit)")
