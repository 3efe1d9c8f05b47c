"""A repeat whose answer is known to be there is read before anything is begun, and that is a hint alone."""

import tempfile
from typing import Any

import pytest
from psycopg.pq import Trace
from sqlalchemy import event

from participant_sdk.idempotency.errors import IdempotencyKeyReused
from participant_sdk.idempotency.repeats import FIRST_WEIGHS
from participant_sdk.idempotency.replay import Replay
from tests.contract.idempotency.runs_world import ANSWER, ATOMIC, MODES, Desk, desk_of, request_of
from tests.contract.idempotency.world import TABLE, World

POSTGRES = pytest.mark.parametrize("flavour", ["postgres-sync", "postgres-async"], indirect=True)


class Wire:
    """Round trips and statements on all connections of an engine, by libpq's own trace."""

    def __init__(self, engine: Any) -> None:
        self._connections: list[Any] = []
        event.listen(
            getattr(engine, "sync_engine", engine), "connect", lambda raw, record: self._connections.append(raw)
        )

    async def told(self, desk: Desk, key: str) -> tuple[Any, int, int]:
        """What `begin` gives, in how many round trips, with how many statements."""
        connections = [getattr(raw, "driver_connection", raw) for raw in self._connections]
        with tempfile.TemporaryFile("w+") as trace:
            for connection in connections:
                connection.pgconn.trace(trace.fileno())
                connection.pgconn.set_trace_flags(Trace.SUPPRESS_TIMESTAMPS)
            found = await desk.begin(ATOMIC, request_of(key))
            for connection in connections:
                connection.pgconn.untrace()
            trace.seek(0)
            lines = trace.read().splitlines()
        return (
            found,
            sum("\tReadyForQuery" in line for line in lines),
            sum("\tCommandComplete" in line for line in lines),
        )


async def run(desk: Desk, key: str) -> None:
    async with await desk.begun(ATOMIC, request_of(key)) as working:
        await working.work(key)
        await working.succeed()


@POSTGRES
async def test_a_known_repeat_is_one_select_and_a_first_request_pays_nothing_for_it(world: World) -> None:
    engine = world.make_engine()
    wire = Wire(engine)
    async with desk_of(world, engine=engine) as desk, desk_of(world) as elsewhere:
        await run(desk, "k0")
        first, trips, _ = await wire.told(desk, "k1")
        assert trips == 1
        async with first as working:
            await working.work("k1")
            await working.succeed()
        again, *cost = await wire.told(desk, "k1")
        assert (again.answer, *cost) == (ANSWER, 1, 1)

        await run(elsewhere, "k2")
        again, *cost = await wire.told(desk, "k2")
        assert (again.answer, *cost) == (ANSWER, 2, 4)  # BEGIN, the lock, the row; and ROLLBACK
        again, *cost = await wire.told(desk, "k2")
        assert (again.answer, *cost) == (ANSWER, 1, 1)


@POSTGRES
async def test_when_nearly_all_are_repeats_of_others_they_are_read_first(world: World) -> None:
    engine = world.make_engine()
    wire = Wire(engine)
    async with desk_of(world, engine=engine) as desk, desk_of(world) as elsewhere:
        keys = [f"k{number}" for number in range(3 + int(FIRST_WEIGHS))]
        for key in keys:
            await run(elsewhere, key)
        await run(desk, "mine")
        costs = [(await wire.told(desk, key))[1:] for key in keys]
        assert costs[0] == (2, 4)
        assert costs[-1] == (1, 1)
        for number in range(len(keys)):
            await run(desk, f"new {number}")
        found, trips, _ = await wire.told(desk, "a first one")
        assert trips == 1
        await found.do("fail_retryable")


@pytest.mark.parametrize("operation", MODES, ids=lambda operation: operation.mode.value)
async def test_a_known_key_may_have_no_answer_any_more(world: World, operation: Any) -> None:
    async with desk_of(world) as desk:
        async with await desk.begun(operation) as working:
            await working.work()
            await working.succeed()
        assert isinstance(await desk.begin(operation), Replay)
        with pytest.raises(IdempotencyKeyReused):
            await desk.begin(operation, request_of(payload=b"another request"))
        world.change(f"UPDATE {TABLE} SET expires_ms = 1")
        async with await desk.begun(operation) as working:
            await working.work("once more")
            await working.succeed()
        assert isinstance(await desk.begin(operation), Replay)
        world.change(f"DELETE FROM {TABLE}")
        async with await desk.begun(operation) as working:
            await working.work("and again")
            await working.succeed()
        assert await desk.replayed(operation) == ANSWER
