"""Group commit: the saves of all live transactions, one flush at a time.

A flush starts at once when none is on its way, and takes whatever gathered while the last one was. It holds at most
one row per xid: all work on an xid passes through one driver, which waits for each save (protocol A2); the last save,
which nobody waits for, is only ever followed by nothing.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import structlog

from .codec import new_row, saved_row, transaction
from .model import Transaction
from .store.rows import Batch, Row, RowRejected
from .store.store import Store

_log = structlog.get_logger(__name__)

ROWS_MAX = 1_000
BYTES_MAX = 16 * 1024 * 1024
LINGER_S = 0.02
"""How long a last save waits for a flush to ride on."""


WAITING_ROWS_MAX = 20_000
WAITING_BYTES_MAX = 64 * 1024 * 1024
"""How much may wait for the store before new transactions are refused."""


class Overloaded(Exception):
    """Too much waits for the store. Nothing of this request was stored."""


class Started(NamedTuple):
    """A transaction that was begun, now or before under the same key."""

    tx: Transaction
    """The row that stands: the new one, or the holder of its idempotency key."""
    new: bool


class _Entry(NamedTuple):
    tx: Transaction
    row: Row
    begins: bool
    done: asyncio.Future[Any] | None
    """Is told what came of it: a Started of a begin, the Transaction that stands of a save; None: nobody waits."""

    def told(self, standing: Row | None) -> Started | Transaction:
        """What that is, by the row that stands in its place, if another does. Raises RowRejected."""
        if self.begins:
            return _started(self.tx, standing)
        return _saved(self.tx, standing)


class Journal:
    """Writes transactions through group commit."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[bytes, _Entry] = {}
        self._begin_bytes = 0
        self._flushing = False
        self._starting = False
        self._timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def check_room(self) -> None:
        """Raises Overloaded if no more transactions should begin now."""
        if len(self._waiting) >= WAITING_ROWS_MAX or self._begin_bytes >= WAITING_BYTES_MAX:
            raise Overloaded(f"{len(self._waiting)} transactions wait for the store")

    def begin(self, tx: Transaction) -> asyncio.Future[Started]:
        """Store a new transaction, unless its key is taken. Raises RowRejected, having stored nothing."""
        row = new_row(tx)
        started = self._write(tx, row, begins=True)
        self._begin_bytes += len(row.body)
        return started

    def save(self, tx: Transaction) -> asyncio.Future[Transaction]:
        """Store the next version of a transaction; the row that stands when it is durable.

        Raises RowRejected if the database cannot take it.
        """
        return self._write(tx, saved_row(tx, self._store.format), begins=False)

    def save_last(self, tx: Transaction) -> None:
        """Store the last version, some time soon. It promises nothing new; if it is lost, recovery finds the same."""
        self._add(_Entry(tx, saved_row(tx, self._store.format), False, None))

    async def drain(self) -> None:
        """Return when everything that was given so far has been written."""
        self._start()
        await self._idle.wait()

    def _write(self, tx: Transaction, row: Row, *, begins: bool) -> asyncio.Future[Any]:
        done: asyncio.Future[Any] = self._loop.create_future()
        self._add(_Entry(tx, row, begins, done))
        return done

    def _add(self, entry: _Entry) -> None:
        waiting = self._waiting.get(entry.row.xid)
        if waiting is not None and waiting.done is not None:
            raise AssertionError(f"two saves of transaction {entry.row.xid.hex()} at once")
        self._waiting[entry.row.xid] = entry
        self._idle.clear()
        if self._flushing:
            return
        if entry.done is not None:
            if not self._starting:  # else a flush starts this very turn, with all that the turn brings
                self._starting = True
                self._loop.call_soon(self._start)
        elif self._timer is None:
            self._timer = self._loop.call_later(LINGER_S, self._start)

    def _start(self) -> None:
        self._starting = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._flushing or not self._waiting:
            return
        begins, saves = self._take()
        labels = {e.row.xid: e.tx.spec.labels for e in begins if e.tx.spec.labels}
        batch = Batch([entry.row for entry in begins], [entry.row for entry in saves], labels)
        self._flushing = True
        flushed = self._store.flush(batch)
        entries = [*begins, *saves]  # the store tells the outcomes in that order
        flushed.add_done_callback(lambda outcome: self._finish(entries, outcome))

    def _take(self) -> tuple[list[_Entry], list[_Entry]]:
        """What the next flush holds: begins and saves."""
        begins: list[_Entry] = []
        saves: list[_Entry] = []
        count = size = 0
        for entry in self._waiting.values():
            row = entry.row
            size += len(row.body) + len(row.progress)
            if count and (count >= ROWS_MAX or size > BYTES_MAX):
                break
            count += 1
            (begins if entry.begins else saves).append(entry)
        if count == len(self._waiting):
            self._waiting.clear()
        else:
            for entry in (*begins, *saves):
                del self._waiting[entry.row.xid]
        return begins, saves

    def _finish(self, entries: list[_Entry], outcome: asyncio.Future[list[Row | RowRejected | None]]) -> None:
        self._flushing = False
        error = outcome.exception()
        standing = [error] * len(entries) if error is not None else outcome.result()
        for entry, row in zip(entries, standing, strict=True):
            if entry.begins:
                self._begin_bytes -= len(entry.row.body)
            if entry.done is None:
                if row is not None:  # recovery will come to the same end
                    _log.warning("journal.last_save_not_stored", xid=entry.row.xid.hex(), standing=str(row)[:200])
            elif entry.done.done():
                pass  # nobody waits any more
            elif isinstance(row, BaseException):
                entry.done.set_exception(row)
            else:
                try:
                    entry.done.set_result(entry.told(row))
                except Exception as failure:
                    entry.done.set_exception(failure)
        if not self._waiting:
            self._idle.set()
        elif any(entry.done is not None for entry in self._waiting.values()):
            self._start()
        else:
            self._timer = self._loop.call_later(LINGER_S, self._start)


def _started(tx: Transaction, standing: Row | None) -> Started:
    if standing is None:
        return Started(tx, True)
    return Started(transaction(standing), standing.xid == tx.spec.xid)


def _saved(tx: Transaction, standing: Row | None) -> Transaction:
    if standing is None:
        return tx
    if not standing.state:
        raise RowRejected(f"transaction {tx.spec.xid.hex()} is not in the store any more")
    return transaction(standing)
