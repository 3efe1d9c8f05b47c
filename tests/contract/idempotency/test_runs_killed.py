"""Processes that are killed at every point of a request: never two effects, and the record says what there is.

Cases 38 and 39. What cannot be told apart, as during a COMMIT, is either way: the record decides what a repeat does.
"""

import asyncio
import os
import subprocess
import time

import pytest

from participant_sdk.idempotency.errors import InProgress, RunUnknown
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.record import State
from participant_sdk.idempotency.replay import Replay
from participant_sdk.idempotency.testing import CRASH_VARIABLE, Point
from tests import forks
from tests.contract.idempotency.crash_program import operation_of
from tests.contract.idempotency.runs_world import ANSWER, Desk, Working, desk_of
from tests.contract.idempotency.world import World

NEVER = "never"
MODES = (("atomic", "auto"), ("leased", "auto"), ("leased", "never"))


def killed(world: World, mode: str, take_over: str, point: str) -> str:
    """What the process printed before it was killed."""
    program = ["tests.contract.idempotency.crash_program", world.flavour, world.url, mode, take_over]
    environment = dict(os.environ) if point == NEVER else {**os.environ, CRASH_VARIABLE: point}
    with forks.start(program, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        assert process.wait(60) == (0 if point == NEVER else -9), printed
        return printed.strip()


async def repeated(desk: Desk, operation: Operation) -> Working | Replay | RunUnknown:
    """What a repeat is given, once the dead one's connection and lease are over."""
    ends_at = time.monotonic() + 60
    while True:
        try:
            return await desk.begin(operation)
        except InProgress:
            assert time.monotonic() < ends_at
            await asyncio.sleep(0.02)
        except RunUnknown as unknown:
            return unknown


@pytest.mark.parametrize("point", [*(point.value for point in Point), NEVER])
@pytest.mark.parametrize(("mode", "take_over"), MODES)
@pytest.mark.parametrize("flavour", ["sqlite-sync", "sqlite-async", "postgres-sync", "mariadb-async"], indirect=True)
async def test_killed_at(world: World, mode: str, take_over: str, point: str) -> None:
    if point == Point.DURING_COMMIT and (world.is_sqlite or world.flavour.startswith("mariadb-async")):
        pytest.skip("the COMMIT of this driver cannot be cut in the middle")
    operation = operation_of(mode, take_over)
    printed = killed(world, mode, take_over, point)
    async with desk_of(world) as desk:
        found = await repeated(desk, operation)
        record = await desk.record(operation)
        effects = world.effects()
        if point in (Point.AFTER_BUSINESS_COMMIT, Point.BEFORE_ANSWER, NEVER):
            assert isinstance(found, Replay)
            assert printed == ("ran" if point == NEVER else "")
        elif point != Point.DURING_COMMIT:
            assert not isinstance(found, Replay)
        match found:
            case Replay():
                assert found.answer == ANSWER
                assert effects == ["order"]
                assert record is not None
                assert record.state is State.SUCCEEDED
            case RunUnknown():
                assert (mode, take_over) == ("leased", "never")
                assert point in (Point.AFTER_CLAIM, Point.BEFORE_BUSINESS_COMMIT, Point.DURING_COMMIT)
                assert effects == []
                assert record is not None
                assert record.state is State.UNKNOWN
            case Working():
                assert take_over == "auto" or point == Point.BEFORE_CLAIM
                assert effects == []
                claimed = mode == "leased" and point != Point.BEFORE_CLAIM
                assert found.run.attempt == (2 if claimed else 1)
                async with found as run:
                    await run.work()
                    await run.succeed()
        if not isinstance(found, RunUnknown):
            assert await desk.replayed(operation) == ANSWER
            assert world.effects() == ["order"]
