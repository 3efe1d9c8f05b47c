"""Crashes that are simulated in this process: what they leave is what a process leaves that is killed there."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.errors import InProgress
from participant_sdk.idempotency.fronts import MemoryFront
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.record import State
from participant_sdk.idempotency.replay import Replay
from participant_sdk.idempotency.testing import CRASH_VARIABLE, Crashed, Point, crash_at, crashes
from participant_sdk.idempotency.testing.points import read_point
from participant_sdk.idempotency.words import words_of
from tests.contract.idempotency.runs_world import (
    ANSWER,
    ATOMIC,
    MODES,
    PHASED,
    Desk,
    Working,
    desk_of,
    insert,
    request_of,
    until,
)
from tests.contract.idempotency.world import TABLE, World

COMMITTED = (Point.AFTER_BUSINESS_COMMIT, Point.BEFORE_ANSWER)
CUTTABLE = ("postgres", "mariadb-sync")
ON_SQLITE = pytest.mark.parametrize("flavour", ["sqlite-sync", "sqlite-async"], indirect=True)
"""What is in memory, and what counts, is the same on every database."""


async def request(desk: Desk, operation: Operation, key: str) -> None:
    """From its beginning to its end."""
    run = await desk.begun(operation, request_of(key))
    async with run:
        await run.work(key)
        await run.succeed()


async def begun_at_last(desk: Desk, operation: Operation, key: str) -> Working | Replay:
    """Once the lease is over, and the server has seen that the connection is gone."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await desk.begin(operation, request_of(key))
            except InProgress:
                with suppress(LookupError):  # it is not PROCESSING
                    await asyncio.to_thread(desk.lapse, key)
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("operation", MODES, ids=lambda operation: operation.mode.value)
async def test_what_is_left_at_each_point(world: World, operation: Operation) -> None:
    points = [point for point in Point if point is not Point.DURING_COMMIT or world.flavour.startswith(CUTTABLE)]
    async with desk_of(world, sweep=None) as desk:
        for point in points:
            with crash_at(point) as crash:
                await request(desk, operation, point)
            assert crash.fired
            leased = operation is not ATOMIC and point is not Point.BEFORE_CLAIM
            if leased and point in (Point.AFTER_CLAIM, Point.BEFORE_BUSINESS_COMMIT):
                with pytest.raises(InProgress):
                    await desk.begin(operation, request_of(point))
            found = await begun_at_last(desk, operation, point)
            if point is not Point.DURING_COMMIT:
                assert isinstance(found, Replay) is (point in COMMITTED), point
            if isinstance(found, Working):
                assert world.effects().count(point) == 0
                assert found.run.attempt == (2 if leased else 1)
                async with found as run:
                    await run.work(point)
                    await run.succeed()
            assert await desk.replayed(operation, request_of(point)) == ANSWER
        assert world.effects() == sorted(points)


@ON_SQLITE
async def test_each_commit_of_a_phased_run_is_a_hit(world: World) -> None:
    async with desk_of(world, sweep=None) as desk:
        for hit in (1, 2, 3):
            key = f"k{hit}"
            with crash_at("after_business_commit", hit=hit, operation=PHASED.name):
                run = await desk.begun(PHASED, request_of(key))
                async with run:
                    for point in ("one", "two"):
                        await run.work(f"{point} {hit}")
                        await run.do("reach", point, b"")
                    await run.work(f"end {hit}")
                    await run.succeed()
            record = await desk.record(PHASED, key)
            assert record is not None
            assert record.recovery_point == (None, "one", "two", "two")[hit]
            assert record.state is (State.SUCCEEDED if hit == 3 else State.PROCESSING)
    assert world.effects() == ["end 3", "one 1", "one 2", "one 3", "two 2", "two 3"]


@pytest.mark.parametrize("operation", MODES, ids=lambda operation: operation.mode.value)
@pytest.mark.parametrize("point", ["before_business_commit", "after_business_commit"])
async def test_in_a_session_of_the_users(world: World, operation: Operation, point: str) -> None:
    async with desk_of(world, sweep=None) as desk:
        for way in ("join", "complete"):
            with crash_at(point):
                session: Any = AsyncSession(world.engine) if world.is_async else Session(world.engine)
                try:
                    on = session if operation is ATOMIC else None
                    run = await desk.begun(operation, request_of(way), on=on)
                    async with run:
                        if operation is not ATOMIC and way == "join":
                            await run.do("join", session)
                        await desk.on(session, insert(way)) if world.is_async else await desk.call(insert(way), session)
                        if way == "join":
                            await run.succeed()
                        else:
                            await run.do("complete", ANSWER, session)
                            await desk.call(session.commit)
                finally:
                    await desk.call(session.close)
            record = await desk.record(operation, way)
            done = point == "after_business_commit"
            assert (record is not None and record.state is State.SUCCEEDED) is done
            assert (way in world.effects()) is done


@ON_SQLITE
async def test_a_dead_process_does_nothing_and_a_new_one_knows_nothing(world: World) -> None:
    front = MemoryFront()
    async with desk_of(world, sweep=None, fronts=[front]) as desk:
        await request(desk, ATOMIC, "before")
        other = await desk.begun(replace(MODES[1], lease_s=0.1), request_of("other"))
        with crash_at("before_answer"):
            with pytest.raises(Crashed):
                await request(desk, ATOMIC, "dies")
            assert front.counts.stored == 2
            now_ms = words_of(world.auditor.dialect, world.tables).now_ms
            over = f"SELECT 1 FROM {TABLE} WHERE key_hash = :key AND lease_until_ms <= {now_ms}"
            await until(lambda: world.query(over, key=other.run.claim.key_hash))  # for nobody renews it
            for late in (request(desk, ATOMIC, "late"), other.succeed(), desk.record()):
                with pytest.raises(Crashed):
                    await late
        assert front.counts.entries == 0
        assert await desk.record(ATOMIC, "late") is None
        assert await desk.replayed(ATOMIC, request_of("before")) == ANSWER
        await request(desk, ATOMIC, "late")
    assert world.effects() == ["before", "dies", "late"]


def test_crashes_that_show_nothing_or_cannot_be() -> None:
    with (
        pytest.raises(AssertionError, match=r"crash_at\('after_claim'\): hit 0 times, and not 1"),
        crash_at("after_claim"),
    ):
        pass
    with pytest.raises(ConfigurationError, match="no crash point 'after_lunch'; there are before_claim, "):
        crash_at("after_lunch").__enter__()
    with pytest.raises(ConfigurationError, match="hit 0 is not 1 to"):
        crash_at("after_claim", hit=0).__enter__()
    nothing = pytest.raises(AssertionError, match="hit 0 times")
    with nothing, crash_at("after_claim"), pytest.raises(ConfigurationError, match="armed already, at after_claim"):
        crash_at("before_claim").__enter__()
    with pytest.raises(ZeroDivisionError), crash_at("before_claim"):
        raise ZeroDivisionError
    with pytest.raises(ExceptionGroup) as others, crash_at("before_claim"):
        raise BaseExceptionGroup("all", [Crashed(Point.BEFORE_CLAIM), ZeroDivisionError()])
    assert [type(error) for error in others.value.exceptions] == [ZeroDivisionError]


def test_the_setting_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_point("after_claim") == (Point.AFTER_CLAIM, 1)
    assert read_point("before_answer:12") == (Point.BEFORE_ANSWER, 12)
    for setting, text in (("", "no crash point ''"), ("after_claim:x", "stands a number"), ("after_claim:0", "hit 0")):
        with pytest.raises(ConfigurationError, match=text):
            read_point(setting)
    monkeypatch.setenv(CRASH_VARIABLE, "after_lunch")
    with pytest.raises(ConfigurationError, match=f"{CRASH_VARIABLE}.*no crash point 'after_lunch'"):
        crashes.arm_from_environment()


@pytest.mark.parametrize("flavour", ["sqlite-sync", "sqlite-async", "mariadb-async"], indirect=True)
async def test_a_commit_that_cannot_be_cut_is_said_so(world: World) -> None:
    async with desk_of(world, sweep=None) as desk:
        with pytest.raises(ConfigurationError, match=r"the COMMIT of .* cannot be cut"), crash_at("during_commit"):
            await request(desk, ATOMIC, "k")
    assert world.effects() == []
