"""The body of an ASGI request: taken whole, hashed as it arrives, and handed to an application as if it came then."""

from __future__ import annotations

from collections.abc import AsyncIterator

from participant_sdk.asgi import Message, Receive
from participant_sdk.idempotency.errors import RequestTooLarge
from participant_sdk.idempotency.http_spool import Spool, check_declared
from participant_sdk.idempotency.request_parts import BodyHasher, HashedBody


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
        async for chunk in self.spool.chunks_apart():
            given += len(chunk)
            yield {"type": "http.request", "body": chunk, "more_body": given < self.spool.size}
        if not given:
            yield {"type": "http.request", "body": b"", "more_body": False}


async def read_body(receive: Receive, declared: bytes | None, bytes_max: int) -> RequestBody | None:
    """The body of a request; None if the client has gone before its end. `declared`: its Content-Length.

    Raises RequestTooLarge as soon as it is known, without reading the rest.
    """
    check_declared(declared, bytes_max)
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
            await spool.add_apart(chunk)
    except BaseException:
        spool.close()
        raise
    return RequestBody(spool, hasher.done(spool.whole))
