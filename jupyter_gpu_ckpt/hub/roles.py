"""The least rights for what hubs do here, as entries of ``JupyterHub.load_roles``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def culler_role(service: str = "gpu-ckpt-culler", users: Iterable[str] = ()) -> dict[str, Any]:
    """Return the role of an idle culler that drains servers before it stops them.

    Draining adds ``access:servers`` to the culler's usual scopes.  It permits in a server whatever the server's user
    can do: run the culler where nobody else can read its token.  ``users`` limits it to their servers.  Groups do not
    work: a user's server does not know the groups, and refuses a token for ``access:servers!group=...``
    (``jupyterhub.services.auth.check_scopes``).
    """
    scopes = ("list:users", "read:users:activity", "read:servers", "delete:servers", "access:servers")
    filters = [f"!user={user}" for user in users] or [""]
    return {
        "name": f"{service}-role",
        "description": "Drains idle servers and stops them",
        "scopes": [scope + limit for scope in scopes for limit in filters],
        "services": [service],
    }
