"""Transports for httpx, and httpx2: one key per intent, sent again until it is answered.

    httpx.Client(transport=RetryTransport(httpx.HTTPTransport()))
    httpx.AsyncClient(transport=AsyncRetryTransport(httpx.AsyncHTTPTransport()))

A POST or PATCH gets a header Idempotency-Key: its own, else `extensions={"idempotency_key": ...}`, else that of the
`intent` it is in, else a new one. What has a key, and what only reads, is sent again by the rules of `retry_rules`.

What is sent again must be there: bytes, text, JSON and forms are. A body that is streamed (a generator, a file, a
multipart form) gets its key and is sent once; call `request.read()` before sending to have it kept, and sent again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from participant_sdk.idempotency.retry_rules import RetryPolicy
from participant_sdk.idempotency.retry_sending import HEADER, KEYED_METHODS, Sending, Setup, transport_errors

if TYPE_CHECKING:
    _Transport: Any  # httpx.BaseTransport, or httpx2's: neither is imported, both take any object with its methods
else:
    _Transport = object


class RetryTransport(_Transport):  # type: ignore[misc]  # see _Transport
    """For `httpx.Client(transport=...)` or httpx2's, around another transport. For any number of threads.

    `keyed_methods`: which requests get a key; `extensions={"idempotency_key": None}` leaves one request without.
    `first_sent`: the header, such as "First-Sent", in which each request with a key says when its intent began.
    `response.extensions["tricord_attempts"]` tells how often it was sent. When the tries are used up, the last answer
    is returned as it came; if there is none, RetriesExhausted is raised, which is also of the last error's class.
    """

    def __init__(
        self,
        inner: Any,
        policy: RetryPolicy | None = None,
        *,
        header: str = HEADER,
        keyed_methods: Collection[str] = KEYED_METHODS,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        time_of_day: Callable[[], float] = time.time,
        first_sent: str | None = None,
    ) -> None:
        self._setup = Setup(inner, policy, header, keyed_methods, clock, time_of_day, first_sent)
        self._sleep = sleep

    def handle_request(self, request: Any) -> Any:
        """See httpx.BaseTransport."""
        sending = Sending(request, self._setup)
        while True:
            try:
                response = self._setup.inner.handle_request(request)
                if (wait_s := sending.after_answer(response)) is None:
                    return sending.answered(response, _read(response) if sending.to_be_read(response) else None)
                response.close()
            except transport_errors() as error:
                wait_s = sending.after_error(error)
            self._sleep(wait_s)

    def close(self) -> None:
        """Close the transport inside."""
        self._setup.inner.close()

    def __enter__(self) -> Self:
        self._setup.inner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._setup.inner.__exit__(kind, error, trace)


class AsyncRetryTransport(_Transport):  # type: ignore[misc]  # see _Transport
    """As RetryTransport, for `httpx.AsyncClient`. `sleep` is asyncio's; give trio's to a client on trio."""

    def __init__(
        self,
        inner: Any,
        policy: RetryPolicy | None = None,
        *,
        header: str = HEADER,
        keyed_methods: Collection[str] = KEYED_METHODS,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        time_of_day: Callable[[], float] = time.time,
        first_sent: str | None = None,
    ) -> None:
        self._setup = Setup(inner, policy, header, keyed_methods, clock, time_of_day, first_sent)
        self._sleep = sleep

    async def handle_async_request(self, request: Any) -> Any:
        """See httpx.AsyncBaseTransport."""
        sending = Sending(request, self._setup)
        while True:
            try:
                response = await self._setup.inner.handle_async_request(request)
                if (wait_s := sending.after_answer(response)) is None:
                    return sending.answered(response, await _aread(response) if sending.to_be_read(response) else None)
                await response.aclose()
            except transport_errors() as error:
                wait_s = sending.after_error(error)
            await self._sleep(wait_s)

    async def aclose(self) -> None:
        """Close the transport inside."""
        await self._setup.inner.aclose()

    async def __aenter__(self) -> Self:
        await self._setup.inner.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._setup.inner.__aexit__(kind, error, trace)


def _read(response: Any) -> bytes:
    """The body as it came, not decoded; the connection is free then."""
    try:
        return b"".join(response.stream)
    finally:
        response.stream.close()


async def _aread(response: Any) -> bytes:
    try:
        return b"".join([chunk async for chunk in response.stream])
    finally:
        await response.stream.aclose()
