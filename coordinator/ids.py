"""Transaction ids: UUIDv7 (RFC 9562), so that rows made together lie together in the index."""

from __future__ import annotations

import os

XID_BYTES = 16


def new_xid(now_ms: int) -> bytes:
    """16 bytes: 48 bits of time in milliseconds, then version, variant and 74 random bits."""
    value = bytearray(now_ms.to_bytes(6, "big") + os.urandom(10))
    value[6] = 0x70 | value[6] & 0x0F
    value[8] = 0x80 | value[8] & 0x3F
    return bytes(value)


def parse_xid(text: str) -> bytes | None:
    """The xid that a text names (32 hexadecimal digits, dashes allowed), or None."""
    digits = text.replace("-", "")
    if len(digits) != 2 * XID_BYTES:
        return None
    try:
        return bytes.fromhex(digits)
    except ValueError:
        return None
