"""Leaves alone what does not answer: after a failure nobody asks for a while, and then one at a time does."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Final

PAUSE_MIN_S: Final = 1.0
PAUSE_MAX_S: Final = 30.0


class Breaker:
    """Closed until a call fails; then open for a pause that doubles with each failure in a row. For any threads.

    `ticket` is taken before a call, and handed back with its result. Of many calls that were out when the first of
    them failed, only that one counts.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._series = 0
        self._next_at = 0.0

    def ticket(self) -> int | None:
        """For a call now; None: make none. When a pause is over one caller gets one, and the others wait on."""
        if not self._failures:
            return self._series
        with self._lock:
            now = self._clock()
            if self._failures:
                if now < self._next_at:
                    return None
                self._next_at = now + self._pause()  # should this caller never tell
            return self._series

    def succeeded(self, ticket: int) -> bool:
        """The call was answered; whether the breaker was open until now."""
        if not self._failures:
            return False
        with self._lock:
            if ticket != self._series or not self._failures:
                return False
            self._failures = 0
            return True

    def failed(self, ticket: int) -> bool:
        """The call has failed; whether the breaker was closed until now."""
        with self._lock:
            if ticket != self._series:
                return False
            self._series += 1
            self._failures += 1
            self._next_at = self._clock() + self._pause()
            return self._failures == 1

    def _pause(self) -> float:
        return random.uniform(0.9, 1.0) * min(PAUSE_MAX_S, PAUSE_MIN_S * 2.0 ** min(self._failures - 1, 10))
