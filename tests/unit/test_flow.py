"""The loop: what is saved, what leaves, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from coordinator.flow import MayWait, drive
from coordinator.machine import Event, apply, backoff_ms, begin, move
from coordinator.model import (
    Attention,
    BranchSpec,
    BranchStatus,
    Call,
    Outcome,
    Phase,
    Policy,
    Refusal,
    Reply,
    Spec,
    State,
    Step,
    Transaction,
)
from coordinator.orders import Denied, Order
from tests.stories import world
from tests.stories.script import parse, tell
from tests.stories.world import Answer, World

POLICY = Policy()
XID = bytes.fromhex("01980000000070008a5c3e1f7b9d2460")
TIMEOUT_MS = 30_000
DONE, UNKNOWN = Outcome.DONE, Outcome.UNKNOWN


class Tape:
    """An Io that never waits: time jumps to the next reply. Records what was saved and what left, in order."""

    def __init__(self, answer: Callable[[Call], tuple[int, Outcome]] = lambda call: (10, DONE)) -> None:
        self.reply_to = answer
        self.now = 0
        self.save_ms = 0
        self.late_ms = 0
        """How much later than its time-out a call's UNKNOWN comes."""
        self.saves: list[Transaction] = []
        self.sends: list[tuple[int, int, Phase]] = []
        """When, which branch, which phase."""
        self.events: list[str] = []
        self.rivals: list[Transaction] = []
        """Rows of others that the next saves will meet."""
        self.row: Transaction | None = None
        self._arriving: list[tuple[int, int, Reply]] = []

    def now_ms(self) -> int:
        return self.now

    def send(self, tx: Transaction, calls: Sequence[Call]) -> None:
        assert tx is self.row, "calls come from the row that stands, and from nothing else"
        for call in calls:
            self.sends.append((self.now, call.branch, call.phase))
            self.events.append(f"send {call.branch} {call.phase.name}")
            after_ms, outcome = self.reply_to(call)
            refusal = Refusal("no") if outcome is Outcome.REFUSED else None
            if after_ms >= call.timeout_ms:
                after_ms, outcome = call.timeout_ms + self.late_ms, UNKNOWN
            reply = Reply(call.branch, call.phase, outcome, refusal=refusal)
            self._arriving.append((self.now + after_ms, len(self.sends), reply))

    def claimed(self) -> Transaction | None:
        return None

    def asked(self) -> bool:
        return False

    async def read(self) -> Transaction:
        raise AssertionError("nothing is denied")

    def answer(self, order: Order, tx: Transaction, denied: Denied | None) -> None:
        raise AssertionError("nobody has asked for anything")

    async def arrivals(self, until_ms: int | None, may_wait: MayWait) -> tuple[Sequence[Reply], Sequence[Order]]:
        first_ms = min((when for when, _, _ in self._arriving), default=None)
        assert first_ms is not None or until_ms is not None, "it would wait for ever"
        if first_ms is None or (until_ms is not None and until_ms < first_ms):
            assert until_ms is not None
            assert until_ms > self.now or self.events[-1:] != ["woken for nothing"], "it spins"
            self.now = max(self.now, until_ms)
            self.events.append("woken for nothing")
            return (), ()
        self.now = max(self.now, first_ms)
        arrived = sorted((when, n, reply) for when, n, reply in self._arriving if when <= self.now)
        self._arriving = [entry for entry in self._arriving if entry not in arrived]
        return [reply for _, _, reply in arrived], ()

    def new_save_id(self) -> int:
        return len(self.saves) + 1

    async def save(self, tx: Transaction) -> Transaction:
        assert self.row is not None
        assert tx.version == self.row.version + 1, "a save is over the row that was read last"
        self.saves.append(tx)
        self.events.append(f"save {tx.state.name}")
        self.now += self.save_ms
        self.row = self.rivals.pop(0) if self.rivals else tx
        return self.row

    def drive(self, tx: Transaction, policy: Policy = POLICY) -> Transaction:
        self.row = tx
        run = drive(tx, self, policy)
        try:
            run.send(None)
        except StopIteration as end:
            ended: Transaction = end.value
            assert ended is self.row
            return ended
        raise AssertionError("this Io never pauses")


def begun(branches: int = 2, *, timeout_ms: int = TIMEOUT_MS, xid: bytes = XID) -> Transaction:
    spec = Spec(xid, b"", 0, timeout_ms, tuple(BranchSpec(f"bank-{n}", "debit") for n in range(branches)))
    return begin(spec, 0, POLICY)


def slow(branch: int, phase: Phase, after_ms: int, outcome: Outcome = DONE) -> Callable[[Call], tuple[int, Outcome]]:
    """All answer after 10 ms, but one call."""
    return lambda call: (after_ms, outcome) if (call.branch, call.phase) == (branch, phase) else (10, DONE)


# --- saved before sent -----------------------------------------------------------------------------------------------


def test_the_decision_is_saved_before_any_confirm_leaves_and_two_saves_are_all() -> None:
    tape = Tape()
    tx = tape.drive(begun())
    assert tx.state is State.CONFIRMED
    assert tape.events == [
        "send 0 TRY",
        "send 1 TRY",
        "save CONFIRMING",
        "send 0 CONFIRM",
        "send 1 CONFIRM",
        "save CONFIRMED",
    ]


@pytest.mark.parametrize("branches", [1, 2, 64])
def test_prompt_answers_cost_two_saves_whatever_the_number_of_branches(branches: int) -> None:
    tape = Tape(lambda call: (10 + call.branch, DONE))
    assert tape.drive(begun(branches)).state is State.CONFIRMED
    assert [tx.state for tx in tape.saves] == [State.CONFIRMING, State.CONFIRMED]


def test_a_refusal_is_saved_before_any_cancel_leaves() -> None:
    tape = Tape(slow(1, Phase.TRY, 5, Outcome.REFUSED))
    assert tape.drive(begun()).state is State.CANCELLED
    assert tape.events.index("save CANCELLING") < tape.events.index("send 0 CANCEL")
    assert {phase for _, _, phase in tape.sends} == {Phase.TRY, Phase.CANCEL}


def test_a_refusal_does_not_wait_for_a_slow_try() -> None:
    tape = Tape(
        lambda call: {0: (4_000, DONE), 1: (5, Outcome.REFUSED)}[call.branch] if call.phase == 1 else (10, DONE)
    )
    tape.drive(begun())
    assert [(when, branch) for when, branch, phase in tape.sends if phase is Phase.CANCEL] == [(5, 0), (5, 1)]
    assert tape.now == 15


def test_every_save_has_a_version_and_a_save_id_of_its_own() -> None:
    tape = Tape(slow(0, Phase.TRY, 900))
    tape.drive(begun())
    assert [tx.version for tx in tape.saves] == [2, 3, 4]
    assert len({tx.save_id for tx in tape.saves}) == 3


def test_a_finished_transaction_is_left_alone() -> None:
    tape = Tape()
    tx = begun()._replace(state=State.CONFIRMED, steps=(Step(BranchStatus.CONFIRMED),) * 2, wake_ms=None)
    assert tape.drive(tx) is tx
    assert tape.events == []


# --- progress --------------------------------------------------------------------------------------------------------


def test_progress_is_saved_after_a_while_when_another_branch_is_out() -> None:
    tape = Tape(slow(1, Phase.TRY, 3_000))
    tape.drive(begun())
    first, second, _ = tape.saves
    assert (first.state, first.updated_ms) == (State.TRYING, 10 + POLICY.linger_ms)
    assert [step.status for step in first.steps] == [BranchStatus.TRIED, BranchStatus.PENDING]
    assert (second.state, second.updated_ms) == (State.CONFIRMING, 3_000)


def test_progress_waits_for_company_from_its_first_reply_on() -> None:
    tape = Tape(lambda call: (100 * (call.branch + 1) if call.branch < 4 else 3_000, DONE))
    tape.drive(begun(5))
    tried = [
        sum(step.status is BranchStatus.TRIED for step in tx.steps) for tx in tape.saves if tx.state is State.TRYING
    ]
    assert (tape.saves[0].updated_ms, tried) == (350, [3, 4])


def test_the_last_reply_decides_at_once() -> None:
    tape = Tape(slow(1, Phase.TRY, 100))
    tape.drive(begun())
    assert tape.saves[0].updated_ms == 100


def test_a_branch_is_tried_again_while_another_is_out_but_never_twice_at_a_time() -> None:
    tape = Tape(lambda call: (4_900, DONE) if call.branch == 0 else (10, DONE if call.attempt > 3 else UNKNOWN))
    tape.drive(begun())
    tries = [(when, branch) for when, branch, phase in tape.sends if phase is Phase.TRY]
    assert [branch for _, branch in tries] == [0, 1, 1, 1, 1]
    times = [when for when, branch in tries if branch == 1]
    assert times == sorted(set(times))
    assert times[-1] < 4_900


# --- time ------------------------------------------------------------------------------------------------------------


def test_a_deadline_that_passed_unseen_is_saved_before_anything_else() -> None:
    tape = Tape()
    tape.now = TIMEOUT_MS
    tape.drive(begun()._replace(wake_ms=TIMEOUT_MS + POLICY.lease_ms))
    assert tape.events == ["save CANCELLING", "send 0 CANCEL", "send 1 CANCEL", "save CANCELLED"]


@pytest.mark.parametrize("late_ms", [0, 50])
def test_the_deadline_cancels_though_a_try_is_still_out(late_ms: int) -> None:
    tape = Tape(slow(1, Phase.TRY, 90_000))
    tape.late_ms = late_ms
    tape.drive(begun(timeout_ms=2_000))
    assert [(when, branch) for when, branch, phase in tape.sends if phase is Phase.CANCEL] == [(2_000, 0), (2_000, 1)]


def test_it_rests_until_the_next_attempt_with_no_further_save() -> None:
    tape = Tape(slow(1, Phase.CONFIRM, 1, UNKNOWN))
    tx = tape.drive(begun())
    assert (tx.state, tape.now) == (State.CONFIRMING, 20)
    assert tx.wake_ms == tx.steps[1].next_ms == 20 + backoff_ms(XID, 1, 1, POLICY)
    assert tape.events[-1] == "save CONFIRMING"


def waiting(wake_ms: int) -> Transaction:
    """Claimed too early: the next attempt is at 5000."""
    steps = (Step(BranchStatus.CONFIRMED), Step(BranchStatus.TRIED, attempts=3, next_ms=5_000))
    return begun()._replace(state=State.CONFIRMING, steps=steps, wake_ms=wake_ms)


def test_a_lease_is_given_back_when_there_is_nothing_to_do_yet() -> None:
    tape = Tape()
    tx = tape.drive(waiting(10_000))
    assert (tx.wake_ms, tx.version, tape.sends) == (5_000, 2, [])


def test_an_earlier_wake_is_left_as_it_is() -> None:
    tape = Tape()
    assert tape.drive(waiting(5_000)).version == 1
    assert tape.events == []


def test_giving_back_a_lease_takes_the_row_of_another() -> None:
    rival = waiting(4_000)._replace(version=7, save_id=99)
    tape = Tape()
    tape.rivals = [rival]
    assert tape.drive(waiting(10_000)) is rival


@pytest.mark.parametrize("save_ms", [0, 20_000])
def test_a_short_lease_is_renewed_before_calls_leave_but_only_once(save_ms: int) -> None:
    tape = Tape()
    tape.save_ms = save_ms  # a store that is always so slow would have it renewed for ever
    tape.drive(begun(timeout_ms=900_000)._replace(wake_ms=3_000))
    assert tape.saves[0].wake_ms == POLICY.lease_ms
    assert tape.events[:3] == ["save TRYING", "send 0 TRY", "send 1 TRY"]


def test_a_row_whose_wake_has_come_is_left_to_whoever_claims_it() -> None:
    tape = Tape()
    tape.now = 3_000
    tx = begun()._replace(wake_ms=3_000)
    assert tape.drive(tx) is tx
    assert tape.events == []


def test_a_short_lease_is_not_renewed_over_the_row_of_another() -> None:
    tx = begun()._replace(wake_ms=3_000)
    tape = Tape()
    tape.rivals = [rival_of(tx, Reply(0, Phase.TRY, Outcome.REFUSED))._replace(wake_ms=10_000)]
    assert tape.drive(tx).state is State.CANCELLING
    assert (tape.sends, len(tape.saves)) == ([], 1)


def test_a_lease_outlasts_the_calls_that_leave_under_it() -> None:
    tape = Tape(lambda call: (1_200 * (call.branch + 1), DONE))
    tape.drive(begun(4)._replace(wake_ms=6_500))
    for tx in tape.saves:
        assert tx.state.finished or (tx.wake_ms or 0) >= tx.updated_ms + POLICY.call_timeout_ms


# --- the row decides -------------------------------------------------------------------------------------------------


def rival_of(tx: Transaction, *replies: Reply) -> Transaction:
    """What another coordinator has saved meanwhile."""
    return apply(tx, replies, 5, POLICY)._replace(version=tx.version + 1, save_id=99)


def test_replies_are_applied_to_the_row_of_another() -> None:
    tx = begun()
    tape = Tape(slow(1, Phase.TRY, 9_000))
    tape.rivals = [rival_of(tx, Reply(1, Phase.TRY, DONE))]
    tape.drive(tx)
    assert [(saved.state, saved.version) for saved in tape.saves[:2]] == [(State.TRYING, 2), (State.CONFIRMING, 3)]
    assert tape.row is not None
    assert tape.row.state is State.CONFIRMED


def test_the_decision_of_another_stands() -> None:
    tx = begun()
    tape = Tape()
    tape.rivals = [rival_of(tx, Reply(0, Phase.TRY, Outcome.REFUSED))]
    tx = tape.drive(tx)
    assert tx.state is State.CANCELLING
    assert tape.saves[0].state is State.CONFIRMING  # refused by the store: nothing left on its account
    assert {phase for _, _, phase in tape.sends} == {Phase.TRY}


def test_the_end_that_another_has_saved_is_the_end() -> None:
    tx = begun()
    decided = rival_of(tx, Reply(0, Phase.TRY, DONE), Reply(1, Phase.TRY, DONE))
    ended = rival_of(decided, Reply(0, Phase.CONFIRM, DONE), Reply(1, Phase.CONFIRM, DONE))._replace(wake_ms=None)
    tape = Tape()
    tape.rivals = [ended]
    assert tape.drive(tx) is ended
    assert len(tape.saves) == 1


def test_a_contradiction_is_flagged_on_the_row_of_another_even_at_its_end() -> None:
    tx = begun()
    decided = rival_of(tx, Reply(0, Phase.TRY, DONE), Reply(1, Phase.TRY, DONE))
    ended = rival_of(decided, Reply(0, Phase.CONFIRM, DONE), Reply(1, Phase.CONFIRM, DONE))._replace(wake_ms=None)
    tape = Tape(slow(1, Phase.TRY, 10, Outcome.REFUSED))
    tape.rivals = [ended]
    tx = tape.drive(tx)
    assert (tx.state, tx.attention, tx.wake_ms, tx.version) == (
        State.CONFIRMED,
        Attention.VIOLATION,
        None,
        ended.version + 1,
    )
    assert {phase for _, _, phase in tape.sends} == {Phase.TRY}


def test_a_version_alone_does_not_make_a_row_ones_own() -> None:
    # Both wrote version 2; the other one's row stands. Its save_id tells, and no Confirm leaves.
    tx = begun()
    theirs = rival_of(tx, Reply(0, Phase.TRY, Outcome.REFUSED))
    tape = Tape()
    tape.rivals = [theirs]
    tape.drive(tx)
    assert tape.saves[0].version == theirs.version
    assert Phase.CONFIRM not in {phase for _, _, phase in tape.sends}


def test_whoever_meets_a_decision_leaves_it_to_who_decided() -> None:
    tx = begun()
    tape = Tape(slow(1, Phase.TRY, 3_000))
    tape.rivals = [rival_of(tx, Reply(0, Phase.TRY, DONE), Reply(1, Phase.TRY, DONE))]
    assert tape.drive(tx).state is State.CONFIRMING
    assert {phase for _, _, phase in tape.sends} == {Phase.TRY}
    assert (tape.row or tx).wake_ms == tx.wake_ms


def test_whoever_meets_a_longer_lease_leaves_it_to_whoever_claimed() -> None:
    tx = begun(3)
    tape = Tape(lambda call: (10 if call.branch else 4_000, UNKNOWN if call.branch == 2 else DONE))
    tape.rivals = [rival_of(tx)._replace(wake_ms=(tx.wake_ms or 0) + 5_000)]
    assert tape.drive(tx).state is State.TRYING
    assert sorted(branch for _, branch, _ in tape.sends) == [0, 1, 2]


def test_whoever_meets_a_change_under_its_own_lease_drives_on() -> None:
    """Somebody has only carried out an order: nobody else drives."""
    tx = begun()
    tape = Tape(slow(1, Phase.TRY, 3_000))
    tape.rivals = [rival_of(tx)]
    assert tape.drive(tx).state is State.CONFIRMED


def test_whoever_has_decided_an_open_transaction_drives_on_when_a_visitor_has_saved() -> None:
    """It was never sealed, but is open no more: nobody else sends anything for it."""
    tx = begun()
    tx = move(tx._replace(spec=tx.spec._replace(interactive=True), sealed=False), Event.INITIATOR, 0)
    failures = [UNKNOWN]
    tape = Tape(lambda call: (3_000 if call.branch else 10, failures.pop() if failures and not call.branch else DONE))
    tape.rivals = [rival_of(tx)]
    assert tape.drive(tx).state is State.CANCELLED


# --- leases, with saves that take their time -------------------------------------------------------------------------

HURRIED = bytes.fromhex("0198000000007000800000000000001c")
"""An xid whose first back-off of branch 0 is over before a save is."""


def test_a_hurried_back_off_is_what_the_next_test_needs() -> None:
    assert 0 < backoff_ms(HURRIED, 0, 1, POLICY) <= world.SAVE_MS


def test_nobody_adopts_a_transaction_that_is_being_driven() -> None:
    # The failed branch's next attempt falls due while its failure is being saved. The row's wake has come by then, and
    # under that, not under a lease, the call leaves: another coordinator's scan claims the row and sends the call too
    # (cases 12 and 13, protocol A5).
    there = World(POLICY)
    there.store.insert(begun(1, xid=HURRIED)._replace(save_id=1_000))
    there.answers["", 0, Phase.TRY] = [Answer(UNKNOWN, after_ms=1), Answer(after_ms=3_000)]
    there.coordinator("c1").scans = True
    there.coordinator("c0").drive(there.store.standing())
    there.run()
    assert there.store.standing().state is State.CONFIRMED
    assert there.adopted == []


def test_nobody_adopts_a_transaction_whose_late_try_is_still_out() -> None:
    # Branch 2's Cancel failed and waits for its next attempt; the one call that is out is a Try of before the decision.
    there = World(POLICY)
    there.store.insert(begun()._replace(save_id=1_000))
    there.answers["", 0, Phase.TRY] = [Answer(Outcome.REFUSED)]
    there.answers["", 1, Phase.TRY] = [Answer(after_ms=4_000)]
    there.answers["", 1, Phase.CANCEL] = [Answer(UNKNOWN, after_ms=1), Answer(after_ms=1_000)]
    there.coordinator("c1").scans = True
    there.coordinator("c0").drive(there.store.standing())
    there.run()
    assert there.store.standing().state is State.CANCELLED
    assert there.adopted == []


def test_a_save_that_outlasts_the_lease_does_not_send_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # The database is away for longer than a lease. When it is back, the decision stands, and under a lease that is over
    # the Confirms leave.
    monkeypatch.setattr(world, "SETTLE_MS", 12_000)
    there = World(POLICY)
    there.store.insert(begun()._replace(save_id=1_000))
    there.answers["c0", 0, Phase.CONFIRM] = [Answer(after_ms=3_000)]
    there.coordinator("c0").next_commit = "applied"
    there.coordinator("c0").drive(there.store.standing())
    there.run(11_999)
    wake_ms = there.store.standing().wake_ms
    assert wake_ms is not None
    assert wake_ms < 11_999, "anybody may claim it, and nobody has"
    there.run(12_011)
    there.coordinator("c1").scans = True
    there.run()
    assert there.store.standing().state is State.CONFIRMED
    assert there.adopted == []


def test_the_trace_that_turned_a_decision_needs_the_save_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """The story ``lost_commit_anothers_row`` again, with a store that takes version 2 for its own (protocol A1)."""

    def by_version(store: world.Store, tx: Transaction) -> Transaction:
        row = honest(store, tx)
        return tx if row.version == tx.version else row

    honest = world.Store.swap
    (section,) = parse((Path(world.__file__).parent / "lost_commit_anothers_row.txt").read_text())
    monkeypatch.setattr(world.Store, "swap", by_version)
    with pytest.raises(world.BrokenPromise):
        tell([section])
