"""What may be sent again, and how long to wait first. Pure: the one place where both are decided.

A request may be sent again if it cannot do harm twice: it has an idempotency key, or its method only reads. Then what
came back, or did not, decides:

    HTTP                                            gRPC                                     sent again
    408, 425, 429, 502, 503, 504                    UNAVAILABLE, ABORTED                     yes
    409 with Retry-After: still in progress         RESOURCE_EXHAUSTED with RetryInfo        yes
    500                                             INTERNAL, UNKNOWN                        with `retry_internal`
    no connection, a lost one, a time-out           DEADLINE_EXCEEDED (of one try)           yes
    everything else, such as 409 without
    Retry-After, 422, or any replayed answer        everything else                          no
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from threading import Lock
from typing import Final

from participant_sdk.errors import ConfigurationError

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_STATUSES: Final = frozenset({408, 425, 429, 502, 503, 504})
_CODES: Final = frozenset({"UNAVAILABLE", "ABORTED", "DEADLINE_EXCEEDED"})
_INTERNAL_CODES: Final = frozenset({"INTERNAL", "UNKNOWN"})
_WAIT_S_MAX: Final = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often, how long and how fast. Times are in seconds. Raises ConfigurationError for what cannot work.

    Before retry n (from 0) it waits a random time of 0 to `min(cap_s, base_s * 2**n)`, beside what the server asked
    for. No try begins later than `total_s` after the first one, nor when the server asks for a wait beyond that.
    """

    attempts_max: int = 6
    total_s: float = 60.0
    base_s: float = 0.1
    cap_s: float = 5.0
    try_s: float | None = None
    """gRPC: the deadline of one try, within that of the call; None: only the call's. HTTP clients have their own."""
    retry_internal: bool = False
    """Whether 500, INTERNAL and UNKNOWN are sent again: right where the server keeps no answer of that kind."""
    budget_share: float = 0.2
    """Retries of one client, as a share of its calls: when a server is down, load on it must not multiply."""
    budget_burst: int = 10
    """How many retries are allowed beyond the share: saved up by calls, and there at the start."""

    def __post_init__(self) -> None:
        limits = (
            ("attempts_max", self.attempts_max, 1, 1_000),
            ("total_s", self.total_s, 0, 30 * 86_400),
            ("base_s", self.base_s, 0, 3_600),
            ("cap_s", self.cap_s, 0, 3_600),
            ("try_s", 1 if self.try_s is None else self.try_s, 0.001, 86_400),
            ("budget_share", self.budget_share, 0, 1_000),
            ("budget_burst", self.budget_burst, 0, 1_000_000),
        )
        for field, value, least, most in limits:
            if not (math.isfinite(value) and least <= value <= most):
                raise ConfigurationError(f"retry policy: {field} {value} is not {least} to {most}")

    def jitter_s(self, retry: int, chance: float) -> float:
        """The wait before retry number `retry`, from 0; `chance` is 0 to 1."""
        return chance * min(self.cap_s, self.base_s * 2.0 ** min(retry, 64))


@dataclass(frozen=True, slots=True)
class Fault:
    """What was wrong with a try. `again`: whether its kind may be sent again; `retry_after_s`: as the server asked."""

    again: bool
    retry_after_s: float | None = None


def http_fault(
    status: int, retry_after: str | None, replayed: bool, policy: RetryPolicy, now: Callable[[], float]
) -> Fault | None:
    """What is wrong with an HTTP answer; None: nothing that another try could mend.

    `replayed`: the server said that this is the stored answer; it would be the same again. `now` is the time of day,
    in seconds since 1970, for a Retry-After that is a date.
    """
    after_s = read_retry_after(retry_after, now)
    again = (
        status in _STATUSES
        or (status in (409, 423) and after_s is not None)
        or (status == 500 and policy.retry_internal)
    )
    return Fault(True, after_s) if again and not replayed else None


def grpc_fault(code: str, retry_after_s: float | None, policy: RetryPolicy) -> Fault | None:
    """The same for a gRPC code, by its name; a negative `retry_after_s` is a server that wants no retry."""
    again = (
        code in _CODES
        or (code == "RESOURCE_EXHAUSTED" and retry_after_s is not None)
        or (code in _INTERNAL_CODES and policy.retry_internal)
    )
    if not again or (retry_after_s is not None and retry_after_s < 0):
        return None
    return Fault(True, retry_after_s)


def read_retry_after(text: str | None, now: Callable[[], float]) -> float | None:
    """Seconds from now, never below 0; None: there is none, or it is neither seconds nor an HTTP date."""
    text = (text or "").strip()
    if text.isascii() and text.isdigit():
        return min(float(text), _WAIT_S_MAX)
    if not text:
        return None
    try:
        at = parsedate_to_datetime(text)
        return min(max(0.0, (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - now()), _WAIT_S_MAX)
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


class RetryBudget:
    """Tokens that the calls of one client earn and its retries spend. For any number of threads."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._share, self._burst = policy.budget_share, float(policy.budget_burst)
        self._tokens = self._burst
        self._lock = Lock()

    def earn(self) -> None:
        """A call has begun."""
        with self._lock:
            self._tokens = min(max(self._burst, self._share), self._tokens + self._share)

    def spend(self) -> bool:
        """Whether one more retry is allowed; if so, it is counted."""
        with self._lock:
            if self._tokens < 1.0:
                return False
            self._tokens -= 1.0
            return True


class Tries:
    """The tries of one request. Knows no clock: `now` is given, in seconds that only go forward."""

    def __init__(self, policy: RetryPolicy, budget: RetryBudget, now: float, total_s: float | None = None) -> None:
        """`total_s`: the caller's own limit, such as a deadline; the shorter one counts."""
        self._policy, self._budget = policy, budget
        self._end = now + (policy.total_s if total_s is None else min(policy.total_s, total_s))
        self.attempts = 1
        budget.earn()

    def left_s(self, now: float) -> float:
        """How long this may still go on."""
        return max(0.0, self._end - now)

    def wait_s(self, now: float, fault: Fault, chance: float | None = None) -> float | None:
        """How long to wait before the next try, which is counted with that; None: there is none. See RetryPolicy."""
        if not fault.again or self.attempts >= self._policy.attempts_max:
            return None
        jitter_s = self._policy.jitter_s(self.attempts - 1, random.random() if chance is None else chance)
        wait_s = jitter_s + (fault.retry_after_s or 0.0)
        if now + wait_s >= self._end or not self._budget.spend():
            return None
        self.attempts += 1
        return wait_s
