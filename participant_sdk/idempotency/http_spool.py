"""A body that is held for a while: in memory while it is small, then in a temporary file."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from typing import IO, Final

from participant_sdk.asgi import Message, Receive
from participant_sdk.idempotency.errors import RequestTooLarge
from participant_sdk.idempotency.request_parts import BodyHasher, HashedBody

MEMORY_BYTES_MAX: Final = 1 << 20
CHUNK_BYTES: Final = 1 << 16


class Spool:
    """Bytes in their order, as often as they are asked for. To be closed. `size`: how many there are."""

    def __init__(self) -> None:
        self.size = 0
        self._chunks: list[bytes] = []
        self._file: IO[bytes] | None = None

    async def add(self, chunk: bytes) -> None:
        """The next bytes."""
        if not chunk:
            return
        self.size += len(chunk)
        if self._file is None:
            self._chunks.append(chunk)
            if self.size <= MEMORY_BYTES_MAX or len(self._chunks) == 1:
                return
            self._file = await asyncio.to_thread(tempfile.TemporaryFile)
            chunk = b"".join(self._chunks)
            self._chunks.clear()
        await asyncio.to_thread(self._file.write, chunk)

    def whole(self) -> bytes:
        """All of it."""
        if self._file is None:
            if len(self._chunks) > 1:
                self._chunks[:] = [b"".join(self._chunks)]
            return self._chunks[0] if self._chunks else b""
        self._file.seek(0)
        return self._file.read()

    async def chunks(self) -> AsyncIterator[bytes]:
        """All of it, in parts of what memory should hold at once; nothing may be added meanwhile."""
        if self._file is None:
            for chunk in list(self._chunks):
                yield chunk
            return
        position = 0
        while position < self.size:
            chunk = await asyncio.to_thread(self._read, position)
            position += len(chunk)
            yield chunk

    def _read(self, position: int) -> bytes:
        assert self._file is not None
        self._file.seek(position)
        return self._file.read(CHUNK_BYTES)

    def close(self) -> None:
        """Forget it."""
        self._chunks.clear()
        if self._file is not None:
            self._file.close()


class RequestBody:
    """A request's whole body, hashed as it arrived, to be handed to an application."""

    def __init__(self, spool: Spool, hashed: HashedBody) -> None:
        self.spool = spool
        self.hashed = hashed

    def receive(self, then: Receive) -> Receive:
        """An ASGI `receive` that gives the body, and what `then` gives after it."""
        messages = self._messages()

        async def receive() -> Message:
            async for message in messages:
                return message
            return await then()

        return receive

    async def _messages(self) -> AsyncIterator[Message]:
        given = 0
        async for chunk in self.spool.chunks():
            given += len(chunk)
            yield {"type": "http.request", "body": chunk, "more_body": given < self.spool.size}
        if not given:
            yield {"type": "http.request", "body": b"", "more_body": False}


async def read_body(receive: Receive, declared: bytes | None, bytes_max: int) -> RequestBody | None:
    """The body of a request; None if the client has gone before its end. `declared`: its Content-Length.

    Raises RequestTooLarge as soon as it is known, without reading the rest.
    """
    if declared is not None and declared.isdigit() and int(declared[:20]) > bytes_max:
        raise RequestTooLarge(bytes_max)
    spool, hasher = Spool(), BodyHasher()
    try:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                spool.close()
                return None
            chunk: bytes = message.get("body", b"")
            more = message.get("more_body", False)
            hasher.add(chunk)
            if hasher.size > bytes_max:
                raise RequestTooLarge(bytes_max)
            await spool.add(chunk)
    except BaseException:
        spool.close()
        raise
    return RequestBody(spool, hasher.done(spool.whole))
