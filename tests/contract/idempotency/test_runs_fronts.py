"""Repeats that a front answers, and the sweeper that an Idempotency brings, on every database."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import create_engine, event
from sqlalchemy.ext.asyncio import create_async_engine

from participant_sdk.errors import IdempotencyKeyReused
from participant_sdk.idempotency.errors import InProgress
from participant_sdk.idempotency.fronts import MemoryFront
from participant_sdk.idempotency.inspection import AsyncInspection, Filter, FrontUnavailable, Inspection
from participant_sdk.idempotency.moves import carry_out, carry_out_async
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.record import State
from participant_sdk.idempotency.redis_front import AsyncRedisFront, RedisFront
from participant_sdk.idempotency.sweepers import AsyncSweeper, Sweeper
from participant_sdk.idempotency.sweeping import Sweep, SweepReport
from tests.contract.idempotency.runs_world import ANSWER, ATOMIC, MODES, NO, Desk, Working, desk_of, request_of
from tests.contract.idempotency.world import World
from tests.redis import RedisServer


class Statements:
    """Counts what the engine takes out of its pool: without a connection nothing is asked."""

    def __init__(self, world: World) -> None:
        self.taken = 0
        engine = world.engine.sync_engine if world.is_async else world.engine
        event.listen(engine.pool, "checkout", self._take)

    def _take(self, *_: Any) -> None:
        self.taken += 1


def redis_of(world: World, url: str) -> Any:
    """A front in Redis for the world's stack."""
    if world.is_async:
        return AsyncRedisFront.connect(url, timeout_s=1)
    return RedisFront.connect(url, timeout_s=1)


async def close(desk: Desk, front: Any) -> None:
    await desk.call(front.close)


@pytest.mark.parametrize("operation", MODES, ids=lambda operation: operation.mode.value)
async def test_a_front_answers_repeats_without_the_database(world: World, operation: Operation) -> None:
    front = MemoryFront()
    async with desk_of(world, fronts=[front], sweep=None) as desk:
        run = await desk.begun(operation)
        async with run:
            await run.work()
            await run.succeed()
        statements = Statements(world)
        assert await desk.replayed(operation) == ANSWER
        with pytest.raises(IdempotencyKeyReused):
            await desk.begin(operation, request_of(payload=b"another request"))
        assert front.counts.hits == 2
        assert await desk.replayed(operation) == ANSWER
        assert statements.taken <= 1, "only the mismatch may look twice"
    assert world.effects() == ["order"]


@pytest.mark.parametrize("operation", MODES, ids=lambda operation: operation.mode.value)
async def test_nothing_is_put_before_its_commit_nor_unless_it_has_ended(world: World, operation: Operation) -> None:
    front = MemoryFront()
    async with desk_of(world, fronts=[front], sweep=None) as desk:
        run = await desk.begun(operation)
        async with run:
            await run.work()
            assert front.counts.stored == 0
            await run.do("fail_retryable", "not now")
        assert front.counts.stored == 0
        assert world.effects() == []
        run = await desk.begun(operation)
        async with run:
            await run.work()
            await run.do("fail_final", NO)
        assert front.counts.stored == 1
        assert await desk.replayed(operation) == NO
    assert world.effects() == []


async def test_what_the_database_replays_is_in_front_from_then_on(world: World) -> None:
    async with desk_of(world, sweep=None) as desk:
        run = await desk.begun(ATOMIC)
        async with run:
            await run.succeed()
    front = MemoryFront()
    async with desk_of(world, fronts=[front], sweep=None) as desk:
        assert await desk.replayed(ATOMIC) == ANSWER
        statements = Statements(world)
        assert await desk.replayed(ATOMIC) == ANSWER
        assert statements.taken == 0


async def test_what_was_read_before_a_new_run_is_not_put_over_its_end(world: World) -> None:
    front = MemoryFront()
    async with desk_of(world, fronts=[front], sweep=None) as desk:
        first = await desk.begun(ATOMIC)
        async with first:
            await first.succeed(NO)
        old = await desk.record()
        assert old is not None
        world.expire(old.key_hash)
        front.flush()
        second = await desk.begun(ATOMIC)
        async with second:
            await second.succeed()
        await keep(desk, old)  # by a thread that has stood still since it was read
        assert await desk.replayed(ATOMIC) == ANSWER
        assert front.counts.hits == 1


async def test_redis_behind_memory_serves_several_processes(world: World, redis_url: str) -> None:
    far, near, other_near = redis_of(world, redis_url), MemoryFront(), MemoryFront()
    async with desk_of(world, fronts=[near, far], sweep=None) as desk:
        run = await desk.begun(ATOMIC)
        async with run:
            await run.work()
            await run.succeed()
        async with desk_of(world, fronts=[other_near, far], sweep=None) as other:
            statements = Statements(world)
            assert await other.replayed(ATOMIC) == ANSWER
            assert (other_near.counts.misses, other_near.counts.stored) == (1, 1)
            assert await other.replayed(ATOMIC) == ANSWER
            assert other_near.counts.hits == 1
            assert statements.taken == 0
        await close(desk, far)


async def test_stores_in_two_databases_share_a_front_and_no_answers(world: World, other_url: Callable[[], str]) -> None:
    """With one namespace, as staging beside production, or a shard beside another."""
    url = other_url()
    engine: Any = create_async_engine(url) if world.is_async else create_engine(url)
    front = MemoryFront()
    async with (
        desk_of(world, fronts=[front], sweep=None) as desk,
        desk_of(world, engine=engine, fronts=[front], sweep=None) as other,
    ):
        async with await desk.begun(ATOMIC) as run:
            await run.succeed()
        async with await other.begun(ATOMIC) as run:
            await run.succeed(NO)
        assert (await desk.replayed(ATOMIC), await other.replayed(ATOMIC)) == (ANSWER, NO)
        assert front.counts.hits == 2
        replay = await desk.begin(ATOMIC)
        record = await desk.record()
        assert not isinstance(replay, Working)
        assert record is not None
        assert replay.record.key_hash == record.key_hash, "of the store, not of the front"


async def test_a_front_is_asked_where_nobody_has_called_start(world: World) -> None:
    front = MemoryFront()
    desk = Desk(world, world.engine, {"fronts": [front], "sweep": None})
    async with await desk.begun(ATOMIC) as run:
        await run.succeed()
    statements = Statements(world)
    assert await desk.replayed(ATOMIC) == ANSWER
    assert (front.counts.hits, statements.taken) == (1, 0)


@pytest.mark.parametrize("by", ["key", "tenant"])
async def test_what_is_purged_is_in_no_front_that_was_named(world: World, redis_url: str, by: str) -> None:
    near, far = MemoryFront(), redis_of(world, redis_url)
    inspection: Any = (AsyncInspection if world.is_async else Inspection)(
        world.engine, tables=world.tables, fronts=[near, far]
    )
    async with desk_of(world, fronts=[near, far], sweep=None) as desk:
        async with await desk.begun(ATOMIC) as run:
            await run.succeed(NO)
        assert await desk.replayed(ATOMIC) == NO
        old = await desk.record()
        assert old is not None
        if by == "key":
            await desk.call(inspection.purge, old.key_hash)
        else:
            assert await desk.call(inspection.purge_many, Filter(tenant="shop")) == 1
        await keep(desk, old)  # by a request that has stood still since it read the record
        async with await desk.begun(ATOMIC) as run:
            await run.work()
            await run.succeed()
        assert await desk.replayed(ATOMIC) == ANSWER
        await close(desk, far)
    assert world.effects() == ["order"]


async def keep(desk: Desk, record: Any) -> None:
    """Have a record put into the fronts, as one that the database has replayed."""
    moves = desk.idempotency.setup.keep(record)
    if desk.world.is_async:
        await carry_out_async(moves, desk.engine)
    else:
        await desk.call(carry_out, moves, desk.engine)


async def test_what_a_front_may_still_hold_is_not_deleted(world: World) -> None:
    far = redis_of(world, "redis://127.0.0.1:1")
    inspection: Any = (AsyncInspection if world.is_async else Inspection)(
        world.engine, tables=world.tables, fronts=[far]
    )
    async with desk_of(world, sweep=None) as desk:
        async with await desk.begun(ATOMIC) as run:
            await run.succeed()
        record = await desk.record()
        assert record is not None
        for purge, which in ((inspection.purge, record.key_hash), (inspection.purge_many, Filter(tenant="shop"))):
            with pytest.raises(FrontUnavailable, match="nothing is deleted"):
                await desk.call(purge, which)
        assert await desk.replayed(ATOMIC) == ANSWER
        await close(desk, far)


async def test_a_redis_that_is_away_costs_no_answer(world: World, redis_server: RedisServer, redis_url: str) -> None:
    far = redis_of(world, redis_url)
    async with desk_of(world, fronts=[far], sweep=None) as desk:
        run = await desk.begun(ATOMIC)
        async with run:
            await run.work()
            await run.succeed()
        redis_server.kill()
        try:
            for number in range(20):
                assert await desk.replayed(ATOMIC) == ANSWER
                run = await desk.begun(ATOMIC, request_of(f"away-{number}"))
                async with run:
                    await run.work(f"away {number}")
                    await run.succeed()
            assert far.counts.errors <= 5
        finally:
            redis_server.start()
        await close(desk, far)
    assert len(world.effects()) == 21


async def test_the_sweeper_runs_from_start_to_close(world: World) -> None:
    async with desk_of(world, sweep=None) as desk:
        assert desk.idempotency.sweeper is None
        for number in range(5):
            run = await desk.begun(ATOMIC, request_of(f"old-{number}"))
            async with run:
                await run.succeed()
    world.change(f"UPDATE {world.tables.records.name} SET expires_ms = 0")
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_report(report: SweepReport) -> None:
        loop.call_soon_threadsafe(done.set)

    settings = Sweep(every_s=0.1, on_report=on_report)
    async with desk_of(world, sweep=settings) as desk:
        run = await desk.begun(ATOMIC)
        async with run:
            await run.succeed()
        await asyncio.wait_for(done.wait(), 60)
        sweeper = desk.idempotency.sweeper
        while sweeper.state.deleted < 5:
            done.clear()
            await asyncio.wait_for(done.wait(), 60)
        assert sweeper.running
    assert not sweeper.running
    left = world.query(f"SELECT state FROM {world.tables.records.name} WHERE operation <> ''")
    assert left == [(int(State.SUCCEEDED),)]


async def begun_at_last(desk: Desk, operation: Operation, key: str) -> Working:
    """A run, as a client gets it that sends its request again."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await desk.begun(operation, request_of(key))
            except InProgress:
                continue


@pytest.mark.parametrize("operation", MODES, ids=lambda operation: operation.mode.value)
async def test_runs_over_what_has_expired_go_on_while_it_is_swept(world: World, operation: Operation) -> None:
    """A record may go at any moment between its being met and its being replaced.

    Who comes while it is being deleted is told to come again, as by another run of the key.
    """
    keys = [f"k{number}" for number in range(30)]
    async with desk_of(world, sweep=None) as desk:
        for key in keys:
            run = await desk.begun(operation, request_of(key))
            async with run:
                await run.succeed(NO)
        world.change(f"UPDATE {world.tables.records.name} SET expires_ms = 0")
        sweeper = (AsyncSweeper if world.is_async else Sweeper)(world.engine, world.tables, Sweep(page=5, batch=2))
        over = asyncio.Event()

        async def sweep() -> None:
            while not over.is_set():
                assert (await desk.call(sweeper.sweep)).error == ""

        sweeping = asyncio.ensure_future(sweep())
        try:
            for key in keys:
                run = await begun_at_last(desk, operation, key)
                async with run:
                    await run.work(key)
                    await run.succeed()
        finally:
            over.set()
            await sweeping
        assert [await desk.replayed(operation, request_of(key)) for key in keys] == [ANSWER] * len(keys)
    assert sorted(world.effects()) == sorted(keys)
