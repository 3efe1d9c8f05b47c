"""Many rounds on one database under one isolation level, and what is counted about them. Runs in a process of its own.

Each combination is played until it has come up; what is left of the rounds is random.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.races.bank import Bank
from tests.races.bank_async import AsyncBank
from tests.races.killed import play_killed
from tests.races.play import Played, Round
from tests.races.stories import Cell, Story, cells, external_story, random_story, story_of
from tests.races.watch import watched

THREADS: Final = "threads"
EXTERNAL: Final = "external"
ASYNCIO: Final = "asyncio"
PROCESSES: Final = "processes"
ROUNDS_PER_CELL: Final = 2
"""So many rounds are enough for every combination to come up."""
FAILURES_SHOWN_MAX: Final = 3
ATTEMPTS_MAX: Final = 40
"""How often a combination is played until it is given up."""
PROGRESS: Final = 500


@dataclass(frozen=True)
class Job:
    """What one process does; `part` of `parts` of the combinations, shuffled by `deck_seed`, are its own.

    `kind`: calls in threads, the same of external actions only, as tasks of an event loop (both of these at random
    only), or in processes that really die (then `rounds` counts the deaths).
    """

    database: str
    level: str
    url: str
    rounds: int
    seed: int
    part: int = 0
    parts: int = 1
    kind: str = THREADS
    deck_seed: int = 0
    progress: bool = False

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.database} {self.level}" + (f", {self.kind}" if self.kind != THREADS else "")


@dataclass
class Tally:
    """What has come of a job, or of many. `cells`: how often each combination came up, those with 0 too."""

    rounds: int = 0
    calls: int = 0
    violations: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    cells: Counter[Cell] = field(default_factory=Counter)
    meetings: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    lost_races: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Take another's counts into this one."""
        self.rounds += other.rounds
        self.calls += other.calls
        self.violations += other.violations
        self.seconds += other.seconds
        self.failures += other.failures
        for name in ("cells", "meetings", "struck", "answers", "lost_races"):
            mine, theirs = getattr(self, name), getattr(other, name)
            for key, count in theirs.items():  # `update` would do, but `+` drops zeros, and zeros matter
                mine[key] += count

    def count(self, job: Job, played: Played) -> None:
        """Take one round in."""
        self.rounds += 1
        self.calls += len(played.calls)
        self.meetings.update(f"{{{', '.join(map(str, branch.meeting))}}}" for branch in played.story.branches)
        self.struck.update(played.struck)
        for actor in played.calls:
            answer = "no answer" if actor.reply is None else actor.reply.outcome.name
            self.answers[f"{actor.call.phase.name.capitalize()} {answer}"] += 1
            self.lost_races.update(actor.lost_races)
        if played.story.cell is not None and played.came_up:
            self.cells[played.story.cell] += 1
        if played.wrong:
            self.violations += 1
            if len(self.failures) < FAILURES_SHOWN_MAX:
                self.failures.append(failure(job.kind, job.database, job.level, played))


def perform(job: Job) -> Tally:
    """Play all rounds of a job."""
    tally = Tally()
    began_at = time.perf_counter()
    bank_class = AsyncBank if job.kind == ASYNCIO else Bank
    with bank_class(job.database, job.level, job.url) as bank, watched():
        rounds = play_killed(bank, job.rounds, job.seed) if job.kind == PROCESSES else _played(job, bank, tally)
        for number, played in enumerate(rounds, 1):
            tally.count(job, played)
            if job.progress and number % PROGRESS == 0:
                print(f"races: {job.name}: {number} of {job.rounds} ({tally.violations} violations)", flush=True)
    tally.seconds = time.perf_counter() - began_at
    return tally


def _played(job: Job, bank: Bank, tally: Tally) -> Iterator[Played]:
    """Combinations, in turns with random rounds for as long as there are rounds enough for all of them."""
    deck = deck_of(job) if job.kind == THREADS else deque[tuple[Cell, int]]()
    any_story = external_story if job.kind == EXTERNAL else random_story
    tally.cells.update(dict.fromkeys((cell for cell, _ in deck), 0))
    for_all = job.rounds >= ROUNDS_PER_CELL * len(deck)
    for number in range(job.rounds):
        seed = job.seed * 1_000_000 + number
        hurry = for_all and job.rounds - number < 3 * len(deck)
        if not deck or (number % 2 and not hurry):
            yield Round(bank, any_story(job.database, seed)).play()
            continue
        cell, attempts = deck.popleft()
        played = Round(bank, story_of(cell, seed)).play()
        if not played.came_up and attempts < ATTEMPTS_MAX:
            deck.append((cell, attempts + 1))
        yield played


def deck_of(job: Job) -> deque[tuple[Cell, int]]:
    """The job's combinations, shuffled, each with how often it was played in vain."""
    shuffled = list(cells(job.database))
    random.Random(f"{job.deck_seed} {job.level}").shuffle(shuffled)
    return deque((cell, 0) for cell in shuffled[job.part :: job.parts])


def replay(kind: str, database: str, level: str, url: str, story: Story, choices: Sequence[int]) -> Played:
    """Play one round again, with the choices that its trace ended with."""
    bank_class = AsyncBank if kind == ASYNCIO else Bank
    with bank_class(database, level, url) as bank, watched():
        return Round(bank, story, choices).play()


def failure(kind: str, database: str, level: str, played: Played) -> str:
    """All that there is to say about a round that went wrong. Processes cannot be replayed."""
    story = played.story
    number = kind if story.cell is None else str(list(cells(database)).index(story.cell))
    choices = ".".join(map(str, played.choices))
    lines = [f"VIOLATED on {database} {level}: " + "; ".join(played.wrong)]
    if story.cell is not None:
        lines.append(f"combination: {story.cell}")
    for branch_id, branch in enumerate(story.branches, 1):
        lines.append(f"branch {branch_id}: {', '.join(map(str, branch.meeting))} on accounts {branch.accounts}")
    lines += [f"to strike: {fault.phase.name.capitalize()} {fault.label}" for fault in story.faults]
    lines += played.trace
    if kind != PROCESSES:
        token = f"{kind}:{database}:{level}:{number}:{story.seed}:{choices}"
        lines.append(f"again: python -m tests.races.run --replay '{token}'")
    return "\n".join(lines)
