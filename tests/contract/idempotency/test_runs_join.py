"""Runs whose work is in what the user has: a Session, a Connection, or a connection of the driver."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from participant_sdk.idempotency.errors import ConfigurationError, InProgress, LeaseLost
from participant_sdk.idempotency.guard import RunMisused
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.record import State
from tests.contract.idempotency.runs_world import ANSWER, ATOMIC, LEASED, MODES, NO, Desk, desk_of, request_of
from tests.contract.idempotency.world import World

modes = pytest.mark.parametrize("operation", MODES, ids=lambda operation: operation.mode.value)
kinds = pytest.mark.parametrize("kind", ["session", "connection", "driver"])


@asynccontextmanager
async def theirs(desk: Desk, kind: str) -> AsyncIterator[Any]:
    """What the user has opened."""
    world = desk.world
    if kind == "driver":
        if not world.is_postgres:
            pytest.skip("only psycopg's connections are taken")
        dsn = world.url.replace("+psycopg", "")
        if world.is_async:
            async with await psycopg.AsyncConnection.connect(dsn) as raw:
                yield raw
        else:
            with psycopg.connect(dsn) as raw:
                yield raw
    elif world.is_async:
        async with AsyncSession(desk.engine) if kind == "session" else desk.engine.connect() as one:
            yield one
    else:
        one = Session(desk.engine) if kind == "session" else await asyncio.to_thread(desk.engine.connect)
        try:
            yield one
        finally:
            await asyncio.to_thread(one.close)


async def work(desk: Desk, on: Any, what: str) -> None:
    """The business, on what the user has."""
    await desk.call(
        on.execute, text(f"INSERT INTO effects (what) VALUES ('{what}')") if not is_driver(on) else raw(what)
    )


def raw(what: str) -> str:
    return f"INSERT INTO effects (what) VALUES ('{what}')"


def is_driver(on: Any) -> bool:
    return isinstance(on, psycopg.Connection | psycopg.AsyncConnection)


@kinds
@modes
async def test_the_user_commits(world: World, operation: Operation, kind: str) -> None:
    async with desk_of(world) as desk, theirs(desk, kind) as on:
        begun = {"on": on} if operation is ATOMIC else {}
        async with await desk.begun(operation, **begun) as run:
            await work(desk, on, "order")
            await run.do("complete", ANSWER, on)
            assert world.effects() == []
            await desk.call(on.commit)
        assert world.effects() == ["order"]
        assert await desk.replayed(operation) == ANSWER


@kinds
@modes
async def test_the_user_rolls_back(world: World, operation: Operation, kind: str) -> None:
    async with desk_of(world) as desk, theirs(desk, kind) as on:
        begun = {"on": on} if operation is ATOMIC else {}
        run = await desk.begun(operation, **begun)
        await run.__aenter__()
        await work(desk, on, "order")
        await run.do("complete", ANSWER, on)
        await desk.call(on.rollback)
        await run.__aexit__(ZeroDivisionError, ZeroDivisionError(), None)
        assert world.effects() == []
        async with await desk.begun(operation) as again:
            await again.succeed()


@kinds
@modes
async def test_the_run_commits_what_it_has_joined(world: World, operation: Operation, kind: str) -> None:
    async with desk_of(world) as desk, theirs(desk, kind) as on:
        async with await desk.begun(operation) as run:
            await run.do("join", on)
            await work(desk, on, "order")
            await run.succeed()
        assert world.effects() == ["order"]
        assert await desk.replayed(operation) == ANSWER


@modes
async def test_a_session_that_is_closed_before_the_answer_is_no_success(world: World, operation: Operation) -> None:
    async with desk_of(world) as desk, theirs(desk, "session") as on:
        run = await desk.begun(operation)
        await run.do("join", on)
        await work(desk, on, "order")
        await desk.call(on.close)
        with pytest.raises(RunMisused, match="closed or rolled back before the answer"):
            await run.succeed()
        await run.do("fail_retryable")
        again = await desk.begun(operation)
        await again.do("join", on)
        await desk.call(on.rollback)
        await work(desk, on, "what was done after all")
        await again.succeed()
        assert world.effects() == ["what was done after all"]


@kinds
@modes
async def test_the_run_rolls_back_what_it_has_joined(world: World, operation: Operation, kind: str) -> None:
    async with desk_of(world) as desk, theirs(desk, kind) as on:
        async with await desk.begun(operation) as run:
            await run.do("join", on)
            await work(desk, on, "order")
            await run.do("fail_final", NO)
        assert world.effects() == []
        assert await desk.replayed(operation) == NO


@kinds
async def test_a_zombie_that_completes_is_told_and_its_work_can_only_roll_back(world: World, kind: str) -> None:
    async with desk_of(world) as desk, theirs(desk, kind) as on:
        run = await desk.begun(LEASED)
        desk.lapse()
        other = await desk.begun(LEASED)
        await other.work("winner")
        await other.succeed()
        await work(desk, on, "zombie")
        with pytest.raises(LeaseLost):
            await run.do("complete", ANSWER, on)
        await desk.call(on.rollback)
        assert world.effects() == ["winner"]


async def test_several_keys_are_one_local_transaction_in_any_order(world: World) -> None:
    if world.is_sqlite:
        pytest.skip("one local transaction writes at a time, whatever its keys")
    both = [request_of("k1"), request_of("k2")]
    async with desk_of(world) as desk:
        one, other = ((AsyncSession if world.is_async else Session)(desk.engine) for _ in range(2))
        firsts = [await desk.begun(ATOMIC, both[0], on=one), await desk.begun(ATOMIC, both[1], on=other)]
        for request, session in ((both[1], one), (both[0], other)):
            with pytest.raises(InProgress):
                await desk.begin(ATOMIC, request, on=session)
        for run in firsts:
            await run.do("fail_retryable", "the other one has the other key")
        await desk.call(other.close)
        runs = [await desk.begun(ATOMIC, request, on=one) for request in both]
        for run in runs:
            await run.do("complete", ANSWER, one)
        await desk.call(one.commit)
        await desk.call(one.close)
        assert [await desk.replayed(ATOMIC, request) for request in both] == [ANSWER] * 2


@modes
async def test_another_database_is_refused(world: World, operation: Operation, other_url: Callable[[], str]) -> None:
    url = other_url()
    engine: Any = create_async_engine(url) if world.is_async else create_engine(url)
    async with desk_of(world) as desk:
        run = await desk.begun(operation)
        elsewhere = AsyncSession(engine) if world.is_async else Session(engine)
        with pytest.raises(ConfigurationError, match=r"another database|is ATOMIC"):
            await run.do("complete", ANSWER, elsewhere)
        with pytest.raises(ConfigurationError, match="another database"):
            await run.do("join", elsewhere)
        await desk.call(elsewhere.close)
        await run.succeed()
    await world.dispose(engine)


@modes
async def test_the_same_database_by_another_engine_is_taken(world: World, operation: Operation) -> None:
    engine = world.make_engine()
    async with desk_of(world) as desk:
        run = await desk.begun(operation)
        session = AsyncSession(engine) if world.is_async else Session(engine)
        await run.do("join", session)
        await desk.call(session.execute, text(raw("order")))
        await run.succeed()
        await desk.call(session.close)
    await world.dispose(engine)
    assert world.effects() == ["order"]


async def test_what_cannot_be_joined_is_refused(world: World) -> None:
    async with desk_of(world) as desk:
        run = await desk.begun(LEASED)
        with pytest.raises(ConfigurationError, match="not str"):
            await run.do("join", "a session")
        await run.do("fail_retryable")
        record = await desk.record(LEASED)
        assert record is not None
        assert record.state is State.FAILED_RETRYABLE


@kinds
@modes
async def test_the_user_commits_after_the_block(world: World, operation: Operation, kind: str) -> None:
    async with desk_of(world) as desk, theirs(desk, kind) as on:
        begun = {"on": on} if operation is ATOMIC else {}
        async with await desk.begun(operation, **begun) as run:
            await work(desk, on, "order")
            await run.do("complete", ANSWER, on)
        await desk.call(on.commit)
        assert world.effects() == ["order"]
        assert await desk.replayed(operation) == ANSWER
