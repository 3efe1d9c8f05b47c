"""A COMMIT's answer that is lost, tasks that are cancelled, databases that go away: never taken for a failure."""

import asyncio
import dataclasses
import gc
import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import event

from participant_sdk.idempotency.errors import InProgress, StoreUnavailable
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.record import State
from participant_sdk.idempotency.replay import Replay
from tests.contract.idempotency.runs_world import (
    ANSWER,
    ATOMIC,
    LEASED,
    MODES,
    PHASED,
    Desk,
    Working,
    desk_of,
    request_of,
    until,
)
from tests.contract.idempotency.world import TABLE, World
from tests.contract.proxy import Proxy

modes = pytest.mark.parametrize("operation", MODES, ids=lambda operation: operation.mode.value)


@pytest.fixture
def proxied(world: World) -> Iterator[tuple[World, Proxy, Any]]:
    """A world on PostgreSQL, a proxy before it, and an engine that goes through the proxy."""
    assert world.is_postgres
    with Proxy(world.url.replace("+psycopg", "")) as proxy:
        url, world.url = world.url, proxy.dsn.replace("postgresql:", "postgresql+psycopg:", 1)
        engine = world.make_engine()
        world.url = url
        yield world, proxy, engine


@modes
async def test_a_commit_whose_answer_is_lost_was_done(proxied: tuple[World, Proxy, Any], operation: Operation) -> None:
    world, proxy, engine = proxied
    async with desk_of(world, engine=engine) as desk:
        async with await desk.begun(operation) as run:
            await run.work()
            proxy.lose_next_answer()
            await run.succeed()
        assert proxy.lost == 1
        assert world.effects() == ["order"]
        assert await desk.replayed(operation) == ANSWER


@modes
async def test_a_commit_that_never_came_was_not_done(
    proxied: tuple[World, Proxy, Any], operation: Operation, caplog: pytest.LogCaptureFixture
) -> None:
    world, _, engine = proxied
    async with desk_of(world, engine=engine) as desk:
        run = await desk.begun(operation)
        await run.work()
        end_connections(world)
        with pytest.raises(StoreUnavailable):
            await run.succeed()
        assert [each.getMessage() for each in caplog.records if each.levelno > logging.WARNING] == []
        assert world.effects() == []
        async with await desk.begun(operation) as again:
            await again.work("again")
            await again.succeed()
        assert world.effects() == ["again"]


def lose_commit(world: World, proxy: Proxy, engine: Any) -> None:
    """The answer of the next COMMIT that is sent by itself."""

    def lose(connection: Any) -> None:
        if proxy.lost == 0:
            proxy.lose_next_answer()

    event.listen(engine.sync_engine if world.is_async else engine, "commit", lose)


def end_connections(world: World) -> None:
    """Of everybody that is in the middle of something."""
    idle = "state = 'idle in transaction' AND datname = current_database() AND pid <> pg_backend_pid()"
    world.query(f"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE {idle}")


@modes
async def test_of_a_joined_connection_too(proxied: tuple[World, Proxy, Any], operation: Operation) -> None:
    world, proxy, engine = proxied
    async with desk_of(world, engine=engine) as desk:
        run = await desk.begun(operation)
        theirs = await desk.call(engine.connect().start) if world.is_async else await desk.call(engine.connect)
        await run.do("join", theirs)
        await run.work()
        lose_commit(world, proxy, engine)
        await run.succeed()
        assert proxy.lost == 1
        assert world.effects() == ["order"]
        assert await desk.replayed(operation) == ANSWER
        with suppress(Exception):
            await desk.call(theirs.invalidate)
        with suppress(Exception):
            await desk.call(theirs.close)


async def test_a_recovery_point_whose_answer_is_lost_was_reached(proxied: tuple[World, Proxy, Any]) -> None:
    world, proxy, engine = proxied
    async with desk_of(world, engine=engine) as desk:
        async with await desk.begun(PHASED) as run:
            await run.work("one")
            lose_commit(world, proxy, engine)
            await run.do("reach", "one", b"data")
            assert proxy.lost == 1
            await run.work("two")
            end_connections(world)
            with pytest.raises(StoreUnavailable):
                await run.do("reach", "two", b"more")
        assert world.effects() == ["one"]
        again = await desk.begun(PHASED)
        assert again.run.record is not None
        assert again.run.record.recovery_point == "one"
        await again.succeed()


@modes
async def test_a_run_whose_task_is_cancelled_is_let_go(world: World, operation: Operation) -> None:
    if not world.is_async:
        pytest.skip("threads are not cancelled")
    async with desk_of(world) as desk:
        at_work = asyncio.Event()

        async def request() -> None:
            async with await desk.begun(operation) as run:
                await run.work()
                at_work.set()
                await asyncio.sleep(600)

        await cancelled(asyncio.create_task(request()), at_work)
        await ran_again(desk, operation)
        assert world.effects() == ["again"]


@modes
async def test_a_run_that_is_cancelled_while_it_commits_is_let_go_or_done(world: World, operation: Operation) -> None:
    if not world.is_async or world.is_sqlite:
        pytest.skip("threads are not cancelled, and SQLite's commit cannot be held up")
    operation = dataclasses.replace(operation, wait_s=60)
    async with desk_of(world, poll_s=0.05) as desk:
        for delay in (0.0, 0.001, 0.003, 0.01):
            at_work = asyncio.Event()

            async def request(at_work: asyncio.Event) -> None:
                async with await desk.begun(operation) as run:
                    await run.work()
                    at_work.set()
                    await run.succeed()

            task = asyncio.create_task(request(at_work))
            await at_work.wait()
            await asyncio.sleep(delay)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            found = await desk.begin(operation)
            if isinstance(found, Replay):
                assert world.effects() == ["order"]
            else:
                assert world.effects() == []
                await found.succeed()
            world.change("DELETE FROM effects")
            world.change(f"DELETE FROM {TABLE}")


async def cancelled(task: "asyncio.Task[Any]", at_work: asyncio.Event) -> None:
    await at_work.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def ran_again(desk: Desk, operation: Operation) -> None:
    """At once, or when the server has seen that the connection is gone."""
    ends_at = time.monotonic() + 30
    while True:
        try:
            found = await desk.begun(operation)
        except InProgress:
            assert time.monotonic() < ends_at
            await asyncio.sleep(0.02)
        else:
            async with found as run:
                await run.work("again")
                await run.succeed()
            return


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
@modes
async def test_whatever_leaves_the_block_lets_the_run_go(
    world: World, operation: Operation, error: type[BaseException]
) -> None:
    async with desk_of(world) as desk:
        run = await desk.begun(operation)
        await run.__aenter__()
        await run.work()
        await run.__aexit__(error, error(), None)
        await ran_again(desk, operation)
        assert world.effects() == ["again"]


async def test_the_store_that_cannot_be_reached(world: World) -> None:
    if not world.is_postgres:
        pytest.skip("one that nobody can connect to")
    proxy = Proxy(world.url.replace("+psycopg", ""))
    url, world.url = world.url, proxy.dsn.replace("postgresql:", "postgresql+psycopg:", 1)
    engine = world.make_engine()
    world.url = url
    async with desk_of(world, engine=engine) as desk:
        run = await desk.begun(LEASED)
        proxy.__exit__(None, None, None)
        for operation in MODES:
            with pytest.raises(StoreUnavailable) as away:
                await desk.begin(operation)
            assert away.value.retry_after_ms > 0
        await run.do("fail_retryable")  # it can be told to nobody; the lease will end it
    assert world.effects() == []


async def test_who_waits_is_not_turned_away_by_a_moment_without_the_store(proxied: tuple[World, Proxy, Any]) -> None:
    world, proxy, engine = proxied
    async with desk_of(world) as desk, desk_of(world, engine=engine, poll_s=0.02, listen=False) as other:
        run = await desk.begun(LEASED)
        task = asyncio.create_task(other.replayed(dataclasses.replace(LEASED, wait_s=60)))
        await until(lambda: other.idempotency.setup.waiting.number == 1)
        proxy.lose_next_answer()
        await until(lambda: proxy.lost == 1)
        await run.succeed()
        assert await task == ANSWER


async def test_a_record_says_why_it_failed(world: World) -> None:
    async with desk_of(world) as desk:
        run: Working = await desk.begun(ATOMIC)
        await run.do("fail_retryable", "the bank is closed")
        record = await desk.record()
        assert record is not None
        assert (record.state, record.reason) == (State.FAILED_RETRYABLE, "the bank is closed")


@modes
async def test_a_request_that_is_cancelled_while_it_claims_leaves_the_key_free(
    world: World, operation: Operation
) -> None:
    if not world.is_async:
        pytest.skip("threads are not cancelled")
    async with desk_of(world) as desk:
        for steps in range(12):
            task = asyncio.create_task(desk.begin(operation))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                found = await task
                assert isinstance(found, Working)
                await found.do("fail_retryable")
            await ran_again(desk, operation)
            await asyncio.to_thread(world.change, f"DELETE FROM {TABLE}")


@modes
async def test_a_run_that_nobody_has_any_more_does_not_bar_its_key(world: World, operation: Operation) -> None:
    if world.is_async:
        pytest.skip("a connection that is lost in an event loop is told as a warning")
    async with desk_of(world) as desk:

        def forget() -> None:
            desk.idempotency.begin(dataclasses.replace(operation, lease_s=0.3), request_of())
            gc.collect()

        await asyncio.to_thread(forget)
        await ran_again(desk, operation)
