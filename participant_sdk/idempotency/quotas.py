"""How many new keys a tenant may bring: a bucket of tokens for each, in the memory of the process.

Records are not counted: that would be one more statement, or one row for all of a tenant's requests to wait at. So the
limit is one of each process, and starts anew with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Lock
from typing import Final, Self

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.errors import TooManyKeys
from participant_sdk.idempotency.kinds import NUMBER, check_kinds

TENANTS_MAX: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyQuota:
    """At most `keys` runs at once, and over time `keys` in each `window_s` seconds, of a tenant in this process.

    What is answered from its record does not count. `tenants_max`: how many tenants are kept in mind, those that were
    active last; one that is forgotten starts with all its keys. Raises ConfigurationError.
    """

    keys: int
    window_s: float
    tenants_max: int = 10_000

    def __post_init__(self) -> None:
        check_kinds("quota", self, keys=int, window_s=NUMBER, tenants_max=int)
        for field, value, least, most in (
            ("keys", self.keys, 1, 1_000_000_000),
            ("window_s", self.window_s, 0.001, 366 * 86_400),
            ("tenants_max", self.tenants_max, 1, TENANTS_MAX),
        ):
            if not math.isfinite(value) or not least <= value <= most:
                raise ConfigurationError(f"quota: {field} {value!r} is not {least} to {most}")


class Buckets:
    """The tokens of the tenants of one operation. For any number of threads.

    Of each tenant one number is kept: the moment at which its bucket is full again. `now`: in seconds, only forward.
    """

    def __init__(self, quota: KeyQuota, now: Callable[[], float] = time.monotonic) -> None:
        self._quota = quota
        self._now = now
        self._each_s = quota.window_s / quota.keys
        self._full_at: dict[str, float] = {}
        self._lock = Lock()

    def take(self, tenant: str) -> None:
        """A token. Raises TooManyKeys if there is none."""
        now = self._now()
        with self._lock:
            full_at = max(now, self._full_at.pop(tenant, now)) + self._each_s
            wait_s = full_at - now - self._quota.window_s
            if wait_s > self._each_s * 1e-6:  # not what comes of adding up
                self._full_at[tenant] = full_at - self._each_s
                raise TooManyKeys(self._quota.keys, self._quota.window_s, math.ceil(wait_s * 1_000))
            self._full_at[tenant] = full_at
            if len(self._full_at) > self._quota.tenants_max:
                del self._full_at[next(iter(self._full_at))]

    def give_back(self, tenant: str) -> None:
        """The token that was taken last: it was not needed."""
        with self._lock:
            if tenant in self._full_at:
                self._full_at[tenant] -= self._each_s

    def __len__(self) -> int:
        return len(self._full_at)


class Quotas:
    """The buckets of one door, by the names of its operations; of most there are none.

    Raises ConfigurationError for an operation that has two quotas.
    """

    def __init__(self, quotas: Iterable[tuple[str, KeyQuota | None]]) -> None:
        found: dict[str, KeyQuota | None] = {}
        for operation, quota in quotas:
            if found.setdefault(operation, quota) != quota:
                raise ConfigurationError(f"{operation}: quota {quota} is not that of its other routes")
        self._buckets = {operation: Buckets(quota) for operation, quota in found.items() if quota is not None}

    def token(self, operation: str, tenant: str) -> Token:
        """For one request, around its question to the store."""
        return Token(self._buckets.get(operation) if self._buckets else None, tenant)


class Token:
    """A `with` block takes it, which raises TooManyKeys, and gives it back unless it was `spent`: it came to a run."""

    __slots__ = ("_buckets", "_tenant", "spent")

    def __init__(self, buckets: Buckets | None, tenant: str) -> None:
        self._buckets = buckets
        self._tenant = tenant
        self.spent = False

    def __enter__(self) -> Self:
        if self._buckets is not None:
            self._buckets.take(self._tenant)
        return self

    def __exit__(self, *error: object) -> None:
        if self._buckets is not None and not self.spent:
            self._buckets.give_back(self._tenant)
