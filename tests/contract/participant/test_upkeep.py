"""Purge and resolver in the background: when they run, what they tell, and that they end."""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import grpc
import pytest
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection

from participant_sdk import Call, ConfigurationError, Participant, upkeep_loops
from participant_sdk.upkeep import PurgeReport, Report, ResolveReport, Upkeep, UpkeepState
from tests.contract.participant.records import (
    COMMITTED,
    CONFIRMED,
    CONFIRMING,
    TRIED,
    Records,
    branch,
    counts,
    old_xid,
    stored,
)
from tests.contract.participant.world import DONE, TRY, WAIT_SECONDS, Debit, Gate, Held, World, new_xid
from tests.postgres import free_port

SOON = timedelta(seconds=1)

several = pytest.mark.parametrize("flavour", ["sqlite-sync", "postgres-async", "mariadb-sync"], indirect=True)
both_stacks = pytest.mark.parametrize("flavour", ["sqlite-sync", "sqlite-async"], indirect=True)


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    """Every thread of an upkeep ends with its participant."""
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name == "tricord-upkeep"] == []


class Reports:
    """The reports so far; `next` waits for one more."""

    def __init__(self) -> None:
        self.all: list[Report] = []
        self._changed = threading.Condition()

    def __call__(self, report: Report) -> None:
        with self._changed:
            self.all.append(report)
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(condition, WAIT_SECONDS)

        assert await asyncio.to_thread(wait)


@asynccontextmanager
async def second(
    world: World,
    coordinator: str | None,
    upkeep: Upkeep | None,
    bank_on: Callable[[Any], Participant] | None = None,
) -> AsyncIterator[Any]:
    """Another instance of the world's participant, on its database, which has an upkeep; what `start` returns."""
    other = World(world.flavour, world.url)
    if bank_on is not None:
        other.participant = bank_on(other.engine)
    settings: dict[str, Any] = {"coordinator": coordinator, "upkeep": upkeep}
    if other.is_async:
        other.serving = await other.participant.start_async("127.0.0.1:0", **settings)
    else:
        other.serving = await asyncio.to_thread(lambda: other.participant.start("127.0.0.1:0", **settings))
    other.channel = grpc.aio.insecure_channel(other.serving.address)
    try:
        yield other.serving
    finally:
        await other.close()


@several
async def test_both_run_in_the_background(world: World, records: Records) -> None:
    over = await branch(world, COMMITTED, await records.put(old_xid(), CONFIRMED))
    waiting = await branch(world, TRIED, await records.put(old_xid(days=1), CONFIRMING))
    reports = Reports()
    upkeep = Upkeep(purge_every=SOON, resolve_every=SOON, on_report=reports)
    async with second(world, records.endpoint, upkeep) as serving:
        await reports.until(lambda: {PurgeReport, ResolveReport} <= {type(report) for report in reports.all})
        assert stored(world) == {(waiting, 1)}
        assert world.status(waiting) == COMMITTED
        late = await branch(world, TRIED, await records.put(old_xid(days=2), CONFIRMED))
        another = await branch(world, COMMITTED, await records.put(old_xid(), CONFIRMED))
        assert (await world.call(TRY, await records.put(new_xid(), CONFIRMED))).outcome == DONE
        await reports.until(lambda: serving.upkeep.purged == 2)
        state: UpkeepState = serving.upkeep
    assert {(over, 1), (another, 1)}.isdisjoint(stored(world))
    assert world.status(late) == TRIED  # behind what was looked through; the next pass over everything finds it
    assert (state.purged, state.confirmed, state.cancelled, state.failed_rounds) == (2, 1, 0, 0)
    assert isinstance(state.last_purge, PurgeReport)
    assert isinstance(state.last_resolve, ResolveReport)
    rounds = [sum(isinstance(report, kind) for report in reports.all) for kind in (PurgeReport, ResolveReport)]
    assert rounds[0] >= state.purge_rounds > 1
    assert rounds[1] >= state.resolve_rounds >= 1
    assert counts(reports.all[0]) in ({"purged": 1}, {"confirmed": 1})


@both_stacks
@pytest.mark.parametrize("off", ["no upkeep", "neither", "no coordinator"])
async def test_switched_off(world: World, records: Records, off: str) -> None:
    upkeep = {"no upkeep": None, "neither": Upkeep(purge_every=None, resolve_every=None)}.get(off, Upkeep())
    async with second(world, None if off == "no coordinator" else records.endpoint, upkeep) as serving:
        assert serving.upkeep is None
        assert "tricord-upkeep" not in {thread.name for thread in threading.enumerate()}


@both_stacks
@pytest.mark.parametrize("only", ["purge", "resolve"])
async def test_one_of_them_switched_off(world: World, records: Records, only: str) -> None:
    await branch(world, COMMITTED, await records.put(old_xid(), CONFIRMED))
    await branch(world, TRIED, await records.put(old_xid(days=1), CONFIRMING))
    reports = Reports()
    every = {f"{name}_every": SOON if name == only else None for name in ("purge", "resolve")}
    async with second(world, records.endpoint, Upkeep(**every, on_report=reports)) as serving:  # type: ignore[arg-type]
        await reports.until(lambda: len(reports.all) >= 2)
        assert (serving.upkeep.purged, serving.upkeep.confirmed) == ((1, 0) if only == "purge" else (0, 1))
    assert {type(report) for report in reports.all} == {PurgeReport if only == "purge" else ResolveReport}


@both_stacks
async def test_a_coordinator_that_does_not_answer_is_told_once(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is asked more and more rarely; calls go on meanwhile. An on_report that fails stops nothing."""
    monkeypatch.setattr(upkeep_loops, "BACKOFF_SECONDS_MAX", 0.01)
    reports = Reports()

    def report(report: Report) -> None:
        reports(report)
        raise ZeroDivisionError

    upkeep = Upkeep(purge_every=None, resolve_every=SOON, on_report=report)
    xid = await branch(world, TRIED, old_xid())
    with caplog.at_level(logging.INFO, "tricord.participant"):
        async with second(world, f"127.0.0.1:{free_port()}", upkeep) as serving:
            await reports.until(lambda: len(reports.all) >= 3)
            assert (await world.call(TRY, new_xid())).outcome == DONE
            assert serving.upkeep.failed_rounds >= 3
            assert serving.upkeep.last_resolve.error.startswith("the coordinator cannot be asked: UNAVAILABLE")
    told = [text for text in caplog.messages if "resolve ended early" in text]
    assert len(told) == len({report.error for report in reports.all if isinstance(report, ResolveReport)})
    assert caplog.messages.count("participant bank: on_report has failed") >= 3
    assert world.status(xid) == TRIED


def test_failed_rounds_come_more_and_more_rarely() -> None:
    rounds = upkeep_loops.Rounds(None)  # type: ignore[arg-type]
    pauses = []
    for failures in range(12):
        rounds._failures[ResolveReport] = failures
        pauses.append(rounds._pause(ResolveReport, 60.0))
    assert all(0.9 * 60 * 2**n <= pause <= 1.1 * 60 * 2**n for n, pause in enumerate(pauses[:4]))
    assert all(540 <= pause <= 660 for pause in pauses[4:])
    rounds._failures[PurgeReport] = 5
    assert 3_240 <= rounds._pause(PurgeReport, 3_600.0) <= 3_960


@both_stacks
async def test_it_stops_where_it_waits(world: World, records: Records) -> None:
    reports = Reports()
    upkeep = Upkeep(purge_every=timedelta(hours=1), resolve_every=SOON, on_report=reports)
    async with second(world, records.endpoint, upkeep) as serving:
        await reports.until(lambda: len(reports.all) >= 1)
        await stopped_at_once(serving)


@pytest.mark.parametrize("flavour", ["sqlite-sync"], indirect=True)
async def test_it_may_be_stopped_out_of_its_own_report(world: World, records: Records) -> None:
    reports = Reports()

    def stop(report: Report) -> None:
        assert serving.stop()
        reports(report)

    async with second(world, records.endpoint, Upkeep(purge_every=None, resolve_every=SOON, on_report=stop)) as serving:
        await reports.until(lambda: len(reports.all) == 1)
        assert serving.upkeep.resolve_rounds == 1


@both_stacks
async def test_it_stops_while_the_coordinator_is_silent(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """And tells nothing of the question that it has given up."""
    await branch(world, TRIED, old_xid())
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        coordinator = f"127.0.0.1:{listener.getsockname()[1]}"
        async with second(world, coordinator, Upkeep(purge_every=None, resolve_every=SOON)) as serving:
            connections = [await asyncio.to_thread(listener.accept) for _ in ("registration", "upkeep")]
            await stopped_at_once(serving)
            assert serving.upkeep == UpkeepState()
            for connection, _ in connections:
                connection.close()
    assert [text for text in caplog.messages if "resolve" in text] == []


@both_stacks
async def test_it_stops_while_a_handler_runs(world: World, records: Records, caplog: pytest.LogCaptureFixture) -> None:
    """Which goes on, as a call does that has come from elsewhere, and may end within the grace."""
    xid = await branch(world, TRIED, await records.put(old_xid(), CONFIRMING))
    gate = Gate()
    upkeep = Upkeep(purge_every=None, resolve_every=SOON)
    async with second(world, records.endpoint, upkeep, slow_confirm(world, gate)) as serving:
        await gate.wait_reached()
        await stopped_at_once(serving)
        assert world.status(xid) == TRIED
        gate.opened.set()
    assert world.status(xid) == COMMITTED
    assert [text for text in caplog.messages if "owed" in text] == []


async def stopped_at_once(serving: Any) -> None:
    """Its upkeep; the rest of it goes on."""
    started_at = time.monotonic()
    upkeep = serving._attached._upkeep
    if isinstance(upkeep, upkeep_loops.TaskUpkeep):
        await upkeep.stop()
        assert upkeep._task.done()
        assert not upkeep._task.cancelled()
    else:
        await asyncio.to_thread(upkeep.stop)
        assert not upkeep._thread.is_alive()
    assert time.monotonic() - started_at < 1.0


def slow_confirm(world: World, gate: Gate) -> Callable[[Any], Participant]:
    """Makes a bank whose Confirm waits at the gate."""

    def on(engine: Any) -> Participant:
        bank = Participant("bank", engine)
        if world.is_async:

            @bank.action("debit")
            async def debit_async(call: Call[Debit], db: AsyncConnection) -> Held: ...  # type: ignore[empty-body]
            @debit_async.confirm
            async def _(call: Call[Debit], db: AsyncConnection) -> None:
                await asyncio.to_thread(gate.pass_through)

            @debit_async.cancel
            async def _(call: Call[Debit], db: AsyncConnection) -> None: ...
        else:

            @bank.action("debit")
            def debit(call: Call[Debit], db: Connection) -> Held: ...  # type: ignore[empty-body]
            @debit.confirm
            def _(call: Call[Debit], db: Connection) -> None:
                gate.pass_through()

            @debit.cancel
            def _(call: Call[Debit], db: Connection) -> None: ...

        return bank

    return on


@both_stacks
async def test_beside_a_server_of_the_program(world: World, records: Records) -> None:
    await branch(world, COMMITTED, await records.put(old_xid(), CONFIRMED))
    reports = Reports()
    upkeep = Upkeep(purge_every=SOON, resolve_every=None, on_report=reports)
    attached = world.serving._attached
    assert world.serving.upkeep is None
    attached.start_upkeep(records.endpoint, upkeep)
    with pytest.raises(ConfigurationError, match="has begun already"):
        attached.start_upkeep(records.endpoint, upkeep)
    await reports.until(lambda: len(reports.all) >= 1)
    assert attached.upkeep.purged == 1


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"purge_every": timedelta(milliseconds=999)}, r"purge_every is 0:00:00.999000, but must be 0:00:01 to 7 days"),
        ({"resolve_every": timedelta(days=8)}, r"resolve_every is 8 days, 0:00:00, but must be 0:00:01 to 7 days"),
        ({"resolve_after": timedelta(seconds=-1)}, r"resolve_after is -1 day, .* but must be 0 to 7 days"),
        ({"on_report": asyncio.sleep}, r"on_report is a coroutine function, but must be a plain one"),
        ({"batch": 0}, r"batch is 0, but must be 1 to 1000"),
        ({"batch": 1_001}, r"batch is 1001, but must be 1 to 1000"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ConfigurationError, match=pattern):
        Upkeep(**settings)
