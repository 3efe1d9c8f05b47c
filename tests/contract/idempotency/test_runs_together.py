"""Requests of one key that come at once, or while one runs: one run, and the others wait or are told to come back."""

import asyncio
import dataclasses
from typing import Any

import pytest
from sqlalchemy import event

from participant_sdk.idempotency.errors import IdempotencyKeyReused, InProgress, RunUnknown, StoreUnavailable
from participant_sdk.idempotency.machine import TakeOver
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.record import Answer, Record, State
from participant_sdk.idempotency.replay import Replay
from tests.contract.idempotency.runs_world import ANSWER, ATOMIC, LEASED, MODES, Desk, desk_of, request_of, until
from tests.contract.idempotency.world import World
from tests.engines import prepared_on

modes = pytest.mark.parametrize("operation", MODES, ids=lambda operation: operation.mode.value)
PATIENT = 60.0


def patient(operation: Operation) -> Operation:
    """It waits for as long as a slow machine may need."""
    return dataclasses.replace(operation, wait_s=PATIENT)


async def ordered(desk: Desk, operation: Operation, *, pause_s: float = 0.0) -> Answer:
    """One order, or its answer again."""
    found = await desk.begin(operation)
    if isinstance(found, Replay):
        return found.answer
    async with found as run:
        await run.work()
        await asyncio.sleep(pause_s)
        await run.succeed()
    return ANSWER


@modes
async def test_fifty_at_once_and_a_pool_of_five(world: World, operation: Operation) -> None:
    engine = world.make_engine(pool_size=5, max_overflow=0, pool_timeout=30)
    async with desk_of(world, engine=engine, waiters_per_key_max=50, poll_s=0.05) as desk:
        answers = await asyncio.gather(*(ordered(desk, patient(operation), pause_s=0.2) for _ in range(50)))
    assert answers == [ANSWER] * 50
    assert world.effects() == ["order"]


async def test_who_waits_for_a_run_of_this_process_asks_the_database_nothing(world: World) -> None:
    async with desk_of(world, waiters_per_key_max=50) as desk:
        run = await desk.begun(ATOMIC)
        await run.work()
        taken: list[Any] = []
        engine = getattr(desk.engine, "sync_engine", desk.engine)
        event.listen(engine.pool, "checkout", lambda *arguments: taken.append(arguments))
        waiting = [asyncio.create_task(desk.replayed(patient(ATOMIC))) for _ in range(20)]
        await waited_for(desk, 20)
        await run.succeed()
        assert await asyncio.gather(*waiting) == [ANSWER] * 20
        assert taken == []


async def test_nothing_is_prepared_where_the_driver_may_not(world: World) -> None:
    """As behind a pooler that gives each transaction another connection."""
    if not world.is_postgres:
        pytest.skip("only psycopg prepares")
    engine = world.make_engine(connect_args={"prepare_threshold": None})
    prepared = prepared_on(engine)
    async with desk_of(world, engine=engine) as desk:
        for operation in MODES:
            request = request_of(operation.mode.value)
            async with await desk.begun(operation, request) as run:
                await run.work()
                await run.succeed()
            assert await desk.replayed(operation, request) == ANSWER
    assert prepared == []


@modes
async def test_who_does_not_wait_is_told_to_come_back(world: World, operation: Operation) -> None:
    async with desk_of(world) as desk, desk_of(world, engine=world.make_engine()) as other:
        run = await desk.begun(operation)
        for each in (desk, other):
            if world.is_sqlite and operation is ATOMIC and each is other:
                continue  # it waits for the only lock for writing
            with pytest.raises(InProgress) as refused:
                await each.begin(operation)
            assert refused.value.retry_after_ms > 0
        await run.succeed()


@modes
async def test_no_waiter_holds_a_connection(world: World, operation: Operation) -> None:
    engine = world.make_engine(pool_size=1, max_overflow=0, pool_timeout=1)
    async with desk_of(world) as desk, desk_of(world, engine=engine, poll_s=0.05) as other:
        run = await desk.begun(operation)
        if world.is_sqlite and operation is ATOMIC:
            await run.succeed()
            return
        waiting = [asyncio.create_task(ordered(other, patient(operation))) for _ in range(8)]
        await waited_for(other, 8)
        for _ in range(5):  # each look is over at once
            assert await other.record(LEASED, key="another") is None
        await run.succeed()
        assert await asyncio.gather(*waiting) == [ANSWER] * 8


@modes
async def test_waiters_are_bounded(world: World, operation: Operation) -> None:
    async with desk_of(world, waiters_max=3, waiters_per_key_max=2, poll_s=0.05) as desk:
        run = await desk.begun(operation)
        waiting = [asyncio.create_task(ordered(desk, patient(operation))) for _ in range(2)]
        await waited_for(desk, 2)
        with pytest.raises(InProgress):
            await desk.begin(patient(operation))
        await run.succeed()
        assert await asyncio.gather(*waiting) == [ANSWER] * 2


@modes
async def test_a_wait_ends(world: World, operation: Operation) -> None:
    async with desk_of(world, poll_s=0.01) as desk:
        run = await desk.begun(operation)
        with pytest.raises(InProgress):
            await desk.begin(dataclasses.replace(operation, wait_s=0.1))
        with pytest.raises(InProgress):
            await desk.begin(patient(operation), deadline_s=0.1)
        assert not desk.idempotency.setup.waiting
        await run.succeed()


@modes
async def test_who_waits_runs_when_the_other_has_failed(world: World, operation: Operation) -> None:
    async with desk_of(world, poll_s=30) as desk:  # it is woken
        run = await desk.begun(operation)
        waiting = asyncio.create_task(ordered(desk, patient(operation)))
        await waited_for(desk, 1)
        await run.do("fail_retryable")
        assert await waiting == ANSWER
        assert world.effects() == ["order"]


@modes
async def test_another_request_is_refused_on_every_path(world: World, operation: Operation) -> None:
    async with desk_of(world) as desk:
        other = request_of(payload=b"another request")
        run = await desk.begun(operation)
        if operation is LEASED:
            with pytest.raises(IdempotencyKeyReused):
                await desk.begin(patient(operation), other)
        await run.do("fail_retryable")
        with pytest.raises(IdempotencyKeyReused):
            await desk.begin(operation, other)
        run = await desk.begun(operation)
        if operation is LEASED:
            desk.lapse()
            with pytest.raises(IdempotencyKeyReused):
                await desk.begin(operation, other)
        await run.succeed()
        with pytest.raises(IdempotencyKeyReused):
            await desk.begin(operation, other)
        elsewhere = await desk.begun(operation, request_of(tenant="another shop", payload=b"another request"))
        await elsewhere.succeed(Answer(ANSWER.codec, 200, (), b"theirs"))
        assert await desk.replayed(operation) == ANSWER


async def test_never_taken_over_is_unknown(world: World) -> None:
    operation = dataclasses.replace(LEASED, take_over=TakeOver.NEVER)
    async with desk_of(world) as desk:
        await desk.begun(dataclasses.replace(operation, heartbeat=False))
        desk.lapse()
        for _ in range(2):
            with pytest.raises(RunUnknown):
                await desk.begin(operation)
        record = await desk.record()
        assert record is not None
        assert record.state is State.UNKNOWN


async def test_taken_over_only_if_reentrant(world: World) -> None:
    seen: list[Record] = []

    def reentrant(record: Record) -> bool:
        seen.append(record)
        return len(seen) == 1

    operation = dataclasses.replace(LEASED, take_over=TakeOver.ONLY_IF_REENTRANT, reentrant=reentrant, heartbeat=False)
    async with desk_of(world) as desk:
        await desk.begun(operation)
        desk.lapse()
        second = await desk.begun(operation)
        assert second.run.attempt == 2
        desk.lapse()
        with pytest.raises(RunUnknown):
            await desk.begin(operation)
    assert [record.attempt for record in seen] == [1, 2]


async def test_attempts_are_bounded(world: World) -> None:
    operation = dataclasses.replace(LEASED, attempts_max=2, heartbeat=False)
    async with desk_of(world) as desk:
        for attempt in (1, 2):
            run = await desk.begun(operation)
            assert run.run.attempt == attempt
            desk.lapse()
        with pytest.raises(RunUnknown):
            await desk.begin(operation)


async def waited_for(desk: Desk, number: int) -> None:
    """Until so many wait."""
    await until(lambda: desk.idempotency.setup.waiting.number >= number)


async def test_nothing_runs_while_the_store_is_away(world: World) -> None:
    for operation in MODES:
        async with desk_of(world) as desk:
            world.change("DROP TABLE tricord_idempotency")
            with pytest.raises(StoreUnavailable):
                await desk.begin(operation)
            with pytest.raises(StoreUnavailable):
                await desk.record(operation)
            assert not desk.idempotency.setup.running
    assert world.effects() == []
