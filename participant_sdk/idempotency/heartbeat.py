"""Renewing the leases of all runs of a process, by one statement, on a connection of its own.

A third of the shortest lease after the last time, or a little sooner. What is not renewed for that, because the
database cannot be reached, or this process stands still, is nobody's decision here: the fence is the judge at the end.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from participant_sdk.idempotency.faults import told
from participant_sdk.idempotency.own_pool import own_pool, own_pool_async
from participant_sdk.steps import run, run_async

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from participant_sdk.idempotency.run_state import AnyRun
    from participant_sdk.idempotency.store import Held, Store

logger = logging.getLogger("tricord.idempotency")

IDLE_S: Final = 30.0
"""How long the connection is kept when there is nothing to renew."""
PART_OF_LEASE: Final = 3.0
AGAIN_S: Final = 0.2
"""When it is tried again, at the soonest, after an error."""


class Leases:
    """The runs whose leases are renewed, and when that is due next (of `time.monotonic`)."""

    def __init__(self) -> None:
        # What nobody has any more renews no lease.
        self._runs: WeakValueDictionary[bytes, AnyRun] = WeakValueDictionary()
        self.due_at = float("inf")

    def add(self, run: AnyRun) -> bool:
        """Whether it is due sooner by that."""
        self._runs[run.claim.key_hash] = run
        due_at = time.monotonic() + _interval(run)
        sooner = due_at < self.due_at
        self.due_at = min(self.due_at, due_at)
        return sooner

    def remove(self, run: AnyRun) -> None:
        """It is over."""
        if self._runs.get(run.claim.key_hash) is run:
            del self._runs[run.claim.key_hash]

    def to_renew(self) -> list[tuple[AnyRun, Held, int]]:
        """All that are live, with the ms that their lease is to last; not those that nobody waits for any more."""
        live = [(run, run.held, run.asked.lease_ms) for run in list(self._runs.values())]
        return [(run, held, lease_ms) for run, held, lease_ms in live if held is not None and lease_ms > 0]

    def renewed(self, tried: list[tuple[AnyRun, Held, int]], kept: frozenset[bytes]) -> list[AnyRun]:
        """Those that another has taken over."""
        return [run for run, held, _ in tried if held.key_hash not in kept and self._runs.get(held.key_hash) is run]

    def plan(self, failed: bool) -> None:
        """When it is due next."""
        runs = list(self._runs.values())
        pause = min((_interval(run) for run in runs), default=float("inf"))
        self.due_at = time.monotonic() + (max(pause / 2, AGAIN_S) if failed else pause)


def _interval(run: AnyRun) -> float:
    return run.operation.lease_s / PART_OF_LEASE * random.uniform(0.8, 1.0)


class ThreadBeat:
    """In a thread, from the first run on."""

    def __init__(self, engine: Engine, store: Store) -> None:
        self._engine = own_pool(engine)
        self._store = store
        self._leases = Leases()
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, run: AnyRun) -> None:
        """See Beat."""
        with self._condition:
            if self._leases.add(run):
                self._condition.notify()
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="tricord-heartbeat", daemon=True)
                self._thread.start()

    def remove(self, run: AnyRun) -> None:
        """See Beat."""
        with self._condition:
            self._leases.remove(run)

    def close(self) -> None:
        """Renew nothing any more."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._closed and (left := self._leases.due_at - time.monotonic()) > 0:
                    if not self._condition.wait(min(left, IDLE_S)) and left > IDLE_S:
                        self._engine.dispose()
                tried = self._leases.to_renew()
                if self._closed:
                    break
            lost, failed = self._beat(tried)
            with self._condition:
                self._leases.plan(failed)
            for one in lost:
                one.mark_lost()
        self._engine.dispose()

    def _beat(self, tried: list[tuple[AnyRun, Held, int]]) -> tuple[list[AnyRun], bool]:
        if not tried:
            return [], False
        try:
            with self._engine.connect() as connection:
                kept = run(self._store.renew([(held, lease_ms) for _, held, lease_ms in tried]), connection)
        except Exception as error:
            logger.warning("%d leases could not be renewed: %s", len(tried), told(error))
            return [], True
        with self._condition:
            return self._leases.renewed(tried, kept), False


class TaskBeat:
    """In a task, from the first run on."""

    def __init__(self, engine: AsyncEngine, store: Store) -> None:
        self._engine = own_pool_async(engine)
        self._store = store
        self._leases = Leases()
        self._task: asyncio.Task[None] | None = None
        self._sooner: asyncio.Future[None] | None = None
        self._closed = False

    def add(self, run: AnyRun) -> None:
        """See Beat."""
        if self._leases.add(run) and self._sooner is not None and not self._sooner.done():
            self._sooner.set_result(None)
        if self._task is None and not self._closed:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="tricord-heartbeat")

    def remove(self, run: AnyRun) -> None:
        """See Beat."""
        self._leases.remove(run)

    async def close(self) -> None:
        """Renew nothing any more."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._engine.dispose()

    async def _run(self) -> None:
        while True:
            while (left := self._leases.due_at - time.monotonic()) > 0:
                self._sooner = asyncio.get_running_loop().create_future()
                done, _ = await asyncio.wait([self._sooner], timeout=min(left, IDLE_S))
                if not done and left > IDLE_S:
                    await self._engine.dispose()
            tried = self._leases.to_renew()
            lost, failed = await self._beat(tried)
            self._leases.plan(failed)
            for one in lost:
                one.mark_lost()

    async def _beat(self, tried: list[tuple[AnyRun, Held, int]]) -> tuple[list[AnyRun], bool]:
        if not tried:
            return [], False
        try:
            renew = self._store.renew([(held, lease_ms) for _, held, lease_ms in tried])
            async with self._engine.connect() as connection:
                kept = await run_async(renew, connection)
        except Exception as error:
            logger.warning("%d leases could not be renewed: %s", len(tried), told(error))
            return [], True
        return self._leases.renewed(tried, kept), False
