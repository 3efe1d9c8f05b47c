"""When the calls of one address time out: one timer for all of them; a timer each would cost more than the call."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable


class Deadlines:
    """One timer for all calls of a link.

    Nearly all calls have the same time-out, so their deadlines come in the order in which they were added: a dict
    keeps them. The few with less (a transaction's deadline is near) are kept in a heap.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, time_out: Callable[[int], None]) -> None:
        self._loop = loop
        self._time_out = time_out
        self._even: dict[int, float] = {}
        self._last_s = 0.0
        self._odd: list[tuple[float, int]] = []
        self._odd_live: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, call_id: int, deadline_s: float) -> None:
        """Watch one more call."""
        if deadline_s >= self._last_s:
            self._last_s = deadline_s
            self._even[call_id] = deadline_s
        else:
            heapq.heappush(self._odd, (deadline_s, call_id))
            self._odd_live.add(call_id)
        if self._timer is None or deadline_s < self._timer.when():
            self._arm(deadline_s)

    def remove(self, call_id: int) -> None:
        """Watch a call no longer."""
        if self._even.pop(call_id, None) is None:
            self._odd_live.discard(call_id)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, when_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        now_s = self._loop.time() + 0.001  # some event loops' clocks step by milliseconds
        late = []
        for call_id, deadline_s in self._even.items():
            if deadline_s > now_s:
                break
            late.append(call_id)
        while self._odd and (self._odd[0][0] <= now_s or self._odd[0][1] not in self._odd_live):
            _, call_id = heapq.heappop(self._odd)
            if call_id in self._odd_live:
                late.append(call_id)
        for call_id in late:
            self._time_out(call_id)
        times = [self._odd[0][0]] if self._odd else []
        if self._even:
            times.append(next(iter(self._even.values())))
        if times:
            self._arm(min(times))
