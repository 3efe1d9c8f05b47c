"""Many `execute` calls at once, by both clients, at real coordinators: also when one is killed or stopped meanwhile."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from participant_sdk import (
    AsyncTricordClient,
    IdempotencyKeyReused,
    Transaction,
    TransactionCancelled,
    TransactionState,
    TricordClient,
    UnknownParticipant,
    branch,
)
from tests.coordinators import CoordinatorProcess

from .participant_server import ParticipantServer, refuse
from .scene import Scene

DEBIT, CREDIT = branch("bank", "debit", {}), branch("stock", "credit", {})
THREADS = 40


@pytest.fixture
def on_sqlite(tmp_path: Path) -> Iterator[Scene]:
    """Where it matters that the coordinator is away, and not what it stores in."""
    with ExitStack() as stack:
        yield Scene(stack, str(tmp_path / "tricord.db"))


async def executed(kind: str, endpoint: str, *calls: dict[str, Any]) -> list[Any]:
    """What they come to, all at once: each is given the arguments, "branches" among them."""
    if kind == "async":
        async with AsyncTricordClient(endpoint) as tasks:
            asking = (tasks.execute(*call.pop("branches", (DEBIT, CREDIT)), **call) for call in calls)
            return await asyncio.gather(*asking, return_exceptions=True)
    with TricordClient(endpoint) as client, ThreadPoolExecutor(THREADS) as threads:
        loop = asyncio.get_running_loop()

        def ask(call: dict[str, Any]) -> Transaction:
            return client.execute(*call.pop("branches", (DEBIT, CREDIT)), **call)

        asked = [loop.run_in_executor(threads, ask, call) for call in calls]
        return await asyncio.gather(*asked, return_exceptions=True)


def check(scene: Scene, found: list[Any]) -> None:
    """All confirmed, and each a transaction of its own, of which there are no others."""
    assert Counter(getattr(each, "state", each) for each in found) == {TransactionState.CONFIRMED: len(found)}
    xids = {each.xid for each in found}
    assert len(xids) == len(found)
    assert {seen.call.xid for seen in scene.bank.seen()} == xids


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_thousands_at_once(scene: Scene, kind: str) -> None:
    coordinator = scene.coordinator(call_timeout_ms=20_000, lease_ms=40_000)  # one process answers all these calls
    check(scene, await executed(kind, coordinator.endpoint, *[{} for _ in range(1_500)]))
    assert coordinator.stop() == 0
    (stopped,) = coordinator.log("coordinator.stopped")
    assert (stopped["begun"], stopped["confirmed"]) == (1_500, 1_500)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_each_has_its_own_outcome(scene: Scene, kind: str) -> None:
    coordinator = scene.coordinator()
    scene.stock.answer = lambda call: refuse(call)
    await executed(kind, coordinator.endpoint, {"branches": (DEBIT,), "idempotency_key": "taken"})
    calls: list[dict[str, Any]] = []
    for _ in range(10):
        calls += [
            {"branches": (DEBIT,)},
            {},
            {"branches": (branch("nobody", "debit", {}),)},
            {"branches": (CREDIT,), "idempotency_key": "taken"},
        ]
    found = await executed(kind, coordinator.endpoint, *calls)
    assert [type(each) for each in found] == [
        Transaction, TransactionCancelled, UnknownParticipant, IdempotencyKeyReused,
    ] * 10  # fmt: skip
    assert {each.refusal.reason for each in found[1::4]} == {"insufficient_funds"}


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("ending", [CoordinatorProcess.kill, CoordinatorProcess.stop])
async def test_a_coordinator_that_starts_again_meanwhile(on_sqlite: Scene, kind: str, ending: Any) -> None:
    """Whoever waits learns the outcome of what was asked for, once, however often it had to ask."""
    coordinator = on_sqlite.coordinator(drain_ms=100)

    async def restart(participant: ParticipantServer) -> None:
        await asyncio.to_thread(participant.wait_for, 30, "TRY")
        await asyncio.to_thread(ending, coordinator)
        await asyncio.to_thread(coordinator.start)

    restarting = asyncio.create_task(restart(on_sqlite.bank))
    found = await executed(kind, coordinator.endpoint, *[{"timeout": 60} for _ in range(600)])
    await restarting
    check(on_sqlite, found)


@pytest.mark.database
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_another_coordinator_goes_on(shared: Scene, kind: str) -> None:
    first, second = shared.coordinator(), shared.coordinator()

    async def kill(participant: ParticipantServer) -> None:
        await asyncio.to_thread(participant.wait_for, 30, "TRY")
        await asyncio.to_thread(first.kill)

    killing = asyncio.create_task(kill(shared.bank))
    found = await executed(kind, f"{first.endpoint},{second.endpoint}", *[{"timeout": 60} for _ in range(600)])
    await killing
    check(shared, found)
