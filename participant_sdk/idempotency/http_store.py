"""A store as a door of an event loop uses it: an AsyncIdempotency as it is, an Idempotency through threads.

Whoever waits in `begin` holds a thread of its own pool, so that those that wait never keep the run that they wait for
from ending.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Final, Protocol, TypeAlias, TypeVar

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.idempotency import AsyncIdempotency, Idempotency
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.record import Answer, Record
from participant_sdk.idempotency.replay import Replay
from participant_sdk.idempotency.request import KeyedRequest
from participant_sdk.idempotency.runs import AsyncRun, Run

T = TypeVar("T")

BEGINNING_THREADS: Final = 64
ENDING_THREADS: Final = 16

Store: TypeAlias = AsyncIdempotency | Idempotency


class DoorRun(Protocol):
    """The ends of a run that a door brings about."""

    async def succeed(self, answer: Answer) -> None:
        """See Run."""

    async def fail_final(self, answer: Answer) -> None:
        """See Run."""

    async def fail_retryable(self, reason: str = "") -> None:
        """See Run."""

    async def leave(self, error: BaseException) -> None:
        """As leaving the run's block with that error."""


class DoorStore:
    """`begin` and `look_up` of either kind of store. Raises ConfigurationError for what is no store."""

    def __init__(self, store: Store) -> None:
        if not isinstance(store, AsyncIdempotency | Idempotency):
            raise ConfigurationError(f"{store!r} is neither an AsyncIdempotency nor an Idempotency")
        self._store = store
        self._beginning = _Threads("idempotency-begin", BEGINNING_THREADS)
        self._ending = _Threads("idempotency-end", ENDING_THREADS)

    async def begin(self, operation: Operation, request: KeyedRequest) -> Replay | AsyncRun | Run:
        """See Idempotency."""
        if isinstance(self._store, AsyncIdempotency):
            return await self._store.begin(operation, request)
        store = self._store
        return await self._beginning.call(lambda: store.begin(operation, request))

    async def look_up(self, operation: Operation, key: str, tenant: str) -> Record | None:
        """See Idempotency."""
        if isinstance(self._store, AsyncIdempotency):
            return await self._store.look_up(operation, key, tenant)
        store = self._store
        return await self._ending.call(lambda: store.look_up(operation, key, tenant))

    def ends_of(self, run: AsyncRun | Run) -> DoorRun:
        """How to end a run."""
        return _TaskRun(run) if isinstance(run, AsyncRun) else _ThreadedRun(run, self._ending)


class _TaskRun:
    def __init__(self, run: AsyncRun) -> None:
        self.succeed = run.succeed
        self.fail_final = run.fail_final
        self.fail_retryable = run.fail_retryable
        self._exit = run.__aexit__

    async def leave(self, error: BaseException) -> None:
        await self._exit(type(error), error, None)


class _ThreadedRun:
    def __init__(self, run: Run, threads: _Threads) -> None:
        self._run = run
        self._threads = threads

    async def succeed(self, answer: Answer) -> None:
        await self._threads.call(lambda: self._run.succeed(answer))

    async def fail_final(self, answer: Answer) -> None:
        await self._threads.call(lambda: self._run.fail_final(answer))

    async def fail_retryable(self, reason: str = "") -> None:
        await self._threads.call(lambda: self._run.fail_retryable(reason))

    async def leave(self, error: BaseException) -> None:
        await self._threads.call(lambda: self._run.__exit__(type(error), error, None))


class _Threads:
    """Made when the first is needed: a door on an AsyncIdempotency has none."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._pool: ThreadPoolExecutor | None = None

    async def call(self, function: Callable[[], T]) -> T:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._most, self._name)
        return await asyncio.get_running_loop().run_in_executor(self._pool, copy_context().run, function)
