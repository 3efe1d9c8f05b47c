"""What initiators, participants and operators may ask of a transaction that is stored already, as pure functions.

An order is carried out on the row as it stands, by whichever coordinator it reached, and saved by the same
compare-and-swap as everything else: if another's row stands there, the order is carried out on that one. Each is
idempotent, so that a repeat (its answer was lost) finds what the first one did.

Pure, as ``machine`` is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from .machine import Event, apply, from_registered, move, named, waits
from .model import (
    Attention,
    BranchSpec,
    BranchStatus,
    Joined,
    Phase,
    Policy,
    Reply,
    Resolution,
    State,
    Step,
    Transaction,
)

BRANCHES_MAX = 64
BRANCH_BYTES_MAX = 8 * 1024 * 1024
"""The payloads of all branches together."""
LIFE_MS_MAX = 24 * 3600 * 1000
"""No transaction is undecided for longer, renewals included: fences remember a little longer (protocol C7)."""


class Denied(Exception):
    """The order cannot be carried out on this transaction. Nothing was changed."""

    def __init__(self, reason: str, message: str, **metadata: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.metadata: Mapping[str, str] = metadata


class Order(Protocol):
    """Something that is asked of a transaction."""

    def obey(self, tx: Transaction, now_ms: int, policy: Policy) -> Transaction:
        """The transaction after it; the very same value if there is nothing to change. Raises Denied."""


class AddBranch(NamedTuple):
    """Add a branch, unless it was added before. Its first call is its adder's to send, once this is saved."""

    branch: BranchSpec
    joined: Joined

    def obey(self, tx: Transaction, now_ms: int, policy: Policy) -> Transaction:
        """See Order."""
        index = self.find(tx)
        if index is not None:
            if tx.spec.branches[index] != self.branch or tx.joined_as(index) != self.joined:
                text = f"branch_key: it belongs to branch {index + 1}, which is another one"
                raise Denied("BRANCH_KEY_REUSED", text, branch_id=str(index + 1))
            return tx
        _check_trying(tx, "takes no more branches")
        if not self.joined.enlisted and not tx.spec.interactive:
            raise Denied("SEALED", "the transaction was begun with all its branches; only participants may add theirs")
        if not 0 <= self.joined.parent <= len(tx.steps):
            raise Denied("UNKNOWN_BRANCH", f"parent_branch_id: there is no branch {self.joined.parent}")
        self._check_room(tx)
        # While its adder's call may be out, nobody else sends it (the lease of this one branch).
        timeout_ms = policy.call_timeout_of(self.branch) + policy.lease_margin_ms
        step = Step() if self.joined.enlisted else Step(next_ms=now_ms + timeout_ms)
        return tx._replace(
            spec=tx.spec._replace(branches=(*tx.spec.branches, self.branch)),
            steps=(*tx.steps, step),
            joined=(*tx.joined, self.joined),
            updated_ms=now_ms,
        )

    def find(self, tx: Transaction) -> int | None:
        """The index of the branch that has this key."""
        for n, joined in enumerate(tx.joined, tx.begun):
            if joined.key == self.joined.key:
                return n
        return None

    def _check_room(self, tx: Transaction) -> None:
        if len(tx.steps) >= BRANCHES_MAX:
            raise Denied("TOO_MANY_BRANCHES", f"the transaction has {BRANCHES_MAX} branches, which is the limit")
        size = sum(len(branch.payload.data) for branch in (*tx.spec.branches, self.branch))
        if size > BRANCH_BYTES_MAX:
            text = f"the payloads of all branches would have {size} bytes; the limit is {BRANCH_BYTES_MAX}"
            raise Denied("TOO_MANY_BYTES", text)


def _never_told(participant: str, action: str) -> str:
    return ""


class Report(NamedTuple):
    """Tell what became of an enlisted branch's Try: as a reply of its participant to that Try."""

    reply: Reply
    registered: Callable[[str, str], str] = _never_told
    """By participant and action: the fence database that must answer; empty if it was never told."""

    def obey(self, tx: Transaction, now_ms: int, policy: Policy) -> Transaction:
        """See Order."""
        branch_id = self.reply.branch + 1
        joined = tx.joined_as(self.reply.branch) if 0 < branch_id <= len(tx.steps) else None
        if joined is None or not joined.enlisted:
            raise Denied("NOT_ENLISTED", f"branch_id: {branch_id} is no branch that was enlisted")
        if self.reply.phase is not Phase.TRY:
            raise ValueError("only a Try is reported")
        branch = tx.spec.branches[self.reply.branch]
        reply = from_registered(self.reply, self.registered(branch.participant, branch.action))
        return apply(tx, (reply,), now_ms, policy)


class Confirm(NamedTuple):
    """Seal an interactive transaction, and decide to confirm it: both in one save (protocol B1)."""

    tried: frozenset[int]
    """The branch_ids that the initiator saw tried."""

    def obey(self, tx: Transaction, now_ms: int, policy: Policy) -> Transaction:
        """See Order."""
        if tx.state in (State.CONFIRMING, State.CONFIRMED):
            return tx
        _check_trying(tx, "cannot be confirmed")
        if not tx.spec.interactive:
            raise Denied("NOT_INTERACTIVE", "the transaction was begun with all its branches and is decided by itself")
        if not tx.steps:
            raise Denied("NO_BRANCHES", "the transaction has no branches: there is nothing to confirm")
        open_ = [n for n, step in enumerate(tx.steps, 1) if step.status is not BranchStatus.TRIED]
        if open_:
            text = f"not tried yet: branch {_list(open_)}; wait for each, or cancel"
            raise Denied("BRANCHES_NOT_TRIED", text, branch_ids=_list(open_))
        known = named(tx, self.tried)
        missing = [n for n in range(1, len(tx.steps) + 1) if n not in known]
        if missing:
            text = (
                f"not named in tried_branch_ids: branch {_list(missing)}; the initiator has not seen the answer of "
                "each Try: ask again with its branch_key, or cancel"
            )
            raise Denied("BRANCHES_NOT_NAMED", text, branch_ids=_list(missing))
        return apply(tx._replace(sealed=True, updated_ms=now_ms), (), now_ms, policy)


class Cancel(NamedTuple):
    """Decide to cancel."""

    reason: str

    def obey(self, tx: Transaction, now_ms: int, policy: Policy) -> Transaction:
        """See Order."""
        if tx.state in (State.CANCELLING, State.CANCELLED):
            return tx
        _check_trying(tx, "cannot be cancelled")
        why = f"cancelled by its initiator: {self.reason}" if self.reason else "cancelled by its initiator"
        return apply(move(tx, Event.INITIATOR, now_ms, why), (), now_ms, policy)


class OperatorCancel(NamedTuple):
    """Decide to cancel, for an operator. Alone of all orders it is denied when repeated: it tells who was first."""

    actor: str
    reason: str

    def obey(self, tx: Transaction, now_ms: int, policy: Policy) -> Transaction:
        """See Order."""
        _check_trying(tx, "cannot be cancelled any more")
        why = f"cancelled by an operator ({self.actor}): {self.reason}"
        return apply(move(tx, Event.OPERATOR, now_ms, why), (), now_ms, policy)


class Retry(NamedTuple):
    """Make calls that wait for their next attempt due now; those that may be out are left alone (protocol G1)."""

    participant: str = ""
    """Only calls to this one; empty: to all."""

    def obey(self, tx: Transaction, now_ms: int, policy: Policy) -> Transaction:
        """See Order."""
        if tx.state.finished:
            text = f"transaction {tx.spec.xid.hex()} is {tx.state.name}: no participant is owed a call any more"
            raise Denied("FINISHED", text, xid=tx.spec.xid.hex(), state=tx.state.name)
        steps = tuple(
            step._replace(next_ms=now_ms)
            if waits(tx, n, now_ms) and self.participant in ("", tx.spec.branches[n].participant)
            else step
            for n, step in enumerate(tx.steps)
        )
        return tx if steps == tx.steps else tx._replace(steps=steps, updated_ms=now_ms)


class Resolve(NamedTuple):
    """Record that a branch was confirmed or cancelled by hand (protocol G1).

    It may be reversed until the participant has written it down; a transaction that was once mixed stays so. Where the
    participant's database is ``lost`` nobody can write it down: the branch ends at once.
    """

    branch_id: int
    confirmed: bool
    actor: str
    reason: str
    lost: bool = False

    def obey(self, tx: Transaction, now_ms: int, policy: Policy) -> Transaction:
        """See Order."""
        xid, branch = tx.spec.xid.hex(), self.branch_id - 1
        if not 0 <= branch < len(tx.steps):
            raise Denied("UNKNOWN_BRANCH", f"branch_id: transaction {xid} has no branch {self.branch_id}")
        if tx.state is State.TRYING:
            text = f"transaction {xid} is TRYING: nothing can be resolved before it is decided; cancel it, or wait"
            raise Denied("NOT_DECIDED", text, xid=xid, state=tx.state.name)
        step = tx.steps[branch]
        standing = tx.resolution_of(branch)
        same = standing is not None and (standing.confirmed, standing.lost) == (self.confirmed, self.lost)
        if same and self.lost:
            return tx
        if step.status in (BranchStatus.CONFIRMED, BranchStatus.CANCELLED):
            text = f"branch {self.branch_id} of transaction {xid} is {step.status.name}: it has answered for good"
            raise Denied("ANSWERED", text, xid=xid, state=tx.state.name, branch_state=step.status.name)
        if same:
            return tx
        opposite = self.confirmed is not (tx.state is State.CONFIRMING)
        resolution = Resolution(self.branch_id, self.confirmed, self.actor, self.reason, now_ms, opposite, self.lost)
        # The call that tells the participant is another one: it starts anew, and is due now.
        step = step._replace(attempts=0, next_ms=0)
        if self.lost:
            step = step._replace(status=BranchStatus.CONFIRMED if self.confirmed else BranchStatus.CANCELLED)
        resolved = tx._replace(
            resolved=(*tx.resolved, resolution),
            steps=(*tx.steps[:branch], step, *tx.steps[branch + 1 :]),
            attention=Attention.VIOLATION if opposite else tx.attention,
            updated_ms=now_ms,
        )
        return apply(resolved, (), now_ms, policy)


class Renew(NamedTuple):
    """Move the deadline to so many ms from now."""

    timeout_ms: int

    def obey(self, tx: Transaction, now_ms: int, policy: Policy) -> Transaction:
        """See Order."""
        _check_trying(tx, "has no deadline any more")
        last_ms = tx.spec.created_ms + LIFE_MS_MAX
        if now_ms + self.timeout_ms > last_ms:
            text = (
                f"timeout: no transaction stays undecided for longer than 24 h; {max(0, last_ms - now_ms)} ms are left"
            )
            raise Denied("DEADLINE_TOO_LATE", text)
        return tx._replace(renewed_ms=now_ms + self.timeout_ms, updated_ms=now_ms)


def carry_out(
    tx: Transaction, orders: Iterable[Order], now_ms: int, policy: Policy
) -> tuple[Transaction, list[Denied | None]]:
    """The transaction after these orders, one after another, and for each why it was denied, if it was."""
    verdicts: list[Denied | None] = []
    for order in orders:
        try:
            tx = order.obey(tx, now_ms, policy)
        except Denied as denied:
            verdicts.append(denied)
        else:
            verdicts.append(None)
    return tx, verdicts


def _check_trying(tx: Transaction, what: str) -> None:
    if tx.state is not State.TRYING:
        why = f": {tx.cancel_reason}" if tx.cancel_reason else ""
        text = f"transaction {tx.spec.xid.hex()} is {tx.state.name} and {what}{why}"
        raise Denied("NOT_TRYING", text, xid=tx.spec.xid.hex(), state=tx.state.name)


def _list(branch_ids: Iterable[int]) -> str:
    return ", ".join(map(str, branch_ids))
