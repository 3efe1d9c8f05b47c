"""Whole columns as arrays in PostgreSQL's binary form.

psycopg makes an array of a list element by element, in Python: of all that a flush costs the coordinator that would be
most. Here a column is one join, or one call of ``struct``. No element is NULL.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import psycopg
from psycopg.adapt import Dumper
from psycopg.pq import Format

_BYTEA_OID, _INT8_OID, _TEXT_OID = 17, 20, 25
_head = struct.Struct("!iiIii").pack
"""Dimensions, whether there are NULLs, the elements' type, how many they are, the first one's index."""
_length = struct.Struct("!i").pack


class Bytes(bytes):
    """An array of ``bytea``."""

    __slots__ = ()


class Integers(bytes):
    """An array of ``bigint``."""

    __slots__ = ()


class Texts(bytes):
    """An array of ``text``."""

    __slots__ = ()


def bytes_array(values: Sequence[bytes]) -> Bytes:
    """As ``bytea[]``."""
    return Bytes(_elements(_BYTEA_OID, values))


def texts_array(values: Sequence[str]) -> Texts:
    """As ``text[]``."""
    return Texts(_elements(_TEXT_OID, [value.encode() for value in values]))


def integers_array(values: Sequence[int]) -> Integers:
    """As ``bigint[]``. Raises struct.error for one that does not fit."""
    count = len(values)
    flat: list[int] = [8] * (2 * count)
    flat[1::2] = values
    return Integers(_head(1, 0, _INT8_OID, count, 1) + struct.pack(f"!{'iq' * count}", *flat))


def _elements(oid: int, values: Sequence[bytes]) -> bytes:
    parts: list[bytes] = [_head(1, 0, oid, len(values), 1)] * (2 * len(values) + 1)
    parts[1::2] = [_length(len(value)) for value in values]
    parts[2::2] = values
    return b"".join(parts)


def register(connection: psycopg.Connection[Any]) -> None:
    """Have a connection send these arrays as they are."""
    for kind, dumper in _DUMPERS:
        connection.adapters.register_dumper(kind, dumper)


def _dumper(type_name: str) -> type[Dumper]:
    class AsItIs(Dumper):
        format = Format.BINARY
        oid = psycopg.adapters.types[type_name].array_oid

        def dump(self, obj: Any) -> Any:
            return obj

    return AsItIs


_DUMPERS: Iterable[tuple[type, type[Dumper]]] = (
    (Bytes, _dumper("bytea")),
    (Integers, _dumper("int8")),
    (Texts, _dumper("text")),
)
