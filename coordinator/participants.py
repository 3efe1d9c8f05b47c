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
MISS_S = 0.2
"""Likewise for a name that is missing."""


class Participants:
    """The registered participants."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows: dict[str, ParticipantRow] = {}
        self._read_s = 0.0
        self._reading: asyncio.Task[None] | None = None
        self._next_reading: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        """Read the list from the store, in one read for all who ask before it begins. Raises StoreError."""
        await asyncio.shield(self._next_reading or self._read_next())

    def find(self, name: str) -> ParticipantRow | None:
        """A participant as last heard; looks again in the background when that is long ago, or the name missing."""
        age_s = time.monotonic() - self._read_s
        if age_s > (REFRESH_S if name in self._rows else MISS_S) and self._next_reading is None:
            self._read_s = time.monotonic()
            self._read_next().add_done_callback(_log_failure)
        return self._rows.get(name)

    def addresses(self) -> set[str]:
        """Where participants are, as last heard."""
        return {row.address for row in self._rows.values()}

    async def look_up(self, name: str, action: str) -> ParticipantRow | None:
        """A participant, for somebody who wants this action of it.

        What is missing here is looked for in the store before it is said to be missing: another coordinator may have
        taken the registration. Raises StoreError.
        """
        row = self._rows.get(name)
        if row is None or action not in row.actions:
            await self.refresh()
            row = self._rows.get(name)
        return row

    async def register(self, row: ParticipantRow, *, replace_fence: bool) -> dict[str, tuple[str, str]]:
        """Store a participant; see ``Store.register``. Raises StoreError."""
        clashes = await self._store.register(row, replace_fence=replace_fence)
        known = self._rows.get(row.name)
        if not clashes and (known is None or (known.address, known.actions) != (row.address, row.actions)):
            await self.refresh()
            _log.info("participant.registered", participant=row.name, address=row.address, actions=sorted(row.actions))
        return clashes

    def _read_next(self) -> asyncio.Task[None]:
        """Begin a read as soon as the one under way has ended."""
        self._next_reading = asyncio.get_running_loop().create_task(self._read(self._reading))
        return self._next_reading

    async def _read(self, previous: asyncio.Task[None] | None) -> None:
        if previous is not None:
            await asyncio.wait([previous])
        self._reading, self._next_reading = self._next_reading, None
        rows = await self._store.participants()
        self._rows = {row.name: row for row in rows}
        self._read_s = time.monotonic()


def _log_failure(reading: asyncio.Task[None]) -> None:
    if not reading.cancelled() and isinstance(error := reading.exception(), StoreError):
        _log.warning("participants.refresh_failed", error=str(error))
