"""What a user may do to the local transaction of a run, and may not: no effect without its record, whatever he does."""

import asyncio
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from sqlalchemy import DDL, Column, Connection, MetaData, String, Table, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, registry

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.guard import RunMisused
from participant_sdk.idempotency.operation import Operation
from tests.contract.idempotency.runs_world import ATOMIC, LEASED, MODES, Desk, Working, desk_of, insert, request_of
from tests.contract.idempotency.world import World

SQL = "INSERT INTO effects (what) VALUES ('order')"


def session_of(world: World) -> Any:
    """A user's own."""
    return AsyncSession(world.engine) if world.is_async else Session(world.engine)


async def connection_of(desk: Desk, **options: Any) -> Any:
    """A user's own."""
    engine = desk.engine.execution_options(**options)
    return await engine.connect() if desk.world.is_async else await desk.call(engine.connect)


async def joined(desk: Desk, operation: Operation, on: Any) -> Working:
    """A run that works there."""
    working = await desk.begun(operation)
    await working.do("join", on)
    return working


@pytest.mark.parametrize("operation", MODES, ids=lambda operation: operation.mode.value)
async def test_a_joined_session_is_not_committed_by_the_work(world: World, operation: Operation) -> None:
    async with desk_of(world) as desk:
        session = session_of(world)
        working = await joined(desk, operation, session)
        await desk.call(session.execute, text(SQL))
        with pytest.raises(RunMisused, match=r"called commit\(\)"):
            await desk.call(session.commit)
        await working.do("fail_retryable")
        await desk.call(session.close)
        assert world.effects() == []
        again = await desk.begun(operation)
        await again.work()
        await again.succeed()
        assert world.effects() == ["order"]


@pytest.mark.parametrize("operation", MODES, ids=lambda operation: operation.mode.value)
@pytest.mark.parametrize("own", [True, False], ids=["own", "joined"])
async def test_a_commit_that_was_refused_is_followed_by_no_success(
    world: World, operation: Operation, own: bool
) -> None:
    async with desk_of(world) as desk:
        connection = None if own else await connection_of(desk)
        working = await desk.begun(operation) if own else await joined(desk, operation, connection)
        used = await working.do("connect")
        await desk.on(used, insert("order"))
        with pytest.raises(RunMisused):
            await desk.call(used.commit)
        with pytest.raises(RunMisused):
            await working.succeed()
        await working.do("fail_retryable")
        if connection is not None:
            await desk.call(connection.close)
        assert world.effects() == []


@pytest.mark.parametrize("operation", MODES, ids=lambda operation: operation.mode.value)
@pytest.mark.parametrize("own", [True, False], ids=["own", "joined"])
async def test_a_commit_as_sql_is_refused(world: World, operation: Operation, own: bool) -> None:
    """The connection stays as it was: nothing of that has come to the driver."""
    sayings: list[Callable[[Connection], Any]] = [
        lambda db: db.execute(text("COMMIT")),
        lambda db: db.exec_driver_sql("SELECT 1; commit"),
        lambda db: db.execute(DDL("ROLLBACK")),  # type: ignore[no-untyped-call]
    ]
    async with desk_of(world) as desk:
        connection = None if own else await connection_of(desk)
        for saying in sayings:
            working = await desk.begun(operation) if own else await joined(desk, operation, connection)
            used = await working.do("connect")
            await desk.on(used, insert("order"))
            with pytest.raises(RunMisused, match=r"the work executed (COMMIT|ROLLBACK): its local transaction ends"):
                await desk.on(used, saying)
            with pytest.raises(RunMisused):
                await working.succeed()
            await working.do("fail_retryable")
            assert world.effects() == []
        if connection is not None:
            await desk.on(connection, insert("after"))
            await desk.on(connection, sayings[0])
            await desk.call(connection.close)


@pytest.mark.parametrize("flavour", ["postgres-sync", "postgres-async"], indirect=True)
@pytest.mark.parametrize("operation", MODES, ids=lambda operation: operation.mode.value)
async def test_a_driver_connection_is_not_committed_by_the_work(world: World, operation: Operation) -> None:
    kind: Any = psycopg.AsyncConnection if world.is_async else psycopg.Connection
    async with desk_of(world) as desk:
        raw = await desk.call(kind.connect, world.url.replace("+psycopg", ""))
        for commit in (lambda: raw.commit(), lambda: raw.execute("COMMIT")):
            working = await joined(desk, operation, raw)
            await desk.call(raw.execute, SQL)
            with pytest.raises(RunMisused, match="its local transaction ends with its record"):
                await desk.call(commit)
            with pytest.raises(RunMisused):
                await working.succeed()
            await working.do("fail_retryable")
            assert world.effects() == []
        working = await joined(desk, operation, raw)
        block = raw.transaction()
        await desk.call(block.__aenter__ if world.is_async else block.__enter__)
        await desk.call(raw.execute, SQL)
        await desk.call(block.__aexit__ if world.is_async else block.__exit__, None, None, None)
        assert world.effects() == []  # it was a savepoint's
        await working.succeed()
        assert world.effects() == ["order"]
        await desk.call(raw.execute, SQL.replace("order", "more"))
        await desk.call(raw.commit)
        await desk.call(raw.close)
        assert world.effects() == ["more", "order"]


async def test_a_run_within_another_does_not_commit_for_it(world: World) -> None:
    """On one connection; nor is it free before the outer one has ended."""
    async with desk_of(world) as desk:
        if kind := world.is_postgres and (psycopg.AsyncConnection if world.is_async else psycopg.Connection):
            connection: Any = await desk.call(kind.connect, world.url.replace("+psycopg", ""))
        else:
            connection = await connection_of(desk)
        outer = await joined(desk, LEASED, connection)
        within = await desk.begun(LEASED, request_of("k2"))
        await within.do("join", connection)
        with pytest.raises(RunMisused, match=r"called commit\(\)"):
            await within.succeed()
        with pytest.raises(RunMisused, match=r"called commit\(\)"):
            await desk.call(connection.commit)
        await outer.do("fail_retryable")
        await desk.call(connection.commit)
        await desk.call(connection.close)


async def test_what_was_joined_may_be_committed_again_after_the_run(world: World) -> None:
    async with desk_of(world) as desk:
        connection = await connection_of(desk)
        working = await joined(desk, LEASED, connection)
        await desk.on(connection, insert("order"))
        await working.succeed()
        await desk.on(connection, insert("more"))
        await desk.call(connection.commit)
        await desk.call(connection.close)
        assert world.effects() == ["more", "order"]


@pytest.mark.parametrize("operation", MODES, ids=lambda operation: operation.mode.value)
async def test_a_session_that_was_rolled_back_by_the_work_goes_on(world: World, operation: Operation) -> None:
    async with desk_of(world) as desk:
        session = session_of(world)
        working = await joined(desk, operation, session)
        await desk.call(session.execute, text("INSERT INTO effects (what) VALUES ('undone')"))
        await desk.call(session.rollback)
        await desk.call(session.execute, text(SQL))
        await working.succeed()
        await desk.call(session.close)
        assert world.effects() == ["order"]
        await desk.replayed(operation)


async def test_a_session_is_joined_twice(world: World) -> None:
    async with desk_of(world) as desk:
        session = session_of(world)
        working = await joined(desk, ATOMIC, session)
        await desk.call(session.execute, text(SQL))
        await working.do("join", session)
        await working.succeed()
        await desk.call(session.close)
        assert world.effects() == ["order"]


@pytest.mark.parametrize("operation", MODES, ids=lambda operation: operation.mode.value)
async def test_autocommit_is_refused(world: World, operation: Operation) -> None:
    async with desk_of(world) as desk:
        connection = await connection_of(desk, isolation_level="AUTOCOMMIT")
        working = await desk.begun(operation)
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            async with working:
                await working.do("join", connection)
        await desk.call(connection.close)
        if operation is ATOMIC:
            connection = await connection_of(desk, isolation_level="AUTOCOMMIT")
            with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
                await desk.begin(operation, request_of("k2"), on=connection)
            await desk.call(connection.close)


@pytest.mark.parametrize("flavour", ["postgres-sync", "postgres-async"], indirect=True)
async def test_a_driver_connection_in_autocommit_is_refused(world: World) -> None:
    async with desk_of(world) as desk:
        kind: Any = psycopg.AsyncConnection if world.is_async else psycopg.Connection
        raw = await desk.call(kind.connect, world.url.replace("+psycopg", ""), autocommit=True)
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            await desk.begin(ATOMIC, on=raw)
        async with await desk.begun(LEASED) as working:
            with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
                await working.do("complete", working.run.request, raw)
            await working.do("fail_retryable")
        await desk.call(raw.close)


@pytest.mark.parametrize("flavour", ["postgres-sync"], indirect=True)
@pytest.mark.parametrize("operation", MODES, ids=lambda operation: operation.mode.value)
async def test_only_its_own_block_ends_a_driver_connection(world: World, operation: Operation) -> None:
    """psycopg refuses commit() and rollback() in it: the record would wait for a row that nobody lets go."""
    async with desk_of(world) as desk:

        def work() -> None:
            with psycopg.connect(world.url.replace("+psycopg", "")) as raw, raw.transaction():
                raw.execute(SQL)
                with desk.idempotency.begin(operation, request_of()) as run:
                    run.join(raw)

        with pytest.raises(ConfigurationError, match=r"transaction\(\) block"):
            await asyncio.to_thread(work)
        assert world.effects() == []


@pytest.mark.parametrize("flavour", ["postgres-sync", "sqlite-sync"], indirect=True)
async def test_a_session_with_work_in_two_databases_is_refused(world: World, other_url: Any) -> None:
    other = create_engine(other_url())
    table = Table("elsewhere", MetaData(), Column("what", String(20), primary_key=True))
    table.metadata.create_all(other)

    class Elsewhere:
        def __init__(self, what: str) -> None:
            self.what = what

    registry().map_imperatively(Elsewhere, table)
    try:
        async with desk_of(world) as desk:
            with Session(world.engine, binds={Elsewhere: other}) as session:
                working = await joined(desk, ATOMIC, session)
                session.add(Elsewhere("order"))
                with pytest.raises(ConfigurationError, match="another connection"):
                    async with working:
                        await working.succeed()
            with Session(binds={Elsewhere: other}) as session, pytest.raises(ConfigurationError, match="bind"):
                await desk.begin(ATOMIC, request_of("k2"), on=session)
            with other.connect() as db:
                assert db.execute(table.select()).all() == []
    finally:
        other.dispose()
