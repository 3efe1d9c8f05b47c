"""The invariants by number and in words, what of a history each needs, and what was found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple


class Invariant(NamedTuple):
    """What must hold of every history."""

    words: str
    needs: str
    """What a history must hold so that it can be judged; empty if none can show it."""


INVARIANTS: Final[Mapping[int, Invariant]] = {
    1: Invariant(
        "One decision, durable before phase 2",
        "decisions (saved, row) beside calls, effects or answers",
    ),
    2: Invariant(
        "No mixed ending, unless an operator has resolved a branch",
        "effects or fence rows of several branches, or of one beside its decision",
    ),
    3: Invariant(
        "A Confirm takes effect once at most, and once exactly where its branch was tried and confirmed",
        "effects, or fence rows beside what was asked",
    ),
    4: Invariant(
        "No effect of a Try that came after its Cancel is left standing",
        "effects of branches that were cancelled",
    ),
    5: Invariant("Sums are conserved, and nothing is reserved at rest", "balances, fence rows or effects at rest"),
    6: Invariant("Answers repeat identically", "several answers under one key or about one xid"),
    7: Invariant("The same key with another request never runs", "keys with fingerprints, or with xids"),
    8: Invariant("A stale coordinator changes nothing", "saved with its version, twice for one xid"),
    9: Invariant("States only move forward", "saved, or saved beside row, twice for one xid"),
    10: Invariant("Nothing is purged while a message for it can arrive", "purged"),
    11: Invariant("Everything terminates", "the line end, and row, saved or asked"),
    12: Invariant("A dead participant delays only its own", ""),
}


class Violation(NamedTuple):
    """What does not hold, and which lines contradict each other."""

    number: int
    subject: str
    """The xid; or ``key …``, ``unit …``, ``account …`` where it is about no single transaction."""
    what: str
    lines: Sequence[int]

    @property
    def text(self) -> str:
        """One line for people."""
        lines = ", ".join(map(str, self.lines))
        where = f" (line{'s' if len(self.lines) > 1 else ''} {lines})" if lines else ""
        return f"invariant {self.number}, {INVARIANTS[self.number].words}: {self.subject}: {self.what}{where}"


class Findings:
    """Counts what was judged, and hands on what does not hold as it is found."""

    def __init__(self, tell: Callable[[Violation], None]) -> None:
        self.judged: Counter[int] = Counter()
        """By invariant: how many transactions, keys, units and accounts could be judged."""
        self.violated: Counter[int] = Counter()
        self._tell = tell

    def add(self, number: int, subject: str, what: str, lines: Sequence[int]) -> None:
        """Something does not hold."""
        self.violated[number] += 1
        self._tell(Violation(number, subject, what, sorted(set(lines))))
