"""What must always hold, by number, in words and in code.

``Watch`` sees every durable write, every effect that a participant's database commits, every call that leaves and
every answer that is told; what it finds wrong is noted with its number, and ends the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from coordinator.codec import transaction
from coordinator.machine import TRANSITIONS
from coordinator.model import Attention, BranchSpec, BranchStatus, Call, Phase, Spec, State, Transaction
from coordinator.store.rows import Row
from participant_sdk.call import IncomingCall, Outcome
from participant_sdk.call import Reply as ParticipantReply
from participant_sdk.fence import SETTLES, Status
from participant_sdk.fence import Phase as FencePhase

from .handlers import CHARGE, read_payload
from .loop import SimLoop, World
from .losses import Losses
from .transactions import Account, Change, StoredRow

INVARIANTS: dict[int, str] = {
    1: "One decision: it is durable before a Confirm or Cancel leaves, and nothing is sent that is not stored",
    2: "No mixed ending: no branch is confirmed of a cancelled transaction, none cancelled of a confirmed one",
    3: "Each effect at most once; a Confirm's exactly once when the branch was tried and its transaction is confirmed",
    4: "No Try has an effect after its branch was marked as cancelled",
    5: "The sum is conserved, and nothing is reserved when all is at rest",
    6: "An answer that was told is durable, and is told again the same; DONE is said only of what has happened",
    7: "A key belongs to one request: another one under it never runs",
    8: "A stale coordinator changes nothing: a row changes by one version at a time, over the one before it",
    9: "States only move forward, those of branches too; a transaction's branches only grow in number",
    10: "No fence row is purged while a message for it can have an effect",
    11: "Everything comes to its end when faults have stopped",
    12: "A participant that is gone delays only its own",
    13: "Nothing happens that the programs did not expect",
    14: "An interactive transaction is confirmed only by its initiator; any only with branches that this one has named"
    " or begun with, and with those that their handlers have seen tried",
    15: "Nobody sends a call that another has out: whoever sends holds the lease (where the store is quick and exact)",
    16: "A participant purges and resolves by a stored record alone, never because there is none",
    17: "What a restored store has made end mixed is shown to a person",
}

STEPS_FORWARD: dict[BranchStatus, tuple[BranchStatus, ...]] = {
    BranchStatus.PENDING: (BranchStatus.TRIED, BranchStatus.REFUSED, BranchStatus.CANCELLED, BranchStatus.CONFIRMED),
    BranchStatus.TRIED: (BranchStatus.CONFIRMED, BranchStatus.CANCELLED),
    BranchStatus.REFUSED: (BranchStatus.CANCELLED, BranchStatus.CONFIRMED),
    BranchStatus.CONFIRMED: (),
    BranchStatus.CANCELLED: (),
}
"""A refused or pending branch is CONFIRMED only where an operator has said so by hand."""

_CANCEL_MARKS = (int(Status.ROLLBACKED), int(Status.SUSPENDED))


STRAY = "-stray"


def stray_name(participant: str) -> str:
    """What a participant is called here while it runs on the wrong database."""
    return participant + STRAY


class Violation(NamedTuple):
    """What was found wrong."""

    number: int
    text: str

    def __str__(self) -> str:
        return f"invariant {self.number} ({INVARIANTS[self.number]}): {self.text}"


def decision(state: int) -> str:
    """What a state says of the decision."""
    if state in (State.CONFIRMING, State.CONFIRMED):
        return "confirm"
    return "cancel" if state in (State.CANCELLING, State.CANCELLED) else ""


class Watch:
    """Sees all, and notes what is wrong."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.violations: list[Violation] = []
        self.stands: dict[str, Transaction] = {}
        """What is durable, by xid in text."""
        self.effects: Counter[tuple[str, str, int, FencePhase]] = Counter()
        """By participant, xid, branch_id and phase."""
        self.accounts: dict[tuple[str, str], Account] = {}
        """What each account must be, by the effects that there were."""
        self.marked: set[tuple[str, str, int]] = set()
        """Branches that were ever marked as cancelled, at their participant."""
        self.purged: set[tuple[str, str, int]] = set()
        self.confirms: dict[bytes, set[int]] = {}
        """By key: the branch_ids that its initiator has named in a Confirm."""
        self._answers: dict[tuple[str, str, int, FencePhase], ParticipantReply] = {}
        self._out: dict[tuple[str, int, Phase], tuple[SimLoop, int]] = {}
        """Who has sent a call last, and when it times out."""
        self.exact = False
        """Whether leases can be held to: no clock jumps, no process stands still, the store answers quickly."""
        self._told: dict[bytes, tuple[bytes, str]] = {}
        self.losses = Losses(world)
        """Nothing is held against the coordinators of which a restored store has lost something."""
        self._seen: dict[str, set[tuple[int, int]]] = {}
        """By xid: which branch's handler has seen which other one tried."""

    def wrong(self, number: int, text: str) -> None:
        """Note a violation."""
        self._world.note("INVARIANT", f"{number} is broken: {text}")
        self.violations.append(Violation(number, text))
        self._world.stop = True

    # --- the store -----------------------------------------------------------------------------------------

    def commit(self, before: Row | None, row: Row) -> None:
        """A row has been written durably."""
        world = self._world
        tx = transaction(row)
        xid = row.xid.hex()
        old = self.stands.get(xid)
        self.stands[xid] = tx
        world.note("store", f"{xid[-6:]} v{tx.version} {tx.state.name} {_statuses(tx)} wake {_wake(tx, world)}")
        if old is None or before is None:
            if old is not None or before is not None or tx.version != 1 or tx.state is not State.TRYING:
                self.wrong(8, f"{xid} was written as new, version {tx.version}, {tx.state.name}")
            return
        if tx.version != before.version + 1:
            self.wrong(8, f"{xid} went from version {before.version} to {tx.version}")
        self._check_forward(xid, old, tx)
        if old.state is not tx.state:
            world.counts[f"{old.state.name} -> {tx.state.name}"] += 1
            if tx.state is State.CONFIRMING:
                self._check_decided(xid, tx)
        if tx.attention > old.attention:
            world.counts[f"attention {tx.attention.name}"] += 1
        if len(tx.resolved) > len(old.resolved):
            world.counts["resolved by hand"] += 1

    def _check_forward(self, xid: str, old: Transaction, tx: Transaction) -> None:
        if decision(old.state) and decision(tx.state) != decision(old.state):
            self.wrong(1, f"{xid} was decided {old.state.name} and is {tx.state.name}")
        elif tx.state is not old.state and not _reached(old.state, tx.state):
            self.wrong(9, f"{xid} went from {old.state.name} to {tx.state.name}")
        if tx.spec.branches[: len(old.spec.branches)] != old.spec.branches or len(tx.steps) != len(tx.spec.branches):
            self.wrong(9, f"{xid} has lost branches: {len(old.spec.branches)} -> {len(tx.spec.branches)}")
        for n, (was, now) in enumerate(zip(old.steps, tx.steps, strict=False), 1):
            if was.status is not now.status and now.status not in STEPS_FORWARD[was.status]:
                self.wrong(9, f"{xid}#{n} went from {was.status.name} to {now.status.name}")
            resolution = old.resolution_of(n - 1)
            changed = was.status is not now.status
            if (
                changed
                and resolution is not None
                and (now.status is BranchStatus.CONFIRMED) is not resolution.confirmed
            ):
                self.wrong(9, f"{xid}#{n} was resolved by hand and became {now.status.name}")
            if was.result is not None and now.result != was.result:
                self.wrong(6, f"{xid}#{n} has another result than before")
        if tx.resolved[: len(old.resolved)] != old.resolved:
            self.wrong(9, f"{xid} has lost what operators have resolved")

    def _check_decided(self, xid: str, tx: Transaction) -> None:
        not_tried = [n for n, step in enumerate(tx.steps, 1) if step.status is not BranchStatus.TRIED]
        if not_tried:
            self.wrong(3, f"{xid} is to be confirmed, and its branches {not_tried} were not tried")
        named = set(self.confirms.get(tx.spec.key, ()) if tx.spec.interactive else range(1, tx.begun + 1))
        seen = self._seen.get(xid, set())
        while below := {child for parent, child in seen if parent in named} - named:
            named |= below
        missing = set(range(1, len(tx.steps) + 1)) - named
        if missing:
            self.wrong(14, f"{xid} is to be confirmed, and whoever called {sorted(missing)} has not seen it tried")

    def restored(self, rows: Iterable[Row], flagged: Sequence[bytes]) -> None:
        """The store has gone back to an earlier time."""
        before = self.stands
        self.stands = {row.xid.hex(): transaction(row) for row in rows}
        self.losses.restored(before, self.stands, {xid.hex() for xid in flagged})
        lost = {tx.spec.key for tx in self.losses.lost.values()}
        self._told = {key: told for key, told in self._told.items() if key not in lost}

    # --- calls ---------------------------------------------------------------------------------------------

    def sent(self, sender: SimLoop, xid: str, spec: Spec, call: Call) -> None:
        """A call leaves a coordinator."""
        coordinator = sender.name
        tx = self.stands.get(xid)
        out = self._out.get((xid, call.branch, call.phase))
        if out is not None and out[0] is not sender and out[0].alive and self._world.now_us < out[1]:
            self._world.counts["calls sent while another had them out"] += 1
            # A save of whoever serves an open transaction may cut a lease short that was claimed meanwhile.
            if self.exact and (tx is None or tx.sealed or tx.state is not State.TRYING):
                self.wrong(
                    15, f"{coordinator} sends {call.phase.name} to {xid}#{call.branch + 1}; {out[0].name} has it out"
                )
        self._out[xid, call.branch, call.phase] = (sender, self._world.now_us + call.timeout_ms * 1000)
        what = f"{coordinator} sends {call.phase.name} to {xid}#{call.branch + 1}"
        if tx is None or call.branch >= len(tx.spec.branches):
            self.wrong(1, f"{what}, which is not in the store")
            return
        need = {Phase.CONFIRM: "confirm", Phase.CANCEL: "cancel"}.get(call.phase)
        if need is not None and decision(tx.state) != need:
            self.wrong(1, f"{what}, and what is stored is {tx.state.name}")
        if call.phase in (Phase.SETTLE_CONFIRMED, Phase.SETTLE_CANCELLED) and tx.resolution_of(call.branch) is None:
            self.wrong(1, f"{what}, and nobody has resolved it")
        failed = tx.steps[call.branch].attempts
        if need is not None and call.attempt > failed + 1 and tx.resolution_of(call.branch) is None:
            self.wrong(1, f"{what} as attempt {call.attempt}, and what is stored has failed {failed} times")
        if call.attempt > 1:
            self._world.counts["calls sent again"] += 1

    def replied(self, sender: SimLoop, xid: str, branch: int, phase: Phase) -> None:
        """A call that a coordinator has sent has its reply."""
        out = self._out.get((xid, branch, phase))
        if out is not None and out[0] is sender:
            del self._out[xid, branch, phase]

    # --- participants --------------------------------------------------------------------------------------

    def opens(self, participant: str, accounts: Sequence[str], balance: int) -> None:
        """A participant begins with these accounts, and so much in each."""
        for account in accounts:
            self.accounts[participant, account] = Account(balance)

    def committed(self, participant: str, changes: Sequence[Change]) -> None:
        """A participant's database has committed this, all at once."""
        lost = any(change.key[0] in ("effect", "fence") and change.key[1] in self.losses for change in changes)
        for kind in ("effect", "fence", "account"):
            for change in changes:
                if change.key[0] != kind:
                    continue
                if kind == "effect":
                    _, xid, branch_id, phase = change.key
                    for _ in range((change.old or 0), change.new):
                        self._effect(participant, str(xid), int(str(branch_id)), FencePhase[str(phase)])
                elif kind == "fence":
                    _, xid, branch_id = change.key
                    self._fence(participant, str(xid), int(str(branch_id)), change.old, change.new)
                elif lost:  # of the lost history it is not known what it should be
                    self.accounts[participant, str(change.key[1])] = change.new
                else:
                    self._account(participant, str(change.key[1]), change.new)

    def _effect(self, participant: str, xid: str, branch_id: int, phase: FencePhase) -> None:
        """A handler's effect is durable."""
        world = self._world
        world.note(participant, f"effect of {phase.name} {xid[-6:]}#{branch_id}")
        world.counts[f"effects of {phase.name}"] += 1
        key = (participant, xid, branch_id)
        self.effects[(*key, phase)] += 1
        what = f"{phase.name} of {xid}#{branch_id} at {participant}"
        tx = self.stands.get(xid)
        if xid in self.losses:
            self._lost_effect(key, phase, what)
            return
        if tx is None or branch_id > len(tx.steps):
            self.wrong(1, f"{what} had an effect and is not in the store")
            return
        external = tx.spec.branches[branch_id - 1].action == CHARGE
        if self.effects[(*key, phase)] > 1 and not (external and phase is FencePhase.CANCEL):
            self.wrong(3, f"{what} had its effect twice")
        if phase is FencePhase.TRY:
            if key in self.marked:
                self.wrong(4, f"{what} had an effect after its cancel mark")
            if key in self.purged:
                self.wrong(10, f"{what} had an effect after its fence row was purged")
            if tx.state is not State.TRYING:
                world.counts["late Trys with an effect"] += 1
        elif decision(tx.state) != ("confirm" if phase is FencePhase.CONFIRM else "cancel"):
            self.wrong(2, f"{what} had an effect, and the transaction is {tx.state.name}")
        elif self.effects[(*key, FencePhase.TRY)] != 1 and not external:
            self.wrong(3, f"{what} had an effect without its Try")
        if not external:
            self._expect(participant, tx.spec.branches[branch_id - 1], phase)

    def _lost_effect(self, key: tuple[str, str, int], phase: FencePhase, what: str) -> None:
        """An effect of a branch of which the store has lost something: its fence has not."""
        self._world.counts["effects of what a restore has lost"] += 1
        tx = self.losses.lost[key[1]]
        external = key[2] > len(tx.spec.branches) or tx.spec.branches[key[2] - 1].action == CHARGE
        if external:
            return
        if self.effects[(*key, phase)] > 1:
            self.wrong(3, f"{what} had its effect twice")
        if phase is FencePhase.TRY:
            if key in self.marked or key in self.purged:
                self.wrong(4, f"{what} had an effect after its cancel mark, or after its fence row was purged")
        elif self.effects[(*key, FencePhase.CONFIRM)] and self.effects[(*key, FencePhase.CANCEL)]:
            self.wrong(2, f"{what} had an effect, and so had its opposite")

    def _expect(self, participant: str, branch: BranchSpec, phase: FencePhase) -> None:
        """What an effect has to make of the account."""
        name, amount = read_payload(branch.payload.data)
        now = self.accounts[participant, name]
        share = amount if phase is FencePhase.TRY else -amount
        now = now._replace(held=now.held - share) if amount < 0 else now._replace(due=now.due + share)
        if phase is FencePhase.CONFIRM:
            now = now._replace(balance=now.balance + amount)
        self.accounts[participant, name] = now

    def _account(self, participant: str, name: str, new: Account) -> None:
        expected = self.accounts[participant, name]
        if new != expected or new.balance - new.held < 0:
            self.wrong(5, f"account {name} of {participant} is {new}; by the effects it should be {expected}")

    def _fence(self, participant: str, xid: str, branch_id: int, old: StoredRow | None, new: StoredRow | None) -> None:
        """A fence row is durably another one."""
        key = (participant, xid, branch_id)
        before, after = old.status if old else None, new.status if new else None
        self._world.note(participant, f"fence {xid[-6:]}#{branch_id}: {_name(before)} -> {_name(after)}")
        what = f"the fence row of {xid}#{branch_id} at {participant}"
        if new is None:
            self._world.counts["fence rows purged"] += 1
            self.purged.add(key)
            tx = self.stands.get(xid)
            if not self.losses.may_go(participant.removesuffix(STRAY), xid):
                self.wrong(16, f"{what} was purged, and nobody has read that the transaction is finished")
            elif xid not in self.losses and (tx is None or not tx.state.finished):
                self.wrong(10, f"{what} was purged and the transaction is not finished")
            elif before == Status.TRIED:
                self.wrong(10, f"{what} was purged while something is reserved under it")
            return
        if before not in (None, after, Status.TRIED):
            self.wrong(9, f"{what} went from {_name(before)} to {_name(after)}")
        if after in _CANCEL_MARKS:
            self.marked.add(key)
        if before is None:
            self._world.counts[f"fence {_name(after)} at once"] += 1

    def answered(self, participant: str, call: IncomingCall, reply: ParticipantReply) -> None:
        """A participant answers a call: what it has said once for good, it says again."""
        key = (participant, call.xid, call.branch_id, call.phase)
        if key[:3] in self.purged:
            self._world.counts["late calls after a purge"] += 1
        if reply.outcome is Outcome.UNKNOWN:
            return
        if reply.outcome is Outcome.DONE:
            self._check_done(key, call)
        if reply.tried_branch_ids:  # which only the process that ran it knows: whoever else repeats it, names none
            reply = replace(reply, tried_branch_ids=frozenset())
        if participant.endswith(STRAY):
            return  # a late repeat of a Try may run there, too: what it said of the branch before, is not so any more
        before = self._answers.setdefault(key, reply)
        if before == reply or call.xid in self.losses:
            return
        # What was tried, and then cancelled or forgotten, is refused: whoever asks has known better for long.
        over = key[:3] in self.marked or key[:3] in self.purged
        refused = over and call.phase is FencePhase.TRY and reply.refusal is not None
        forgotten = key[:3] in self.purged and (call.phase in SETTLES or reply.outcome is Outcome.VIOLATION)
        if not refused and not forgotten:
            self.wrong(6, f"{call} was answered {before}, and then {reply}")
        self._answers[key] = reply

    def _check_done(self, key: tuple[str, str, int, FencePhase], call: IncomingCall) -> None:
        """DONE is said of what is durable, and of nothing else."""
        branch = key[:3]
        if call.action == CHARGE or branch in self.purged or call.xid in self.losses:
            return
        if call.phase is FencePhase.CANCEL:
            if branch not in self.marked:
                self.wrong(6, f"{call} was answered DONE, and there is no cancel mark")
        elif call.phase not in SETTLES and not self.effects[key]:
            tx = self.stands.get(call.xid)
            if tx is None or tx.resolution_of(call.branch_id - 1) is None:
                self.wrong(6, f"{call} was answered DONE, and has had no effect")

    def saw(self, xid: str, parent: int, branch_ids: Iterable[int]) -> None:
        """A handler has seen tried what it has called."""
        self._seen.setdefault(xid, set()).update((parent, branch_id) for branch_id in branch_ids)

    # --- answers -------------------------------------------------------------------------------------------

    def told(self, key: bytes, tx: Transaction) -> None:
        """An initiator or operator was told that its transaction stands so."""
        xid = tx.spec.xid.hex()
        if xid in self.losses:
            return  # it may be an answer of before
        stored = self.stands.get(xid)
        said = decision(tx.state)
        if stored is None or (said and decision(stored.state) != said):
            self.wrong(6, f"{tx.state.name} was told of {xid}, stored is {stored.state.name if stored else 'nothing'}")
            return
        before = self._told.get(key)
        if before is not None and key and (before[0] != tx.spec.xid or (said and before[1] and said != before[1])):
            self.wrong(6, f"{said} of {xid} was told, and {before[1]} of {before[0].hex()} before")
        if before is None or said:
            self._told[key] = (tx.spec.xid, said)

    def refused(self, key: bytes, xid: bytes, branches: tuple[BranchSpec, ...]) -> None:
        """A request was told that its key belongs to another one."""
        tx = self.stands.get(xid.hex())
        if xid.hex() in self.losses:
            return
        if tx is None or tx.spec.key != key or tx.spec.branches[: tx.begun] == branches:
            self.wrong(7, f"{key!r} was refused, though it belongs to no other request")

    def ran_other(self, key: bytes, why: str) -> None:
        """Another request than the first was answered as if it were its own."""
        self.wrong(7, f"{key!r}: {why}")

    # --- at the end ----------------------------------------------------------------------------------------

    def at_rest(self) -> None:
        """Faults have stopped, and nothing moves any more."""
        keys: set[bytes] = set()
        for xid, tx in self.stands.items():
            if tx.spec.key in keys:
                self.wrong(7, f"two transactions hold the key {tx.spec.key!r}")
            keys.add(tx.spec.key)
            self._world.counts[tx.state.name] += 1
            for n, branch in enumerate(tx.spec.branches):
                self._check_branch(xid, tx, n, branch)
        if not self.losses.lost and not any(tx.resolved for tx in self.stands.values()):
            for (participant, name), account in self.accounts.items():
                if (account.held or account.due) and not participant.endswith(STRAY):
                    self.wrong(5, f"account {name} of {participant} is {account} at rest")

    def _check_branch(self, xid: str, tx: Transaction, n: int, branch: BranchSpec) -> None:
        tried, confirmed, cancelled = (
            self.effects[branch.participant, xid, n + 1, phase]
            for phase in (FencePhase.TRY, FencePhase.CONFIRM, FencePhase.CANCEL)
        )
        if xid in self.losses:
            self._check_mixed(xid, tx, n, confirmed, cancelled)
            return
        if tx.resolution_of(n) is not None:
            return  # a person has done the rest
        effects = f"{tried} Try, {confirmed} Confirm, {cancelled} Cancel"
        if branch.action == CHARGE:  # its Try has its effect elsewhere
            tried, cancelled = (1, 0) if tx.state is State.CONFIRMED and not cancelled else (cancelled, cancelled)
        if tx.state is State.CONFIRMED and (tried, confirmed, cancelled) != (1, 1, 0):
            self.wrong(3, f"{xid}#{n + 1} is CONFIRMED; effects: {effects}")
        if tx.state is State.CANCELLED and (confirmed or tried != cancelled):
            self.wrong(2, f"{xid}#{n + 1} is CANCELLED; effects: {effects}")

    def _check_mixed(self, xid: str, tx: Transaction, n: int, confirmed: int, cancelled: int) -> None:
        """What a restore has made of a transaction cannot be helped, but a person must be told."""
        if confirmed if tx.state is State.CANCELLED else cancelled:
            self._world.counts["mixed by a restore"] += 1
            if tx.attention is not Attention.VIOLATION:
                self.wrong(17, f"{xid}#{n + 1} has ended otherwise than {tx.state.name}, and nobody is told")

    def resolves(self, participant: str, call: IncomingCall) -> None:
        """A participant's resolver makes a call by what it has read."""
        tx = self.losses.record(participant, call.xid)
        want = "confirm" if call.phase in (FencePhase.CONFIRM, FencePhase.SETTLE_CONFIRMED) else "cancel"
        by_hand = None if tx is None else tx.resolution_of(call.branch_id - 1)
        says = decision(tx.state) if tx is not None else "nothing"
        if by_hand is not None:
            says = "confirm" if by_hand.confirmed else "cancel"
        if says != want:
            self.wrong(16, f"{participant} resolves with {call}, and the record says {says}")


def _reached(old: State, new: State) -> bool:
    """Whether there is a way from one state to the other: a save may make several moves at once."""
    ways = [to for (state, _), to in TRANSITIONS.items() if state is old]
    return new in ways or any(_reached(way, new) for way in ways)


def _name(status: int | None) -> str:
    return "none" if status is None else Status(status).name


def _statuses(tx: Transaction) -> str:
    return ",".join(step.status.name for step in tx.steps) or "-"


def _wake(tx: Transaction, world: World) -> str:
    return "-" if tx.wake_ms is None else f"{tx.wake_ms - world.now_ms:+d} ms"
