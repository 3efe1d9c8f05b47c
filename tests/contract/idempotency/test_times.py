"""Time that goes by for a record, as users' tests have it: by the store, its operation and the key."""

from typing import Any

import pytest

from participant_sdk.idempotency.errors import InProgress
from participant_sdk.idempotency.fronts import MemoryFront
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.record import Record
from participant_sdk.idempotency.testing import async_expire, async_lapse, crash_at, expire, lapse
from tests.contract.idempotency.runs_world import ANSWER, ATOMIC, LEASED, NO, Desk, desk_of
from tests.contract.idempotency.world import World


class Awaited:
    """A front that has to be waited for, also to be emptied."""

    def __init__(self) -> None:
        self.front = MemoryFront()

    async def get(self, key_hash: bytes) -> Record | None:
        return self.front.get(key_hash)

    async def put(self, record: Record) -> None:
        self.front.put(record)

    async def flush(self) -> None:
        self.front.flush()


async def goes_by(desk: Desk, what: str, operation: Operation, key: str = "k1", tenant: str = "shop") -> None:
    """`lapse` or `expire`, of the desk's stack."""
    flavours: dict[str, Any] = {"lapse": (lapse, async_lapse), "expire": (expire, async_expire)}
    await desk.call(flavours[what][desk.world.is_async], desk.idempotency, operation, key, tenant)


async def test_lapse_and_expire(world: World) -> None:
    front: Any = Awaited() if world.is_async else MemoryFront()
    async with desk_of(world, sweep=None, fronts=[front]) as desk:
        with crash_at("after_claim"):
            await desk.begun(LEASED)
        with pytest.raises(InProgress):
            await desk.begin(LEASED)
        with pytest.raises(LookupError, match="nothing that can expire"):
            await goes_by(desk, "expire", LEASED)
        await goes_by(desk, "lapse", LEASED)
        run = await desk.begun(LEASED)
        assert run.run.attempt == 2
        async with run:
            await run.succeed()
        with pytest.raises(LookupError, match="no run is in progress"):
            await goes_by(desk, "lapse", LEASED)
        assert await desk.replayed(LEASED) == ANSWER
        await goes_by(desk, "expire", LEASED)
        run = await desk.begun(LEASED)
        assert run.run.attempt == 1
        async with run:
            await run.succeed(NO)
        for key, tenant in (("k2", "shop"), ("k1", "another shop")):
            with pytest.raises(LookupError):
                await goes_by(desk, "expire", LEASED, key, tenant)
        assert await desk.replayed(ATOMIC) == NO
