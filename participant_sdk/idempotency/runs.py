"""What runs under a key: the work's own local transaction, and every way to end it, once.

with idempotency.begin(operation, request) as run:
    run.connection.execute(...)
    run.succeed(answer)
"""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast

from participant_sdk.idempotency import ending, joining
from participant_sdk.idempotency.asking import Asked, Begun
from participant_sdk.idempotency.current import bound_run
from participant_sdk.idempotency.guard import RunMisused
from participant_sdk.idempotency.moves import Moves, carry_out, carry_out_async
from participant_sdk.idempotency.phases import AsyncPhases, Phases
from participant_sdk.idempotency.record import Answer
from participant_sdk.idempotency.run_state import Stage
from participant_sdk.idempotency.setup import Setup

if TYPE_CHECKING:
    from collections.abc import Callable

    from psycopg import AsyncConnection as RawAsyncConnection
    from psycopg import Connection as RawConnection
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
    from sqlalchemy.orm import Session

logger = logging.getLogger("tricord.idempotency")

R = TypeVar("R")

RELEASE_S: Final = 5.0
"""How long a task that is cancelled still works at letting its run go."""
_LEFT_OPEN: Final = "the run was left without an outcome: call succeed, fail_final, fail_retryable, unknown or complete"


class Run(Phases):
    """A run on an Engine. Used by one thread at a time.

    As a context manager it is `current_run()` in its block. Leaving the block with an exception is `fail_retryable`;
    leaving it without an outcome raises RunLeftOpen, and nothing of it stays.
    """

    def __init__(self, asked: Asked, begun: Begun, setup: Setup, engine: Engine) -> None:
        super().__init__(asked, begun, setup)
        self._engine = engine

    @property
    def connection(self) -> Connection:
        """The run's own local transaction on the engine, or the one that it joined; begun when first asked for.

        Do not commit it, nor roll it back: `succeed` and the others do. Where local transactions see one snapshot
        (REPEATABLE READ, SERIALIZABLE) the run's record is locked from its beginning, and the run cannot be taken over
        as long as it is open. Raises StoreUnavailable.
        """
        return self.connect()

    def connect(self) -> Connection:
        """As `connection`."""
        return cast("Connection", (self.at_hand or self._do(ending.connected(self))).connection)

    def session(self, factory: Callable[..., Session] | None = None) -> Session:
        """An ORM session in the run's local transaction; `factory` is called with `bind=`. It is flushed at the end."""
        return cast("Session", self._do(joining.lent(self, factory, asynchronous=False)))

    def join(self, on: Session | Connection | RawConnection[Any]) -> None:
        """The work happens in the local transaction of `on`, and the run's outcome commits it, or rolls it back.

        Raises ConfigurationError if `on` is bound to another database than the store's; InProgress if an ATOMIC run
        that had begun on a connection of its own has lost its key to another one by that.
        """
        self._do(joining.joined(self, on))

    def complete(self, answer: Answer, on: Session | Connection | RawConnection[Any]) -> None:
        """Store the answer in the local transaction of `on`, which you commit: both are durable then, or neither.

        Raises LeaseLost if another run has taken over: roll back. Raises ConfigurationError if `on` is bound to
        another database than the store's, and for an ATOMIC run that was not begun on it.
        """
        self._do(joining.handed(self, answer, on))

    def succeed(self, answer: Answer) -> None:
        """Store the answer with the work, and commit: when it returns, both are durable.

        An answer of more than the operation's `answer_bytes_max` leaves a TOMBSTONE. Raises LeaseLost if another run
        has taken over: nothing of this one stays. Raises StoreUnavailable if it was not committed, or if that cannot
        be found out now: repeating the request, with its key, tells.
        """
        self._do(ending.succeeded(self, answer))

    def fail_final(self, answer: Answer) -> None:
        """Roll the work back, and store the answer for good. Raises as `succeed`."""
        self._do(ending.failed_for_good(self, answer))

    def fail_retryable(self, reason: str = "") -> None:
        """Roll the work back; the same request may run again at once. Never raises."""
        self._do(ending.failed_for_now(self, reason))

    def unknown(self, reason: str) -> None:
        """Roll back what is in the local transaction; the request runs no more until a person has looked at it.

        Raises LeaseLost if another run has taken over, StoreUnavailable, and ConfigurationError for an ATOMIC run.
        """
        self._do(ending.doomed(self, reason))

    def reach(self, point: str, phase_data: bytes) -> None:
        """Store a recovery point with what is in the local transaction, and commit it. For PHASED runs.

        The next use of `connection` begins another. Raises LeaseLost and StoreUnavailable as `succeed`.
        """
        self._do(ending.recovery_point(self, point, phase_data))

    def _do(self, moves: Moves[R]) -> R:
        return carry_out(moves, self._engine)

    def __enter__(self) -> Self:
        self._bind(bound_run(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unbind()
        if error is not None and self.stage is not Stage.ENDED:
            # Where a driver was interrupted, its connection says nothing more.
            self._do(ending.failed_for_now(self, reason_of(error), cut_off=not isinstance(error, Exception)))
        elif self.stage is Stage.HANDED:
            self._do(joining.handed_over(self))
        elif self.stage is Stage.OPEN:
            self.fail_retryable("left without an outcome")
            raise RunMisused(f"{self.operation.name}: {_LEFT_OPEN}")


class AsyncRun(AsyncPhases):
    """A run on an AsyncEngine. Used by one task at a time. Otherwise as `Run`."""

    def __init__(self, asked: Asked, begun: Begun, setup: Setup, engine: AsyncEngine) -> None:
        super().__init__(asked, begun, setup)
        self._engine = engine

    @property
    def connection(self) -> AsyncConnection:
        """As `Run.connection`; a LEASED or PHASED run begins it with `await run.connect()`, which is needed before."""
        self.check_open()
        if self.line is None:
            raise RunMisused(f"{self.operation.name}: its local transaction has not begun: `await run.connect()` first")
        return cast("AsyncConnection", self.line.connection)

    async def connect(self) -> AsyncConnection:
        """Begin the local transaction, unless it has begun; gives `connection`. Raises StoreUnavailable."""
        return cast("AsyncConnection", (await self._do(ending.connected(self))).connection)

    async def session(self, factory: Callable[..., AsyncSession] | None = None) -> AsyncSession:
        """As `Run.session`."""
        return cast("AsyncSession", await self._do(joining.lent(self, factory, asynchronous=True)))

    async def join(self, on: AsyncSession | AsyncConnection | RawAsyncConnection[Any]) -> None:
        """As `Run.join`."""
        await self._do(joining.joined(self, on))

    async def complete(self, answer: Answer, on: AsyncSession | AsyncConnection | RawAsyncConnection[Any]) -> None:
        """As `Run.complete`."""
        await self._do(joining.handed(self, answer, on))

    async def succeed(self, answer: Answer) -> None:
        """As `Run.succeed`."""
        await self._do(ending.succeeded(self, answer))

    async def fail_final(self, answer: Answer) -> None:
        """As `Run.fail_final`."""
        await self._do(ending.failed_for_good(self, answer))

    async def fail_retryable(self, reason: str = "") -> None:
        """As `Run.fail_retryable`."""
        await self._do(ending.failed_for_now(self, reason))

    async def unknown(self, reason: str) -> None:
        """As `Run.unknown`."""
        await self._do(ending.doomed(self, reason))

    async def reach(self, point: str, phase_data: bytes) -> None:
        """As `Run.reach`."""
        await self._do(ending.recovery_point(self, point, phase_data))

    async def _do(self, moves: Moves[R]) -> R:
        """Carry out the moves; if its task is cancelled meanwhile, the run is let go before that comes out."""
        try:
            return await carry_out_async(moves, self._engine)
        except asyncio.CancelledError:
            await self._release("cancelled")
            raise

    async def _release(self, reason: str) -> None:
        """Let the run go, for a bounded time, whatever is cancelled; if it is not done then, its lease ends it."""
        moves = ending.failed_for_now(self, reason, cut_off=True)
        task = asyncio.get_running_loop().create_task(carry_out_async(moves, self._engine))
        try:
            await asyncio.wait_for(asyncio.shield(task), RELEASE_S)
        except TimeoutError:
            logger.warning("%s: its run could not be let go in time", self.operation.name)
        except asyncio.CancelledError:  # once more: the task goes on by itself
            logger.debug("%s: its run is let go in the background", self.operation.name)

    async def __aenter__(self) -> Self:
        self._bind(bound_run(self))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unbind()
        if error is not None and not isinstance(error, Exception) and self.stage is not Stage.ENDED:
            await self._release(reason_of(error))
        elif error is not None and self.stage is not Stage.ENDED:
            await self.fail_retryable(reason_of(error))
        elif self.stage is Stage.HANDED:
            await self._do(joining.handed_over(self))
        elif self.stage is Stage.OPEN:
            await self.fail_retryable("left without an outcome")
            raise RunMisused(f"{self.operation.name}: {_LEFT_OPEN}")


def reason_of(error: BaseException) -> str:
    """Why a run has failed, as it is stored: the kind of the error, whose text may hold the user's data."""
    return type(error).__name__
