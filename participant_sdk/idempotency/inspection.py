"""What operators may see of the records, and their word on them: for programs, and under `tricord idempotency`.

inspection = Inspection(engine)
record = inspection.find("8e03978e", "orders.create", tenant="acme")
inspection.resolve(record.key_hash, State.FAILED_RETRYABLE, reason="the bank has no payment of that number")
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy import Dialect
from sqlalchemy.exc import SQLAlchemyError

from participant_sdk.background import Moves, TaskMover, ThreadMover
from participant_sdk.handling import told
from participant_sdk.idempotency.errors import StoreUnavailable
from participant_sdk.idempotency.fronts import ErasingFront, check_erasing
from participant_sdk.idempotency.inspecting import (
    FrontUnavailable,
    Inspecting,
    NoSuchRecord,
    Page,
    RecordInUse,
    Statistics,
    ttl_ms_of,
)
from participant_sdk.idempotency.inspection_sql import Counted, Entry, Filter
from participant_sdk.idempotency.record import Answer, State
from participant_sdk.idempotency.store import Outcome
from participant_sdk.idempotency.sweepers import sweeping_view
from participant_sdk.idempotency.sweeping_sql import FIRST
from participant_sdk.idempotency.tables import DEFAULT, IdempotencyTables

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

__all__ = [
    "AsyncInspection", "Counted", "Entry", "Filter", "FrontUnavailable", "Inspection", "NoSuchRecord", "Page",
    "RecordInUse", "Statistics",
]  # fmt: skip

R = TypeVar("R")


class Inspection:
    """The records of `tables` on `engine`, in `namespace`. A key is told by its 32-byte hash: see `find`.

    `fronts`: what is purged is forgotten there too, before it is deleted.

    All methods raise StoreUnavailable where the database cannot be asked. Raises ConfigurationError for a database
    that cannot hold records.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        namespace: str = "default",
        tables: IdempotencyTables = DEFAULT,
        fronts: Sequence[ErasingFront] = (),
    ) -> None:
        check_erasing(fronts, asyncio=False)
        self._moves = Inspecting(engine, namespace, tables, fronts)
        self._engine = sweeping_view(engine)

    def find(self, key: str, operation: str = "", tenant: str = "") -> Entry:
        """The record of a key. Raises NoSuchRecord."""
        return self._run(self._moves.found(self._moves.hashes(key, operation, tenant), operation))

    def show(self, key_hash: bytes) -> Entry:
        """The record under a key's hash. Raises NoSuchRecord."""
        return self._run(self._moves.found([key_hash]))

    def answer(self, key_hash: bytes) -> Answer | None:
        """The stored answer; None if there is none."""
        return self._run(self._moves.answer(key_hash))

    def page(self, which: Filter = Filter(), after: bytes = FIRST, rows: int = 50) -> Page:  # noqa: B008
        """The next so many records, at most 1000. Raises InvalidRequest."""
        return self._run(self._moves.page(which, after, rows))

    def statistics(self) -> Statistics:
        """Reads the whole table."""
        return self._run(self._moves.statistics())

    def resolve(
        self, key_hash: bytes, state: State, *, reason: str, answer: Answer | None = None, ttl_s: float = 86_400,
        force: bool = False, live: bool = False,
    ) -> Entry:  # fmt: skip
        """Say what became of an UNKNOWN record; the record afterwards, which expires `ttl_s` from now.

        SUCCEEDED and FAILED_FINAL come with the answer that repeats are to get, TOMBSTONE and FAILED_RETRYABLE (it may
        run again) without one. `force`: also of a run whose lease has ended without an outcome; `live`: also of one
        that goes on, such as in a process that hangs: its local transaction rolls back, and nothing else does. Raises
        NoSuchRecord, RecordInUse and InvalidRequest.
        """
        outcome = Outcome(state, answer, ttl_ms_of(ttl_s), reason)
        return self._run(self._moves.resolve(key_hash, outcome, force=force, live=live))

    def extend(self, key_hash: bytes, ttl_s: float) -> Entry:
        """Let a record that has ended expire not before `ttl_s` from now. Raises NoSuchRecord and RecordInUse."""
        return self._run(self._moves.extend(key_hash, ttl_s))

    def purge(self, key_hash: bytes, *, force: bool = False, dry_run: bool = False) -> Entry:
        """Delete a record of which the outcome is known; `force`: also of another, if it is not live.

        Gives what it was. A front that was not named (see the class) may go on replaying it for a while. Raises
        NoSuchRecord, RecordInUse, FrontUnavailable.
        """
        return self._run(self._moves.purge_one(key_hash, force=force, dry_run=dry_run))

    def purge_many(self, which: Filter, *, force: bool = False, dry_run: bool = False) -> int:
        """As `purge`, all that match, in small batches; how many. What is locked is left.

        Raises InvalidRequest, FrontUnavailable.
        """
        return self._run(self._moves.purge(which, force=force, dry_run=dry_run))

    def _run(self, moves: Moves[R]) -> R:
        try:
            return ThreadMover(self._engine).run(moves)  # type: ignore[return-value]  # nobody stops it
        except Exception as error:
            if not _of_database(error, self._engine.dialect):
                raise
            raise StoreUnavailable(f"the records could not be asked for: {told(error)}") from error


class AsyncInspection:
    """As `Inspection`, on an AsyncEngine."""

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        namespace: str = "default",
        tables: IdempotencyTables = DEFAULT,
        fronts: Sequence[ErasingFront] = (),
    ) -> None:
        check_erasing(fronts, asyncio=True)
        self._moves = Inspecting(engine, namespace, tables, fronts)
        self._engine = sweeping_view(engine)

    async def find(self, key: str, operation: str = "", tenant: str = "") -> Entry:
        """As `Inspection.find`."""
        return await self._run(self._moves.found(self._moves.hashes(key, operation, tenant), operation))

    async def show(self, key_hash: bytes) -> Entry:
        """As `Inspection.show`."""
        return await self._run(self._moves.found([key_hash]))

    async def answer(self, key_hash: bytes) -> Answer | None:
        """As `Inspection.answer`."""
        return await self._run(self._moves.answer(key_hash))

    async def page(self, which: Filter = Filter(), after: bytes = FIRST, rows: int = 50) -> Page:  # noqa: B008
        """As `Inspection.page`."""
        return await self._run(self._moves.page(which, after, rows))

    async def statistics(self) -> Statistics:
        """As `Inspection.statistics`."""
        return await self._run(self._moves.statistics())

    async def resolve(
        self, key_hash: bytes, state: State, *, reason: str, answer: Answer | None = None, ttl_s: float = 86_400,
        force: bool = False, live: bool = False,
    ) -> Entry:  # fmt: skip
        """As `Inspection.resolve`."""
        outcome = Outcome(state, answer, ttl_ms_of(ttl_s), reason)
        return await self._run(self._moves.resolve(key_hash, outcome, force=force, live=live))

    async def extend(self, key_hash: bytes, ttl_s: float) -> Entry:
        """As `Inspection.extend`."""
        return await self._run(self._moves.extend(key_hash, ttl_s))

    async def purge(self, key_hash: bytes, *, force: bool = False, dry_run: bool = False) -> Entry:
        """As `Inspection.purge`."""
        return await self._run(self._moves.purge_one(key_hash, force=force, dry_run=dry_run))

    async def purge_many(self, which: Filter, *, force: bool = False, dry_run: bool = False) -> int:
        """As `Inspection.purge_many`."""
        return await self._run(self._moves.purge(which, force=force, dry_run=dry_run))

    async def _run(self, moves: Moves[R]) -> R:
        try:
            return await TaskMover(self._engine).run(moves)  # type: ignore[return-value]  # nobody stops it
        except Exception as error:
            if not _of_database(error, self._engine.dialect):
                raise
            raise StoreUnavailable(f"the records could not be asked for: {told(error)}") from error


def _of_database(error: Exception, dialect: Dialect) -> bool:
    return isinstance(error, SQLAlchemyError | OSError | dialect.loaded_dbapi.Error)
