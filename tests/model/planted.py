"""Faults for the model to find: each one breaks a rule of the protocol in the functions that are explored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from coordinator import machine
from coordinator.model import BranchStatus, Call, Outcome, Policy, Reply, State, Transaction
from participant_sdk import fence
from tests.model import invariants
from tests.model.configurations import RESTORED, TWO_COORDINATORS, TWO_COORDINATORS_ONE_BRANCH
from tests.model.explore import TRAP
from tests.model.state import Setup
from tests.model.values import Rules


class Planted(NamedTuple):
    """A fault, where it is looked for, and the rules of which one must be found broken."""

    name: str
    rules: Rules
    setup: Setup
    broken: tuple[str, ...]


def always_swaps(row: Transaction | None, save: Transaction) -> Transaction:
    """A save without compare-and-swap."""
    return save


def presumes_cancel(tx: Transaction, replies: Sequence[Reply], now_ms: int, policy: Policy) -> Transaction:
    """The deadline counts although the transaction is decided."""
    if tx.state is State.CONFIRMING and now_ms >= tx.deadline_ms:
        return tx._replace(state=State.CANCELLING)
    return machine.apply(tx, replies, now_ms, policy)


def cancels_what_was_tried(tx: Transaction, replies: Sequence[Reply], now_ms: int, policy: Policy) -> Transaction:
    """A branch whose Try was not answered is taken for one that was never tried."""
    after = machine.apply(tx, replies, now_ms, policy)
    if after.state is not State.CANCELLING:
        return after
    steps = tuple(
        s._replace(status=BranchStatus.CANCELLED) if s.status is BranchStatus.PENDING else s for s in after.steps
    )
    return after._replace(steps=steps)


def counts_violations(tx: Transaction, replies: Sequence[Reply], now_ms: int, policy: Policy) -> Transaction:
    """A violation is taken for "done before"."""
    replies = [r._replace(outcome=Outcome.DONE) if r.outcome is Outcome.VIOLATION else r for r in replies]
    return machine.apply(tx, replies, now_ms, policy)


def counts_refusals(tx: Transaction, replies: Sequence[Reply], now_ms: int, policy: Policy) -> Transaction:
    """A refused Try is taken for a tried one."""
    replies = [r._replace(outcome=Outcome.DONE) if r.outcome is Outcome.REFUSED else r for r in replies]
    return machine.apply(tx, replies, now_ms, policy)


def never_cancels_the_refused(tx: Transaction, now_ms: int, policy: Policy) -> tuple[Call, ...]:
    """No Cancel is sent to a branch that has refused, and the transaction waits for its answer."""
    return tuple(c for c in machine.due(tx, now_ms, policy) if tx.steps[c.branch].status is not BranchStatus.REFUSED)


def deciding(phase: fence.Phase, status: fence.Status | None, verdict: fence.Verdict) -> Rules:
    """The fence's table with one other cell."""

    def decide(asked: fence.Phase, met: fence.Status | None, same_call: bool) -> fence.Verdict:
        return verdict if (asked, met) == (phase, status) else fence.decide(asked, met, same_call)

    return Rules(decide=decide)


TRY, CONFIRM, CANCEL = fence.Phase.TRY, fence.Phase.CONFIRM, fence.Phase.CANCEL
TRIED, COMMITTED, SUSPENDED = fence.Status.TRIED, fence.Status.COMMITTED, fence.Status.SUSPENDED
TURNED = (invariants.FORWARD, invariants.DURABLE)
PLANTED = (
    Planted(
        "decision sent before it is saved",
        Rules(unsaved_decision_is_sent=True),
        TWO_COORDINATORS,
        (invariants.DURABLE,),
    ),
    Planted("compare-and-swap dropped", Rules(swap=always_swaps), TWO_COORDINATORS, (invariants.STALE, *TURNED)),
    Planted("read back by version", Rules(read_back_by_version=True), TWO_COORDINATORS, TURNED),
    Planted(
        "empty confirm acknowledged",
        deciding(CONFIRM, None, fence.Verdict.DONE),
        RESTORED,
        (invariants.CONFIRMED,),
    ),
    Planted(
        "late Try runs after the cancel mark",
        deciding(TRY, SUSPENDED, fence.Verdict.RUN_TRY),
        TWO_COORDINATORS_ONE_BRANCH,
        (invariants.MARK,),
    ),
    Planted(
        "late Try told as success after the cancel mark",
        deciding(TRY, SUSPENDED, fence.Verdict.REPLAY_RESULT),
        TWO_COORDINATORS_ONE_BRANCH,
        (invariants.ANSWERED,),
    ),
    Planted("presumed cancel of a decided transaction", Rules(apply=presumes_cancel), TWO_COORDINATORS, TURNED),
    Planted(
        "Cancel only to what was tried", Rules(apply=cancels_what_was_tried), TWO_COORDINATORS, (invariants.RESERVED,)
    ),
    Planted("violation counts as done", Rules(apply=counts_violations), RESTORED, (invariants.CONFIRMED,)),
    Planted("refusal counts as tried", Rules(apply=counts_refusals), TWO_COORDINATORS, (invariants.CONTRADICTED,)),
    Planted(
        "refused branch is never cancelled", Rules(due=never_cancels_the_refused), TWO_COORDINATORS_ONE_BRANCH, (TRAP,)
    ),
    Planted(
        "Confirm runs again",
        deciding(CONFIRM, COMMITTED, fence.Verdict.RUN_CONFIRM),
        TWO_COORDINATORS_ONE_BRANCH,
        (invariants.ONCE,),
    ),
    Planted(
        "Try runs again", deciding(TRY, TRIED, fence.Verdict.RUN_TRY), TWO_COORDINATORS_ONE_BRANCH, (invariants.ONCE,)
    ),
    Planted(
        "Cancel without a Try leaves no mark",
        deciding(CANCEL, None, fence.Verdict.DONE),
        TWO_COORDINATORS_ONE_BRANCH,
        (invariants.ANSWERED,),
    ),
)
