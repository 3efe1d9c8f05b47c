"""Taking turns where a database lets only one local transaction write at a time, as SQLite does.

The turn is handed on directly, so nobody polls and nobody is overtaken, but Confirm and Cancel go before Trys:
what is decided must end, however many new Trys arrive meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sqlalchemy import Connection


TURN: Final = "tricord.turn"
"""In `connection.info` while a call has the turn, as what gives it away."""


class Held:
    """A turn that one has; `give` hands it on, once."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    def give(self) -> None:
        """The next may go. Nothing if it was given already."""
        if (release := self._release) is not None:
            self._release = None
            release()


def give_turn(connection: Connection) -> None:
    """The call on this connection writes nothing for a while. What it writes later has to wait like any stranger's."""
    if (held := connection.info.get(TURN)) is not None:
        held.give()


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
