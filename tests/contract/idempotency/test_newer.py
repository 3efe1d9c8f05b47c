"""Two versions of a program on one table, as while it is rolled out: what the newer one has written is never run again.

A state, a codec or a fingerprint that this program does not know means that it cannot judge the record: the request is
refused, with an error that another try, by the newer program, ends.
"""

from typing import Any

import grpc
import pytest

from participant_sdk.idempotency.errors import NotComparable
from participant_sdk.idempotency.grpc_status import GrpcCodes
from participant_sdk.idempotency.inspection import Inspection
from participant_sdk.idempotency.problems import Answering
from participant_sdk.idempotency.sweepers import AsyncSweeper, Sweeper
from tests.contract.idempotency.runs_world import ATOMIC, LEASED, PHASED, desk_of
from tests.contract.idempotency.world import TABLE, World

pytestmark = pytest.mark.parametrize("flavour", ["sqlite-sync", "postgres-async", "mariadb-sync"], indirect=True)

NEWER = (("state", 9), ("codec", 9), ("fingerprint_version", 999))
"""Each of a kind that a later version may bring."""


@pytest.mark.parametrize("operation", [ATOMIC, LEASED, PHASED], ids=lambda operation: operation.mode.value)
@pytest.mark.parametrize(("column", "number"), NEWER)
async def test_a_record_of_a_newer_program(world: World, operation: Any, column: str, number: int) -> None:
    async with desk_of(world, sweep=None) as desk:
        run = await desk.begun(operation)
        async with run:
            await run.work()
            await run.succeed()
        world.change(f"UPDATE {TABLE} SET {column} = {number}")
        before = world.query(f"SELECT * FROM {TABLE}")
        for _ in range(2):
            with pytest.raises(NotComparable, match="was written by a newer program") as refused:
                await desk.begin(operation)
        if column != "fingerprint_version":
            with pytest.raises(NotComparable, match=f"its {column} {number} is not known here"):
                await desk.record(operation)
        assert world.query(f"SELECT * FROM {TABLE}") == before
        assert world.effects() == ["order"]
    assert refused.value.retryable
    problem = Answering().problem(refused.value)
    assert problem.status == 503
    assert b"retry-after" in dict(problem.headers)
    assert GrpcCodes().refusal(refused.value).code is grpc.StatusCode.FAILED_PRECONDITION


async def test_the_sweeper_leaves_it_and_operators_are_told(world: World) -> None:
    async with desk_of(world, sweep=None) as desk:
        run = await desk.begun(ATOMIC)
        async with run:
            await run.succeed()
        world.change(f"UPDATE {TABLE} SET state = 9, expires_ms = 0")
        report = await desk.call((AsyncSweeper if world.is_async else Sweeper)(world.engine, world.tables).sweep)
        assert (report.deleted, report.error) == (0, "")
        with pytest.raises(NotComparable):
            await desk.begin(ATOMIC)
    with pytest.raises(NotComparable, match="its state 9 is not known here"):
        Inspection(world.auditor).page()
    with pytest.raises(NotComparable, match="its state 9 is not known here"):
        Inspection(world.auditor).statistics()
