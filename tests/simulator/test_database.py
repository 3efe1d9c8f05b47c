"""The simulated database does what the fence's real ones do: row locks, snapshots, savepoints, lost COMMITs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg import errors

from coordinator.delivery_messages import call_message, reply_of
from coordinator.model import BranchSpec, Outcome, Payload, Phase, Reply, Spec
from coordinator.model import Call as OwedCall
from participant_sdk.payload import BYTES
from participant_sdk.steps import Rollback
from tests.simulator.database_client import SimConnection, SimEngine, roll_back
from tests.simulator.database_server import DatabaseFaults, DatabaseServer, Session
from tests.simulator.handlers import MOVE, Business, payload_of
from tests.simulator.loop import SimLoop, World
from tests.simulator.participants import ParticipantNode, Service
from tests.simulator.sdk_clock import simulated_sdk
from tests.simulator.transactions import Flavour, Key

X: Key = ("row", "x")
Y: Key = ("row", "y")


class Town:
    """One process and one database."""

    def __init__(self, flavour: Flavour = Flavour.READ_COMMITTED, faults: DatabaseFaults | None = None) -> None:
        self.world = World(1)
        self.server = self.database("one", flavour, faults)
        self.loop = SimLoop(self.world, "process")
        self.engine = SimEngine(self.loop, self.server)

    def database(self, name: str, flavour: Flavour, faults: DatabaseFaults | None = None) -> DatabaseServer:
        """Another database."""
        rng = random.Random(name)
        return DatabaseServer(self.world, name, rng, flavour=flavour, faults=faults or DatabaseFaults())

    def run(self, *work: Coroutine[Any, Any, Any]) -> list[Any]:
        """Run these side by side, each to its end; what they gave, or the errors that they ended with."""
        tasks: list[asyncio.Task[Any]] = []
        self.loop.arrive(lambda: tasks.extend(map(self.loop.create_task, work)))
        assert self.world.run(lambda: bool(tasks) and all(task.done() for task in tasks), 100_000_000, 100_000)
        return [task.exception() or task.result() for task in tasks]


def insert(key: Key, value: object, session: Session) -> bool:
    return session.begun().insert(key, value)


def read(key: Key, session: Session) -> Any:
    return session.begun().read(key)


def add(key: Key, session: Session) -> int:
    local = session.begun()
    value = (local.lock(key) or 0) + 1
    local.write(key, value)
    return int(value)


def commit(session: Session) -> None:
    session.server.commit(session)


async def working(town: Town, work: Callable[[SimConnection], Coroutine[Any, Any, Any]], after_s: float = 0.0) -> Any:
    await asyncio.sleep(after_s)
    async with town.engine.connect() as connection:
        return await work(connection)


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("flavour", [Flavour.READ_COMMITTED, Flavour.SERIALIZABLE, Flavour.LOCKING])
def test_an_insert_waits_for_one_that_is_not_committed(flavour: Flavour, commits: bool) -> None:
    async def first(db: SimConnection) -> None:
        await db.ask(partial(insert, X, "first"))
        await asyncio.sleep(0.5)
        await db.ask(commit if commits else roll_back)

    async def second(db: SimConnection) -> bool:
        inserted: bool = (await db.ask(partial(insert, X, "second")))[0]
        await db.ask(commit)
        return inserted

    town = Town(flavour)
    _, inserted = town.run(working(town, first), working(town, second, 0.1))
    if commits and flavour is Flavour.SERIALIZABLE:
        assert isinstance(inserted, errors.SerializationFailure)
    else:
        assert inserted is not commits
    assert town.server.tables.latest(X) == ("first" if commits else "second")
    assert town.server.counts["lock_wait"] == 1


def test_a_wait_for_a_lock_ends_with_an_error() -> None:
    async def first(db: SimConnection) -> None:
        await db.ask(partial(add, X))
        await asyncio.sleep(3)

    async def second(db: SimConnection) -> None:
        await db.ask(partial(add, X))

    town = Town()
    _, error = town.run(working(town, first), working(town, second, 0.1))
    assert isinstance(error, errors.LockNotAvailable)
    assert town.server.tables.latest(X) is None


def test_a_deadlock_is_found() -> None:
    async def both(one: Key, other: Key, db: SimConnection) -> None:
        await db.ask(partial(add, one))
        await asyncio.sleep(0.1)
        await db.ask(partial(add, other))
        await db.ask(commit)

    town = Town()
    ends = town.run(working(town, partial(both, X, Y)), working(town, partial(both, Y, X)))
    assert sorted(map(type, ends), key=str) == sorted([type(None), errors.DeadlockDetected], key=str)
    assert town.server.tables.latest(X) == town.server.tables.latest(Y) == 1


def test_what_was_read_is_as_it_was_or_commit_fails() -> None:
    async def reader(db: SimConnection) -> None:
        await db.ask(partial(read, X))
        await asyncio.sleep(0.5)
        assert (await db.ask(partial(read, X)))[0] is None
        await db.ask(partial(add, Y))
        await db.ask(commit, commits=True)

    async def writer(db: SimConnection) -> None:
        await db.ask(partial(add, X), commit)

    town = Town(Flavour.SERIALIZABLE)
    error, _ = town.run(working(town, reader), working(town, writer, 0.1))
    assert isinstance(error, errors.SerializationFailure)
    assert town.server.tables.latest(Y) is None


def test_a_swallowed_error_leaves_nothing_that_can_be_committed() -> None:
    async def swallows(db: SimConnection) -> str:
        await db.ask(partial(add, X), lambda session: session.begun().savepoint())
        with pytest.raises(ZeroDivisionError):
            await db.ask(lambda _session: 1 // 0)
        try:
            await db.ask(lambda session: session.begun().release())
        except psycopg.Error as error:
            return str(error.sqlstate)
        return "released"

    town = Town()
    assert town.run(working(town, swallows)) == ["25P02"]
    town = Town(Flavour.LOCKING)
    assert town.run(working(town, swallows)) == ["3B001"]  # all was rolled back, the savepoint included


def test_a_commit_lands_when_its_sender_has_given_it_up_and_the_next_run_waits_for_it() -> None:
    async def gives_up(db: SimConnection) -> None:
        town.server.faults.lands_later = 0.0
        await db.ask(partial(insert, X, "late"))
        town.server.faults.lands_later = 1.0
        await db.ask(commit, commits=True)

    async def again(db: SimConnection) -> bool:
        town.server.faults.lands_later = 0.0
        inserted: bool = (await db.ask(partial(insert, X, "again")))[0]
        await db.ask(commit)
        return inserted

    town = Town(faults=DatabaseFaults(later_ms=900, notice_ms=900))
    error, inserted = town.run(working(town, gives_up), working(town, again, 0.01))
    assert isinstance(error, psycopg.OperationalError)
    assert (inserted, town.server.tables.latest(X)) == (False, "late")
    assert town.server.counts["late_commit"] == 1


@pytest.mark.parametrize("applied", [True, False])
def test_a_lost_commit_is_applied_or_not(applied: bool) -> None:
    async def lost(db: SimConnection) -> None:
        await db.ask(partial(add, X))
        town.server.faults.lost_after, town.server.faults.lost_before = float(applied), float(not applied)
        await db.ask(commit, commits=True)

    town = Town()
    [error] = town.run(working(town, lost))
    assert isinstance(error, psycopg.OperationalError)
    town.world.run(lambda: False, 100_000_000, 1000)
    assert town.server.tables.latest(X) == (1 if applied else None)
    assert not town.server.tables.locks


def test_a_connection_that_was_lost_is_made_anew_once_it_was_rolled_back() -> None:
    async def goes_on(db: SimConnection) -> int:
        for fault in (1.0, 0.0):  # not before somebody has rolled back
            town.server.faults.lost_before = fault
            with pytest.raises(psycopg.OperationalError):
                await db.ask(partial(add, X))
        await db.run_sync(Rollback().perform)
        return int((await db.ask(partial(add, X)))[0])

    town = Town()
    assert town.run(working(town, goes_on)) == [1]


def test_a_crashed_process_holds_its_locks_until_the_server_notices() -> None:
    async def crashes(db: SimConnection) -> None:
        await db.ask(partial(add, X))
        town.loop.crash()

    town = Town()
    town.loop.on_crash = town.engine.crashed
    town.loop.arrive(lambda: town.loop.create_task(working(town, crashes)))
    town.world.run(lambda: not town.loop.alive, 1_000_000, 1000)
    assert X in town.server.tables.locks
    town.world.run(lambda: False, 10_000_000, 1000)
    assert not town.server.tables.locks
    assert town.server.tables.latest(X) is None
    town.world.close()


def asked(town: Town, node: ParticipantNode, registered: str) -> Reply:
    """What the coordinator makes of the answer to one Try."""
    xid = f"{town.world.now_ms:012x}7{0:019x}"
    spec = Spec(bytes.fromhex(xid), b"", 0, 1_000, (BranchSpec("bank", MOVE, Payload(payload_of("a", -1), BYTES)),))
    call = OwedCall(0, Phase.TRY, 1, 1_000)
    replies: list[Any] = []
    town.loop.arrive(node.receive_message, call_message(xid, spec, call), replies.append)
    assert town.world.run(lambda: bool(replies), 10_000_000, 10_000)
    return reply_of(0, Phase.TRY, replies[0], registered)


def test_an_answer_out_of_another_database_says_nothing() -> None:
    town = Town()
    other = town.database("other", Flavour.READ_COMMITTED)
    service = Service("bank", town.server, Business(random.Random(1)), 10_000)
    for server in (town.server, other):
        server.open_account("a", 10)
    with simulated_sdk(random.Random(1)):
        right = ParticipantNode(town.world, "right", town.loop, service, random.Random(1))
        assert asked(town, right, town.server.fence_id).outcome is Outcome.DONE
        # A process that was started on another database names that one.
        wrong = ParticipantNode(town.world, "wrong", town.loop, service, random.Random(1), server=other)
        assert asked(town, wrong, town.server.fence_id).outcome is Outcome.VIOLATION
        # One whose engine is led elsewhere later sees it, and does nothing.
        right.engine.server = other
        reply = asked(town, right, town.server.fence_id)
    assert (reply.outcome, reply.attention) == (Outcome.UNKNOWN, True)
    assert "not the one it was at the start" in reply.error
