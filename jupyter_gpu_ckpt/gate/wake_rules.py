"""The messages that wake a sleeping kernel.

A browser that opens or reloads a notebook sends ``kernel_info_request``, ``comm_info_request``, ``history_request`` and
``debug_request`` by itself; a kernel that woke for those would wake whenever its notebook is opened.  So there is an
allow-list of messages by which a user has the kernel *do* something; all others wait until the kernel is back.

Source: the message types of "Messaging in Jupyter" (jupyter_client's documentation), protocol 5.4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .wire import Request

#: ``execute_request`` wakes also when it is silent: the front end needs the answer all the same.  ``comm_open`` and
#: ``comm_msg`` are a moved slider.  ``comm_close`` is missing on purpose: closing a page sends it.  A console sends
#: ``is_complete_request`` at the end of a line, to run it if it is (`UNKNOWN_AFTER`).
WAKE_TYPES = frozenset({"execute_request", "comm_open", "comm_msg", "input_reply", "is_complete_request"})

#: Seconds after which it is answered that nobody knows whether a line is complete, if the kernel is not back by then: a
#: console then runs the line.  jupyter_console waits for a second, and without an answer never asks again.
UNKNOWN_AFTER = 0.7

#: A page with widgets opens a comm of this target by itself and requests the states of all widgets (ipywidgets).  It
#: continues without an answer after some seconds.
_PAGE_TARGETS = frozenset({"jupyter.widget.control"})
_PAGE_METHODS = frozenset({"request_state", "request_states"})


def wakes(request: Request) -> bool:
    """Return whether ``request`` wakes a kernel that sleeps."""
    content = request.content
    if request.msg_type == "comm_open":
        return content.get("target_name") not in _PAGE_TARGETS
    if request.msg_type == "comm_msg":
        data = content.get("data")
        return not (isinstance(data, dict) and data.get("method") in _PAGE_METHODS)
    return request.msg_type in WAKE_TYPES
