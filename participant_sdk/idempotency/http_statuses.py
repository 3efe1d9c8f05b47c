"""Which answers of an HTTP handler are kept, and what becomes of the work behind them. Pure."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum, unique
from typing import Final

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.kinds import check_kinds

NEVER: Final = frozenset({401, 403, 408, 421, 425, 429})
"""They say something of this moment or this caller, not of the request; with all of 5xx they are never kept."""


@unique
class Ending(Enum):
    """What becomes of a run whose handler has answered."""

    DONE = "done"
    """The work stays, the answer is kept."""
    FINAL = "final"
    """The work is rolled back, the answer is kept: it will not be another one."""
    AGAIN = "again"
    """The work is rolled back, the answer is given once; a repeat runs again."""


@unique
class Compat(Enum):
    """Habits of other services that go against the rules here."""

    NONE = "none"
    STRIPE_V1 = "stripe-v1"
    """A handler's own 5xx is a final answer too, as in the first version of that API. What it raises is not."""


@dataclass(frozen=True, slots=True)
class Statuses:
    """2xx and 3xx keep the work and the answer; of 4xx those in `final` keep the answer; all else may run again.

    A handler overrules that with the header `X-Idempotency: final` or `retryable`, which does not leave the door; but
    401, 403, 408, 421, 425, 429 and 5xx are never kept. Raises ConfigurationError where `final` holds one of those.
    """

    final: AbstractSet[int] = frozenset()
    compat: Compat = Compat.NONE

    def __post_init__(self) -> None:
        check_kinds("statuses", self, final=(AbstractSet, list, tuple), compat=Compat)
        for status in self.final:
            if not isinstance(status, int) or not 400 <= status <= 599:
                raise ConfigurationError(f"statuses: final {status!r} is not 400 to 499; below 400 all are kept")
            if self._never(status):
                raise ConfigurationError(
                    f"statuses: final {status} says something of this moment or this caller; it can never be kept"
                )
        object.__setattr__(self, "final", frozenset(self.final))

    def ending(self, status: int, said: str | None = None) -> Ending:
        """What an answer with `status` means, of which the handler has said "final", "retryable" or nothing."""
        if self._never(status) or said == "retryable":
            return Ending.AGAIN
        if status < 400:
            return Ending.DONE
        if status in self.final or said == "final" or status >= 500:
            return Ending.FINAL
        return Ending.AGAIN

    def _never(self, status: int) -> bool:
        return status in NEVER or (status >= 500 and self.compat is not Compat.STRIPE_V1)


DEFAULT_STATUSES: Final = Statuses()
