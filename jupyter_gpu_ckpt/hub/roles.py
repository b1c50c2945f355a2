"""The least rights for what hubs do here, as entries of ``JupyterHub.load_roles``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def culler_role(service: str = "gpu-ckpt-culler", users: Iterable[str] = ()) -> dict[str, Any]:
    """The role of an idle culler that parks servers before it stops them.

    ``access:servers`` is what parking adds to the culler's usual scopes.  It lets its owner do in a server whatever the
    server's user can: run the culler where nobody else can read its token.  With ``users`` it reaches their servers
    alone.  Groups will not do: a user's server that is shown a token does not know who is in which group, and refuses
    one for ``access:servers!group=...`` (``jupyterhub.services.auth.check_scopes``).
    """
    scopes = ("list:users", "read:users:activity", "read:servers", "delete:servers", "access:servers")
    filters = [f"!user={user}" for user in users] or [""]
    return {
        "name": f"{service}-role",
        "description": "Parks idle servers and stops them",
        "scopes": [scope + limit for scope in scopes for limit in filters],
        "services": [service],
    }
