"""Base of the errors that refuse a dump for what it cannot save."""

from __future__ import annotations


class Unsavable(OSError):
    """State of stopped processes that cannot be saved or would not come back; ``strerror`` names it and the reason."""

    #: The kind of state: the field of the reply to `Init.run` that names it (`capsule.Capsule.run`).
    field = ""
