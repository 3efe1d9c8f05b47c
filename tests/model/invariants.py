"""What must hold in every state and at every step, whatever has happened before."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from coordinator.machine import TRANSITIONS
from coordinator.model import Attention, BranchStatus, Outcome, Phase
from coordinator.model import State as TxState
from coordinator.orders import Confirm
from participant_sdk.fence import Status
from tests.model.fences import Branch
from tests.model.state import Label, State, call_bit, reply_bit
from tests.model.store import Age
from tests.model.values import NOTHING, Event
from tests.model.world import World

RULES = (
    "states only move forward: there is one decision, and it never turns",
    "a branch only moves forward",
    "a decision is durable before any Confirm or Cancel is sent",
    "no mixed ending without an operator",
    "Confirm has effect at most once, and only where Try had, and only by the decision",
    "where the ending is CONFIRMED, Confirm has had effect exactly once",
    "where the ending is known, nothing is reserved any more",
    "no Try has an effect after the cancel mark",
    "a stale coordinator's save changes nothing",
    "no participant is told what contradicts its fence, and nothing contradicts the record",
    "what is answered with DONE has happened",
    "only what is registered in the record is tried, and only what the initiator names is confirmed",
)
FORWARD, BRANCH, DURABLE, MIXED, ONCE, CONFIRMED, RESERVED, MARK, STALE, CONTRADICTED, ANSWERED, NAMED = RULES

STATUS_MOVES = {
    BranchStatus.PENDING: (BranchStatus.TRIED, BranchStatus.REFUSED, BranchStatus.CANCELLED),
    BranchStatus.TRIED: (BranchStatus.CONFIRMED, BranchStatus.CANCELLED),
    BranchStatus.REFUSED: (BranchStatus.CANCELLED,),
}
ENDS = (BranchStatus.CONFIRMED, BranchStatus.CANCELLED)
FENCE_MOVES: dict[Status | None, tuple[Status, ...]] = {
    None: (Status.TRIED, Status.ROLLBACKED, Status.SUSPENDED),
    Status.TRIED: (Status.COMMITTED, Status.ROLLBACKED),
}
HAPPENED: dict[Phase, Callable[[Branch], bool]] = {
    Phase.TRY: lambda branch: branch.tries == 1,
    Phase.CONFIRM: lambda branch: branch.confirms == 1,
    Phase.CANCEL: lambda branch: branch.marked,
}


class Invariants:
    """Judges states and steps of one world; what was judged once is remembered."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._judged: dict[tuple[int, tuple[int, ...], int, int], str] = {}
        self._rows: dict[tuple[int, int], str] = {}
        self._interactive = world.setup.spec.interactive
        places = range(world.setup.branches)
        self._violations = sum(reply_bit(n, phase, Outcome.VIOLATION) for n in places for phase in Phase)
        self._answers = [
            (n, reply_bit(n, p, Outcome.DONE), happened) for n in places for p, happened in HAPPENED.items()
        ]

    def broken(self, before: State, label: Label, after: State) -> str:
        """The rule that this step breaks, or the state after it; empty if none."""
        if after.row != before.row:
            wrong = self._rows.get((before.row, after.row))
            if wrong is None:
                wrong = self._rows[before.row, after.row] = self._row_moves(before.row, after.row)
            if wrong:
                return wrong
            if label.age is Age.STALE:
                return STALE
        if self._interactive and label.event is not None and not self._named(label.value, label.event):
            return NAMED
        if after.branches != before.branches and not after.forgot:
            for a, b in zip(before.branches, after.branches, strict=True):
                if a != b and (wrong := self._fence_moves(self._world.branch(a), self._world.branch(b))):
                    return wrong
        key = (after.row, after.branches, after.calls, after.replies)
        judged = self._judged.get(key)
        if judged is None:
            judged = self._judged[key] = next(self._wrong(after), "")
        return judged

    def _row_moves(self, before: int, after: int) -> str:
        b = self._world.values.tx(after)
        if before == NOTHING:
            return "" if b.state is TxState.TRYING else FORWARD
        a = self._world.values.tx(before)
        if a.state is not b.state and b.state not in _after(a.state, len(a.steps)):
            return FORWARD
        for n, (old, new) in enumerate(zip(a.steps, b.steps, strict=False)):
            if old.status is new.status or (a.resolution_of(n) is not None and new.status in ENDS):
                continue
            if new.status not in STATUS_MOVES.get(old.status, ()):
                return BRANCH
        return "" if len(b.steps) >= len(a.steps) else BRANCH

    def _named(self, value: int, event: Event) -> bool:
        """Whether what decides to confirm an interactive transaction is a Confirm that names all its branches."""
        tx = self._world.values.tx(value)
        if tx.state is not TxState.CONFIRMING or event.replies:
            return True
        return isinstance(event.order, Confirm) and event.order.tried >= set(range(1, len(tx.steps) + 1))

    def _fence_moves(self, a: Branch, b: Branch) -> str:
        if a.marked and b.tries > a.tries:
            return MARK
        if a.status is not b.status and b.status not in FENCE_MOVES.get(a.status, ()):
            return BRANCH
        return ""

    def _wrong(self, state: State) -> Iterator[str]:
        world = self._world
        branches = [world.branch(number) for number in state.branches]
        tx = None if state.row == NOTHING else world.values.tx(state.row)
        decided = None if tx is None else tx.state
        confirmed = decided in (TxState.CONFIRMING, TxState.CONFIRMED)
        cancelled = decided in (TxState.CANCELLING, TxState.CANCELLED)
        mixed = tx is not None and tx.mixed
        for n in range(len(branches)):
            if state.calls & call_bit(n, Phase.CONFIRM) and not confirmed:
                yield DURABLE
            if state.calls & call_bit(n, Phase.CANCEL) and not cancelled:
                yield DURABLE
        if any(b.confirms for b in branches) and any(b.cancels for b in branches) and not mixed:
            yield MIXED
        for branch in branches:
            if branch.confirms > 1 or branch.tries > 1 or branch.cancels > 1:
                yield ONCE
            if branch.confirms and (not branch.tries or not confirmed):
                yield ONCE
            if branch.cancels and not cancelled:
                yield MIXED
        registered = 0 if tx is None else len(tx.steps)
        if any(branch.tries for branch in branches[registered:]):
            yield NAMED
        if tx is None:
            return
        by_hand = {r.branch_id - 1 for r in tx.resolved}
        counted = [branch for n, branch in enumerate(branches[:registered]) if n not in by_hand]
        if tx.state is TxState.CONFIRMED and any(branch.confirms != 1 for branch in counted):
            yield CONFIRMED
        if tx.state.finished and any(b.status is Status.TRIED for b in branches):
            yield RESERVED
        if world.setup.forgets:
            return
        for n, bit, happened in self._answers:
            if state.replies & bit and not happened(branches[n]) and n not in by_hand:
                yield ANSWERED
        if world.setup.resolved_max:
            return
        if tx.attention is Attention.VIOLATION or state.replies & self._violations:
            yield CONTRADICTED


def _after(state: TxState, branches: int) -> set[TxState]:
    """What a state may turn into in one save; without branches it is finished by the move that decides it."""
    found = {after for (before, _), after in TRANSITIONS.items() if before is state}
    return found if branches else found | {end for after in found for end in _after(after, 1)}
