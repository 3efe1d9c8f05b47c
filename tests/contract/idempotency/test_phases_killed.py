"""SIGKILL of a real process at every point of a phased run: each phase once, and the other side sees one key."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from participant_sdk.idempotency.errors import InProgress, RunUnknown
from participant_sdk.idempotency.machine import TakeOver
from participant_sdk.idempotency.operation import Mode, Operation
from participant_sdk.idempotency.record import State
from participant_sdk.idempotency.testing import CRASH_VARIABLE
from tests import forks
from tests.contract.idempotency.charger import Charger, charging
from tests.contract.idempotency.phased_program import IN_CALL, POINTS, payment, payment_async
from tests.contract.idempotency.shop import NAME, PHASED, Shop, shop_of
from tests.contract.idempotency.world import World

MODULE = "tests.contract.idempotency.phased_program"
PROCESS_S = 60.0
IN_ORDER, AFTER_ORDER, AFTER_CALL, AFTER_CHARGE = POINTS[:4]

pytestmark = pytest.mark.parametrize(
    "flavour",
    ["sqlite-sync", "sqlite-async", "postgres-sync", "postgres-async", "mariadb-sync", "mariadb-async"],
    indirect=True,
)


class Scene:
    """A world, somebody who charges, a process that dies, and another program that takes over."""

    def __init__(self, world: World, charger: Charger, shop: Shop) -> None:
        self.world, self.charger, self.shop = world, charger, shop

    async def die(self, point: str, payment_id: str = "p-1") -> None:
        """Another process dies there; then its lease ends."""
        stack = "async" if self.world.is_async else "sync"
        self.charger.kills = point == IN_CALL
        arguments = [MODULE, stack, self.world.url, self.charger.address, payment_id]
        environment = dict(os.environ) if point == IN_CALL else {**os.environ, CRASH_VARIABLE: point}
        with forks.start(arguments, env=environment) as process:
            assert await asyncio.to_thread(process.wait, PROCESS_S) == -signal.SIGKILL
        self.charger.kills = False
        with pytest.raises(InProgress):
            await self.pay(payment_id)
        self.shop.lapse(payment_id)

    async def pay(self, payment_id: str = "p-1", operation: Operation = PHASED, **settings: Any) -> str:
        """By the program of this process."""
        make: Any = payment_async if self.world.is_async else payment
        function = make(self.shop.store, self.charger.address, operation, **settings)
        said: str = await self.shop.call(function, payment_id, 5)
        return said


@pytest.fixture
async def scene(world: World) -> AsyncIterator[Scene]:
    with charging() as charger:
        async with shop_of(world) as shop:
            yield Scene(world, charger, shop)


async def test_wherever_a_process_dies_each_phase_is_done_once_and_the_charge_has_one_key(scene: Scene) -> None:
    for number, point in enumerate(POINTS):
        payment_id = f"p-{number}"
        await scene.die(point, payment_id)
        done = scene.world.effects()
        assert done.count(f"order {payment_id}") == (point != IN_ORDER)
        said = await scene.pay(payment_id)
        assert said == f"charge-{number}"
        assert await scene.pay(payment_id) == said
        effects = [effect for effect in scene.world.effects() if payment_id in effect.split()]
        assert effects == [f"order {payment_id}", f"paid {payment_id} {said}"]
        assert len(scene.charger.charged) == number + 1
        assert (await scene.shop.record(payment_id)).attempt == 2
    asked_twice = [count for count in scene.charger.asked.values() if count == 2]
    assert len(asked_twice) == len({IN_CALL, AFTER_CALL})


async def test_a_charge_that_cannot_be_repeated_ends_unknown_and_nothing_is_charged_twice(scene: Scene) -> None:
    await scene.die(AFTER_CHARGE, "p-1")
    assert await scene.pay("p-1", repeatable=False) == "charge-0"
    scene.charger.fails = 1
    with pytest.raises(Exception, match="503"):
        await scene.pay("p-2", repeatable=False)
    for _ in range(2):
        with pytest.raises(RunUnknown):
            await scene.pay("p-2", repeatable=False)
    record = await scene.shop.record("p-2")
    assert (record.state, record.recovery_point) == (State.UNKNOWN, "charge")
    assert "may have been made" in record.reason
    assert scene.world.effects() == ["order p-1", "order p-2", "paid p-1 charge-0"]
    assert sorted(scene.charger.asked.values()) == [1, 1]


async def test_take_over_policies(scene: Scene) -> None:
    never = Operation(name=NAME, mode=Mode.PHASED, take_over=TakeOver.NEVER)
    before_charge = Operation(
        name=NAME,
        mode=Mode.PHASED,
        take_over=TakeOver.ONLY_IF_REENTRANT,
        reentrant=lambda record: record.recovery_point in (None, "order"),
    )
    for payment_id, point, operation, runs in (
        ("p-1", AFTER_ORDER, never, False),
        ("p-2", AFTER_ORDER, before_charge, True),
        ("p-3", IN_ORDER, before_charge, True),
        ("p-4", AFTER_CHARGE, before_charge, False),
    ):
        await scene.die(point, payment_id)
        if runs:
            assert await scene.pay(payment_id, operation)
            continue
        with pytest.raises(RunUnknown):
            await scene.pay(payment_id, operation)
        assert (await scene.shop.record(payment_id)).state is State.UNKNOWN
    assert [effect for effect in scene.world.effects() if effect.startswith("paid")] == [
        "paid p-2 charge-0",
        "paid p-3 charge-1",
    ]
