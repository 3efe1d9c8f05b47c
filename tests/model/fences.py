"""A participant's database, as far as one branch is concerned: its fence row, what its handlers did, and one lock.

What ``participant_sdk.local_transaction`` does with a verdict is told here in steps: the row is met (inserted or
locked), the handler runs, COMMIT is answered, or lost and lands later or never. Whoever holds the row keeps every
other call of its branch waiting, from the first statement to the end of COMMIT.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from coordinator.model import Outcome, Phase
from participant_sdk import fence
from participant_sdk.fence import Status, Verdict

COUNT_MAX = 2
"""More often than this nothing need be counted."""


class Stage(Enum):
    """How far a local transaction has come."""

    MET = "holds the row"
    DONE = "its handler has run"
    REFUSED = "its handler has refused, and was rolled back to its savepoint"
    LOST = "its COMMIT is on the way, and nobody listens for the answer"


class Open(NamedTuple):
    """A local transaction that is not at its end."""

    phase: Phase
    verdict: Verdict
    stage: Stage
    after: tuple[Status | None, int, int, int]
    """What it leaves if it commits: status, and how often Try, Confirm and Cancel have had effect."""


class Branch(NamedTuple):
    """What is committed, and what is open."""

    status: Status | None = None
    tries: int = 0
    confirms: int = 0
    cancels: int = 0
    open: Open | None = None

    @property
    def marked(self) -> bool:
        """Whether no Try may have an effect any more."""
        return self.status in (Status.SUSPENDED, Status.ROLLBACKED)


class Move(NamedTuple):
    """What a participant's database can do next."""

    name: str
    after: Branch
    outcome: Outcome | None = None
    """What is answered, if anything is."""
    phase: Phase = Phase.TRY


HANDLERS = {
    Verdict.RUN_TRY: (Status.TRIED, (1, 0, 0)),
    Verdict.RUN_CONFIRM: (Status.COMMITTED, (0, 1, 0)),
    Verdict.RUN_CANCEL: (Status.ROLLBACKED, (0, 0, 1)),
}
"""The verdicts that run a handler: the status that they leave, and whose effect there is once more."""
WRITES = {
    Verdict.SETTLE_COMMITTED: Status.COMMITTED,
    Verdict.SETTLE_ROLLBACKED: Status.ROLLBACKED,
    Verdict.SUSPEND: Status.SUSPENDED,
}
"""The verdicts that only write the row."""
ANSWERS = {
    Verdict.DONE: Outcome.DONE,
    Verdict.REPLAY_RESULT: Outcome.DONE,
    Verdict.REPLAY_REFUSAL: Outcome.REFUSED,
    Verdict.REFUSE_SUSPENDED: Outcome.REFUSED,
}
"""The verdicts that are only answered; all others are violations."""


def met(branch: Branch, phase: Phase, verdict: Verdict) -> Iterator[tuple[Stage, Open | None, Outcome]]:
    """The ways in which a call can go on that has got the row: each with what it would commit, and answer."""
    handler = HANDLERS.get(verdict)
    counts = (branch.tries, branch.confirms, branch.cancels)
    if handler is not None:
        status, more = handler
        tries, confirms, cancels = (min(COUNT_MAX, a + b) for a, b in zip(counts, more, strict=True))
        ran = Open(phase, verdict, Stage.DONE, (status, tries, confirms, cancels))
        yield Stage.DONE, ran, Outcome.DONE
        if verdict is Verdict.RUN_TRY:
            yield Stage.REFUSED, Open(phase, verdict, Stage.REFUSED, (Status.ROLLBACKED, *counts)), Outcome.REFUSED
    elif verdict in WRITES:
        yield Stage.DONE, Open(phase, verdict, Stage.DONE, (WRITES[verdict], *counts)), Outcome.DONE
    else:
        assert verdict in ANSWERS or verdict.is_violation, verdict
        yield Stage.MET, None, ANSWERS.get(verdict, Outcome.VIOLATION)


def deliver(branch: Branch, phase: Phase, verdict: Verdict, *, steps: bool) -> Iterator[Move]:
    """A call arrives at a branch whose row nobody holds."""
    for stage, open_, outcome in met(branch, phase, verdict):
        if open_ is None:
            yield Move(f"answers {outcome.name}: {verdict.value}", branch, outcome, phase)
        elif not steps:
            word = "refuses" if stage is Stage.REFUSED else "commits"
            yield Move(f"{word}: {verdict.value}", Branch(*open_.after), outcome, phase)
        else:
            held = open_._replace(stage=Stage.MET, after=branch[:4])
            yield Move(f"meets the row: {verdict.value}", branch._replace(open=held))
            break


def go_on(branch: Branch) -> Iterator[Move]:
    """What an open local transaction can do next."""
    open_ = branch.open
    assert open_ is not None
    free = branch._replace(open=None)
    if open_.stage is Stage.MET:
        for stage, ran, _ in met(free, open_.phase, open_.verdict):
            name = "its handler refuses" if stage is Stage.REFUSED else f"its statements run ({open_.verdict.name})"
            yield Move(name, free._replace(open=ran))
        yield Move("is rolled back: its process has died", free)
    elif open_.stage is Stage.LOST:
        yield Move("its lost COMMIT lands", Branch(*open_.after))
        yield Move("its lost COMMIT has come to nothing", free)
    else:
        outcome = Outcome.REFUSED if open_.stage is Stage.REFUSED else Outcome.DONE
        yield Move("its COMMIT is answered", Branch(*open_.after), outcome, open_.phase)
        yield Move("its COMMIT is lost", free._replace(open=open_._replace(stage=Stage.LOST)))


def fence_phase(phase: Phase) -> fence.Phase:
    """The same phase as the participant calls it."""
    return fence.Phase(int(phase))
