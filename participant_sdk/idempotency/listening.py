"""Being told by PostgreSQL that a run has ended: one connection of a process, while somebody waits there.

It only makes waiting shorter. Before it listens, after it has lost its connection, and where it cannot have one, who
waits looks into the database from time to time; and whenever it begins to listen, all look once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from participant_sdk.idempotency.faults import told
from participant_sdk.idempotency.own_pool import own_pool, own_pool_async

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from participant_sdk.idempotency.waiting import Waiting

logger = logging.getLogger("tricord.idempotency")

IDLE_S: Final = 10.0
"""How long it listens on when nobody waits any more."""
TICK_S: Final = 0.5
"""How often it sees whether it is still wanted."""
AGAIN_FIRST_S: Final = 0.5
AGAIN_MAX_S: Final = 30.0


class Wanted:
    """For how long to listen, and when to try again."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self._since = time.monotonic()
        self.pause_s = AGAIN_FIRST_S

    def still(self) -> bool:
        """Whether somebody waits, or did not long ago."""
        if self._waiting:
            self._since = time.monotonic()
        return time.monotonic() - self._since < IDLE_S

    def begun(self) -> None:
        """It listens now: what has ended before was not told."""
        self.pause_s = AGAIN_FIRST_S
        self._waiting.all_look()

    def failed(self, error: Exception) -> float:
        """How long to pause."""
        logger.warning("ends of runs are not told of for now, and looked for instead: %s", told(error))
        pause_s, self.pause_s = self.pause_s, min(2 * self.pause_s, AGAIN_MAX_S)
        return pause_s

    def notified(self, payload: str) -> None:
        """The hash of a key, in hexadecimal; whatever else anybody sends there is none."""
        try:
            self._waiting.notified(bytes.fromhex(payload))
        except ValueError:
            logger.debug("a notification that is no hash of a key")


class ThreadListener:
    """In a thread."""

    def __init__(self, engine: Engine, channel: str, waiting: Waiting) -> None:
        self._engine = own_pool(engine)
        self._channel = channel
        self._waiting = waiting
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def wanted(self) -> None:
        """Somebody waits."""
        with self._lock:
            if self._thread is None and not self._stopping.is_set():
                self._thread = threading.Thread(target=self._run, name="tricord-listener", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Listen no more; returns when it does not."""
        self._stopping.set()
        if (thread := self._thread) is not None:
            thread.join()

    def _run(self) -> None:
        wanted = Wanted(self._waiting)
        while not self._stopping.is_set():
            with self._lock:
                if not wanted.still():
                    self._thread = None
                    return
            try:
                with self._engine.connect() as connection:
                    try:
                        self._listen(connection, wanted)
                    finally:
                        connection.invalidate()  # it is of no use to anybody else
            except Exception as error:
                self._stopping.wait(wanted.failed(error))

    def _listen(self, connection: Connection, wanted: Wanted) -> None:
        raw: Any = connection.connection.driver_connection
        raw.autocommit = True
        raw.execute(listen(connection, self._channel))
        wanted.begun()
        while wanted.still() and not self._stopping.is_set():
            for notification in raw.notifies(timeout=TICK_S):
                wanted.notified(notification.payload)


class TaskListener:
    """In a task."""

    def __init__(self, engine: AsyncEngine, channel: str, waiting: Waiting) -> None:
        self._engine = own_pool_async(engine)
        self._channel = channel
        self._waiting = waiting
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def wanted(self) -> None:
        """Somebody waits."""
        if self._task is None and not self._closed:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="tricord-listener")

    async def close(self) -> None:
        """Listen no more."""
        self._closed = True
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        wanted = Wanted(self._waiting)
        while wanted.still():
            try:
                async with self._engine.connect() as connection:
                    raw: Any = (await connection.get_raw_connection()).driver_connection
                    try:
                        await self._listen(raw, await connection.run_sync(listen, self._channel), wanted)
                    finally:
                        await connection.invalidate()
            except Exception as error:
                await asyncio.sleep(wanted.failed(error))
        self._task = None

    async def _listen(self, raw: Any, statement: str, wanted: Wanted) -> None:
        await raw.set_autocommit(True)
        await raw.execute(statement)
        wanted.begun()
        while wanted.still():
            async for notification in raw.notifies(timeout=TICK_S):
                wanted.notified(notification.payload)


def listen(connection: Connection, channel: str) -> str:
    """The statement."""
    return f"LISTEN {connection.dialect.identifier_preparer.quote_identifier(channel)}"
