"""What a user reads on the spawn page beside the spawner's own words."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

_ATTRIBUTE = "_gpu_ckpt_told"


def tell(spawner: Any, message: str) -> None:
    """Show ``message`` on the page of the spawn under way, before what the spawner itself tells there.

    JupyterHub reads that page's messages from ``Spawner.progress`` (an asynchronous generator); here that of this one
    spawner is put behind ours.  The log has the message too: a spawn by REST has no page.
    """
    spawner.log.info("%s: %s", spawner._log_name, message)
    told = getattr(spawner, _ATTRIBUTE, None)
    if told is None:
        told = []
        setattr(spawner, _ATTRIBUTE, told)
        theirs = spawner.progress

        async def progress() -> AsyncIterator[dict[str, Any]]:
            for one in told:
                yield {"progress": 5, "message": one}
            async for event in theirs():
                yield event

        spawner.progress = progress
    told.append(message)


def forget(spawner: Any) -> None:
    """A new spawn begins: what was told of the one before is no news."""
    getattr(spawner, _ATTRIBUTE, []).clear()
