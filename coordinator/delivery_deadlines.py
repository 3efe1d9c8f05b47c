"""When many things are to be looked at, each once: one timer for all; a timer each would cost more than the thing."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)


class Deadlines(Generic[_Key]):
    """One timer for all calls of a link, or whatever else waits for so long, by a key.

    Nearly all calls have the same time-out, so their deadlines come in the order in which they were added: a dict
    keeps them. The few with less (a transaction's deadline is near) are kept in a heap.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, time_out: Callable[[_Key], None]) -> None:
        self._loop = loop
        self._time_out = time_out
        self._even: dict[_Key, float] = {}
        self._last_s = 0.0
        self._odd: list[tuple[float, int, _Key]] = []
        self._odd_count = 0
        self._odd_live: set[_Key] = set()
        self._timer: asyncio.Handle | None = None
        self._due_s = 0.0
        """When the timer fires. It is not asked itself: what uvloop gives for a time that has come knows none."""

    def add(self, key: _Key, deadline_s: float) -> None:
        """Watch one more."""
        if deadline_s >= self._last_s:
            self._last_s = deadline_s
            self._even[key] = deadline_s
        else:
            self._odd_count += 1  # keys need have no order
            heapq.heappush(self._odd, (deadline_s, self._odd_count, key))
            self._odd_live.add(key)
        if self._timer is None or deadline_s < self._due_s:
            self._arm(deadline_s)

    def remove(self, key: _Key) -> None:
        """Watch it no longer."""
        if self._even.pop(key, None) is None:
            self._odd_live.discard(key)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, when_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = when_s
        self._timer = self._loop.call_at(when_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        now_s = self._loop.time() + 0.001  # some event loops' clocks step by milliseconds
        late = []
        for key, deadline_s in self._even.items():
            if deadline_s > now_s:
                break
            late.append(key)
        while self._odd and (self._odd[0][0] <= now_s or self._odd[0][2] not in self._odd_live):
            _, _, key = heapq.heappop(self._odd)
            if key in self._odd_live:
                late.append(key)
        for key in late:
            self._time_out(key)
        times = [self._odd[0][0]] if self._odd else []
        if self._even:
            times.append(next(iter(self._even.values())))
        if times:
            self._arm(min(times))
