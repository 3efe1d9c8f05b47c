"""Whole columns as arrays in PostgreSQL's binary form.

psycopg makes an array of a list element by element, in Python: of all that a flush costs the coordinator that would be
most. Here a column is one join, or one call of ``struct``. No element is NULL.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_BYTEA_OID, _INT8_OID, _TEXT_OID = 17, 20, 25
_head = struct.Struct("!iiIii").pack
"""Dimensions, whether there are NULLs, the elements' type, how many they are, the first one's index."""
_length = struct.Struct("!i").pack


def bytes_array(values: Sequence[bytes]) -> bytes:
    """As ``bytea[]``."""
    return _elements(_BYTEA_OID, values)


def texts_array(values: Sequence[str]) -> bytes:
    """As ``text[]``."""
    return _elements(_TEXT_OID, [value.encode() for value in values])


def integers_array(values: Sequence[int]) -> bytes:
    """As ``bigint[]``. Raises struct.error for one that does not fit."""
    count = len(values)
    flat: list[int] = [8] * (2 * count)
    flat[1::2] = values
    return _head(1, 0, _INT8_OID, count, 1) + struct.pack(f"!{'iq' * count}", *flat)


def _elements(oid: int, values: Sequence[bytes]) -> bytes:
    parts: list[bytes] = [_head(1, 0, oid, len(values), 1)] * (2 * len(values) + 1)
    parts[1::2] = [_length(len(value)) for value in values]
    parts[2::2] = values
    return b"".join(parts)
