"""What a participant's fence says of a branch that an operator resolves by hand. No I/O.

It is asked before anything is recorded, and Settle asks it again afterwards: the answers here are those that Settle
would get (``participant_sdk.fence`` has the table), so that what would end as a contradiction is not recorded at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from enum import Enum
from typing import NamedTuple

from .doctor import Reach
from .doctor_fence import FenceRow, FenceStatus
from .model import Transaction
from .orders import Denied, Resolve


class Word(NamedTuple):
    """What one address of a participant answered."""

    address: str
    reach: Reach
    text: str = ""
    """Why it cannot be asked; empty with ANSWERED."""
    fence_id: str = ""
    row: FenceRow | None = None
    """With ANSWERED; None: its fence has no row of the branch."""

    def is_of(self, fence_id: str) -> bool:
        """Whether it is the word of this fence; of any, where it is not known which one Try has reserved in."""
        return self.reach is Reach.ANSWERED and fence_id in ("", self.fence_id)


class Verdict(Enum):
    """What that means for a resolution."""

    FITS = 1
    """Settle would be acknowledged."""
    CONTRADICTS = 2
    """Settle would find that the branch has ended otherwise."""
    UNCLEAR = 3


class Judgement(NamedTuple):
    """What the fence says of one resolution."""

    verdict: Verdict
    text: str
    """For people: what it says and since when, or why it says nothing."""
    answers: bool
    """Whether somebody is there who answers for the fence, or could."""


_OPPOSITE = {True: FenceStatus.ROLLBACKED, False: FenceStatus.COMMITTED}
_MAY_ANSWER = (Reach.NOT_OFFERED, Reach.BUSY)


def judge(tx: Transaction, order: Resolve, words: Sequence[Word], now_ms: int) -> Judgement:
    """What the words of a participant's addresses, all of them or the one that counts, say of a resolution."""
    index = order.branch_id - 1
    branch, fence_id = tx.spec.branches[index], tx.steps[index].fence_id
    of_it = next((word for word in words if word.is_of(fence_id)), None)
    if of_it is None:
        answers = any(word.reach in _MAY_ANSWER for word in words)
        why = "; ".join(_unasked(word, fence_id) for word in words) or "it has no address at the moment"
        return Judgement(Verdict.UNCLEAR, f"participant {branch.participant} cannot be asked: {why}", answers)
    row = of_it.row
    if row is None:
        return Judgement(Verdict.FITS, "it has no row: as far as it knows nothing was tried", True)
    if row.action != branch.action:
        return Judgement(Verdict.CONTRADICTS, f"its row is of another action, {row.action}", True)
    verdict, text = _of_row(row, order.confirmed)
    return Judgement(verdict, f"{text} since {_time_text(now_ms - row.age_ms)}", True)


def refusal_of(tx: Transaction, order: Resolve, said: Judgement) -> Denied | None:
    """Why a resolution that nobody forces is refused; None if it is not."""
    xid, participant = tx.spec.xid.hex(), tx.spec.branches[order.branch_id - 1].participant
    asked = "confirmed" if order.confirmed else "cancelled"
    about = {"xid": xid, "state": tx.state.name, "participant": participant, "fence": said.text}
    if order.lost:
        if not said.answers:
            return None
        text = (
            f"participant {participant} is there, so its database is not lost; its fence: {said.text}. Resolve the "
            "branch without --lost, or add --force (force in the request)"
        )
        return Denied("PARTICIPANT_ANSWERS", text, **about)
    if said.verdict is Verdict.CONTRADICTS:
        text = (
            f"branch {order.branch_id} of transaction {xid} cannot be resolved as {asked}: the fence of participant "
            f"{participant} contradicts: {said.text}. --force (force in the request) records it all the same"
        )
        return Denied("FENCE_CONTRADICTS", text, **about)
    if said.verdict is Verdict.UNCLEAR:
        text = (
            f"whether branch {order.branch_id} of transaction {xid} can be resolved as {asked} is not known: "
            f"{said.text}. Ask again later, or add --force (force in the request), or --lost (lost) if its database is "
            "gone for good"
        )
        return Denied("FENCE_UNCLEAR", text, **about)
    return None


def _of_row(row: FenceRow, confirmed: bool) -> tuple[Verdict, str]:
    try:
        status = FenceStatus(row.status)
    except ValueError:
        return Verdict.UNCLEAR, "its row has a status that this coordinator does not know,"
    if status is FenceStatus.TRIED and row.external:
        if row.running:  # nobody can have done by hand what may still have its effect
            return Verdict.UNCLEAR, "its external Try may still be running,"
        return Verdict.FITS, "its external Try has not ended, and does not run any more,"
    text = status.name if row.finished else f"{status.name} (its handler committed by itself and never ended)"
    # SUSPENDED, nothing was ever tried, is kept so by Settle, whichever way the branch was resolved.
    return Verdict.CONTRADICTS if status is _OPPOSITE[confirmed] else Verdict.FITS, text


def _unasked(word: Word, fence_id: str) -> str:
    if word.reach is Reach.ANSWERED:
        why = f"it stands on fence database {word.fence_id or '?'}, Try was answered by {fence_id}"
    elif word.reach is Reach.NOT_OFFERED:
        why = f"it is there, and does not offer GetBranch ({word.text})"
    else:
        why = word.text
    return f"{word.address}: {why}"


def _time_text(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
