"""A task that is cancelled leaves no connection outside of the pool, and no claim that nobody runs."""

import asyncio
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from sqlalchemy import Connection, event

from participant_sdk.idempotency.replay import Replay
from tests.contract.idempotency.runs_world import ATOMIC, LEASED, Desk, desk_of, request_of
from tests.contract.idempotency.world import World

pytestmark = pytest.mark.parametrize("flavour", ["postgres-async", "mariadb-async", "sqlite-async"], indirect=True)


@dataclass
class Cancel:
    """A step at which a task is cancelled."""

    task: Callable[[], "asyncio.Task[Any] | None"]

    def perform(self, connection: Connection) -> None:
        raise NotImplementedError

    async def perform_async(self, connection: Any) -> None:
        if (task := self.task()) is not None:
            task.cancel()
        await asyncio.sleep(0)


def out_of_pool(desk: Desk) -> int:
    """Connections that nobody has given back."""
    count: int = desk.engine.pool.checkedout()
    return count


async def cancelled(work: Any, at: list["asyncio.Task[Any]"]) -> None:
    """Run it, to be cancelled by whoever finds it in `at`."""
    task = asyncio.create_task(work)
    at.append(task)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_repeat_is_cancelled_while_it_leaves(world: World) -> None:
    async with desk_of(world) as desk, desk_of(world) as other:
        await (await other.begun(ATOMIC)).succeed()  # else it would be known, and begin nothing
        store, at = desk.idempotency.setup.store, []  # type: ignore[var-annotated]
        leave = store.leave

        def left() -> Generator[Any, Any, None]:
            yield Cancel(lambda: at.pop() if at else None)
            yield from leave()

        store.leave = left
        await cancelled(desk.idempotency.begin(ATOMIC, request_of()), at)
        assert out_of_pool(desk) == 0
        await desk.replayed(ATOMIC)


async def test_a_run_is_cancelled_while_it_gives_its_connection_back(world: World) -> None:
    async with desk_of(world) as desk:
        at: list[asyncio.Task[Any]] = []
        running = await desk.begun(ATOMIC)
        await running.work()
        event.listen(desk.engine.sync_engine, "reset", lambda *given: at.pop().cancel() if at else None)
        await cancelled(running.succeed(), at)
        for _ in range(1000):
            if out_of_pool(desk) == 0:
                break
            await asyncio.sleep(0.01)
        assert out_of_pool(desk) == 0
        await desk.replayed(ATOMIC)
        assert world.effects() == ["order"]


async def test_a_run_that_nobody_cancels_makes_no_task(world: World) -> None:
    if not world.url.startswith("postgresql"):
        pytest.skip("giving back asks the database once more")
    async with desk_of(world) as desk:
        await (await desk.begun(ATOMIC, request_of("k0"))).succeed()  # the connection is new, and prepares
        loop, made = asyncio.get_running_loop(), []

        def noted(loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> "asyncio.Task[Any]":
            made.append(work)
            return asyncio.Task(work, loop=loop, **more)

        running = await desk.begun(ATOMIC)
        await running.work()
        loop.set_task_factory(noted)
        try:
            await running.succeed()
        finally:
            loop.set_task_factory(None)
        assert made == []
        assert out_of_pool(desk) == 0


async def test_a_claim_that_was_cancelled_does_not_last_for_its_lease(world: World) -> None:
    async with desk_of(world) as desk:
        store, at = desk.idempotency.setup.store, []  # type: ignore[var-annotated]
        claim = store.claim

        def claimed(wanted: Any) -> Generator[Any, Any, Any]:
            found = yield from claim(wanted)
            yield Cancel(lambda: at.pop() if at else None)
            return found

        store.claim = claimed
        operation = replace(LEASED, lease_s=3_600, wait_s=20)
        await cancelled(desk.idempotency.begin(operation, request_of()), at)
        again = await desk.begin(operation)
        assert not isinstance(again, Replay)
        assert again.run.attempt == 2
        await again.succeed()
