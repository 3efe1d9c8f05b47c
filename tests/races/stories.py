"""Which calls meet, what came before them, and what goes wrong: every combination once, then at random."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from participant_sdk.fence import Phase
from tests.races import faults
from tests.races.faults import Fault
from tests.races.model import PHASES

SWITCHES: Final = (0.0, 0.15, 0.5, 1.0)


@dataclass(frozen=True, order=True)
class Kind:
    """One of the six: a call that comes for the first time, or a repeat of one that was sent before."""

    phase: Phase
    repeated: bool

    def __str__(self) -> str:
        return f"{self.phase.name.capitalize()}{chr(39) if self.repeated else ''}"


KINDS: Final = tuple(Kind(phase, repeated) for phase in PHASES for repeated in (False, True))
MEETINGS: Final = tuple(meeting for size in (2, 3) for meeting in itertools.combinations(KINDS, size))
"""Every pair and every triple of them."""


@dataclass(frozen=True)
class Cell:
    """A combination that has to come up: these calls meet, and this strikes one of this phase."""

    meeting: tuple[Kind, ...]
    phase: Phase | None
    label: str

    def __str__(self) -> str:
        who = f"{self.phase.name.capitalize()} " if self.phase is not None else ""
        return f"{{{', '.join(map(str, self.meeting))}}}: {who}{self.label}"


@dataclass(frozen=True)
class Before:
    """A call that was sent before the race, and what struck it."""

    phase: Phase
    fault: Fault | None


@dataclass(frozen=True)
class BranchStory:
    """What happens to one branch. `accounts`: in the order in which its handlers touch them.

    `external`: its action has its effect outside; `writes`: but uses the database, too.
    """

    before: tuple[Before, ...]
    meeting: tuple[Kind, ...]
    accounts: tuple[int, ...] = ()
    external: bool = False
    writes: bool = True


@dataclass(frozen=True)
class Story:
    """One round. `apart`: the share of calls that go to the second instance.

    `orderly`: Try goes first where it can, then whom the cell is about. `time_passes`: leases lapse during the race.
    `looks`: how often an auditor looks at what is committed, meanwhile.
    """

    seed: int
    branches: tuple[BranchStory, ...]
    faults: tuple[Fault, ...]
    cell: Cell | None
    apart: float
    switch: float
    orderly: bool = False
    time_passes: bool = False
    looks: int = 0


def labels(database: str) -> tuple[str, ...]:
    """All that can strike a call."""
    kinds = (faults.KILLED,) if database == "sqlite" else (faults.KILLED, faults.LOST)
    cut = (f"{kind} {place}" for kind in kinds for place in faults.PLACES)
    return (*cut, faults.FAILING, faults.REFUSING, faults.SLOW, faults.EXPIRED)


def cells(database: str) -> Iterator[Cell]:
    """Every combination."""
    for meeting in MEETINGS:
        yield Cell(meeting, None, "undisturbed")
        for phase in sorted({kind.phase for kind in meeting}):
            for label in labels(database):
                if label != faults.REFUSING or phase is Phase.TRY:
                    yield Cell(meeting, phase, label)


def fault_of(label: str, phase: Phase, rng: random.Random) -> Fault:
    """What `label` counts, at one of its places."""
    kind, _, place = label.partition(" ")
    if not place:
        place = rng.choice(faults.EXPIRES_AT) if kind == faults.EXPIRED else faults.IN_HANDLER
    return Fault(kind, place, phase)


def story_of(cell: Cell, seed: int) -> Story:
    """A round in which the cell may well come up."""
    rng = random.Random(seed)
    struck = () if cell.phase is None else (fault_of(cell.label, cell.phase, rng),)
    branch = BranchStory(_before_cell(cell, rng), cell.meeting, (1,))
    apart, switch = rng.choice((0.0, 0.5, 1.0)), rng.choice(SWITCHES)
    return Story(seed, (branch,), struck, cell, apart, switch, orderly=rng.random() < 0.6)


def _before_cell(cell: Cell, rng: random.Random) -> tuple[Before, ...]:
    """Nothing that keeps the call that the cell is about from running its handler; what is repeated, was lost."""
    sent = []
    repeated = {kind.phase for kind in cell.meeting if kind.repeated} - {
        kind.phase for kind in cell.meeting if not kind.repeated
    }
    if cell.phase is not Phase.TRY and Phase.TRY not in {kind.phase for kind in cell.meeting if not kind.repeated}:
        sent.append(Before(Phase.TRY, None))
        repeated -= {Phase.TRY}
    for phase in sorted(repeated):
        if rng.random() < 0.3:
            sent.append(Before(phase, Fault(faults.KILLED, rng.choice(faults.PLACES[:4]), phase)))
    return tuple(sent)


def random_story(database: str, seed: int) -> Story:
    """Any round: one branch or two, with up to two faults."""
    rng = random.Random(seed)
    if rng.random() < 0.2:
        return external_story(database, seed)
    meetings = [rng.choice(MEETINGS)]
    if rng.random() < 0.2:
        meetings[0] = tuple(rng.choices(KINDS, k=rng.choice((2, 3, 4))))  # some of them more than once
    if len(meetings[0]) < 4 and rng.random() < 0.3:
        meetings.append(tuple(rng.choices(KINDS, k=rng.choice((1, 2)))))
    roads = rng.choice((((1,), (1,)), ((1,), (2,)), ((1, 2), (2, 1))))
    branches = tuple(
        BranchStory(_before(meeting, rng), meeting, road) for meeting, road in zip(meetings, roads, strict=False)
    )
    struck = tuple(_any_fault(database, branches, rng) for _ in range(rng.choice((0, 1, 1, 1, 2))))
    apart, switch, looks = rng.choice((0.0, 0.5, 0.5)), rng.choice(SWITCHES), rng.choice((0, 0, 0, 2))
    return Story(seed, branches, struck, None, apart, switch, looks=looks)


def external_story(database: str, seed: int) -> Story:
    """A Try whose effect lies outside, often with what is hard about it: overtaken by Cancel, or run a second time."""
    rng = random.Random(f"external {seed}")
    meeting, kind = rng.choice(MEETINGS), rng.random()
    struck: list[Fault] = []
    if kind < 0.3:
        meeting = tuple(rng.sample((Kind(Phase.TRY, False), Kind(Phase.TRY, True), Kind(Phase.CANCEL, False)), k=3))
        struck.append(Fault(faults.SLOW, faults.AFTER_EFFECT, Phase.TRY))
    elif kind < 0.5:
        meeting = (Kind(Phase.TRY, False), Kind(Phase.TRY, True), *rng.choice(((), (Kind(Phase.CANCEL, False),))))
        struck.append(Fault(rng.choice((faults.KILLED, faults.FAILING)), faults.AFTER_EFFECT, Phase.TRY))
        struck.append(Fault(faults.REFUSING, faults.IN_HANDLER, Phase.TRY, skip=1))
    branch = BranchStory(_before(meeting, rng), meeting, external=True, writes=rng.random() < 0.5)
    for _ in range(rng.choice((0, 1, 1, 2)) if kind > 0.5 else rng.choice((0, 1))):
        fault = _any_fault(database, (branch,), rng)
        if fault.phase is Phase.TRY:
            if fault.place == faults.IN_HANDLER and fault.kind != faults.REFUSING and rng.random() < 0.5:
                fault = replace(fault, place=faults.AFTER_EFFECT)
            fault = replace(fault, skip=rng.choice((0, 1, 2)))
        struck.append(fault)
    orderly, time_passes = rng.random() < 0.3, kind < 0.5 or rng.random() < 0.5
    return Story(seed, (branch,), tuple(struck), None, 0.5, rng.choice(SWITCHES), orderly, time_passes)


def _any_fault(database: str, branches: tuple[BranchStory, ...], rng: random.Random) -> Fault:
    phase = rng.choice([kind.phase for branch in branches for kind in branch.meeting])
    among = [label for label in labels(database) if label != faults.REFUSING or phase is Phase.TRY]
    if rng.random() < 0.3:  # a new connection costs more than the rest of a round
        among = [label for label in among if " " not in label]
    return fault_of(rng.choice(among), phase, rng)


def _before(meeting: tuple[Kind, ...], rng: random.Random) -> tuple[Before, ...]:
    """What was sent before: Try in most cases, unless it is in the race, and whatever is repeated in it."""
    first = {kind.phase for kind in meeting if not kind.repeated}
    repeated = {kind.phase for kind in meeting if kind.repeated}
    sent = []
    for phase in PHASES:
        if phase in first or (phase not in repeated and (phase is not Phase.TRY or rng.random() < 0.15)):
            continue
        fate = rng.random()
        if fate < 0.7:
            refused = phase is Phase.TRY and fate < 0.1
            sent.append(Before(phase, Fault(faults.REFUSING, faults.IN_HANDLER, phase) if refused else None))
        elif fate > 0.85:
            sent.append(Before(phase, Fault(faults.KILLED, rng.choice(faults.PLACES), phase)))
        # else it never arrived
    return tuple(sent)
