"""All that a history says about one transaction, sorted by kind and in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from .events import (
    Asked,
    Called,
    Effect,
    Event,
    Fence,
    History,
    Purged,
    Resolved,
    Row,
    Saved,
    Told,
)

SIDES: Final = {
    "CONFIRMING": "confirmed",
    "CONFIRMED": "confirmed",
    "CANCELLING": "cancelled",
    "CANCELLED": "cancelled",
}
"""How a decided state will end."""
RANKS: Final = {"TRYING": 0, "CONFIRMING": 1, "CANCELLING": 1, "CONFIRMED": 2, "CANCELLED": 2}
"""How far a state is on its way."""
FENCE_SIDES: Final = {"COMMITTED": "confirmed", "ROLLBACKED": "cancelled", "SUSPENDED": "cancelled"}
EFFECT_SIDES: Final = {
    "confirm": "confirmed",
    "cancel": "cancelled",
    "suspended": "cancelled",
    "refused": "cancelled",
}

E = TypeVar("E", bound=Event)


class Fact(NamedTuple):
    """An event and the number of its line."""

    line: int
    event: Any


def lines(*facts: Fact) -> list[int]:
    """Their numbers."""
    return [fact.line for fact in facts]


def surely_before(history: History, one: Fact, other: Fact) -> bool:
    """Whether one thing surely came before another, by what the history says of its order."""
    if history.order == "lines":
        return one.line < other.line
    return bool(one.event.at + history.skew_ms < other.event.at)


class Branch:
    """What is said about one branch."""

    def __init__(self) -> None:
        self.effects: dict[str, list[Fact]] = {}
        """By what they are."""
        self.fences: list[Fact] = []
        self.resolved: list[Fact] = []
        self.purged: list[Fact] = []
        self.called: list[Fact] = []

    def of(self, what: str) -> Sequence[Fact]:
        """The effects of one sort."""
        return self.effects.get(what, ())

    @property
    def all_effects(self) -> list[Fact]:
        """The effects of every sort."""
        return [fact for facts in self.effects.values() for fact in facts]

    @property
    def participant(self) -> str:
        """Whose it is; empty if only an operator has spoken of it."""
        facts = [*self.all_effects, *self.fences, *self.called, *self.purged]
        return str(facts[0].event.participant) if facts else ""

    def endings(self) -> list[tuple[str, Fact]]:
        """How it has ended, by each fact that says so."""
        found = [(EFFECT_SIDES[what], fact) for what, facts in self.effects.items() if what != "try" for fact in facts]
        return found + [(FENCE_SIDES[fact.event.status], fact) for fact in self.fences if fact.event.status != "TRIED"]


class Evidence:
    """One transaction's facts. ``at_rest``: nothing more comes about it."""

    def __init__(
        self, xid: str, facts: Iterable[Fact], history: History, *, at_rest: bool, asked: Sequence[Fact] = ()
    ) -> None:
        self.xid = xid
        self.history = history
        self.at_rest = at_rest
        self.asked = asked
        """What was asked under its keys, or about its xid."""
        self.told: list[Fact] = []
        self.saved: list[Fact] = []
        self.rows: list[Fact] = []
        self.forgotten: list[Fact] = []
        """When its record was purged."""
        self.branches: dict[int, Branch] = {}
        in_order = sorted(facts, key=self._place)
        for fact in in_order:
            self._sort(fact)
        self.records = [fact for fact in (*self.saved, *self.rows) if fact.event.state in SIDES]
        """Decided states on record."""
        self.answers = [fact for fact in self.told if fact.event.state in SIDES]
        """Decided states that were told."""

    def _place(self, fact: Fact) -> tuple[int, int]:
        return (fact.line if self.history.order == "lines" else fact.event.at, fact.line)

    def _sort(self, fact: Fact) -> None:
        event = fact.event
        match event:
            case Told():
                self.told.append(fact)
            case Saved():
                self.saved.append(fact)
            case Row():
                self.rows.append(fact)
            case Effect():
                self.branch(event.branch_id).effects.setdefault(event.what, []).append(fact)
            case Fence():
                self.branch(event.branch_id).fences.append(fact)
            case Called():
                self.branch(event.branch_id).called.append(fact)
            case Resolved():
                self.branch(event.branch_id).resolved.append(fact)
            case Purged(branch_id=0):
                self.forgotten.append(fact)
            case Purged():
                self.branch(event.branch_id).purged.append(fact)
            case Asked():
                self.asked = [*self.asked, fact]

    def branch(self, branch_id: int) -> Branch:
        """What is said about a branch, made at its first mention."""
        if branch_id not in self.branches:
            self.branches[branch_id] = Branch()
        return self.branches[branch_id]

    def before(self, one: Fact, other: Fact) -> bool:
        """Whether one thing surely came before another."""
        return surely_before(self.history, one, other)

    def has_all(self, kind: str) -> bool:
        """Whether what is missing of a kind has not happened."""
        return self.at_rest and kind in self.history.complete

    @property
    def decision(self) -> tuple[str, Fact] | None:
        """How it was decided, and who says so: what is on record, else what was told. None if that contradicts."""
        facts = self.records or self.answers
        sides = {SIDES[fact.event.state] for fact in facts}
        return (sides.pop(), facts[-1]) if len(sides) == 1 else None
