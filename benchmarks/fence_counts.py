"""What a call of each variant costs the database: statements, round trips, commits, flushes, and what a replay writes.

Nothing here is timed. Statements and round trips are counted on the wire, in the messages that libpq itself writes
down; commits and flushes by the server; SQLite tells each statement to a callback.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import psycopg
import pymysql
from psycopg.pq import Trace

from .fence_bank import BARE, FIRST, REPLAYS, VARIANTS, Bank, Job, jobs_of
from .report import progress

BLOCK: Final = 50
ATTEMPTS: Final = 5

_TAG: Final = re.compile(r'^B\t\d+\tCommandComplete\t "(\w+)', re.MULTILINE)
_READY: Final = re.compile(r"^B\t\d+\tReadyForQuery", re.MULTILINE)
_ON_TABLES: Final = frozenset({"SELECT", "INSERT", "UPDATE", "DELETE", "MERGE"})


class Statements(NamedTuple):
    """Of one call. `on_tables` is without BEGIN, COMMIT and the like; None where that is not told."""

    statements: int
    on_tables: int | None
    round_trips: int | None


class Durable(NamedTuple):
    """Of one call, on average: transactions that the server counted as committed, and flushes of its log."""

    commits: float
    flushes: float


class Written(NamedTuple):
    """By a block of replays: bytes of WAL, and transaction ids."""

    wal_bytes: int
    xids: int


def statements_of(bank: Bank, count: Callable[[Bank, Job], Statements]) -> dict[str, Statements]:
    """Of one call of each variant, on a bank that is warm: what is prepared once is prepared."""
    counted = {}
    for variant in VARIANTS:
        for before, job in jobs_of(variant, 1):
            for needed in before:
                bank.run(needed)
            counted[variant] = count(bank, job)
    return counted


def on_postgres(bank: Bank, job: Job) -> Statements:
    """By libpq's own trace of the protocol's messages."""
    return on_the_wire(bank.connections, lambda: bank.run(job))


def on_the_wire(connections: Sequence[Any], call: Callable[[], None]) -> Statements:
    """What a call sends on these connections of psycopg."""
    with tempfile.TemporaryFile("w+") as trace:
        for connection in connections:
            connection.pgconn.trace(trace.fileno())
            connection.pgconn.set_trace_flags(Trace.SUPPRESS_TIMESTAMPS)
        call()
        for connection in connections:
            connection.pgconn.untrace()
        trace.seek(0)
        messages = trace.read()
    tags = _TAG.findall(messages)
    return Statements(len(tags), sum(tag in _ON_TABLES for tag in tags), len(_READY.findall(messages)))


def on_mariadb(bank: Bank, job: Job) -> Statements:
    """By the server's count of each session's statements; each is a round trip."""

    def questions() -> int:
        total = 0
        for connection in bank.connections:
            with connection.cursor() as cursor:
                cursor.execute("SHOW SESSION STATUS LIKE 'Questions'")
                total += int(cursor.fetchone()[1])
        return total

    before = questions()
    bank.run(job)
    made = questions() - before - len(bank.connections)
    return Statements(made, None, made)


def on_sqlite(bank: Bank, job: Job) -> Statements:
    """By the driver's callback."""
    seen: list[str] = []
    connections: list[sqlite3.Connection] = bank.connections
    for connection in connections:
        connection.set_trace_callback(seen.append)
    bank.run(job)
    for connection in connections:
        connection.set_trace_callback(None)
    return Statements(len(seen), None, None)


def durable_of(bank: Bank, admin: psycopg.Connection[Any], database: str) -> dict[str, Durable]:
    """Of each variant that commits, in a block of calls of it alone. Empty before PostgreSQL 15."""
    counted: dict[str, Durable] = {}
    if admin.info.server_version < 150000:
        progress("commits and flushes are not counted: before PostgreSQL 15 a session cannot be asked to tell them")
        return counted
    for variant in (BARE, *FIRST):
        jobs = _prepared(bank, variant)
        before = counters(bank.connections, admin, database)
        for job in jobs:
            bank.run(job)
        commits, flushes = (
            after - was for after, was in zip(counters(bank.connections, admin, database), before, strict=True)
        )
        counted[variant] = Durable(commits / len(jobs), flushes / len(jobs))
    return counted


def written_by_replays(bank: Bank, admin: psycopg.Connection[Any]) -> Written:
    """The least of a few blocks: now and then the server writes something of its own."""
    least = []
    for _ in range(ATTEMPTS):
        jobs = [job for variant in REPLAYS for job in _prepared(bank, variant)]
        for job in jobs:  # whoever reads a page first may have to prune from it what others have left there
            bank.run(job)
        before = log_position(admin)
        for job in jobs:
            bank.run(job)
        after = log_position(admin)
        least.append(Written(after[0] - before[0], after[1] - before[1]))
        if not any(least[-1]):
            break
    return min(least)


def _prepared(bank: Bank, variant: str) -> list[Job]:
    jobs = []
    for before, job in jobs_of(variant, BLOCK):
        for needed in before:
            bank.run(needed)
        jobs.append(job)
    return jobs


def counters(connections: Sequence[Any], admin: psycopg.Connection[Any], database: str) -> tuple[int, int]:
    """Commits in the database, and flushes, until now."""
    for connection in connections:  # a session tells its counts when it likes, unless it is asked
        # Past psycopg, which deallocates all that is prepared when it rolls back; a commit would be counted.
        connection.pgconn.exec_(b"BEGIN; SELECT pg_stat_force_next_flush(); ROLLBACK")
    commits = admin.execute("SELECT xact_commit FROM pg_stat_database WHERE datname = %s", [database]).fetchone()
    flushes = admin.execute(
        "SELECT sum(fsyncs) FROM pg_stat_io WHERE object = 'wal'"
        if admin.info.server_version >= 180000
        else "SELECT wal_sync FROM pg_stat_wal"
    ).fetchone()
    assert commits is not None
    assert flushes is not None
    return int(commits[0]), int(flushes[0])


def log_position(admin: psycopg.Connection[Any]) -> tuple[int, int]:
    """Bytes of WAL, and transaction ids, until now."""
    row = admin.execute(
        "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0'), pg_snapshot_xmax(pg_current_snapshot())"
    ).fetchone()
    assert row is not None
    return int(row[0]), int(row[1])


@contextlib.contextmanager
def administrator(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """A session beside the bank's, in another database, so that its own transactions are not counted."""
    with contextlib.closing(psycopg.connect(dsn, autocommit=True)) as admin:
        yield admin


def settings_of_postgres(admin: psycopg.Connection[Any]) -> str:
    """What decides about durability, as read back."""
    names = ("server_version", "fsync", "synchronous_commit", "full_page_writes", "wal_sync_method")
    settings = {name: admin.execute(f"SHOW {name}").fetchone() for name in names}
    return ", ".join(f"{name}={row[0]}" for name, row in settings.items() if row)


def settings_of_mariadb(connection: pymysql.Connection[pymysql.cursors.Cursor]) -> str:
    """What decides about durability, as read back."""
    names = ("version", "innodb_flush_log_at_trx_commit", "innodb_doublewrite", "tx_isolation")
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {', '.join(f'@@{name}' for name in names)}")
        return ", ".join(f"{name}={value}" for name, value in zip(names, cursor.fetchone() or (), strict=True))
