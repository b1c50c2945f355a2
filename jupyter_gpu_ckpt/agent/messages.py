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
    """Return the frames of a message, for ``send_multipart``.  They are copies; to send them needs no thread.

    Lone surrogates, which no message can have, are escaped: with a backslash they are no name of a save point.
    """
    message = session.msg(msg_type, content, parent)
    try:
        parts = session.serialize(message, ident)
    except UnicodeEncodeError:
        parts = session.serialize({**message, "content": _encodable(content)}, ident)
    return [zmq.Frame(part, copy=True) for part in parts]


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(name): _encodable(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encodable(each) for each in value]
    return value


def show(text: str) -> None:
    """Print a text in pieces, each of them a message."""
    while text:
        end = len(text) if len(text) <= _PIECE else text.rfind("\n", 0, _PIECE) + 1 or _PIECE
        print(text[:end], end="" if end < len(text) else "\n", flush=end < len(text))
        text = text[end:]
