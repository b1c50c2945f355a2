"""Make the agent's messages and print its texts so that no thread is needed, and nothing is sent by halves.

ipykernel's ``Session.send`` has pyzmq send a part of 64 KiB or more without copying it.  The first such message of a
process makes pyzmq start a thread and a ZMQ context with two more (``zmq.utils.garbage``).  Where the kernel may not
have them (RLIMIT_NPROC, a control group's ``pids.max``, RLIMIT_NOFILE), libzmq ends the process; or the message breaks
off between two parts, and the socket takes whatever follows for the rest of it.  A report of a thousand files is that
long.
"""

from __future__ import annotations

from typing import Any

import zmq

#: Characters of a text that `show` prints at once: less than 64 KiB in any encoding.
_PIECE = 8192


def frames(session: Any, msg_type: str, content: dict[str, Any], parent: Any = None, ident: Any = None) -> list[Any]:
    """Return the frames of a message, for ``send_multipart``.  They are copies; to send them needs no thread."""
    parts = session.serialize(session.msg(msg_type, content, parent), ident)
    return [zmq.Frame(part, copy=True) for part in parts]


def show(text: str) -> None:
    """Print a text in pieces, each of them a message."""
    while text:
        end = len(text) if len(text) <= _PIECE else text.rfind("\n", 0, _PIECE) + 1 or _PIECE
        print(text[:end], end="" if end < len(text) else "\n", flush=end < len(text))
        text = text[end:]
