"""Waiting for the end of somebody else's run, without a connection of the database.

All who wait for one key in one process share a Watch: one of them looks into the database from time to time, and the
others get what it has seen. Looking is the truth. What else wakes them, the end of a run in this process or a
notification of the database, only says that it is time to look. Bounded per key and per process.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum, unique
from typing import TYPE_CHECKING, Any, Final

from participant_sdk.idempotency.record import Record

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

GROWTH: Final = 1.5
PAUSES_MAX: Final = 8.0
"""How much longer than the first pause between two looks the longest is."""
LEASE_MARGIN_S: Final = 0.02


@unique
class Turn(Enum):
    """What one who waits is told when there is no record to give it."""

    LOOK = "LOOK"
    """Look into the database, and say with `Waiter.looked` what was there."""
    OVER = "OVER"
    """It has waited as long as it may."""


class Watch:
    """Who waits for one key. `flagged`: the fence of the run that was told so."""

    __slots__ = ("condition", "flagged", "look_at", "looking", "pause", "record", "seen", "stale", "waiters")

    def __init__(self, condition: Any, poll_s: float) -> None:
        self.condition = condition
        self.waiters = 0
        self.flagged = 0
        self.looking: Waiter | None = None
        self.stale = False  # something has ended since the look that is under way began
        self.look_at = 0.0  # at once: the run may have ended before anybody watched
        self.pause = poll_s
        self.record: Record | None = None
        self.seen = 0


class Waiter:
    """One who waits; used by one thread or task. `until`: of `time.monotonic`."""

    __slots__ = ("_home", "_seen", "key_hash", "until", "watch")

    def __init__(self, home: Waiting, key_hash: bytes, watch: Watch, until: float) -> None:
        self._home = home
        self._seen = watch.seen
        self.key_hash = key_hash
        self.watch = watch
        self.until = until

    def turn(self) -> Record | Turn | float:
        """What it may do now; else how long to sleep, in seconds, unless it is woken. Under the lock."""
        watch, now = self.watch, time.monotonic()
        if watch.record is not None and watch.seen > self._seen:
            self._seen = watch.seen
            return watch.record
        if now >= self.until:
            return Turn.OVER
        if watch.looking is not None:
            return self.until - now
        if watch.look_at <= now:
            watch.looking = self
            watch.stale = False
            return Turn.LOOK
        return min(self.until, watch.look_at) - now

    def looked(self, record: Record | None, lease_left_s: float | None) -> None:
        """What was in the database, where an ended record is for all. `lease_left_s`: of a run that goes on."""
        watch = self.watch
        with self._home.lock:
            if watch.looking is self:
                watch.looking = None
            pause = watch.pause * random.uniform(0.5, 1.0)
            watch.pause = min(watch.pause * GROWTH, self._home.poll_s * PAUSES_MAX)
            if lease_left_s is not None:
                pause = min(pause, max(lease_left_s, 0.0) + LEASE_MARGIN_S)
            watch.look_at = 0.0 if watch.stale else time.monotonic() + pause
            self._home.tell(watch, record)

    def leave(self) -> None:
        """It waits no more."""
        self._home.leave(self)


class Waiting:
    """All who wait in one process. `on_wait`: called when somebody begins to wait for a run that may be told of."""

    lock: Any = nullcontext()

    def __init__(self, poll_s: float, waiters_max: int, waiters_per_key_max: int) -> None:
        self.poll_s = poll_s
        self._waiters_max = waiters_max
        self._per_key_max = waiters_per_key_max
        self._waiters = 0
        self._watches: dict[bytes, Watch] = {}
        self.on_wait: Callable[[], None] | None = None

    @property
    def number(self) -> int:
        """How many wait."""
        return self._waiters

    def __bool__(self) -> bool:
        """Whether anybody waits."""
        return self._waiters > 0

    def enter(self, key_hash: bytes, until: float, *, may_be_told: bool) -> Waiter | None:
        """Begin to wait; None where too many do. `may_be_told`: the database may tell of the end of that run."""
        with self.lock:
            watch = self._watches.get(key_hash)
            if self._waiters >= self._waiters_max or (watch is not None and watch.waiters >= self._per_key_max):
                return None
            if watch is None:
                watch = self._watches[key_hash] = Watch(self._condition(), self.poll_s)
            watch.waiters += 1
            self._waiters += 1
            waiter = Waiter(self, key_hash, watch, until)
        if may_be_told and self.on_wait is not None:
            self.on_wait()
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """See Waiter."""
        watch = waiter.watch
        with self.lock:
            watch.waiters -= 1
            self._waiters -= 1
            if watch.waiters == 0:
                del self._watches[waiter.key_hash]
            elif watch.looking is waiter:  # it gives up in the middle of a look: the next one's turn
                watch.looking = None
                self._due(watch)
                self._wake(watch)

    def ended(self, key_hash: bytes, record: Record | None) -> None:
        """A run in this process has ended, with `record` where its outcome is for all who wait."""
        if not self._watches:
            return
        with self.lock:
            if (watch := self._watches.get(key_hash)) is not None:
                self._due(watch)
                self.tell(watch, record)

    def notified(self, key_hash: bytes) -> None:
        """The database says that a run has ended."""
        self.ended(key_hash, None)

    def all_look(self) -> None:
        """Something may have been missed."""
        with self.lock:
            for watch in self._watches.values():
                self._due(watch)
                self._wake(watch)

    @staticmethod
    def _due(watch: Watch) -> None:
        watch.look_at = 0.0
        watch.stale = True

    def tell(self, watch: Watch, record: Record | None) -> None:
        """Under the lock: give all who wait the record, if there is one, or have them see whose turn it is."""
        if record is not None and record.state.ended:
            watch.record = record
            watch.seen += 1
        self._wake(watch)

    def _condition(self) -> Any:
        raise NotImplementedError

    def _wake(self, watch: Watch) -> None:
        raise NotImplementedError


class ThreadWaiting(Waiting):
    """For threads."""

    def __init__(self, poll_s: float, waiters_max: int, waiters_per_key_max: int) -> None:
        super().__init__(poll_s, waiters_max, waiters_per_key_max)
        self.lock = threading.Lock()

    def _condition(self) -> threading.Condition:
        return threading.Condition(self.lock)

    def _wake(self, watch: Watch) -> None:
        watch.condition.notify_all()


class TaskWaiting(Waiting):
    """For the tasks of one event loop, and called from it alone."""

    def _condition(self) -> set[asyncio.Future[None]]:
        return set()

    def _wake(self, watch: Watch) -> None:
        for sleeper in watch.condition:
            if not sleeper.done():
                sleeper.set_result(None)


@dataclass(frozen=True, slots=True)
class Await:
    """The move that waits for one's turn; gives a Record that has ended, or a Turn."""

    waiter: Waiter

    def perform(self, engine: Engine) -> Record | Turn:
        """See Move."""
        condition = self.waiter.watch.condition
        with condition:
            while isinstance(turn := self.waiter.turn(), float):
                condition.wait(turn)
        return turn

    async def perform_async(self, engine: AsyncEngine) -> Record | Turn:
        """See Move."""
        sleepers: set[asyncio.Future[None]] = self.waiter.watch.condition
        while isinstance(turn := self.waiter.turn(), float):
            mine = asyncio.get_running_loop().create_future()
            sleepers.add(mine)
            try:
                await asyncio.wait([mine], timeout=turn)
            finally:
                sleepers.discard(mine)
        return turn
