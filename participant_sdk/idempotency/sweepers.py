"""What sweeps: in a thread or a task of its own, or once, by call."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Final, TypeVar

from participant_sdk.background import Moves, TaskMover, ThreadMover
from participant_sdk.idempotency.stores import store_of
from participant_sdk.idempotency.sweeping import DEFAULT_SWEEP, Sweep, SweepReport, SweepState, rounds, sweeping, tell
from participant_sdk.idempotency.sweeping_sql import SweepingSql
from participant_sdk.idempotency.tables import DEFAULT, IdempotencyTables
from participant_sdk.idempotency.words import words_of

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

logger = logging.getLogger("tricord.idempotency")

AnyEngine = TypeVar("AnyEngine", "Engine", "AsyncEngine")

STOP_SECONDS: Final = 5.0
_ENDED: Final = "the sweeper of idempotency records has ended"


class _Sweeping:
    """What both flavours have."""

    def __init__(self, engine: Engine | AsyncEngine, tables: IdempotencyTables, settings: Sweep) -> None:
        self.settings = settings
        self.state = SweepState()
        self._sql = SweepingSql(words_of(engine.dialect, tables), store_of(engine.dialect, tables))

    def _take(self, report: SweepReport) -> None:
        self.state = self.state.after(report)

    def _rounds(self) -> Moves[None]:
        return rounds(self._sql, self.settings, self._take)

    def _told(self, report: SweepReport | None) -> SweepReport:
        if report is None:
            raise AssertionError("nobody stops a round of which the report is waited for")
        tell(report, self.settings)
        return report


class Sweeper(_Sweeping):
    """Deletes the records of `tables` that have expired: `sweep` once, or in a thread between `start` and `stop`.

    `state`: what the thread has done. Raises ConfigurationError for a database that cannot hold records.
    """

    def __init__(self, engine: Engine, tables: IdempotencyTables = DEFAULT, settings: Sweep = DEFAULT_SWEEP) -> None:
        super().__init__(engine, tables, settings)
        self._engine = sweeping_view(engine)
        self._mover: ThreadMover | None = None
        self._thread: threading.Thread | None = None

    def sweep(self, *, rests: bool = False) -> SweepReport:
        """One round now, as fast as it goes, or at the pace of the settings. Never raises: see the report's `error`."""
        return self._told(ThreadMover(self._engine).run(sweeping(self._sql, self.settings, rests=rests)))

    def start(self) -> None:
        """Sweep in a thread from now on. Starting twice is fine."""
        if self._thread is not None:
            return
        self._mover = ThreadMover(self._engine)
        self._thread = threading.Thread(target=self._loop, args=(self._mover,), name="tricord-sweep", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it has been started and not been stopped."""
        return self._thread is not None

    def stop(self) -> None:
        """Sweep no more; waits for the statement that it is at. Stopping twice is fine."""
        mover, thread = self._mover, self._thread
        self._mover = self._thread = None
        if mover is None or thread is None:
            return
        mover.close()
        if threading.current_thread() is not thread:  # on_report may be what stops it
            thread.join(STOP_SECONDS)

    def _loop(self, mover: ThreadMover) -> None:
        try:
            mover.run(self._rounds())
        except Exception:
            logger.exception(_ENDED)


class AsyncSweeper(_Sweeping):
    """As `Sweeper`, on an AsyncEngine, in a task."""

    def __init__(
        self, engine: AsyncEngine, tables: IdempotencyTables = DEFAULT, settings: Sweep = DEFAULT_SWEEP
    ) -> None:
        super().__init__(engine, tables, settings)
        self._engine = sweeping_view(engine)
        self._mover: TaskMover | None = None
        self._task: asyncio.Task[None] | None = None

    async def sweep(self, *, rests: bool = False) -> SweepReport:
        """As `Sweeper.sweep`."""
        return self._told(await TaskMover(self._engine).run(sweeping(self._sql, self.settings, rests=rests)))

    def start(self) -> None:
        """As `Sweeper.start`."""
        if self._task is not None:
            return
        self._mover = TaskMover(self._engine)
        self._task = asyncio.get_running_loop().create_task(self._loop(self._mover))

    @property
    def running(self) -> bool:
        """As `Sweeper.running`."""
        return self._task is not None

    async def stop(self) -> None:
        """As `Sweeper.stop`."""
        mover, task = self._mover, self._task
        self._mover = self._task = None
        if mover is None or task is None:
            return
        await mover.close()
        if asyncio.current_task() is task:
            return
        await asyncio.wait([task], timeout=STOP_SECONDS)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _loop(self, mover: TaskMover) -> None:
        try:
            await mover.run(self._rounds())
        except Exception:
            logger.exception(_ENDED)


def sweeping_view(engine: AnyEngine) -> AnyEngine:
    """The engine for who deletes what nobody needs: under READ COMMITTED it makes no other's statement fail or wait.

    InnoDB locks no gaps then; PostgreSQL looks at a row that has changed once more, in place of an error.
    """
    return engine if engine.dialect.name == "sqlite" else engine.execution_options(isolation_level="READ COMMITTED")
