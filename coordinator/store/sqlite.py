"""The hot path on SQLite: one file, one coordinator.

WAL with ``synchronous=FULL``: a COMMIT that has returned is on disk. One writer connection on one thread. The
instance lock is ``flock`` on a file of its own: opening or locking the database file itself from this process would
drop the locks that SQLite holds on it (protocol A9).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO
from urllib.parse import quote

import sqlalchemy as sa

from ..model import FORMAT, Attention, State
from .rows import ALONE_MS_MAX, CLAIMS_MAX, Batch, Claim, Fault, PutOff, Row, StoreError, names_of, read_row
from .sqlite_flush import write

_COLUMNS = ", ".join(Row._fields)
# Rows that a newer program has written are its own to drive (protocol G2).
_READABLE = f"format <= {FORMAT}"
# Claimed so often without a save that it is claimed alone (A7).
_IN_VAIN = f"(claimed_version = version AND claims >= {CLAIMS_MAX})"
_DUE = f"FROM tricord_transaction WHERE wake_ms <= ? AND {_READABLE} AND"
_DUE_SOME = f"SELECT {_COLUMNS} {_DUE} NOT {_IN_VAIN} ORDER BY wake_ms LIMIT ?"
_DUE_ALONE = f"SELECT claims, {_COLUMNS} {_DUE} {_IN_VAIN} ORDER BY claims, wake_ms LIMIT 1"
_CLAIM = (
    "UPDATE tricord_transaction SET wake_ms = ?, claimed_version = version, "
    "claims = CASE WHEN claimed_version = version THEN claims + 1 ELSE 1 END WHERE xid = ?"
)
_CLAIM_ALONE = "UPDATE tricord_transaction SET wake_ms = ?, claims = ?, attention = ? WHERE xid = ?"
_PUT_OFF = "UPDATE tricord_transaction SET wake_ms = ? WHERE xid = ?"
_NEXT = (
    "SELECT (SELECT wake_ms FROM tricord_transaction "
    f"WHERE wake_ms IS NOT NULL AND {_READABLE} ORDER BY wake_ms LIMIT 1)"
)
_BUSY_TIMEOUT_MS = 1_000  # short, since nothing interrupts it; what meets a lock is run again anyway
_PARAMETERS_MAX = 500
"""Of one statement: older SQLites take no more than 999."""
_FOLDER = "--store must name a file in a folder that exists and may be written to"
_AGAIN = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


class SqliteBackend:
    """One SQLite file as a store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_file: IO[str] | None = None
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None

    def engine(self) -> sa.Engine:
        engine = sa.create_engine(
            sa.URL.create("sqlite", database=str(self.path)), connect_args={"timeout": _BUSY_TIMEOUT_MS / 1000}
        )
        sa.event.listen(engine, "connect", lambda connection, _record: _set_pragmas(connection))
        return engine

    def reading_engine(self) -> sa.Engine | None:
        if not self.path.parent.is_dir():
            raise StoreError(f"the store {self.path} cannot be there: {_FOLDER}")
        if not os.path.lexists(self.path):
            return None
        address = f"file:{quote(str(self.path.absolute()))}?mode=rw"  # which makes none; ro would leave files behind

        def connect() -> sqlite3.Connection:
            return sqlite3.connect(address, uri=True, timeout=_BUSY_TIMEOUT_MS / 1000)

        try:
            with contextlib.closing(connect()) as connection:
                connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.Error as error:
            raise self._no_database(error) from error
        return sa.create_engine("sqlite://", creator=connect, poolclass=sa.NullPool)

    def prepare(self) -> None:
        lock_path = self.path.with_name(self.path.name + ".lock")
        try:
            lock_file = lock_path.open("a+")
        except OSError as error:
            raise StoreError(
                f"the store's lock file {lock_path} cannot be opened: {error.strerror}; {_FOLDER}"
            ) from error
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock_file.seek(0)
            holder = lock_file.read(20).strip() or "?"
            lock_file.close()
            raise StoreError(
                f"another coordinator (process {holder}) uses the store {self.path}: one SQLite file serves one "
                "coordinator; stop that one, name another file, or use PostgreSQL"
            ) from error
        lock_file.truncate(0)
        lock_file.write(str(os.getpid()))
        lock_file.flush()
        self._lock_file = lock_file
        try:
            with contextlib.closing(self._open()) as connection:
                connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.Error as error:
            self.release()
            raise self._no_database(error) from error

    def incarnation(self) -> str:
        return "sqlite"  # a file has no history that could be told apart from outside

    def flush(self, batch: Batch) -> list[Row | None]:
        connection = self._writer = self._writer or self._open()
        try:
            return write(connection, batch)
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise

    def claim(
        self, limit: int, lease_ms: int, put_off: PutOff | None = None, *, alone: bool = True, flags: bool = True
    ) -> Claim:
        connection = self._reader = self._reader or self._open()
        now_ms = time.time_ns() // 1_000_000
        (next_ms,) = connection.execute(_NEXT).fetchone()
        if next_ms is None or next_ms > now_ms or limit < 1:
            return Claim((), now_ms, next_ms)
        connection.execute("BEGIN IMMEDIATE")
        try:
            found = [read_row(values) for values in connection.execute(_DUE_SOME, (now_ms, limit))]
            rows = [row._replace(wake_ms=now_ms + lease_ms) for row in found if not _is_put_off(row, now_ms, put_off)]
            connection.executemany(_CLAIM, [(row.wake_ms, row.xid) for row in rows])
            if put_off is not None:
                times = range(put_off.least_ms, max(put_off.least_ms, put_off.most_ms) + 1)
                others = {row.xid for row in found} - {row.xid for row in rows}
                connection.executemany(_PUT_OFF, [(now_ms + random.choice(times), xid) for xid in others])
            off, claims = len(found) - len(rows), 0
            if alone and not found:
                rows, claims = _claim_alone(connection, now_ms, lease_ms, flags=flags)
            (next_ms,) = connection.execute(_NEXT).fetchone()
            connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise
        return Claim(rows, now_ms, next_ms, off, claims)

    def states(self, connection: sa.Connection, xids: Sequence[bytes]) -> Mapping[bytes, int]:
        found: dict[bytes, int] = {}
        for start in range(0, len(xids), _PARAMETERS_MAX):
            some = tuple(xids[start : start + _PARAMETERS_MAX])
            marks = ", ".join("?" * len(some))
            query = f"SELECT xid, state FROM tricord_transaction WHERE xid IN ({marks})"  # marks only
            found.update((row.xid, row.state) for row in connection.exec_driver_sql(query, some))
        return found

    def timeline(self, connection: sa.Connection) -> int:
        return 0  # see incarnation()

    def fault(self, error: Exception) -> Fault:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _AGAIN:
            return Fault.AGAIN
        if isinstance(error, MemoryError):
            return Fault.AGAIN
        rejected = sqlite3.IntegrityError | sqlite3.DataError | sqlite3.InterfaceError | sqlite3.ProgrammingError
        if isinstance(error, rejected) or not isinstance(error, sqlite3.Error):
            return Fault.REJECTED
        if code == sqlite3.SQLITE_TOOBIG:
            return Fault.REJECTED
        return Fault.LOST  # disk full, I/O error, …: nothing is known but that it may pass

    def interrupt(self) -> None:
        for connection in (self._writer, self._reader):
            if connection is not None:
                with contextlib.suppress(sqlite3.Error):
                    connection.interrupt()

    def close_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def release(self) -> None:
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=_BUSY_TIMEOUT_MS / 1000, isolation_level=None, check_same_thread=False
        )
        try:
            _set_pragmas(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _no_database(self, error: sqlite3.Error) -> StoreError:
        return StoreError(f"the store {self.path} cannot be opened as a SQLite database: {error}")


def _claim_alone(connection: sqlite3.Connection, now_ms: int, lease_ms: int, *, flags: bool) -> tuple[list[Row], int]:
    """A row that was claimed in vain, and how often it was, this time included; none if there is none."""
    values = connection.execute(_DUE_ALONE, (now_ms,)).fetchone()
    if values is None:
        return [], 0
    claims, row = min(values[0] + 1, CLAIMS_MAX + 30), read_row(values[1:])
    stuck = Attention.STUCK if flags and row.attention == Attention.NONE else row.attention
    lease_ms = min(lease_ms * 2 ** (claims - CLAIMS_MAX), ALONE_MS_MAX)
    row = row._replace(wake_ms=now_ms + lease_ms, attention=int(stuck))
    connection.execute(_CLAIM_ALONE, (row.wake_ms, claims, row.attention, row.xid))
    return [row], claims


def _is_put_off(row: Row, now_ms: int, put_off: PutOff | None) -> bool:
    return (
        put_off is not None
        and row.state in (State.CONFIRMING, State.CANCELLING)
        and row.updated_ms > now_ms - put_off.saved_within_ms
        and names_of(row.participants) <= set(put_off.participants)
    )


def _set_pragmas(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")
