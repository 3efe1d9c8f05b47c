"""Deletes finished transactions that are older than the retention, in the background, a page at a time.

Several coordinators may do so at once: each page passes over rows that another holds.
"""

from __future__ import annotations

import asyncio

import structlog

from .store.history import first_xid_at
from .store.rows import StoreError
from .store.store import Store

_log = structlog.get_logger(__name__)


class Purge:
    """Deletes every ``every_ms`` what finished more than ``retention_ms`` ago."""

    def __init__(self, store: Store, retention_ms: int, every_ms: int) -> None:
        self._store = store
        self._retention_ms = retention_ms
        self._every_ms = every_ms
        self._task: asyncio.Task[None] | None = None
        self.deleted = 0
        """How many rows so far."""

    def start(self) -> None:
        """Begin, unless everything is kept for ever."""
        if self._retention_ms:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Delete no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def once(self) -> int:
        """Delete what there is now; how many rows. Raises StoreError."""
        before_ms = self._store.now_ms() - self._retention_ms
        below = first_xid_at(before_ms)
        after: bytes | None = b""
        deleted = 0
        while after is not None:
            page = await self._store.purge_page(after, below, before_ms)
            deleted += page.deleted
            after = page.last
        self.deleted += deleted
        return deleted

    async def _run(self) -> None:
        while True:
            try:
                deleted = await self.once()
                if deleted:
                    _log.info("purge.deleted", transactions=deleted)
            except StoreError as error:
                _log.warning("purge.failed", error=str(error))
            except Exception:
                _log.exception("purge.failed")
            await asyncio.sleep(self._every_ms / 1000)
