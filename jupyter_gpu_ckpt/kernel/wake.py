"""Which messages wake a sleeping kernel.

A browser that opens or reloads a notebook sends ``kernel_info_request``, ``comm_info_request``, ``history_request`` and
``debug_request`` by itself; a kernel that woke for those would wake whenever somebody looks at it.  So waking is an
allow-list of the messages by which a user asks the kernel to *do* something; every other message waits until the kernel
is back.

Source: the message types of "Messaging in Jupyter" (jupyter_client's documentation), protocol 5.4.
"""

from __future__ import annotations

#: ``execute_request`` wakes also when it is silent: a front end that evaluates something in silence needs the answer
#: all the same.  ``comm_open`` and ``comm_msg`` are a moved slider.  ``comm_close`` is missing on purpose: closing a
#: page sends it.
WAKE_TYPES = frozenset({"execute_request", "comm_open", "comm_msg", "input_reply"})


def wakes(msg_type: str) -> bool:
    """Whether a message of type ``msg_type`` wakes a kernel that sleeps."""
    return msg_type in WAKE_TYPES
