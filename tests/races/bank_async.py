"""The participant of the races as an asyncio program: AsyncEngines and `async def` handlers, on one event loop.

The race is led from a thread outside of the loop, as that of threads is; only how a call waits for its turn differs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from sqlalchemy.ext.asyncio import create_async_engine

from participant_sdk import Participant
from participant_sdk.engines import AsyncEngineFence
from participant_sdk.fence_tables import DEFAULT
from tests.races.actor import ACTOR, Actor
from tests.races.bank import RETENTION_MS, Bank
from tests.races.faults import Killed
from tests.races.handlers import Handlers, define_async

R = TypeVar("R")

DRIVERS: Final = {"sqlite:": "sqlite+aiosqlite:", "mysql+pymysql:": "mysql+asyncmy:"}
"""psycopg serves both."""


class AsyncBank(Bank):
    """See Bank."""

    def _prepare(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever, name="race-loop")
        self._loop_thread.start()
        self._await(self._prepare_async())

    def _await(self, work: Coroutine[Any, Any, R]) -> R:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _prepare_async(self) -> None:
        url, options = self.url, self._engine_options()
        for driver, its_async in DRIVERS.items():
            url = url.replace(driver, its_async, 1)
        if self.database == "mariadb":
            options.pop("connect_args")  # asyncmy has no TLS unless it is told to
        self._async_engines = [create_async_engine(url, **options) for _ in range(self.instances)]
        self._async_fences = []
        for engine in self._async_engines:
            self._listen(engine.sync_engine)
            participant = Participant("bank", engine)
            define_async(participant, Handlers(self))
            engine_fence = AsyncEngineFence(engine, DEFAULT, RETENTION_MS)
            self._async_fences.append((engine_fence, await engine_fence.prepare(participant.check(), self.connections)))

    def _dispose(self) -> None:
        self._await(self._dispose_async())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join()
        self._loop.close()

    async def _dispose_async(self) -> None:
        for engine in self._async_engines:
            await engine.dispose()

    def start(self, actor: Actor) -> Future[None]:
        """See Bank."""
        actor.loop = self._loop
        return asyncio.run_coroutine_threadsafe(self._run_async(actor), self._loop)

    def run(self, actor: Actor) -> None:
        """See Bank."""
        self.start(actor).result()

    async def _run_async(self, actor: Actor) -> None:
        engine_fence, fence = self._async_fences[actor.instance]
        ACTOR.set(actor)
        try:
            await actor.point_async("arrives")
            actor.invoked = actor.number()
            actor.ended(await engine_fence.execute(actor.call, fence))
        except Killed:
            actor.gone()
        except BaseException as error:
            actor.crashed = error
        finally:
            if actor.schedule is not None:
                actor.schedule.end(actor.runner)
