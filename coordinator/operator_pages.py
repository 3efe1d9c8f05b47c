"""Page tokens: opaque to callers, made of where the next page starts and of which filters it belongs to."""

from __future__ import annotations

import base64
import binascii
import hashlib

from .errors import InvalidRequest, Violation

_VERSION = b"\x01"
_FILTER_BYTES = 8
_KEY_BYTES = 16


def make_token(filters: str, key: bytes) -> str:
    """The token of the page after the row with this key (16 bytes), for a request with these filters."""
    return base64.urlsafe_b64encode(_VERSION + _digest(filters) + key).decode().rstrip("=")


def key_of(token: str, filters: str) -> bytes:
    """The key that a token was made of. Raises InvalidRequest."""
    try:
        read = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        read = b""
    if len(read) != len(_VERSION) + _FILTER_BYTES + _KEY_BYTES or not read.startswith(_VERSION):
        raise InvalidRequest(Violation("page_token", "is not a token that the page before has returned"))
    if read[len(_VERSION) : -_KEY_BYTES] != _digest(filters):
        raise InvalidRequest(Violation("page_token", "belongs to a request with other filters"))
    return read[-_KEY_BYTES:]


def _digest(filters: str) -> bytes:
    return hashlib.sha256(filters.encode()).digest()[:_FILTER_BYTES]
