"""A claim in an event loop: if the task that asks for it is cancelled, what it may have claimed is undone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from participant_sdk.idempotency.moves import Apart
from participant_sdk.idempotency.store import Held

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from participant_sdk.databases.database import Script

logger = logging.getLogger("tricord.idempotency")


class Undoing:
    """What undoes claims whose tasks were cancelled, in the background."""

    def __init__(self, undo: Callable[[Held], Script[Any]]) -> None:
        self._undo = undo
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, claiming: asyncio.Task[Any], engine: AsyncEngine) -> None:
        """Undo what this task is about to claim."""
        task = asyncio.get_running_loop().create_task(self._undone(claiming, engine))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self, seconds: float) -> None:
        """Wait for what is under way."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)

    async def _undone(self, claiming: asyncio.Task[Any], engine: AsyncEngine) -> None:
        try:
            held = await claiming
            if isinstance(held, Held):
                await Apart(self._undo(held)).perform_async(engine)
        except Exception as error:
            logger.warning("a claim that was cancelled could not be undone: %s", type(error).__name__)


@dataclass(frozen=True, slots=True)
class Claiming:
    """As Apart, for a script that may give a Held; if its task is cancelled meanwhile, that is undone."""

    script: Script[Any]
    undoing: Undoing

    def perform(self, engine: Engine) -> Any:
        """See Move."""
        return Apart(self.script).perform(engine)

    async def perform_async(self, engine: AsyncEngine) -> Any:
        """See Move."""
        claiming = asyncio.get_running_loop().create_task(Apart(self.script).perform_async(engine))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            self.undoing.begin(claiming, engine)
            raise
