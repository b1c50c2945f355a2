"""Replies of a gate in its kernel's name, without a kernel: above all while it does not know the kernel's state."""

from __future__ import annotations

from typing import Any

import pytest
from jupyter_client.session import Session

from jupyter_gpu_ckpt.gate import wire
from jupyter_gpu_ckpt.gate.replies import Replies


class Heard:
    """Replies and what its clients got from it."""

    def __init__(self) -> None:
        self.session = Session(key=b"key")
        self.session.digest_history_size = 0
        self.frames: list[list[bytes]] = []
        self.replies = Replies(self.session, "under-test", lambda channel, frames: self.frames.append(frames))

    def learn(self, protocol: str) -> None:
        self.replies.learn({"header": {"session": "s"}, "content": {"protocol_version": protocol}})

    def welcomes(self) -> list[Any]:
        """The topics of the welcomes since the last look."""
        messages = [self.session.deserialize(wire.split(frames)[1]) for frames in self.frames]
        self.frames.clear()
        assert {message["msg_type"] for message in messages} <= {"iopub_welcome"}
        return sorted(message["content"]["subscription"] for message in messages)


@pytest.fixture
def heard() -> Heard:
    return Heard()


def test_who_subscribed_between_the_kernels_first_answer_and_its_welcome_is_welcomed_after(heard: Heard) -> None:
    """The kernel's idle may overtake its welcome; a client that connects in between still waits for a welcome."""
    heard.learn("5.3")
    heard.replies.welcome(b"")
    heard.replies.welcome(b"")
    heard.replies.welcome(b"stream")
    assert heard.welcomes() == []
    heard.replies.kernel_welcomed()
    assert heard.welcomes() == ["", "stream"]
    heard.replies.kernel_welcomed()
    assert heard.welcomes() == []
    heard.replies.welcome(b"")
    assert heard.welcomes() == [""]


def test_a_kernel_that_sends_no_welcome_has_none_sent_for_it(heard: Heard) -> None:
    heard.learn("5.3")
    heard.replies.welcome(b"")
    heard.replies.forget()
    heard.learn("5.3")
    heard.replies.kernel_welcomed()
    assert heard.welcomes() == [], "subscribers of the gate before had its welcome"


@pytest.mark.parametrize("protocol", [None, "5.4"])
def test_before_the_kernel_is_known_and_where_the_protocol_has_it_everybody_is_welcomed(
    heard: Heard, protocol: str | None
) -> None:
    if protocol:
        heard.learn(protocol)
    heard.replies.welcome(b"topic")
    assert heard.welcomes() == ["topic"]
