"""Leases that are renewed, that end, and that another takes; and being told of ends by PostgreSQL."""

import asyncio
import dataclasses
import threading
import time
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

from participant_sdk.context import in_context
from participant_sdk.idempotency.current import current_run
from participant_sdk.idempotency.errors import InProgress, LeaseLost
from participant_sdk.idempotency.faults import LostRace
from participant_sdk.idempotency.machine import TakeOver
from participant_sdk.idempotency.operation import Mode, Operation
from participant_sdk.idempotency.record import State
from tests.contract.idempotency.runs_world import ANSWER, LEASED, Desk, desk_of, request_of, until
from tests.contract.idempotency.world import TABLE, World

SHORT = dataclasses.replace(LEASED, lease_s=0.6)
PATIENT = dataclasses.replace(LEASED, wait_s=60)


async def renewals(world: World, number: int) -> None:
    """So many times the lease's end has moved."""
    ends = set()

    def moved() -> bool:
        ends.update(world.query(f"SELECT lease_until_ms FROM {TABLE}"))
        return len(ends) > number

    await until(moved)


async def test_the_lease_of_a_long_run_is_renewed(world: World) -> None:
    async with desk_of(world) as desk:
        runs = [await desk.begun(SHORT, request_of(f"k{number}")) for number in range(3)]
        await renewals(world, 3 * 4)
        for number, run in enumerate(runs):
            with pytest.raises(InProgress):
                await desk.begin(SHORT, request_of(f"k{number}"))
            assert not run.run.lost
            await run.succeed()


async def test_without_a_heartbeat_the_first_lease_is_all(world: World) -> None:
    async with desk_of(world, poll_s=0.05) as desk:
        brief = dataclasses.replace(SHORT, heartbeat=False, lease_s=0.2)
        await desk.begun(brief)
        again = await desk.begun(dataclasses.replace(brief, wait_s=60))
        assert again.run.attempt == 2
        await again.succeed()


async def test_no_lease_lasts_longer_than_somebody_waits(world: World) -> None:
    async with desk_of(world, poll_s=0.05) as desk:
        await desk.begun(LEASED, deadline_s=0.5)
        record = await desk.record(LEASED)
        assert record is not None
        assert record.lease_left_ms <= 500
        again = await desk.begun(PATIENT)
        assert again.run.attempt == 2
        await again.succeed()


async def test_a_run_is_told_that_it_has_lost_its_lease(world: World) -> None:
    async with desk_of(world) as desk, desk_of(world, engine=world.make_engine()) as other:
        told = threading.Event()
        run = await desk.begun(SHORT)
        run.run.on_lost = told.set
        await until(lambda: taken_over(world))
        await until(told.is_set)
        assert run.run.lost
        await run.work("zombie")
        with pytest.raises(LeaseLost):
            await run.succeed()
        assert world.effects() == []
        assert not other.idempotency.setup.running


def taken_over(world: World) -> bool:
    """As by a run of another process."""
    world.change(f"UPDATE {TABLE} SET fence = fence + 1, attempt = attempt + 1")
    return True


async def test_a_heartbeat_outlives_its_connection(world: World) -> None:
    if not world.is_postgres:
        pytest.skip("connections are ended by PostgreSQL's own means")
    async with desk_of(world) as desk:
        run = await desk.begun(SHORT)
        await renewals(world, 2)
        renewing = "(query LIKE '%unnest%' OR query = 'COMMIT') AND pid <> pg_backend_pid()"
        last = f"SELECT pid FROM pg_stat_activity WHERE {renewing} ORDER BY state_change DESC LIMIT 1"
        assert world.query(f"SELECT pg_terminate_backend(({last}))") == [(True,)]
        await renewals(world, 3)
        assert not run.run.lost
        await run.succeed()


async def test_the_heartbeat_needs_no_connection_of_the_pool(world: World) -> None:
    engine = world.make_engine(pool_size=1, max_overflow=0, pool_timeout=0.1)
    async with desk_of(world, engine=engine) as desk:
        run = await desk.begun(SHORT)
        await renewals(world, 2)
        if world.is_sqlite or world.has_snapshots:  # one writer; and what is renewed after a snapshot is barred in it
            await run.succeed()
            return
        await run.work()
        await renewals(world, 2)
        await run.succeed()


@pytest.mark.parametrize(
    ("flavour", "own", "by_server"),
    [
        ("postgres-sync-repeatable_read", True, True),
        ("postgres-async-serializable", False, False),
        ("mariadb-sync", False, True),
        ("mariadb-async", True, False),
    ],
    indirect=["flavour"],
)
async def test_a_lease_outlives_work_that_sees_one_snapshot(world: World, own: bool, by_server: bool) -> None:
    """A renewal in the middle of it would bar its completion."""
    options: dict[str, Any] = {}
    if not world.is_postgres:
        options["connect_args"] = {"init_command": "SET SESSION innodb_snapshot_isolation = ON"}
        options["isolation_level"] = None if by_server else "REPEATABLE READ"
    elif by_server:
        level = world.level.lower().replace(" ", "\\ ")
        options["connect_args"] = {"options": f"-c default_transaction_isolation={level}"}
        options["isolation_level"] = None
    engine = world.make_engine(**options)
    async with desk_of(world, engine=engine) as desk:
        renew, renewals_seen = desk.idempotency.setup.store.renew, []

        def noted(held: Any) -> Any:
            kept = yield from renew(held)
            renewals_seen.append(kept)
            return kept

        desk.idempotency.setup.store.renew = noted
        run = await desk.begun(SHORT)
        await until(lambda: len(renewals_seen) > 1)
        connection = None
        if not own:
            connection = await desk.call(engine.connect)
            await run.do("join", connection)
        await desk.on(await run.do("connect"), lambda db: db.execute(text("SELECT * FROM effects")).all())
        await run.work()
        seen = len(renewals_seen)
        await until(lambda: len(renewals_seen) > seen + 3)  # more than a lease
        assert all(renewals_seen)  # it is still there
        with pytest.raises(InProgress):
            await desk.begin(SHORT)
        await run.succeed()
        if connection is not None:
            await desk.call(connection.close)
        assert world.effects() == ["order"]
        await desk.replayed(SHORT)


@pytest.mark.parametrize("flavour", ["postgres-sync", "postgres-async"], indirect=True)
async def test_a_snapshot_that_is_older_than_the_lease_is_not_joined(world: World) -> None:
    """It could not be completed in the end: better be told before the work."""
    kind: Any = psycopg.AsyncConnection if world.is_async else psycopg.Connection
    async with desk_of(world) as desk:
        raw = await desk.call(kind.connect, world.url.replace("+psycopg", ""))
        await desk.call(raw.set_isolation_level, psycopg.IsolationLevel.REPEATABLE_READ)
        run = await desk.begun(SHORT)
        await desk.call(raw.execute, "SELECT * FROM effects")
        await renewals(world, 2)
        with pytest.raises(LostRace, match="join a local transaction before its first statement"):
            await run.do("join", raw)
        await run.do("fail_retryable")
        again = await desk.begun(SHORT)
        await again.do("join", raw)
        await again.succeed()
        await desk.call(raw.close)


async def test_the_context_goes_into_threads(world: World) -> None:
    async with desk_of(world) as desk, await desk.begun(LEASED) as run:
        seen: list[Any] = []

        def look() -> None:
            seen.append(current_run())

        thread = threading.Thread(target=in_context(look))
        thread.start()
        await asyncio.to_thread(thread.join)
        assert seen == [run.run]
        await run.succeed()


@pytest.fixture
def listening(world: World) -> World:
    """Only PostgreSQL tells, under READ COMMITTED."""
    assert world.is_postgres
    assert not world.has_snapshots
    return world


def listens(world: World) -> bool:
    """Whether a connection is there that waits to be told."""
    return bool(listeners(world))


def listeners(world: World) -> list[int]:
    """The connections that wait to be told."""
    found = world.query("SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()")
    return [pid for (pid,) in found]


def is_awaited(world: World) -> bool:
    """Whether the run knows that somebody waits."""
    return world.query(f"SELECT waiters FROM {TABLE}") == [(True,)]


async def waiting(desk: Desk, world: World) -> "asyncio.Task[Any]":
    """One who waits, and whom only a notification can wake in time."""
    task = asyncio.create_task(desk.replayed(PATIENT))
    await until(lambda: is_awaited(world) and listens(world))
    return task


@pytest.mark.parametrize("apart", [False, True], ids=["its engine", "an engine around a pooler"])
async def test_an_end_is_told_long_before_the_next_look(listening: World, apart: bool) -> None:
    around = listening.make_engine(connect_args={"application_name": "around"}) if apart else True
    engine = listening.make_engine()
    async with desk_of(listening) as desk, desk_of(listening, engine=engine, poll_s=55, listen=around) as other:
        run = await desk.begun(LEASED)
        assert not listens(listening)
        task = await waiting(other, listening)
        asking = f"SELECT application_name FROM pg_stat_activity WHERE pid = {listeners(listening)[0]}"
        assert (listening.query(asking) == [("around",)]) is apart
        began_at = time.monotonic()
        await run.succeed()
        assert await task == ANSWER
        assert time.monotonic() - began_at < 20


@pytest.mark.parametrize("end", ["fail_retryable", "fail_final", "complete"])
async def test_every_end_is_told(listening: World, end: str) -> None:
    async with desk_of(listening) as desk, desk_of(listening, engine=listening.make_engine(), poll_s=55) as other:
        run = await desk.begun(LEASED)
        task = asyncio.create_task(other.begin(PATIENT))
        await until(lambda: is_awaited(listening) and listens(listening))
        began_at = time.monotonic()
        if end == "complete":
            connection = await run.do("connect")
            await run.do("complete", ANSWER, connection)
            await desk.call(connection.commit)
            await run.do("fail_retryable")  # has no effect any more
        else:
            await run.do(end, *([ANSWER] if end == "fail_final" else []))
        await task
        assert time.monotonic() - began_at < 20


async def test_nobody_is_told_where_nobody_waits(listening: World) -> None:
    async with desk_of(listening) as desk:
        run = await desk.begun(LEASED)
        with psycopg.connect(listening.url.replace("+psycopg", ""), autocommit=True) as spy:
            spy.execute(f'LISTEN "{TABLE}_ended"')
            await run.succeed()
            spy.execute(f"NOTIFY {TABLE}_ended, 'the last'")
            assert next(spy.notifies(timeout=60)).payload == "the last"
        assert not listens(listening)


async def test_waiting_goes_on_when_the_listening_connection_is_lost(listening: World) -> None:
    async with desk_of(listening) as desk, desk_of(listening, engine=listening.make_engine(), poll_s=0.3) as other:
        run = await desk.begun(LEASED)
        task = await waiting(other, listening)
        (pid,) = listeners(listening)
        listening.query(f"SELECT pg_terminate_backend({pid})")
        await until(lambda: listeners(listening) not in ([], [pid]))  # it listens again
        await run.succeed()
        assert await task == ANSWER


async def test_without_listening_looking_is_enough(listening: World) -> None:
    engine = listening.make_engine()
    async with desk_of(listening) as desk, desk_of(listening, engine=engine, poll_s=0.05, listen=False) as other:
        run = await desk.begun(LEASED)
        task = asyncio.create_task(other.replayed(PATIENT))
        await until(lambda: is_awaited(listening))
        assert not listens(listening)
        await run.succeed()
        assert await task == ANSWER


async def test_it_listens_no_longer_than_somebody_waits(listening: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("participant_sdk.idempotency.listening.IDLE_S", 0.2)
    async with desk_of(listening) as desk:
        run = await desk.begun(LEASED)
        task = await waiting(desk, listening)
        await run.succeed()
        assert await task == ANSWER
        await until(lambda: not listens(listening))
        run = await desk.begun(LEASED, request_of("k2"))
        task = asyncio.create_task(desk.replayed(PATIENT, request_of("k2")))
        await until(lambda: listens(listening))
        await run.succeed()
        assert await task == ANSWER


async def test_a_phased_run_goes_on_from_where_it_was(world: World) -> None:
    phased: Operation = dataclasses.replace(LEASED, mode=Mode.PHASED, heartbeat=False)
    async with desk_of(world) as desk:
        first = await desk.begun(phased)
        await first.work("one")
        await first.do("reach", "one", b"what one gave")
        await first.work("lost")
        if world.is_sqlite:  # its work has the only lock for writing
            await first.do("fail_retryable")
        else:
            desk.lapse()
        second = await desk.begun(phased)
        assert second.run.record is not None
        assert (second.run.record.recovery_point, second.run.record.phase_data) == ("one", b"what one gave")
        await second.work("two")
        await second.succeed()
        assert world.effects() == ["one", "two"]
        if not world.is_sqlite:
            with pytest.raises(LeaseLost):
                await first.do("reach", "two", b"")
        record = await desk.record(phased)
        assert record is not None
        assert record.state is State.SUCCEEDED


@pytest.mark.parametrize(
    ("mode", "take_over", "durable"),
    [
        (Mode.LEASED, TakeOver.AUTO, False),
        (Mode.LEASED, TakeOver.NEVER, True),
        (Mode.PHASED, TakeOver.AUTO, True),
    ],
)
async def test_a_claim_is_durable_where_the_work_has_effects_elsewhere(
    world: World, mode: Mode, take_over: TakeOver, durable: bool
) -> None:
    async with desk_of(world) as desk:
        run = await desk.begun(dataclasses.replace(LEASED, mode=mode, take_over=take_over))
        assert run.run.claim.durable == durable
        await run.succeed()
