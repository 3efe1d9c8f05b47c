"""One request in a process of its own, which kills itself at one point of it.

    python -m tests.contract.idempotency.crash_program FLAVOUR URL MODE TAKE_OVER POINT

It prints "ran" or "replayed" when it gets to its end.
"""

import asyncio
import dataclasses
import os
import signal
import sys
from typing import Any

import psycopg
import pymysql

from participant_sdk.idempotency.machine import TakeOver
from participant_sdk.idempotency.operation import Mode, Operation
from participant_sdk.idempotency.replay import Replay
from tests.contract.idempotency.runs_world import ATOMIC, desk_of
from tests.contract.idempotency.world import World

POINTS = ("before the claim", "after the claim", "before the commit", "during the commit", "after the commit", "never")


def operation_of(mode: str, take_over: str) -> Operation:
    """With a lease that is over soon."""
    return dataclasses.replace(ATOMIC, mode=Mode(mode), take_over=TakeOver(take_over), lease_s=0.3)


def die() -> None:
    """As a power cut would have it."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_commit() -> None:
    """When the next COMMIT has been sent, and nothing was heard of it."""

    def waits(*arguments: Any, **named: Any) -> Any:
        die()

    psycopg.Connection.wait = waits  # type: ignore[method-assign]
    psycopg.AsyncConnection.wait = waits  # type: ignore[method-assign]
    pymysql.connections.Connection._read_ok_packet = waits  # type: ignore[attr-defined]


async def main(flavour: str, url: str, mode: str, take_over: str, point: str) -> None:
    """The request."""
    world = World(flavour, url)
    async with desk_of(world) as desk:
        operation = operation_of(mode, take_over)
        if point == "before the claim":
            die()
        found = await desk.begin(operation)
        if isinstance(found, Replay):
            print("replayed", flush=True)
            return
        async with found as run:
            if point == "after the claim":
                die()
            await run.work()
            if point == "before the commit":
                die()
            if point == "during the commit":
                die_in_commit()
            await run.succeed()
            if point == "after the commit":
                die()
        print("ran", flush=True)
    await world.dispose(world.engine)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
