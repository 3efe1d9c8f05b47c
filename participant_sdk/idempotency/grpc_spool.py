"""The messages of a stream, kept until they are wanted again: in memory, and beyond some size in a file."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from types import TracebackType
from typing import Final

IN_MEMORY_MAX: Final = 1 << 20
_LENGTH: Final = struct.Struct(">I")


class Spool:
    """Serialized messages, each after its length. Closing it frees what it holds; a `with` block does."""

    def __init__(self) -> None:
        self._file: tempfile.SpooledTemporaryFile[bytes] | None = None

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def put(self, message: bytes) -> None:
        """One more."""
        if self._file is None:
            self._file = tempfile.SpooledTemporaryFile(IN_MEMORY_MAX)  # noqa: SIM115  # `close` closes it
        self._file.write(_LENGTH.pack(len(message)))
        self._file.write(message)

    def messages(self) -> Iterator[bytes]:
        """All of them, in their order; from the first one each time, but not two times at once."""
        if self._file is None:
            return
        self._file.seek(0)
        while head := self._file.read(_LENGTH.size):
            yield self._file.read(_LENGTH.unpack(head)[0])

    def data(self, bytes_max: int) -> bytes:
        """All of them as one piece, for `split`; no more than that of it."""
        if self._file is None:
            return b""
        self._file.seek(0)
        return self._file.read(bytes_max)

    def close(self) -> None:
        """Nothing is held any more."""
        if self._file is not None:
            self._file.close()


def split(data: bytes) -> Iterator[bytes]:
    """The messages in what `Spool.data` gave."""
    at = 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size + length
        yield data[at - length : at]
