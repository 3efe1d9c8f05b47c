"""One request in a process of its own, which may be told by its environment to kill itself at one point of it.

    python -m tests.contract.idempotency.crash_program FLAVOUR URL MODE TAKE_OVER

It prints "ran" or "replayed" when it gets to its end.
"""

import asyncio
import dataclasses
import sys

from participant_sdk.idempotency.machine import TakeOver
from participant_sdk.idempotency.operation import Mode, Operation
from participant_sdk.idempotency.replay import Replay
from tests.contract.idempotency.runs_world import ATOMIC, desk_of
from tests.contract.idempotency.world import World


def operation_of(mode: str, take_over: str) -> Operation:
    """With a lease that is over soon."""
    return dataclasses.replace(ATOMIC, mode=Mode(mode), take_over=TakeOver(take_over), lease_s=0.3)


async def main(flavour: str, url: str, mode: str, take_over: str) -> None:
    """The request."""
    world = World(flavour, url)
    async with desk_of(world) as desk:
        found = await desk.begin(operation_of(mode, take_over))
        if isinstance(found, Replay):
            print("replayed", flush=True)
            return
        async with found as run:
            await run.work()
            await run.succeed()
        print("ran", flush=True)
    await world.dispose(world.engine)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
