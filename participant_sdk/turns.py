"""Taking turns where a database lets only one local transaction write at a time, as SQLite does.

The turn is handed on directly, so nobody polls and nobody is overtaken, but Confirm and Cancel go before Trys:
what is decided must end, however many new Trys arrive meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque


class ThreadTurn:
    """For threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._trys: deque[threading.Event] = deque()
        self._phase2: deque[threading.Event] = deque()

    def acquire(self, *, is_try: bool, seconds: float) -> bool:
        """Wait up to `seconds` for the turn; whether it came."""
        waiting = self._trys if is_try else self._phase2
        mine = threading.Event()
        with self._lock:
            if not self._taken:
                self._taken = True
                return True
            waiting.append(mine)
        mine.wait(seconds)
        with self._lock:
            if not mine.is_set():
                waiting.remove(mine)
            return mine.is_set()

    def release(self) -> None:
        """The next may go."""
        with self._lock:
            following = self._phase2 or self._trys
            if following:
                following.popleft().set()
            else:
                self._taken = False


class TaskTurn:
    """For the tasks of one event loop."""

    def __init__(self) -> None:
        self._taken = False
        self._trys: deque[asyncio.Future[None]] = deque()
        self._phase2: deque[asyncio.Future[None]] = deque()

    async def acquire(self, *, is_try: bool, seconds: float) -> bool:
        """Wait up to `seconds` for the turn; whether it came."""
        if not self._taken:
            self._taken = True
            return True
        waiting = self._trys if is_try else self._phase2
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append(mine)
        try:
            await asyncio.wait([mine], timeout=seconds)
        except asyncio.CancelledError:
            if mine.done():
                self.release()
            else:
                waiting.remove(mine)
            raise
        if not mine.done():
            waiting.remove(mine)
        return mine.done()

    def release(self) -> None:
        """The next may go."""
        following = self._phase2 or self._trys
        if following:
            following.popleft().set_result(None)
        else:
            self._taken = False
