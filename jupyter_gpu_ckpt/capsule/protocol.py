"""The version of the packets between a capsule's init (`init`) and its owner (`capsule`).

An init lives as long as its kernel, and its next owner may be of another release.  Every request and every answer is a
JSON object with ``version`` and ``number``, in all versions.  The init does nothing for a request of another version,
and answers it with its own; the owner then raises `errors.ProtocolVersion`, and lets go of the capsule.

Imported by the init: nothing is imported here.
"""

#: To be raised with every change that the other side has to know of.
VERSION = 1
