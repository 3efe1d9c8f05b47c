"""The fence: what a call may do, given what the fence row of its branch says.

One pure table. Messages arrive late, twice and in any order; whether a handler may run is decided here and nowhere
else, from the row that the call itself holds locked. Read it beside the table in the design: a row per phase, a
column per status. A verdict is a named value, so that a replayed refusal can never be mistaken for a success.
"""

from __future__ import annotations

from enum import Enum, IntEnum, unique
from typing import Final


@unique
class Phase(IntEnum):
    """Which of a branch's three operations is called; or that an operator has done one of the last two by hand."""

    TRY = 1
    CONFIRM = 2
    CANCEL = 3
    SETTLE_CONFIRMED = 4
    SETTLE_CANCELLED = 5


SETTLES: Final = frozenset({Phase.SETTLE_CONFIRMED, Phase.SETTLE_CANCELLED})


@unique
class Status(IntEnum):
    """What the fence row says. The numbers are stored: never change one."""

    TRIED = 1
    """Try has reserved something; it waits for Confirm or Cancel."""
    COMMITTED = 2
    """Confirm has run."""
    ROLLBACKED = 3
    """Cancel has run, or Try was refused (then the row holds the refusal)."""
    SUSPENDED = 4
    """Cancel came first: there is nothing to undo, and a Try that still arrives must not run."""


@unique
class Progress(Enum):
    """How far the call that gave the row its status has come."""

    FINISHED = "its last statement is in the row"
    UNFINISHED = "its handler committed by itself, and what came after that is lost"
    LEASED = "an external Try runs, or has stopped less than its lease ago"
    LAPSED = "an external Try did not end within its lease, or ended without knowing its outcome"


@unique
class Verdict(Enum):
    """What to do with a call."""

    RUN_TRY = "insert TRIED and run the Try handler"
    RUN_CONFIRM = "set COMMITTED and run the Confirm handler"
    RUN_CANCEL = "set ROLLBACKED and run the Cancel handler"
    SETTLE_COMMITTED = "set COMMITTED, run nothing: it was confirmed by hand"
    SETTLE_ROLLBACKED = "set ROLLBACKED, run nothing: it was cancelled by hand"
    SUSPEND = "insert SUSPENDED, run nothing: done"
    DONE = "done before, run nothing"
    REPLAY_RESULT = "done before: answer with the stored result"
    REPLAY_REFUSAL = "answer with the stored refusal, or as suspended if there is none"
    REFUSE_SUSPENDED = "refuse: Cancel came before this Try"
    EMPTY_CONFIRM = "violation: Confirm of a branch that was never tried here"
    CONFIRM_AFTER_CANCEL = "violation: Confirm of a branch that was cancelled or refused"
    CONFIRM_SUSPENDED = "violation: Confirm of a branch that was cancelled before it was tried"
    SETTLED_OTHERWISE = "violation: the branch has ended otherwise than it was resolved by hand"
    CANCEL_AFTER_CONFIRM = "violation: Cancel of a branch that was confirmed"
    OTHER_CALL = "violation: the branch was tried with another action or payload"
    HALF_DONE = "violation: its handler committed by itself, and what came after that is lost"
    RUN_TRY_AGAIN = "take the external Try over and run its handler again"
    TRY_RUNS = "unknown: the external Try of this branch may still be running"
    CONFIRM_UNTRIED = "violation: Confirm of a branch whose external Try has not ended well"

    @property
    def is_violation(self) -> bool:
        """Whether the call contradicts what is stored: nothing runs, nothing changes."""
        return self in VIOLATIONS


VIOLATIONS: Final = frozenset(
    {
        Verdict.EMPTY_CONFIRM,
        Verdict.CONFIRM_AFTER_CANCEL,
        Verdict.CONFIRM_SUSPENDED,
        Verdict.CANCEL_AFTER_CONFIRM,
        Verdict.SETTLED_OTHERWISE,
        Verdict.OTHER_CALL,
        Verdict.HALF_DONE,
        Verdict.CONFIRM_UNTRIED,
    }
)

TABLE: Final[dict[tuple[Phase, Status | None], Verdict]] = {
    (Phase.TRY, None): Verdict.RUN_TRY,
    (Phase.TRY, Status.TRIED): Verdict.REPLAY_RESULT,
    (Phase.TRY, Status.COMMITTED): Verdict.REPLAY_RESULT,
    (Phase.TRY, Status.ROLLBACKED): Verdict.REPLAY_REFUSAL,
    (Phase.TRY, Status.SUSPENDED): Verdict.REFUSE_SUSPENDED,
    (Phase.CONFIRM, None): Verdict.EMPTY_CONFIRM,
    (Phase.CONFIRM, Status.TRIED): Verdict.RUN_CONFIRM,
    (Phase.CONFIRM, Status.COMMITTED): Verdict.DONE,
    (Phase.CONFIRM, Status.ROLLBACKED): Verdict.CONFIRM_AFTER_CANCEL,
    (Phase.CONFIRM, Status.SUSPENDED): Verdict.CONFIRM_SUSPENDED,
    (Phase.CANCEL, None): Verdict.SUSPEND,
    (Phase.CANCEL, Status.TRIED): Verdict.RUN_CANCEL,
    (Phase.CANCEL, Status.COMMITTED): Verdict.CANCEL_AFTER_CONFIRM,
    (Phase.CANCEL, Status.ROLLBACKED): Verdict.DONE,
    (Phase.CANCEL, Status.SUSPENDED): Verdict.DONE,
    # Nothing was tried here: SUSPENDED keeps it so, whichever way the branch was resolved.
    (Phase.SETTLE_CONFIRMED, None): Verdict.SUSPEND,
    (Phase.SETTLE_CONFIRMED, Status.TRIED): Verdict.SETTLE_COMMITTED,
    (Phase.SETTLE_CONFIRMED, Status.COMMITTED): Verdict.DONE,
    (Phase.SETTLE_CONFIRMED, Status.ROLLBACKED): Verdict.SETTLED_OTHERWISE,
    (Phase.SETTLE_CONFIRMED, Status.SUSPENDED): Verdict.DONE,
    (Phase.SETTLE_CANCELLED, None): Verdict.SUSPEND,
    (Phase.SETTLE_CANCELLED, Status.TRIED): Verdict.SETTLE_ROLLBACKED,
    (Phase.SETTLE_CANCELLED, Status.COMMITTED): Verdict.SETTLED_OTHERWISE,
    (Phase.SETTLE_CANCELLED, Status.ROLLBACKED): Verdict.DONE,
    (Phase.SETTLE_CANCELLED, Status.SUSPENDED): Verdict.DONE,
}

UNFINISHED: Final[dict[tuple[Phase, Status], Verdict]] = {
    (Phase.TRY, Status.TRIED): Verdict.HALF_DONE,
    (Phase.CONFIRM, Status.TRIED): Verdict.HALF_DONE,
    (Phase.CANCEL, Status.TRIED): Verdict.RUN_CANCEL,
    (Phase.CONFIRM, Status.COMMITTED): Verdict.HALF_DONE,
    (Phase.CANCEL, Status.ROLLBACKED): Verdict.HALF_DONE,
    (Phase.SETTLE_CONFIRMED, Status.COMMITTED): Verdict.SETTLE_COMMITTED,
    (Phase.SETTLE_CANCELLED, Status.ROLLBACKED): Verdict.SETTLE_ROLLBACKED,
}
"""The cells that differ where the row is committed, but the last statement of the call that wrote it never ran.

Only a handler that commits behind the SDK's back can bring that about: some of its work stays, the rest is gone.
That is never answered "done". A half done Try can still be cancelled; any more needs a person, who may settle it.
"""


EXTERNAL: Final[dict[tuple[Phase, Progress], Verdict]] = {
    (Phase.TRY, Progress.LEASED): Verdict.TRY_RUNS,
    (Phase.TRY, Progress.LAPSED): Verdict.RUN_TRY_AGAIN,
    (Phase.CONFIRM, Progress.LEASED): Verdict.CONFIRM_UNTRIED,
    (Phase.CONFIRM, Progress.LAPSED): Verdict.CONFIRM_UNTRIED,
    (Phase.CANCEL, Progress.LEASED): Verdict.TRY_RUNS,
    (Phase.CANCEL, Progress.LAPSED): Verdict.RUN_CANCEL,
    (Phase.SETTLE_CONFIRMED, Progress.LEASED): Verdict.TRY_RUNS,
    (Phase.SETTLE_CONFIRMED, Progress.LAPSED): Verdict.SETTLE_COMMITTED,
    (Phase.SETTLE_CANCELLED, Progress.LEASED): Verdict.TRY_RUNS,
    (Phase.SETTLE_CANCELLED, Progress.LAPSED): Verdict.SETTLE_ROLLBACKED,
}
"""The cells of a row that is the intent of an external Try (rule C4): TRIED is committed before its handler runs.

Its effect lies outside the database, so only its lease keeps Cancel from running beside it, and only its end, stored
in exactly this intent, makes it tried.
"""


def decide(phase: Phase, status: Status | None, same_call: bool, progress: Progress = Progress.FINISHED) -> Verdict:
    """The verdict on a call. `status` is None if the branch has no row; then nothing else matters."""
    if status is None:
        return TABLE[phase, None]
    if not same_call:
        return Verdict.OTHER_CALL
    if progress in (Progress.LEASED, Progress.LAPSED):
        return EXTERNAL[phase, progress]
    whole = TABLE[phase, status]
    return whole if progress is Progress.FINISHED else UNFINISHED.get((phase, status), whole)
