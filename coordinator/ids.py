"""Transaction ids: UUIDv7 (RFC 9562), so that rows made together lie together in the index."""

from __future__ import annotations

import os
import re

XID_BYTES = 16


def new_xid(now_ms: int) -> bytes:
    """16 bytes: 48 bits of time in milliseconds, then version, variant and 74 random bits."""
    value = bytearray(now_ms.to_bytes(6, "big") + os.urandom(10))
    value[6] = 0x70 | value[6] & 0x0F
    value[8] = 0x80 | value[8] & 0x3F
    return bytes(value)


_XID = re.compile(r"[0-9a-fA-F]{32}\Z")


def parse_xid(text: str) -> bytes | None:
    """The xid that a text names (32 hexadecimal digits, dashes allowed), or None."""
    digits = text.replace("-", "")
    return bytes.fromhex(digits) if _XID.match(digits) else None
