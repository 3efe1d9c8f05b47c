"""Records put into a real table as they are wanted, and what is there afterwards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import Engine, create_engine, func, select, text
from sqlalchemy.ext.asyncio import create_async_engine

from participant_sdk.idempotency.record import Codec, State
from participant_sdk.idempotency.sweepers import AsyncSweeper, Sweeper
from participant_sdk.idempotency.sweeping import DEFAULT_SWEEP, Sweep, SweepReport
from participant_sdk.idempotency.tables import IdempotencyTables
from participant_sdk.idempotency.words import words_of
from tests.contract.participant.world import postgres_url, sqlite_url
from tests.mariadb import asyncmy_url, pymysql_url

R = TypeVar("R")

DATABASES = ("sqlite", "postgres", "mariadb")
HOUR_MS = 3_600_000


def key_of(number: int) -> bytes:
    """A key hash; they lie in the order of their numbers."""
    return number.to_bytes(4) + bytes(28)


@dataclass
class Shelf:
    """A table of records in a real database, and how to get at it."""

    url: str
    async_url: str
    engine: Engine
    tables: IdempotencyTables

    def put(self, number: int, state: State = State.SUCCEEDED, *, left_ms: int | None = None, **columns: Any) -> bytes:
        """A record; `left_ms` is what is left of it, `age_ms` and `lease_left_ms` alike; the rest is as columns are."""
        self.put_many([number], state, left_ms=left_ms, **columns)
        return key_of(number)

    def put_many(
        self, numbers: Any, state: State = State.SUCCEEDED, *, left_ms: int | None = None, age_ms: int = 10_000,
        lease_left_ms: int | None = None, **columns: Any,
    ) -> None:  # fmt: skip
        """Several that are alike."""
        now_ms = self.now_ms()
        ended = state not in (State.PROCESSING, State.UNKNOWN)
        common = {
            "tenant": "acme", "operation": "orders.create", "key_hint": "ord-", "created_ms": now_ms - age_ms,
            "fingerprint_version": 1, "fingerprint": bytes(32), "state": int(state), "fence": 1_000, "attempt": 1,
            "waiters": False, "owner": "host-1",
            "lease_until_ms": None if lease_left_ms is None else now_ms + lease_left_ms,
            "expires_ms": None if left_ms is None else now_ms + left_ms,
            "completed_ms": now_ms - age_ms + 5 if ended else None,
        }  # fmt: skip
        if state in (State.SUCCEEDED, State.FAILED_FINAL):
            common |= {"codec": int(Codec.HTTP), "status": 201, "headers": b"", "body": b"{}"}
        rows = [common | {"key_hash": key_of(number)} | columns for number in numbers]
        with self.engine.begin() as connection:
            connection.execute(self.tables.records.insert(), rows)

    def numbers(self) -> list[int]:
        """Which records are there."""
        records = self.tables.records
        there = select(records.c.key_hash).where(records.c.operation != "").order_by(records.c.key_hash)
        with self.engine.connect() as connection:
            return [int.from_bytes(key_hash[:4]) for key_hash in connection.scalars(there)]

    def count(self) -> int:
        """How many are there."""
        with self.engine.connect() as connection:
            there = select(func.count()).select_from(self.tables.records).where(self.tables.records.c.operation != "")
            return connection.scalar(there) or 0

    def row(self, number: int) -> Any:
        """One of them."""
        records = self.tables.records
        with self.engine.connect() as connection:
            return connection.execute(select(records).where(records.c.key_hash == key_of(number))).one()

    def now_ms(self) -> int:
        """The database's clock."""
        with self.engine.connect() as connection:
            return int(connection.scalar(text(f"SELECT {words_of(self.engine.dialect, self.tables).now_ms}")))

    async def sweep(self, stack: str, settings: Sweep = DEFAULT_SWEEP) -> SweepReport:
        """One round, in threads or asyncio."""
        if stack == "sync":
            return Sweeper(self.engine, self.tables, settings).sweep()
        engine = create_async_engine(self.async_url)
        try:
            return await AsyncSweeper(engine, self.tables, settings).sweep()
        finally:
            await engine.dispose()

    async def on_async_engine(self, work: Callable[[Any], Awaitable[R]]) -> R:
        """What `work` gives for an AsyncEngine on this database."""
        engine = create_async_engine(self.async_url)
        try:
            return await work(engine)
        finally:
            await engine.dispose()


@contextmanager
def shelf_of(database: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shelf]:
    """An empty table in a fresh database of that kind."""
    match database:
        case "sqlite":
            url, async_url = sqlite_url(tmp_path), sqlite_url(tmp_path, asynchronous=True)
        case "mariadb":
            dsn = request.getfixturevalue("mariadb_database")
            url, async_url = pymysql_url(dsn), asyncmy_url(dsn)
        case _:
            url = async_url = postgres_url(request.getfixturevalue("pg_database"))
    engine = create_engine(url)
    tables = IdempotencyTables()
    tables.metadata.create_all(engine)
    try:
        yield Shelf(url, async_url, engine, tables)
    finally:
        engine.dispose()
