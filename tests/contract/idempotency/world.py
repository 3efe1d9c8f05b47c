"""A store on a real database, in every flavour, and local transactions on it that a test moves step by step."""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

import psycopg
from sqlalchemy import Connection, Engine, text

from participant_sdk.idempotency.prepare import check_engine, errors_told, make_table
from participant_sdk.idempotency.record import Answer, Codec, Fingerprint, Record, State
from participant_sdk.idempotency.store import Claim, Held, Outcome, Store
from participant_sdk.idempotency.tables import DEFAULT, IdempotencyTables
from participant_sdk.idempotency.testing import expire_row, lapse_row
from participant_sdk.steps import Step, run, run_async
from tests.contract.participant.world import sync_url
from tests.engines import async_engine, sync_engine

R = TypeVar("R")

TABLE = DEFAULT.records_name
WAIT_SECONDS = 20.0
"""Longer than anything takes that does not wait for a lock."""
ANSWER = Answer(Codec.HTTP, 201, ((b"content-type", b"text/plain"), (b"x", b"1"), (b"x", b"2")), b"done\x00\xff")
DONE = Outcome(State.SUCCEEDED, ANSWER, 60_000)
FAILED = Outcome(State.FAILED_RETRYABLE, None, 60_000, "it failed")


def claim_of(key: str = "", **changes: Any) -> Claim:
    """A run that wants to begin, under a new key if none is named."""
    key_hash = hashlib.sha256((key or secrets.token_hex(16)).encode()).digest()
    fingerprint = Fingerprint(1, hashlib.sha256(b"a request").digest())
    return replace(Claim(key_hash, "shop", "orders.create", "abc", fingerprint, "host:1:a", 30_000), **changes)


class Transaction:
    """A connection of the engine, with whatever local transaction it is in."""

    def __init__(self, world: "World", connection: Any) -> None:
        self.world = world
        self.connection = connection

    async def run(self, script: Generator[Step, Any, R]) -> R:
        """A script of the store's."""
        if self.world.is_async:
            return await run_async(script, self.connection)
        return await asyncio.to_thread(run, script, self.connection)

    async def call(self, function: Callable[..., R], *arguments: Any) -> R:
        """A function of a Connection."""
        if self.world.is_async:
            result: R = await self.connection.run_sync(function, *arguments)
            return result
        return await asyncio.to_thread(function, self.connection, *arguments)

    async def work(self, what: str) -> None:
        """The business: one row."""
        await self.call(lambda db: db.execute(text("INSERT INTO effects (what) VALUES (:what)"), {"what": what}))

    async def commit(self) -> None:
        await self.call(Connection.commit)

    async def rollback(self) -> None:
        await self.call(Connection.rollback)


class World:
    """An engine with a store in it, and what looks at both from outside."""

    def __init__(self, flavour: str, url: str, tables: IdempotencyTables = DEFAULT) -> None:
        self.flavour = flavour
        database, stack, *level = flavour.split("-")
        self.is_sqlite = database == "sqlite"
        self.is_postgres = database == "postgres"
        self.is_async = stack == "async"
        self.level = level[0].replace("_", " ").upper() if level else ""
        self.url = url
        self.tables = tables
        self.engine = self.make_engine()
        self.auditor: Engine = sync_engine(sync_url(url))
        self.store: Store

    @property
    def has_snapshots(self) -> bool:
        """Whether a local transaction is barred from what others have changed since it began."""
        return self.is_postgres and self.level in ("REPEATABLE READ", "SERIALIZABLE")

    def make_engine(self, **options: Any) -> Any:
        """Another engine of the flavour: that of another process."""
        options = {**({"isolation_level": self.level} if self.level else {}), **options}
        return async_engine(self.url, **options) if self.is_async else sync_engine(self.url, **options)

    async def __aenter__(self) -> "World":
        try:
            await asyncio.to_thread(self._make_business_table)
            self.store = await self.prepare()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self.dispose(self.engine)
        self.auditor.dispose()

    async def dispose(self, engine: Any) -> None:
        if self.is_async:
            await engine.dispose()
        else:
            engine.dispose()

    async def prepare(self, tables: IdempotencyTables | None = None) -> Store:
        """The store, with its table made and checked."""
        engine: Engine = self.engine.sync_engine if self.is_async else self.engine
        store = check_engine(engine, tables or self.tables)
        with errors_told(engine, store):
            async with self.transaction() as transaction:
                await transaction.call(make_table, store)
        return store

    async def another_store(self, name: str) -> Store:
        """A second one, with a table of its own."""
        return await self.prepare(IdempotencyTables(name))

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """A connection out of the pool; what is not committed at the end is rolled back."""
        if self.is_async:
            async with self.engine.connect() as connection:
                yield Transaction(self, connection)
            return
        connection = await asyncio.to_thread(self.engine.connect)
        try:
            yield Transaction(self, connection)
        finally:
            await asyncio.to_thread(connection.close)

    async def do(self, script: Generator[Step, Any, R]) -> R:
        """A script that is a local transaction of its own."""
        async with self.transaction() as transaction:
            return await transaction.run(script)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Callable[[int], list[str]]]:
        """What was told on the store's channel since, as soon as it is so many; nothing where there is none."""
        if self.store.channel is None:
            yield lambda count: []
            return
        with psycopg.connect(self.url.replace("+psycopg", ""), autocommit=True) as listener:
            listener.execute(f"LISTEN {self.store.channel}")
            told: list[str] = []

            def notified(count: int) -> list[str]:
                for _ in range(2):  # what was told before comes with the answers
                    listener.execute("SELECT 1")
                wanted = max(0, count - len(told))
                told.extend(each.payload for each in listener.notifies(timeout=wanted * 20, stop_after=wanted))
                return told

            yield notified

    async def claimed(self, claim: Claim) -> Held:
        """A claim that nothing stands in the way of."""
        held = await self.do(self.store.claim(claim))
        assert isinstance(held, Held)
        return held

    async def read(self, key_hash: bytes) -> Record:
        """The record, which is there."""
        record = await self.do(self.store.read(key_hash))
        assert record is not None
        return record

    async def write(self, claim: Claim, outcome: Outcome, met: Record | None = None) -> Record:
        """What an atomic run without work leaves."""
        async with self.transaction() as transaction:
            await transaction.run(self.store.meet(claim.key_hash, 1_000))
            await transaction.run(self.store.write(claim, met, outcome, commit=True))
        return await self.read(claim.key_hash)

    def query(self, sql: str, **values: Any) -> list[tuple[Any, ...]]:
        """What others see."""
        with self.auditor.connect() as db:
            return [tuple(row) for row in db.execute(text(sql), values)]

    def change(self, sql: str, **values: Any) -> None:
        """What the store would not do."""
        with self.auditor.begin() as db:
            db.execute(text(sql), values)

    def lapse(self, key_hash: bytes) -> None:
        """The time of the lease goes by."""
        with self.auditor.begin() as db:
            lapse_row(db, self.tables, key_hash)

    def expire(self, key_hash: bytes) -> None:
        """The time of the answer goes by."""
        with self.auditor.begin() as db:
            expire_row(db, self.tables, key_hash)

    def effects(self) -> list[str]:
        """The rows of the business that stayed."""
        return [what for (what,) in self.query("SELECT what FROM effects ORDER BY what")]

    def _make_business_table(self) -> None:
        with self.auditor.begin() as db:
            if self.is_sqlite:
                db.exec_driver_sql("PRAGMA journal_mode = WAL")
            db.execute(text("CREATE TABLE IF NOT EXISTS effects (what varchar(100))"))
