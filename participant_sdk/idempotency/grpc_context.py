"""The context that a keyed handler gets: what it says of its call's end is noted here, and told when it is durable.

gRPC for asyncio sends a status as soon as `abort` is called, and gRPC for threads keeps it in the call; in both, what
the handler says has to wait until the work is committed. All else goes to the context that gRPC gave.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

import grpc

from participant_sdk.idempotency.errors import IdempotencyError
from participant_sdk.idempotency.grpc_answers import Ending, Pairs

logger = logging.getLogger(__name__)

Sink: TypeAlias = Callable[[Any], Awaitable[None]]

_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


class Aborted(Exception):
    """The handler has called `abort`; its context knows with what."""


def _code(given: Any) -> grpc.StatusCode:
    if isinstance(given, grpc.StatusCode):
        return given
    return _BY_NUMBER.get(given, grpc.StatusCode.UNKNOWN) if isinstance(given, int) else grpc.StatusCode.UNKNOWN


def _text(details: Any) -> str:
    return details.decode("utf-8", "replace") if isinstance(details, bytes) else str(details or "")


class KeyedContext:
    """For a handler that runs in a thread. `holds`: initial metadata waits too, as the first response does."""

    def __init__(self, context: Any, *, holds: bool = True) -> None:
        self._context = context
        self._holds = holds
        self._initial: Pairs | None = None
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self._trailing: Pairs = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    @property
    def ending(self) -> Ending:
        """How the call ends, as far as its handler has said."""
        code = self._code or grpc.StatusCode.OK
        return Ending(code, self._details, self._trailing, initial_metadata=self._initial or ())

    def send_initial_metadata(self, initial_metadata: Iterable[tuple[str, str | bytes]]) -> Any:
        """See `grpc.ServicerContext`."""
        if not self._holds:
            self._context.send_initial_metadata(initial_metadata)
        else:
            self._note_initial(initial_metadata)

    def _note_initial(self, initial_metadata: Iterable[tuple[str, str | bytes]]) -> None:
        if self._initial is not None:
            raise ValueError("the initial metadata has been sent already")
        self._initial = tuple((name, value) for name, value in initial_metadata)

    def set_code(self, code: Any) -> None:
        """See `grpc.ServicerContext`."""
        self._code = _code(code)

    def code(self) -> Any:
        """See `grpc.ServicerContext`."""
        return self._code

    def set_details(self, details: str) -> None:
        """See `grpc.ServicerContext`."""
        self._details = _text(details)

    def details(self) -> Any:
        """See `grpc.ServicerContext`: bytes, there."""
        return self._details.encode("utf-8", "replace")

    def set_trailing_metadata(self, trailing_metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """See `grpc.ServicerContext`."""
        self._trailing = tuple((name, value) for name, value in trailing_metadata)

    def trailing_metadata(self) -> Pairs:
        """See `grpc.ServicerContext`."""
        return self._trailing

    @contextmanager
    def noting(self) -> Iterator[None]:
        """The handler runs in the block. What it raises is its call's end, if it has said with which code."""
        try:
            yield
        except Aborted:
            pass
        except IdempotencyError:
            raise
        except Exception as error:
            if self.ending.code is grpc.StatusCode.OK:
                raise
            logger.exception("a handler has raised an error after it had set a status")
            self._details = self._details or f"Exception calling application: {error}"

    def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> Any:
        """See `grpc.ServicerContext`."""
        self._abort(code, details, trailing_metadata)

    def abort_with_status(self, status: Any) -> Any:
        """See `grpc.ServicerContext`."""
        self._abort(status.code, status.details, status.trailing_metadata)

    def _abort(self, code: Any, details: Any, trailing_metadata: Any) -> NoReturn:
        code = _code(code)
        self._code = grpc.StatusCode.UNKNOWN if code is grpc.StatusCode.OK else code  # as gRPC does
        self._details = _text(details) or self._details
        if trailing_metadata:
            self.set_trailing_metadata(trailing_metadata)
        raise Aborted(f"{self._code.name}: {self._details}")


class AsyncKeyedContext(KeyedContext):
    """For a coroutine.

    `requests`: of a call that streams its requests, what its handler may read. `sink`: where its responses go.
    """

    def __init__(
        self,
        context: Any,
        requests: AsyncIterator[Any] | None = None,
        sink: Sink | None = None,
        *,
        holds: bool = True,
    ) -> None:
        super().__init__(context, holds=holds)
        self._requests = requests
        self._sink = sink

    async def send_initial_metadata(self, initial_metadata: Iterable[tuple[str, str | bytes]]) -> Any:
        """See `grpc.aio.ServicerContext`."""
        if not self._holds:
            await self._context.send_initial_metadata(initial_metadata)
        else:
            self._note_initial(initial_metadata)

    def details(self) -> Any:
        """See `grpc.aio.ServicerContext`."""
        return self._details

    async def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> Any:
        """See `grpc.aio.ServicerContext`."""
        self._abort(code, details, trailing_metadata)

    async def abort_with_status(self, status: Any) -> Any:
        """See `grpc.aio.ServicerContext`."""
        self._abort(status.code, status.details, status.trailing_metadata)

    async def read(self) -> Any:
        """See `grpc.aio.ServicerContext`."""
        if self._requests is None:
            return await self._context.read()
        return await anext(self._requests, grpc.aio.EOF)

    async def write(self, message: Any) -> None:
        """See `grpc.aio.ServicerContext`."""
        if self._sink is None:
            await self._context.write(message)
        else:
            await self._sink(message)
