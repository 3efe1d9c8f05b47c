"""Health: whether the coordinator can be used, by how long ago the store has last given a good answer.

Whatever is asked of the store counts, and the claim loop asks it at least once a second. So a database that hangs, and
fails nothing, is seen as soon as one that is gone.
"""

from __future__ import annotations

import asyncio
import time

import structlog
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio

from .engine import SILENT_S
from .server_grpc import STORE_SERVICES
from .store.store import Store

_log = structlog.get_logger(__name__)

LOOK_S = 0.1
"""How often it is looked whether the store has answered again."""


class Health:
    """Tells the health service when the store falls silent, and when it answers again."""

    def __init__(self, store: Store, servicer: health_aio.HealthServicer) -> None:
        self._store = store
        self._servicer = servicer
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look; until then all is as ``make_server`` has set it."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Look no more; what was told last stays."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        serving = True
        while True:
            left_s = self._store.answered_s + SILENT_S - time.monotonic()
            if serving is not (left_s > 0):
                serving = not serving
                (_log.info if serving else _log.warning)("coordinator.health", serving=serving)
                await self._tell(serving)
            await asyncio.sleep(max(left_s, LOOK_S))

    async def _tell(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *STORE_SERVICES):
            await self._servicer.set(name, status)
