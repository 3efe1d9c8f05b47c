"""The asyncio face of a backend: threads, lost connections, running again.

The hot path has a thread for its flushes and one for its claims, each with a connection of its own; the backends stay
plain blocking code. A flush is run until its outcome is known (protocol A1): after a lost connection the same batch
goes out again on a new one, and the rows' ``save_id`` tell whose they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa
import structlog

from ..model import FORMAT
from . import audit, open_rows, registry, schema
from .filtering import list_rows
from .hand_over import HandOver
from .history import Page, purge_page
from .identity import store_identity
from .rows import (
    POSTGRES,
    Backend,
    Batch,
    Claim,
    Fault,
    ListFilter,
    LookedUp,
    ParticipantRow,
    PutOff,
    Row,
    RowRejected,
    StoreError,
    read_row,
)

_log = structlog.get_logger(__name__)

_T = TypeVar("_T")

CLOCK_READ_S_MAX = 0.25
_PAUSE_S_MIN = 0.02
_PAUSE_S_MAX = 1.0
_FORMAT_S = 5.0
"""How old the knowledge of the store's format may get: `tricord migrate --finish` takes effect without a restart."""
_FLAGS_FORMAT = 3
"""The row format whose programs know the attention that a claim gives."""


class StoreClosed(StoreError):
    """The store was closed while it could not tell whether something was stored."""


def backend_for(url: str, lease_ms: int) -> Backend:
    """The backend for a store's URL: ``postgresql://…``, ``sqlite:///path`` or a path. Raises StoreError."""
    if url.startswith(POSTGRES):
        from .postgres import PostgresBackend  # an extra: only who names it needs it

        return PostgresBackend(url, lease_ms)
    if "://" in url and not url.startswith("sqlite:///"):
        scheme = url.split("://", 1)[0]
        raise StoreError(f"store: {scheme}:// is not supported; use postgresql://…, sqlite:///path or a file's path")
    from .sqlite import SqliteBackend

    path = url.removeprefix("sqlite:///")
    if path in ("", ":memory:"):
        raise StoreError("store: a database in memory would lose every decision with the process; name a file")
    return SqliteBackend(Path(path))


@contextlib.contextmanager
def usable_engine(url: str, lease_ms: int) -> Iterator[sa.Engine]:
    """SQLAlchemy's engine on a store that transactions may be kept in. Raises StoreError, SQLAlchemyError."""
    backend = backend_for(url, lease_ms)
    backend.prepare()
    try:
        engine = backend.engine()
        try:
            yield engine
        finally:
            engine.dispose()
    finally:
        backend.release()


class Store:
    """A store of transactions, from asyncio. ``open`` first; every method may raise StoreError."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._writer = HandOver("store-writer")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="store-reader")
        self._others = ThreadPoolExecutor(4, thread_name_prefix="store")
        self._engine: sa.Engine | None = None
        self._closing = threading.Event()
        self._clock_read = False
        self._offset_ms = time.time() * 1000 - time.monotonic() * 1000
        self.store_id = ""
        self.flagged: Sequence[bytes] = ()
        """The xids that ``open`` gave attention, because the database's history has changed."""
        self.format = 1
        """The highest row format that this program may write here, as last heard."""
        self.revision = ""
        """The schema's revision, likewise."""
        self._format_read_s = 0.0
        self.answered_s = time.monotonic()
        """When the store last gave a good answer, by the monotonic clock; threads write it."""
        self.flushes = 0
        """Flushes that were committed."""

    async def open(self) -> None:
        """Check the database, create its tables if it is empty, and learn its clock. Raises StoreError."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._reader, self._open)

    def _open(self) -> None:
        self._backend.prepare()
        try:
            self._engine = self._backend.engine()
            schema.ensure_schema(self._engine)
            self._read_format()
            incarnation = self._backend.incarnation()
            self.store_id, changed, self.flagged = store_identity(self._engine, incarnation)
        except sa.exc.SQLAlchemyError as error:
            self._backend.release()
            raise StoreError(f"the store cannot be set up: {' '.join(str(error).split())[:500]}") from error
        except StoreError:
            self._backend.release()
            raise
        if changed:
            _log.error(
                "store.history_changed", hint="a restore or failover may have lost decisions; see `tricord list`"
            )
        self._claim(0, 0)

    async def close(self) -> None:
        """Close the connections. A flush whose outcome is not known by then ends with StoreClosed."""
        self.stop_waiting()
        loop = asyncio.get_running_loop()
        await self._writer.run(self._backend.close_writer)
        await loop.run_in_executor(self._reader, self._backend.close_reader)
        self._writer.stop()
        self._reader.shutdown()
        self._others.shutdown()
        if self._engine is not None:
            self._engine.dispose()
        self._backend.release()

    def stop_waiting(self) -> None:
        """Give up what waits for a database that does not answer. Only closing comes after this."""
        self._closing.set()
        self._backend.interrupt()

    def now_ms(self) -> int:
        """The store's clock, as last heard, carried on by this machine's monotonic one."""
        return int(time.monotonic() * 1000 + self._offset_ms)

    # --- the hot path --------------------------------------------------------------------------------------

    def flush(self, batch: Batch) -> asyncio.Future[list[Row | RowRejected | None]]:
        """Write a batch; see ``Backend.flush``. A row that the database rejects fails alone: RowRejected stands for it.

        Done when the outcome of every row is known, however long that takes.
        """
        return self._writer.run(functools.partial(self._flush, batch))

    async def claim(self, limit: int, lease_ms: int, put_off: PutOff | None = None, *, alone: bool = True) -> Claim:
        """Take over up to ``limit`` rows that are due, for a lease; see ``Backend.claim``."""
        loop = asyncio.get_running_loop()
        if time.monotonic() - self._format_read_s > _FORMAT_S:
            self._format_read_s = time.monotonic()
            loop.run_in_executor(self._others, self._read_format_again)  # beside the claim: nobody waits for it
        return await loop.run_in_executor(self._reader, self._claim, limit, lease_ms, put_off, alone)

    def _read_format_again(self) -> None:
        before = self.format
        with contextlib.suppress(sa.exc.SQLAlchemyError):  # the claim says so when the store is away
            self._read_format()
        if self.format != before:
            _log.info("store.format", format=self.format)

    def _read_format(self) -> None:
        assert self._engine is not None
        stand = schema.read_stand(self._engine)
        self._format_read_s = time.monotonic()
        if stand.oldest_program > FORMAT:
            _log.error("store.program_too_old", hint="the store was migrated past this program; start a newer one")
        self.format = min(stand.format, FORMAT)
        self.revision = stand.revision

    def _flush(self, batch: Batch) -> list[Row | RowRejected | None]:
        pause_s = _PAUSE_S_MIN
        while True:
            if self._closing.is_set() and pause_s > _PAUSE_S_MIN:
                raise StoreClosed("the store was closed before the outcome of its last flush was known")
            try:
                standing = self._backend.flush(batch)
                self.flushes += 1
                self.answered_s = time.monotonic()
                return list(standing)
            except Exception as error:
                fault = self._backend.fault(error)
                if fault is Fault.REJECTED:
                    return self._flush_halves(batch, error)
                if fault is Fault.LOST:
                    _log.warning(
                        "store.flush_lost", error=str(error).strip()[:300], rows=len(batch.begins) + len(batch.saves)
                    )
                    self._backend.close_writer()
            self._closing.wait(pause_s)
            pause_s = min(pause_s * 2, _PAUSE_S_MAX)

    def _flush_halves(self, batch: Batch, error: Exception) -> list[Row | RowRejected | None]:
        """Find the rows that the database rejects: they fail alone, never their companions."""
        rows = [(row, True) for row in batch.begins] + [(row, False) for row in batch.saves]
        if len(rows) == 1:
            return [RowRejected(f"the database rejected the transaction: {' '.join(str(error).split())[:300]}")]
        middle = len(rows) // 2
        standing: list[Row | RowRejected | None] = []
        for half in (rows[:middle], rows[middle:]):
            begins, saves = [r for r, new in half if new], [r for r, new in half if not new]
            labels = {row.xid: batch.labels[row.xid] for row in begins if row.xid in batch.labels}
            standing += self._flush(Batch(begins, saves, labels))
        return standing

    def _claim(self, limit: int, lease_ms: int, put_off: PutOff | None = None, alone: bool = True) -> Claim:
        before_s = time.monotonic()
        try:
            claim = self._backend.claim(limit, lease_ms, put_off, alone=alone, flags=self.format >= _FLAGS_FORMAT)
        except Exception as error:
            if self._backend.fault(error) is not Fault.AGAIN:
                self._backend.close_reader()
            raise StoreError(f"the store did not answer: {' '.join(str(error).split())[:300]}") from error
        self.answered_s = after_s = time.monotonic()
        # One quick read: its middle is when the clock was read. A slow one would set it wrong by half of its time.
        if not claim.rows and not claim.put_off and (after_s - before_s < CLOCK_READ_S_MAX or not self._clock_read):
            self._offset_ms = claim.now_ms - (before_s + after_s) * 500
            self._clock_read = True
        return claim

    # --- everything else -----------------------------------------------------------------------------------

    async def get(self, *, xid: bytes = b"", key: bytes = b"") -> Row | None:
        """The row of one transaction, by xid or by key."""
        column, value = (schema.transactions.c.xid, xid) if xid else (schema.transactions.c.key, key)

        def read(connection: sa.Connection) -> Row | None:
            found = connection.execute(sa.select(*schema.ROW).where(column == value)).one_or_none()
            return None if found is None else read_row(found)

        return await self._run(read)

    async def look_up(self, xids: Sequence[bytes]) -> LookedUp:
        """How far transactions have come, from what is committed; not only this process drives them.

        Whose states they are is read beside them, each time: the address may lead to another database by now, or to
        the same one after a failover, and what this process learnt when it started would vouch for the wrong one.
        """

        def read(connection: sa.Connection) -> LookedUp:
            store_id = connection.execute(sa.select(schema.store_info.c.store_id)).scalar_one_or_none()
            if store_id is None:
                raise StoreError("the store has lost its identity: its table tricord_store is empty")
            incarnation = self._backend.timeline(connection)
            return LookedUp(self._backend.states(connection, xids), store_id, incarnation)

        return await self._run(read)

    async def list(self, which: ListFilter) -> Sequence[Row]:
        """Transactions in the order of their creation."""
        return await self._run(lambda connection: [read_row(found) for found in list_rows(connection, which)])

    async def count_open(self) -> open_rows.OpenRows:
        """Open transactions by kind, counted up to a limit."""
        return await self._run(lambda connection: open_rows.read(connection, self.now_ms()))

    async def purge_page(self, after: bytes, below: bytes, before_ms: int) -> Page:
        """Delete finished rows of one page of old ones; see ``history``."""
        return await self._run(lambda connection: purge_page(connection, after, below, before_ms))

    async def add_audit(self, rows: Sequence[audit.AuditRow]) -> None:
        """Add records of what operators do, durably, all or none; see ``audit``."""
        await self._run(lambda connection: audit.append(connection, rows))

    async def audit(self, which: audit.AuditFilter) -> Sequence[audit.AuditRow]:
        """Records of what operators did, newest first."""
        return await self._run(lambda connection: audit.read_page(connection, which))

    async def within(self, work: Callable[[sa.Connection], _T]) -> _T:
        """Run ``work`` in one local transaction of its own, again while the database says that it may succeed."""
        return await self._run(work)

    async def participants(self) -> Sequence[registry.KnownParticipant]:
        """All participants."""
        return await self._run(registry.read_all)

    async def heard(self) -> Mapping[tuple[str, str], int]:
        """When each instance, by name and address, was last heard of, by the store's clock in milliseconds."""
        return await self._run(registry.read_heard)

    async def register(self, row: ParticipantRow, *, replace_fence: bool) -> registry.Refused | None:
        """Store an instance of a participant, or that it was heard of; or nothing, and what stands in the way."""
        return await self._run(
            lambda connection: registry.register(connection, row, self.now_ms(), replace_fence=replace_fence)
        )

    async def withdraw(self, name: str, address: str) -> bool:
        """Forget an instance of a participant; whether it was known."""
        return await self._run(lambda connection: registry.withdraw(connection, name, address, self.now_ms()))

    async def _run(self, work: Callable[[sa.Connection], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._others, self._run_blocking, work)

    def _run_blocking(self, work: Callable[[sa.Connection], _T]) -> _T:
        """One local transaction, run again while the database says that it may succeed."""
        if self._engine is None:
            raise StoreError("the store is not open")
        for attempt in range(5):
            try:
                with self._engine.begin() as connection:
                    done = work(connection)
                self.answered_s = time.monotonic()
                return done
            except sa.exc.TimeoutError as error:
                raise StoreError("the store did not answer: all connections are taken") from error
            except sa.exc.DBAPIError as error:
                again = isinstance(error, sa.exc.IntegrityError) or (
                    isinstance(error.orig, Exception) and self._backend.fault(error.orig) is Fault.AGAIN
                )
                if attempt == 4 or self._closing.is_set() or not (again or error.connection_invalidated):
                    raise StoreError(f"the store did not answer: {' '.join(str(error.orig).split())[:300]}") from error
                self._closing.wait(_PAUSE_S_MIN * 2**attempt)
        raise AssertionError("unreachable")
