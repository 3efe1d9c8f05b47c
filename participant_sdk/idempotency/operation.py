"""What an operation says about its keys, its runs and its answers; checked when it is made."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Final

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.kinds import NUMBER, check_kinds
from participant_sdk.idempotency.machine import Rules, TakeOver
from participant_sdk.idempotency.record import Record

NAME_BYTES_MAX: Final = 200
TENANT_BYTES_MAX: Final = 200
_NAME: Final = re.compile(r"[\x21-\x7e]{1,200}")


@unique
class Mode(Enum):
    """How the record and the work belong together."""

    ATOMIC = "atomic"
    """One local transaction holds the work and the record: one commit. Nothing is left behind by a crash."""
    LEASED = "leased"
    """A claim is committed first, with a lease; the work and its completion are a second local transaction."""
    PHASED = "phased"
    """As LEASED, with recovery points in between: for work with calls to others."""


@unique
class KeyScope(Enum):
    """Where one key is one request."""

    OPERATION = "operation"
    """Within its operation: the same key elsewhere is another request."""
    GLOBAL = "global"
    """In the whole namespace: the same key at another operation is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One kind of request that is safe to repeat. Raises ConfigurationError for settings that cannot work.

    Times are in seconds. `wait_s`: how long a repeat waits for the run in progress before it is told to come back.
    `ttl_s`: how long an answer is kept, from its completion; it must not be shorter than `retry_horizon_s`, the time
    over which its callers may still repeat it. `lease_s`, `heartbeat`, `take_over`, `reentrant` and `attempts_max`
    say what happens to a run whose process dies (LEASED and PHASED; an ATOMIC run leaves nothing behind).
    """

    name: str
    mode: Mode = Mode.ATOMIC
    scope: KeyScope = KeyScope.OPERATION
    wait_s: float = 0.0
    ttl_s: float = 24 * 3600.0
    retry_horizon_s: float = 0.0
    lease_s: float = 30.0
    heartbeat: bool = True
    take_over: TakeOver = TakeOver.AUTO
    reentrant: Callable[[Record], bool] | None = None
    attempts_max: int = 10
    answer_bytes_max: int = 1 << 20
    key_hint_chars: int = 0
    """How much of the key is kept readable for people, 0 to 16 characters; the rest is only hashed."""
    rules: Rules = field(init=False, repr=False, compare=False)
    """What `machine.verdict` needs of it."""

    def __post_init__(self) -> None:
        check_kinds("operation", self, name=str)
        check_kinds(
            self.name, self, mode=Mode, scope=KeyScope, take_over=TakeOver, heartbeat=bool,
            wait_s=NUMBER, ttl_s=NUMBER, retry_horizon_s=NUMBER, lease_s=NUMBER,
            attempts_max=int, answer_bytes_max=int, key_hint_chars=int,
        )  # fmt: skip
        if not _NAME.fullmatch(self.name):
            raise ConfigurationError(
                f"operation name {self.name!r} is not 1 to {NAME_BYTES_MAX} printable ASCII characters without spaces"
            )
        self._check_times()
        if not 1 <= self.attempts_max <= 1_000_000:
            raise ConfigurationError(f"{self.name}: attempts_max {self.attempts_max} is not 1 to 1000000")
        if not 0 <= self.answer_bytes_max <= 1 << 30:
            raise ConfigurationError(f"{self.name}: answer_bytes_max {self.answer_bytes_max} is not 0 to {1 << 30}")
        if not 0 <= self.key_hint_chars <= 16:
            raise ConfigurationError(f"{self.name}: key_hint_chars {self.key_hint_chars} is not 0 to 16")
        if (self.take_over is TakeOver.ONLY_IF_REENTRANT) != (self.reentrant is not None):
            raise ConfigurationError(
                f"{self.name}: `reentrant` goes with take_over=ONLY_IF_REENTRANT, and is needed there"
            )
        if self.mode is Mode.ATOMIC and self.take_over is not TakeOver.AUTO:
            raise ConfigurationError(f"{self.name}: an atomic run leaves nothing to take over; take_over must be AUTO")
        rules = Rules(self.name, self.take_over, self.reentrant, self.attempts_max)
        object.__setattr__(self, "rules", rules)

    def _check_times(self) -> None:
        limits = (
            ("wait_s", self.wait_s, 0, 3_600),
            ("ttl_s", self.ttl_s, 1, 366 * 86_400),
            ("retry_horizon_s", self.retry_horizon_s, 0, 366 * 86_400),
            ("lease_s", self.lease_s, 0.1, 86_400),
        )
        for name, value, least, most in limits:
            if not (math.isfinite(value) and least <= value <= most):
                raise ConfigurationError(f"{self.name}: {name} {value} is not {least} to {most} seconds")
        if self.ttl_s < self.retry_horizon_s:
            raise ConfigurationError(
                f"{self.name}: ttl_s {self.ttl_s} is shorter than retry_horizon_s {self.retry_horizon_s}: "
                "a late repeat would run again"
            )
