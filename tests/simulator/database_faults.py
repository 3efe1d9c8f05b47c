"""What goes wrong between a process and its database, and how often."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum, unique
from typing import Final, NamedTuple

TRIP_US: Final = (60, 900)
"""How long a request takes, ordinarily: from, to."""


@unique
class Fate(Enum):
    """What becomes of a request."""

    ANSWERED = "it is carried out and answered"
    LOST_BEFORE = "the connection breaks before it arrives"
    LOST_AFTER = "it is carried out, and the answer is lost"
    LANDS_LATER = "its sender is told that the connection is lost, and it lands later all the same"


class Blow(NamedTuple):
    """What strikes one request. ``conflict_at``: before which statement 40001 strikes; -1: none."""

    fate: Fate
    delay_us: int
    conflict_at: int
    told: list[str]
    """What is counted."""


@dataclass(slots=True)
class DatabaseFaults:
    """How often, of 1, a request meets with what; times in ms. ``heal`` sets all to none."""

    lost_before: float = 0.0
    """The connection breaks before the request arrives."""
    lost_after: float = 0.0
    """It breaks when the request was carried out: the answer is lost."""
    lands_later: float = 0.0
    """The sender is told that it is lost; the request lands up to ``later_ms`` later."""
    later_ms: int = 3_000
    conflict: float = 0.0
    """40001 at a statement."""
    conflict_at_commit: float = 0.0
    slow: float = 0.0
    """A request takes up to ``slow_ms``."""
    slow_ms: int = 500
    notice_ms: int = 5_000
    """At the latest then it is noticed that a client is gone; until then its locks are held."""

    def heal(self) -> None:
        """No faults from now on."""
        self.lost_before = self.lost_after = self.lands_later = self.conflict = self.conflict_at_commit = 0.0
        self.slow = 0.0
        self.notice_ms = 50

    def blow(self, rng: random.Random, statements: int, commits: bool, conflicts: bool) -> Blow:
        """What strikes a request of so many statements. ``conflicts``: whether any statement can meet with one."""
        told = []
        delay_us = rng.randint(*TRIP_US)
        if self.slow and rng.random() < self.slow:
            told.append("slow")
            delay_us = 1000 * rng.randint(1, self.slow_ms)
        conflict_at = -1
        if commits and self.conflict_at_commit and rng.random() < self.conflict_at_commit:
            told.append("conflict_at_commit")
            conflict_at = statements - 1
        elif conflicts and self.conflict and rng.random() < self.conflict:
            told.append("conflict")
            conflict_at = rng.randrange(statements)
        fate, share = Fate.ANSWERED, rng.random()
        for another, rate, what, at_commit in (
            (Fate.LOST_BEFORE, self.lost_before, "lost_before", "lost_before"),
            (Fate.LOST_AFTER, self.lost_after, "lost_after", "lost_after_commit"),
            (Fate.LANDS_LATER, self.lands_later, "lands_later", "late_commit"),
        ):
            if 0 <= share < rate:
                fate = another
                told.append(at_commit if commits else what)
            share -= rate
        return Blow(fate, delay_us, conflict_at, told)
