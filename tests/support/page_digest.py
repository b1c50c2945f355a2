"""The kernel of `cuda/native/page_digests.c`, run alone on a GPU or on the double of its driver.

``python page_digest.py LIBRARY ROUNDS SEED`` prints what is wrong with its answers; nothing if they are right.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

from zero_scan import Address, Device

KERNEL = b"gpu_ckpt_page_digests"
PAGE, ROW, WORDS = 2 << 20, 4096, 16
THREADS = ROW // WORDS
_MASK = (1 << 64) - 1
#: The digest of no bytes under the key 00 01 .. 0f, of the authors of SipHash.
_KEY = bytes(range(16))
_OF_NOTHING = bytes.fromhex("a3817f04ba25a8e66df67214c7550293")


def siphash(content: bytes, key: bytes) -> bytes:
    """Return SipHash-2-4 of 128 bits of a multiple of 256 bytes."""
    one, other = struct.unpack("<2Q", key)
    v = [
        one ^ 0x736F6D6570736575,
        other ^ 0x646F72616E646F6D ^ 0xEE,
        one ^ 0x6C7967656E657261,
        other ^ 0x7465646279746573,
    ]

    def rotate(word: int, left: int) -> int:
        return (word << left | word >> 64 - left) & _MASK

    def mix(rounds: int) -> None:
        a, b, c, d = v
        for _ in range(rounds):
            a = (a + b) & _MASK
            b = rotate(b, 13) ^ a
            a = rotate(a, 32)
            c = (c + d) & _MASK
            d = rotate(d, 16) ^ c
            a = (a + d) & _MASK
            d = rotate(d, 21) ^ a
            c = (c + b) & _MASK
            b = rotate(b, 17) ^ c
            c = rotate(c, 32)
        v[:] = a, b, c, d

    def result() -> int:
        return functools.reduce(int.__xor__, v)

    for word in (*struct.unpack(f"<{len(content) // 8}Q", content), 0):
        v[3] ^= word
        mix(2)
        v[0] ^= word
    v[2] ^= 0xEE
    mix(4)
    first = result()
    v[1] ^= 0xDD
    mix(4)
    return struct.pack("<2Q", first, result())


def digest(page: bytes, key: bytes, known: dict[bytes, bytes]) -> bytes:
    """Return the digest of a page: of what each thread reads, of 16 of those, and of 16 of these."""

    def of(content: bytes) -> bytes:
        if content not in known:
            known[content] = siphash(content, key)
        return known[content]

    read = (b"".join(page[at + row : at + row + WORDS] for row in range(0, PAGE, ROW)) for at in range(0, ROW, WORDS))
    threads = [of(each) for each in read]
    return of(b"".join(of(b"".join(threads[at : at + WORDS])) for at in range(0, THREADS, WORDS)))


def compute(device: Device, pages: Sequence[int], key: bytes, more_blocks: int = 0) -> list[bytes]:
    """Return the kernel's digests of pages at these addresses."""
    count = len(pages) + more_blocks
    needed = count * (8 + WORDS)
    memory = ctypes.create_string_buffer(needed + 8192)
    start = (ctypes.addressof(memory) + 4095) // 4096 * 4096
    digests = (ctypes.c_char * (count * WORDS)).from_address(start)
    listed = (Address * len(pages)).from_address(start + count * WORDS)
    listed[:] = list(pages)
    words = [ctypes.c_ulonglong(word) for word in struct.unpack("<2Q", key)]
    device.launch(count, start, needed + 4096, (listed, digests), *words, ctypes.c_uint(len(pages)))
    return [digests.raw[at : at + WORDS] for at in range(0, count * WORDS, WORDS)]


def faults(device: Device, seed: int, rounds: int) -> list[str]:
    """Return what is wrong: digests of random pages, and of pages with one other bit anywhere."""
    source, wrong = random.Random(seed), list[str]()
    if siphash(b"", _KEY) != _OF_NOTHING:
        wrong.append("siphash is not SipHash")
    key = source.randbytes(16)
    known: dict[bytes, bytes] = {}
    streams = [source.randbytes(PAGE // THREADS) for _ in range(3)]
    threads = [source.choice(streams) for _ in range(THREADS)]
    page = bytearray().join(
        b"".join(thread[at : at + WORDS] for thread in threads) for at in range(0, PAGE // THREADS, WORDS)
    )
    address = device.allocate(bytes(2 * PAGE))
    device.write(address + PAGE, bytes(page))
    zeros = digest(bytes(PAGE), key, known)
    found = compute(device, [address, address + PAGE, address], key, more_blocks=2)
    if found != [zeros, digest(bytes(page), key, known), zeros, bytes(WORDS), bytes(WORDS)]:
        wrong.append("two pages, one twice")
    for at in [0, WORDS - 1, ROW - 1, ROW, PAGE - 1, *(source.randrange(PAGE) for _ in range(rounds))]:
        page[at] ^= 1 << source.randrange(8)
        device.write(address + PAGE + at, bytes(page[at : at + 1]))
        if compute(device, [address + PAGE], key) != [digest(bytes(page), key, known)]:
            wrong.append(f"another bit at {at}")
    if compute(device, [address + PAGE], source.randbytes(16)) == [digest(bytes(page), key, known)]:
        wrong.append("another key has no other digest")
    return wrong


if __name__ == "__main__":
    for line in faults(Device(Path(sys.argv[1]), KERNEL), seed=int(sys.argv[3]), rounds=int(sys.argv[2])):
        print(line)
