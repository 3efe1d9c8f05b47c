"""Which participants there are, and where: the store's list, held in memory and kept fresh.

Names and addresses live in the store, so that after a take-over another coordinator knows them too (protocol B7). A
name that is not known here makes its calls UNKNOWN, never anything final.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from .store.rows import ParticipantRow, StoreError
from .store.store import Store

_log = structlog.get_logger(__name__)

REFRESH_S = 5.0
"""How old the list may get: another coordinator may have taken a registration."""
MISS_S = 0.5
"""How often at the most a name that is missing makes it read the store."""


class Participants:
    """The registered participants."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows: dict[str, ParticipantRow] = {}
        self._read_s = 0.0
        self._reading: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        """Read the list from the store. Raises StoreError."""
        self._read_s = time.monotonic()
        self._rows = {row.name: row for row in await self._store.participants()}

    def find(self, name: str) -> ParticipantRow | None:
        """A participant as last heard; looks again in the background when the list is old or the name missing."""
        row = self._rows.get(name)
        age_s = time.monotonic() - self._read_s
        if age_s > (REFRESH_S if row is not None else MISS_S) and (self._reading is None or self._reading.done()):
            self._reading = asyncio.get_running_loop().create_task(self._refresh_quietly())
        return row

    async def look_up(self, name: str) -> ParticipantRow | None:
        """As ``find``, but a missing name is looked for in the store before None is said. Raises StoreError."""
        if name not in self._rows and time.monotonic() - self._read_s > MISS_S / 10:
            await self.refresh()
        return self._rows.get(name)

    async def register(self, row: ParticipantRow, *, replace_fence: bool) -> dict[str, tuple[str, str]]:
        """Store a participant; see ``Store.register``. Raises StoreError."""
        known = self._rows.get(row.name)
        if known == row:
            return {}
        clashes = await self._store.register(row, replace_fence=replace_fence)
        if not clashes:
            self._rows[row.name] = row
            _log.info("participant.registered", participant=row.name, address=row.address, actions=sorted(row.actions))
        return clashes

    async def _refresh_quietly(self) -> None:
        try:
            await self.refresh()
        except StoreError as error:
            _log.warning("participants.refresh_failed", error=str(error))
