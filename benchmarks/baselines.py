"""What the coordinator's figures stand beside: the parts that it is made of, each measured alone in the same run."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import psycopg

from coordinator.codec import new_row
from coordinator.store.rows import Row
from tests.postgres import PostgresServer

from . import rows
from .processes import Process, start_coordinator
from .report import progress

NAMES = ("noop-1", "noop-2")
_COLUMNS = ", ".join(Row._fields)
_VALUES = ", ".join(
    f"%({name})b" if isinstance(Row._field_defaults.get(name, b""), bytes) else f"%({name})s" for name in Row._fields
)
_INSERT = f"INSERT INTO tricord_transaction ({_COLUMNS}) VALUES ({_VALUES})"
_UPDATE = (
    "UPDATE tricord_transaction SET version = version + 1, save_id = %(save_id)s, state = 3, "
    "updated_ms = %(updated_ms)s, progress = %(progress)b WHERE xid = %(xid)b AND version = %(version)s"
)


class Bare(NamedTuple):
    """Things done alone: the median, and how many in a second."""

    p50_ms: float
    per_s: float


class Parts:
    """A bare echo server and a connection to a table like the coordinator's, to measure on whenever wanted."""

    def __init__(self, stack: ExitStack, server: PostgresServer, folder: Path) -> None:
        self._folder = folder
        self._echo = stack.enter_context(Process("benchmarks.echo", ["serve"], folder / "echo.log"))
        dsn = server.create_database()
        stack.callback(server.drop_database, dsn)
        start_coordinator(stack, folder, dsn)[0].close()  # makes the schema
        self._connection = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        self._connection.execute("SET enable_seqscan = off")  # a plan made while the table is empty would stay

    def echo(self, clients: int, seconds: float) -> Bare:
        """Round trips of so many clients, in a process of their own."""
        arguments = ["call", self._echo.ready, str(clients), str(seconds)]
        with Process("benchmarks.echo", arguments, self._folder / "echo-load.log") as client:
            seen = json.loads(client.read_all())
        return Bare(seen["p50_ms"], seen["answers"] / seen["seconds"])

    def commit(self, seconds: float) -> Bare:
        """Single commits on the coordinator's own table: a row put in, then the same row changed, as plain statements.

        The same columns and indexes as the journal's, but none of its code: what is measured alone gets no better and
        no worse with the journal.
        """

        def run(statement: str, row: Row) -> None:
            self._connection.execute(statement, row._asdict(), prepare=True)

        return _commits(seconds, lambda row: (lambda: run(_INSERT, row), lambda: run(_UPDATE, row)))


def sqlite(folder: Path, seconds: float) -> Bare:
    """Single commits of one such row each on a SQLite file in WAL mode with ``synchronous=FULL``."""
    progress(f"bare SQLite commits, synchronous=FULL, {seconds:g} s")
    with closing(sqlite3.connect(folder / "bare.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        (level,) = connection.execute("PRAGMA synchronous").fetchone()
        (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
        progress(f"SQLite {sqlite3.sqlite_version} as read back: journal_mode={mode}, synchronous={level} (2 is FULL)")
        connection.execute(f"CREATE TABLE bare ({_COLUMNS.replace('xid', 'xid BLOB PRIMARY KEY', 1)})")
        insert = f"INSERT INTO bare VALUES ({', '.join('?' * len(Row._fields))})"
        return _commits(seconds, lambda row: (lambda: connection.execute(insert, row),))


def _commits(seconds: float, works: Callable[[Row], tuple[Callable[[], object], ...]]) -> Bare:
    took: list[float] = []
    start_s = time.perf_counter()
    for row in _fresh_rows():
        for work in works(row):
            before_s = time.perf_counter()
            work()
            took.append(time.perf_counter() - before_s)
        if time.perf_counter() - start_s >= seconds:
            break
    took_s = time.perf_counter() - start_s
    return Bare(sorted(took)[len(took) // 2] * 1000, len(took) / took_s)


def _fresh_rows() -> Iterator[Row]:
    number = 0
    while True:
        yield new_row(rows.made(number, int(time.time() * 1000), NAMES))
        number += 1
