"""A claim: if the task that asks for it is cancelled, what it may have claimed is undone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from participant_sdk.idempotency.moves import Apart, carried_through
from participant_sdk.idempotency.store import Held

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from participant_sdk.databases.database import Script
    from participant_sdk.idempotency.setup import Setup


@dataclass(frozen=True, slots=True)
class Claiming:
    """As Apart, for a script that may give a Held; if its task is cancelled meanwhile, that is undone."""

    script: Script[Any]
    setup: Setup

    def perform(self, engine: Engine) -> Any:
        """See Move."""
        return Apart(self.script).perform(engine)

    async def perform_async(self, engine: AsyncEngine) -> Any:
        """See Move."""

        async def undo(found: Any) -> None:
            if isinstance(found, Held):
                await Apart(self.setup.undo(found)).perform_async(engine)

        claiming = Apart(self.script).perform_async(engine)
        return await carried_through(claiming, undo, self.setup.carried)
