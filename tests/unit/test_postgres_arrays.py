"""Whole columns as binary arrays: byte for byte what psycopg makes of the same lists."""

import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from psycopg import adapters
from psycopg.adapt import AdaptersMap, PyFormat, Transformer
from psycopg.types.numeric import Int8BinaryDumper

from coordinator.store.postgres_arrays import bytes_array, integers_array, texts_array


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (bytes_array, [b"a"]),
        (bytes_array, [b"", bytes(range(256)), b"x" * 100_000]),
        (integers_array, [0]),
        (integers_array, [-(2**63), -1, 1, 2**63 - 1]),
        (texts_array, [""]),
        (texts_array, [",bank,shop,", "Zoë 李"]),
    ],
)
def test_they_are_what_psycopg_sends(make: Callable[[Sequence[Any]], bytes], values: list[Any]) -> None:
    own = AdaptersMap(adapters)  # psycopg's own are shared by every connection of the process
    own.register_dumper(int, Int8BinaryDumper)
    (expected,) = Transformer(own).dump_sequence([values], [PyFormat.BINARY])
    assert expected is not None
    assert bytes(make(values)) == bytes(expected)


def test_what_does_not_fit_raises() -> None:
    with pytest.raises(struct.error):
        integers_array([2**63])
    with pytest.raises(UnicodeEncodeError):
        texts_array(["\ud800"])
