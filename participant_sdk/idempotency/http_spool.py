"""A body that is held for a while: in memory while it is small, then in a temporary file."""

from __future__ import annotations

import asyncio
import io
import tempfile
from collections.abc import AsyncIterator, Iterator
from typing import IO, Any, Final

from participant_sdk.idempotency.errors import RequestTooLarge

MEMORY_BYTES_MAX: Final = 1 << 20
CHUNK_BYTES: Final = 1 << 16


class Spool:
    """Bytes in their order, as often as they are asked for. To be closed. `size`: how many there are.

    What ends in `_apart` is for an event loop, which waits for no file.
    """

    def __init__(self) -> None:
        self.size = 0
        self._chunks: list[bytes] = []
        self._file: IO[bytes] | None = None

    def add(self, chunk: bytes) -> None:
        """The next bytes."""
        if not chunk:
            return
        in_memory = self._stays_in_memory(chunk)
        self.size += len(chunk)
        if in_memory:
            self._chunks.append(chunk)
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  # it is closed by `close`
            chunk = b"".join([*self._chunks, chunk])
            self._chunks.clear()
        self._file.write(chunk)

    async def add_apart(self, chunk: bytes) -> None:
        """As `add`."""
        if self._stays_in_memory(chunk):
            self.add(chunk)
        else:
            await asyncio.to_thread(self.add, chunk)

    def _stays_in_memory(self, chunk: bytes) -> bool:
        return self._file is None and (not self.size or self.size + len(chunk) <= MEMORY_BYTES_MAX)

    def whole(self) -> bytes:
        """All of it."""
        if self._file is None:
            if len(self._chunks) > 1:
                self._chunks[:] = [b"".join(self._chunks)]
            return self._chunks[0] if self._chunks else b""
        self._file.seek(0)
        return self._file.read()

    def chunks(self) -> Iterator[bytes]:
        """All of it, in parts of what memory should hold at once; nothing may be added meanwhile."""
        if self._file is None:
            yield from list(self._chunks)
            return
        position = 0
        while position < self.size:
            chunk = self._read(position)
            position += len(chunk)
            yield chunk

    async def chunks_apart(self) -> AsyncIterator[bytes]:
        """As `chunks`."""
        if self._file is None:
            for chunk in list(self._chunks):
                yield chunk
            return
        position = 0
        while position < self.size:
            chunk = await asyncio.to_thread(self._read, position)
            position += len(chunk)
            yield chunk

    def reader(self) -> IO[bytes]:
        """A file to read all of it from; to close it leaves the spool as it is."""
        if self._file is None:
            return io.BytesIO(self.whole())
        return io.BufferedReader(_Reader(self._read), CHUNK_BYTES)

    def _read(self, position: int, size: int = CHUNK_BYTES) -> bytes:
        assert self._file is not None
        self._file.seek(position)
        return self._file.read(size)

    def close(self) -> None:
        """Forget it."""
        self._chunks.clear()
        if self._file is not None:
            self._file.close()


class _Reader(io.RawIOBase):
    def __init__(self, read: Any) -> None:
        self._read = read
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        chunk = self._read(self._position, len(buffer))
        buffer[: len(chunk)] = chunk
        self._position += len(chunk)
        return len(chunk)


def check_declared(length: bytes | None, bytes_max: int) -> None:
    """Raises RequestTooLarge for a Content-Length that says so."""
    if length is not None and length.isdigit() and (len(length) > 20 or int(length) > bytes_max):
        raise RequestTooLarge(bytes_max)
