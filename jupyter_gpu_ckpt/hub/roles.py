"""The least rights for what hubs do here, as entries of ``JupyterHub.load_roles``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def culler_role(service: str = "gpu-ckpt-culler", users: Iterable[str] = ()) -> dict[str, Any]:
    """Return the role of an idle culler that drains servers before it stops them.

    Draining adds ``tokens`` to the culler's usual scopes: it makes a token for one server, and sends that server no
    other, for its user can read it.  ``tokens`` permits whatever these users can do: run the culler where nobody else
    can read its own token.  ``users`` limits it to them.
    """
    scopes = ("list:users", "read:users:activity", "read:servers", "delete:servers", "tokens")
    filters = [f"!user={user}" for user in users] or [""]
    return {
        "name": f"{service}-role",
        "description": "Drains idle servers and stops them",
        "scopes": [scope + limit for scope in scopes for limit in filters],
        "services": [service],
    }
