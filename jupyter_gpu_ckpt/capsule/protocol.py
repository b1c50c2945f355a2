"""The packets between a capsule's init (`init`) and its owner (`capsule`): their form and version.

A packet is one JSON object; where that is larger than a packet can be, it comes in a file, whose descriptor is sent
with an empty object.  An init lives as long as its kernel, and its next owner may be of another release: so every
request and every answer has ``version`` and ``number``, in all versions.  The init does nothing for a request of
another version, and answers it with its own; the owner then raises `errors.ProtocolVersion`, and detaches.

Imported by the init: nothing is imported here.
"""

#: The init's socket in the capsule's directory.
SOCKET = "capsule.sock"
#: To be raised with every change that the other side has to know of.
VERSION = 2
#: Bytes that are read at once, and the most that an answer may have.
PACKET_BYTES = 1 << 20
