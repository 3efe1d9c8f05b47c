"""Holds against TRIED branches: counted, summed, and told apart. Pure.

All TRIED branches come first, as many as memory is allowed for; then each hold is looked at once and forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import Final

from participant_sdk.holds import BadHold, Hold, check_hold

Key = tuple[str, int]

UNITS_MAX: Final = 100
MISMATCHES_MAX: Final = 1_000
MISMATCHES_DEFAULT: Final = 50

_EXACT: Final = Context(prec=100, traps=[Inexact, InvalidOperation])
"""30 digits before the point and 30 behind it leave room for any number of holds."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A branch that is TRIED. `finished`: its Try has ended."""

    action: str
    finished: bool


@dataclass(slots=True)
class TriedBranches:
    """All of them up to, and with, the transaction `until`; None: all."""

    branches: dict[Key, Tried] = field(default_factory=dict)
    until: str | None = None


@dataclass(slots=True)
class Sum:
    """Of one unit: all that is reserved, and what of it is reserved under TRIED branches."""

    reserved: Decimal = Decimal(0)
    tried: Decimal = Decimal(0)


class Tally:
    """What comes of the comparison. `actions`: those of which a hold is expected; None: of all."""

    def __init__(self, tried: TriedBranches, actions: frozenset[str] | None, mismatches_max: int) -> None:
        self._branches = tried.branches
        self._actions = actions
        self._mismatches_max = mismatches_max
        self._holding: set[Key] = set()
        self._seen = 0
        self.until = tried.until
        self.holds = 0
        self.not_compared = 0
        self.leaked = 0
        self.leaks: list[Hold] = []
        self.sums: dict[str, Sum] = {}

    def take(self, given: object) -> None:
        """Count a hold; raises BadHold."""
        self._seen += 1
        hold, amount = check_hold(given, self._seen)
        if self.until is not None and hold.xid > self.until:
            self.not_compared += 1
            return
        self.holds += 1
        sums = self._sum_of(hold.unit)
        sums.reserved = _EXACT.add(sums.reserved, amount)
        key = hold.xid, hold.branch_id
        if key in self._branches:
            self._holding.add(key)
            sums.tried = _EXACT.add(sums.tried, amount)
            return
        self.leaked += 1
        if len(self.leaks) < self._mismatches_max:
            self.leaks.append(hold)

    def _sum_of(self, unit: str) -> Sum:
        found = self.sums.get(unit)
        if found is None:
            if len(self.sums) == UNITS_MAX:
                raise BadHold(f"hold {self._seen}: unit is {unit!r}, the {UNITS_MAX + 1}th; {UNITS_MAX} can be summed")
            found = self.sums[unit] = Sum()
        return found

    @property
    def seen(self) -> int:
        """How many holds were given."""
        return self._seen

    @property
    def tried(self) -> int:
        """TRIED branches whose Try has ended."""
        return sum(each.finished for each in self._branches.values())

    @property
    def unfinished(self) -> int:
        """The others."""
        return len(self._branches) - self.tried

    def missing(self) -> Iterator[tuple[Key, Tried]]:
        """TRIED branches without an expected hold, in the order of their transactions."""
        for key, each in self._branches.items():
            expected = each.finished and (self._actions is None or each.action in self._actions)
            if expected and key not in self._holding:
                yield key, each


def plain(amount: Decimal) -> str:
    """Without an exponent, nor zeros that say nothing."""
    text = f"{amount:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
