"""Every way to end a run, in each mode: what stays of the work, and what a repeat is told."""

import dataclasses
from typing import Any

import pytest
from sqlalchemy import String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from participant_sdk.idempotency.current import current_run
from participant_sdk.idempotency.errors import AnswerNotStored, ConfigurationError, LeaseLost, RunUnknown
from participant_sdk.idempotency.guard import RunMisused
from participant_sdk.idempotency.inspection import AsyncInspection, Inspection
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.record import State
from tests.contract.idempotency.runs_world import ANSWER, ATOMIC, LEASED, MODES, NO, Working, desk_of, request_of
from tests.contract.idempotency.world import World


class Base(DeclarativeBase):
    pass


class Effect(Base):
    __tablename__ = "effects"
    what: Mapped[str] = mapped_column(String(100), primary_key=True)


pytestmark = pytest.mark.parametrize("operation", MODES, ids=lambda operation: operation.mode.value)


async def failing(run: Working) -> None:
    async with run:
        await run.work()
        raise ZeroDivisionError


async def left_open(run: Working) -> None:
    async with run:
        await run.work()


async def test_success_is_durable_and_replayed(world: World, operation: Operation) -> None:
    async with desk_of(world) as desk:
        async with await desk.begun(operation) as run:
            assert current_run() is run.run
            await run.work()
            await run.succeed()
            assert world.effects() == ["order"]
        assert current_run() is None
        assert await desk.replayed(operation) == ANSWER
        record = await desk.record(operation)
        assert record is not None
        assert (record.state, record.attempt) == (State.SUCCEEDED, 1)
        assert world.effects() == ["order"]


async def test_a_final_failure_leaves_its_answer_and_no_work(world: World, operation: Operation) -> None:
    async with desk_of(world) as desk:
        async with await desk.begun(operation) as run:
            await run.work()
            await run.do("fail_final", NO)
        assert world.effects() == []
        assert await desk.replayed(operation) == NO
        record = await desk.record(operation)
        assert record is not None
        assert record.state is State.FAILED_FINAL


async def test_an_exception_leaves_nothing_and_may_run_again(world: World, operation: Operation) -> None:
    async with desk_of(world) as desk:
        with pytest.raises(ZeroDivisionError):
            await failing(await desk.begun(operation))
        assert world.effects() == []
        record = await desk.record(operation)
        assert record is not None
        assert (record.state, record.reason) == (State.FAILED_RETRYABLE, "ZeroDivisionError")
        async with await desk.begun(operation) as again:
            assert again.run.attempt == 2
            await again.work("again")
            await again.succeed()
        assert world.effects() == ["again"]


async def test_a_run_that_is_left_open_is_told_so(world: World, operation: Operation) -> None:
    async with desk_of(world) as desk:
        with pytest.raises(RunMisused, match="without an outcome"):
            await left_open(await desk.begun(operation))
        assert world.effects() == []
        async with await desk.begun(operation) as again:
            await again.succeed()
            with pytest.raises(RunMisused, match="already"):
                await again.do("fail_final", NO)


async def test_an_answer_that_is_too_large_leaves_a_tombstone(world: World, operation: Operation) -> None:
    operation = dataclasses.replace(operation, answer_bytes_max=10)
    async with desk_of(world) as desk:
        async with await desk.begun(operation) as run:
            await run.work()
            await run.succeed()
        assert world.effects() == ["order"]
        with pytest.raises(AnswerNotStored):
            await desk.begin(operation)


async def test_unknown_never_runs_again(world: World, operation: Operation) -> None:
    async with desk_of(world) as desk:
        async with await desk.begun(operation) as run:
            await run.work()
            if operation is ATOMIC:
                with pytest.raises(ConfigurationError):
                    await run.do("unknown", "the bank did not answer")
                await run.do("fail_retryable")
                return
            await run.do("unknown", "the bank did not answer")
        assert world.effects() == []
        with pytest.raises(RunUnknown):
            await desk.begin(operation)


async def test_a_zombie_leaves_nothing(world: World, operation: Operation) -> None:
    if operation is ATOMIC:
        pytest.skip("nothing to take over")
    async with desk_of(world) as desk, desk_of(world, engine=world.make_engine()) as other:
        zombie = await desk.begun(operation)
        await zombie.work("zombie")
        if not (world.is_sqlite or world.has_snapshots):  # the zombie has the only lock for writing, or its record's
            desk.lapse()
            winner = await other.begun(operation)
            assert (winner.run.attempt, winner.run.fence > zombie.run.fence) == (2, True)
            await winner.work("winner")
            await winner.succeed()
            with pytest.raises(LeaseLost):
                await zombie.succeed()
            assert world.effects() == ["winner"]
        else:
            await zombie.do("fail_retryable")


async def test_a_run_that_an_operator_has_ended_leaves_nothing(world: World, operation: Operation) -> None:
    if operation is ATOMIC or world.is_sqlite or world.has_snapshots:
        pytest.skip("there is no record yet, or the run has the only lock for writing, or its record's")
    inspection: Any = (AsyncInspection if world.is_async else Inspection)(world.engine, tables=world.tables)
    async with desk_of(world) as desk:
        hanging = await desk.begun(operation)
        await hanging.work("hanging")
        record = await desk.record(operation)
        assert record is not None
        word = {"reason": "it hangs", "live": True}
        await desk.call(inspection.resolve, record.key_hash, State.FAILED_RETRYABLE, **word)
        again = await desk.begun(operation)
        assert (again.run.attempt, again.run.fence > hanging.run.fence) == (2, True)
        with pytest.raises(LeaseLost):
            await hanging.succeed()
        await again.work()
        await again.succeed()
        assert world.effects() == ["order"]
        assert await desk.replayed(operation) == ANSWER


async def test_the_derived_key_is_the_same_in_every_attempt(world: World, operation: Operation) -> None:
    async with desk_of(world) as desk:
        first = await desk.begun(operation)
        key = first.run.derived_key("charge")
        assert key != first.run.derived_key("refund")
        await first.do("fail_retryable")
        second = await desk.begun(operation)
        assert second.run.derived_key("charge") == key
        await second.succeed()
        third = await desk.begun(operation, request_of("k2"))
        assert third.run.derived_key("charge") != key
        await third.do("fail_retryable")


async def test_a_session_is_flushed_and_lets_its_objects_go(world: World, operation: Operation) -> None:
    async with desk_of(world) as desk:
        async with await desk.begun(operation) as run:
            session = await run.do("session")
            effect = Effect(what="from a session")
            session.add(effect)
            await run.succeed()
        assert effect.what == "from a session"
        assert world.effects() == ["from a session"]


async def test_leased_runs_hold_no_connection_before_their_work(world: World, operation: Operation) -> None:
    if operation is not LEASED:
        pytest.skip("an ATOMIC run is its connection")
    async with desk_of(world) as desk:
        run = await desk.begun(operation)
        pool = (world.engine.sync_engine if world.is_async else world.engine).pool
        assert pool.checkedout() == 0
        await run.succeed()
