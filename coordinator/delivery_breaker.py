"""One address's circuit breaker: a dead or hung participant costs little, and delays nobody but its own.

CLOSED -> OPEN after failures in a row; when the open period is over, HALF_OPEN lets one call through as a probe, and
what becomes of that closes it or opens it again for twice as long. An answered call, whatever it says, closes it.
While it is not closed calls are answered at once, with the time before which they need not come again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from enum import Enum

import structlog

from .model import Phase

_log = structlog.get_logger(__name__)

FAILURES_MAX = 5
"""Failures in a row that open it: no connection, a broken stream, UNAVAILABLE."""
SILENT_MAX = 32
"""Likewise calls that time out. More of them, for a few slow handlers make no participant dead."""
SILENT_MS_MIN = 100
"""A call with less time than this tells nothing when it times out."""
OPEN_MS_MIN = 500
OPEN_MS_MAX = 15_000
RETURNS_PER_S = 500
"""How many Confirms and Cancels that an address owes should come again: each return is a claim and a save."""
CROWD_MS = 500
"""For so long ahead its returns are booked when too many wait for it to be looked at one by one."""
_JITTER = 0.25
_PROBE_MS = 100
"""How long a probe is likely to take."""


class BreakerState(Enum):
    """Whether calls go through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"
    """A probe is out."""


class Breaker:
    """Opened and closed by what becomes of an address's calls."""

    __slots__ = (
        "_booked_s",
        "_clock_s",
        "_open_ms",
        "_pause_ms_max",
        "_probed_s",
        "_shut_s",
        "address",
        "closed",
        "failures",
        "last_error",
        "probe",
        "probe_at_s",
        "silent",
        "since_ms",
        "spotless",
        "trusted_s",
    )

    def __init__(self, address: str, pause_ms_max: int, clock_s: Callable[[], float]) -> None:
        self.address = address
        self.closed = True
        self.spotless = True
        """Closed, and nothing counted: an answer changes nothing."""
        self.trusted_s = 0.0
        """When somebody last said that the address is back."""
        self.failures = 0
        self.silent = 0
        self.probe = 0
        """The call_id of the call that tries whether it may close; 0: none."""
        self.last_error = ""
        self.since_ms = _now_ms()
        """When it last opened or closed, by this machine's clock."""
        self._clock_s = clock_s
        self._pause_ms_max = min(pause_ms_max, OPEN_MS_MAX)
        self._open_ms = 0.0
        self.probe_at_s = 0.0
        """When the next probe may go."""
        self._probed_s = 0.0
        self._shut_s = 0.0
        self._booked_s = 0.0
        """Until when Confirms and Cancels come again, at ``RETURNS_PER_S``."""

    @property
    def state(self) -> BreakerState:
        """As seen now."""
        if self.closed:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if self.probe else BreakerState.OPEN

    def admits_probe(self) -> bool:
        """Whether a call may go through although it is not closed; ``begin_probe`` then says which."""
        return not self.probe and self._clock_s() >= self.probe_at_s

    def begin_probe(self, call_id: int) -> None:
        """This call tries whether it may close."""
        self.probe = call_id
        self._probed_s = self._clock_s()

    def answered(self) -> None:
        """A call was answered. Need not be told while ``spotless``."""
        self.spotless = True
        self.failures = self.silent = self.probe = 0
        if not self.closed:
            self.closed = True
            self.since_ms = _now_ms()
            _log.info("delivery.breaker_closed", address=self.address)

    def failed(self, why: str) -> None:
        """The address could not be reached, or turned its calls away."""
        self.spotless = False
        self.failures += 1
        self.last_error = why
        if self.failures >= FAILURES_MAX:
            self._open(why)

    def timed_out(self, timeout_ms: int, why: str) -> bool:
        """A call was not answered in its time; whether that has opened it."""
        if timeout_ms < SILENT_MS_MIN:
            return False
        self.spotless = False
        self.silent += 1
        self.last_error = why
        if self.silent < SILENT_MAX or not self.closed:
            return False
        self._open(why)
        return True

    def trust(self) -> None:
        """Somebody says that the address is back: calls go through at once, and the first that fails opens it again."""
        self.trusted_s = self._clock_s()
        if self.closed:
            return
        self.closed = True
        self.failures, self.silent, self.probe = FAILURES_MAX - 1, SILENT_MAX - 1, 0
        self._booked_s = 0.0
        self.since_ms = _now_ms()
        _log.info("delivery.breaker_trusts", address=self.address)

    def probe_failed(self) -> None:
        """The probe got no answer."""
        self.probe = 0
        self._open_for(min(self._open_ms * 2, self._pause_ms_max))

    def retry_ms(self, phase: Phase) -> int:
        """When a call that was not let through should come again.

        A Try as soon as the probe will have told: its transaction has a deadline. Confirm and Cancel are owed for
        ever, by any number of transactions: they wait the longer, the longer it has been open and the more they are,
        so that each comes a few times an outage and not all at once after it.
        """
        now_s = self._clock_s()
        if self.probe:  # as long again as it has been out
            wait_ms = max(_PROBE_MS, (now_s - self._probed_s) * 1000)
        else:
            wait_ms = (self.probe_at_s - now_s) * 1000 + _PROBE_MS
        if phase is Phase.TRY:
            return int(wait_ms + random.uniform(0, max(_PROBE_MS, wait_ms * _JITTER)))
        self.book(1)
        longest_ms = self.longest_ms(self._pause_ms_max)
        return int(random.uniform(min(wait_ms, longest_ms), longest_ms))

    def book(self, calls: int) -> None:
        """So many Confirms and Cancels will come again."""
        self._booked_s = max(self._booked_s, self._clock_s()) + calls / RETURNS_PER_S

    def longest_ms(self, cap_ms: float) -> float:
        """When the last of them should come."""
        now_s = self._clock_s()
        open_s = now_s - self._shut_s + OPEN_MS_MIN / 1000
        return min(cap_ms, max(open_s, self._booked_s - now_s) * 1000)

    def crowded(self) -> bool:
        """Whether so many wait, and none is wanted as a probe, that more had better not be looked at."""
        return not self.closed and not self.admits_probe() and self._booked_s - self._clock_s() > CROWD_MS / 1000

    def _open(self, why: str) -> None:
        if not self.closed:
            return  # its probe decides
        self.closed = False
        self.since_ms = _now_ms()
        self._shut_s = self._clock_s()
        self._open_for(min(OPEN_MS_MIN, self._pause_ms_max))
        _log.warning("delivery.breaker_open", address=self.address, why=why)

    def _open_for(self, period_ms: float) -> None:
        self._open_ms = period_ms
        self.probe_at_s = self._clock_s() + period_ms * random.uniform(1 - _JITTER, 1 + _JITTER) / 1000


def _now_ms() -> int:
    return int(time.time() * 1000)
