"""Transaction ids: UUIDv7 (RFC 9562), so that rows made together lie together in the index."""

from __future__ import annotations

import os
import re

XID_BYTES = 16
_RANDOM_BYTES = 10
"""Of an xid."""
_BLOCK_BYTES = 4096


class Ids:
    """Draws ids from the system's randomness, which it reads in blocks: each read is a system call without the GIL."""

    __slots__ = ("_at", "_block")

    def __init__(self) -> None:
        self._block = b""
        self._at = 0

    def xid(self, now_ms: int) -> bytes:
        """See ``new_xid``."""
        return _xid(now_ms, self._draw(_RANDOM_BYTES))

    def save_id(self) -> int:
        """A random positive number of 63 bits."""
        return (int.from_bytes(self._draw(8), "big") >> 2) + 1

    def _draw(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > len(self._block):
            self._block, start, self._at = os.urandom(_BLOCK_BYTES), 0, count
        return self._block[start : self._at]


def new_xid(now_ms: int) -> bytes:
    """16 bytes: 48 bits of time in milliseconds, then version, variant and 74 random bits."""
    return _xid(now_ms, os.urandom(_RANDOM_BYTES))


def _xid(now_ms: int, random: bytes) -> bytes:
    value = bytearray(now_ms.to_bytes(6, "big") + random)
    value[6] = 0x70 | value[6] & 0x0F
    value[8] = 0x80 | value[8] & 0x3F
    return bytes(value)


_XID = re.compile(r"[0-9a-fA-F]{32}\Z")


def parse_xid(text: str) -> bytes | None:
    """The xid that a text names (32 hexadecimal digits, dashes allowed), or None."""
    digits = text.replace("-", "")
    return bytes.fromhex(digits) if _XID.match(digits) else None
