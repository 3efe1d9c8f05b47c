"""What a moment of the world is, and what is explored."""

from __future__ import annotations

from typing import NamedTuple

from coordinator.model import Outcome, Phase, Spec
from tests.model.store import Age
from tests.model.values import NOTHING, Event

DOWN, HOLDS, SAVES = 0, 1, 2
PHASES = len(Phase)
OUTCOMES = len(Outcome)


class Setup(NamedTuple):
    """What is explored."""

    name: str
    spec: Spec
    coordinators: int = 2
    branches: int = 2
    lost: int = 1
    """How many lost COMMITs of the coordinators may be on the way at a time."""
    steps: bool = False
    """Whether a participant's local transaction is told in steps, or happens at once when its call arrives."""
    together: bool = False
    """Whether two replies may also be taken in one save."""
    forgets: bool = False
    """Whether one participant's database may once be set back to before its Try."""
    events: tuple[Event, ...] = ()
    """What initiators and operators may ask at any time, of any coordinator, any number of times."""
    resolved_max: int = 0


class Coordinator(NamedTuple):
    """One process: it knows nothing, holds a value that a save has returned, or waits for a save."""

    kind: int = DOWN
    value: int = NOTHING
    age: Age = Age.FRESH
    afloat: bool = False
    """The COMMIT was lost, and is on its way to the row."""


class State(NamedTuple):
    """The world at one moment; coordinators and branches by their numbers in ``World``."""

    row: int
    coordinators: tuple[int, ...]
    calls: int = 0
    replies: int = 0
    orphans: tuple[int, ...] = ()
    """Lost COMMITs on their way whose coordinator has crashed."""
    branches: tuple[int, ...] = ()
    forgot: bool = False


class Label(NamedTuple):
    """What happens."""

    place: int | None
    """The coordinator that does it, if one does."""
    text: str
    value: int = NOTHING
    """The value that is saved, or lands."""
    age: Age | None = None
    """How it stood to the row."""
    event: Event | None = None
    """What it was made of, where it may decide."""


def call_bit(branch: int, phase: Phase) -> int:
    """A call in flight."""
    return 1 << (branch * PHASES + phase - 1)


def reply_bit(branch: int, phase: Phase, outcome: Outcome) -> int:
    """A reply in flight."""
    return reply_bits(phase, outcome) << branch * PHASES * OUTCOMES


def reply_bits(phase: Phase, outcome: Outcome | None) -> int:
    return 0 if outcome is None else 1 << ((phase - 1) * OUTCOMES + outcome - 1)


def reply_kinds(branches: int) -> list[tuple[int, Phase, Outcome]]:
    """All replies that there can be."""
    return [(branch, phase, outcome) for branch in range(branches) for phase in Phase for outcome in Outcome]
