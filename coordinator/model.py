"""What a transaction is: immutable values, and nothing that moves.

A ``Spec`` is what the initiator asked for; it is shared by every later value of its transaction, and replaced only
where a branch is added to an open one.
A ``Transaction`` is the spec plus how far it has come. Values are tuples because the coordinator makes one per save
at high rates: a named tuple is built in a fraction of the time of a frozen dataclass.

Pure: no clock, no randomness, no I/O. Times are integers: milliseconds of the store's clock since 1970 (``_ms``).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

FORMAT = 3
"""The highest version of a row that this program reads; ``codec`` writes the lowest that holds what there is."""


class Phase(IntEnum):
    """What a call asks of a participant."""

    TRY = 1
    CONFIRM = 2
    CANCEL = 3
    SETTLE_CONFIRMED = 4
    """An operator has resolved the branch by hand: write that down and run nothing (protocol G1)."""
    SETTLE_CANCELLED = 5


class Outcome(IntEnum):
    """What came of one call."""

    DONE = 1
    """It has happened, now or before."""
    REFUSED = 2
    """The business says no. Counts in answer to Try only."""
    UNKNOWN = 3
    """Not known to have happened, nor not to have: time-out, broken stream, any error. Repeated."""
    VIOLATION = 4
    """It contradicts what the participant has stored. Never taken for success, never turns a decision."""


class State(IntEnum):
    """A transaction's states. ``machine.TRANSITIONS`` holds every move between them."""

    TRYING = 1
    """Undecided; only here can it time out or be cancelled."""
    CONFIRMING = 2
    """Decided: every branch will be confirmed."""
    CONFIRMED = 3
    CANCELLING = 4
    """Decided: every branch will be cancelled."""
    CANCELLED = 5

    @property
    def finished(self) -> bool:
        """Whether nothing is owed to any participant any more."""
        return self in _FINISHED


_FINISHED = frozenset((State.CONFIRMED, State.CANCELLED))


class BranchStatus(IntEnum):
    """How far one branch has come."""

    PENDING = 1
    """Try has not been answered for certain; it may have run all the same."""
    TRIED = 2
    REFUSED = 3
    CONFIRMED = 4
    CANCELLED = 5


class Attention(IntEnum):
    """Why a person should look at a transaction."""

    NONE = 0
    RETRYING = 1
    """A branch failed again and again. Cleared when the transaction ends."""
    VIOLATION = 2
    """A participant contradicted the protocol or cannot carry a call out. Stays on record."""
    STUCK = 3
    """It was claimed again and again, and nothing was saved: whoever drives it may die of it (protocol A7). Given by
    the claim itself, where there is no other; cleared by the next save."""

    @property
    def lasting(self) -> Attention:
        """What of it outlasts a save."""
        return Attention.NONE if self is Attention.STUCK else self


WHY_STUCK = "coordinators have claimed it again and again, and saved nothing: they may die of it"
"""What people are told of STUCK, which no branch's error tells."""


class Payload(NamedTuple):
    """Bytes that the coordinator carries and never reads."""

    data: bytes = b""
    content_type: str = ""


class Refusal(NamedTuple):
    """Why a participant said no: ``reason`` for programs, ``message`` for people."""

    reason: str
    message: str = ""


class BranchSpec(NamedTuple):
    """One branch as the initiator asked for it. Its branch_id is its place among the branches, from 1."""

    participant: str
    action: str
    payload: Payload = Payload()


class Joined(NamedTuple):
    """How a branch came to an open transaction."""

    key: str
    """Unique in the transaction: what asks with it again means the same branch (protocol B2)."""
    enlisted: bool = False
    """Its participant was called directly, and reports its Try by itself (protocol B3)."""
    parent: int = 0
    """The branch_id in whose Try that call was made; 0: the initiator made it."""


class Spec(NamedTuple):
    """What was asked for. Only ``branches`` ever changes, and only by growing."""

    xid: bytes
    """16 bytes, UUIDv7: unique, and in the order of time."""
    key: bytes
    """Namespace, NUL, idempotency key, in UTF-8; empty when the transaction has no key."""
    created_ms: int
    timeout_ms: int
    branches: tuple[BranchSpec, ...]
    metadata: tuple[tuple[str, str], ...] = ()
    """What every call carries to its participant, by key; the coordinator never reads it."""
    interactive: bool = False
    """Its initiator adds the branches one at a time, and confirms."""
    ordered: bool = False
    """The branches that it began with are tried one after another."""
    labels: tuple[tuple[str, str], ...] = ()
    """What people find it by, by name."""


class Step(NamedTuple):
    """How far one branch has come."""

    status: BranchStatus = BranchStatus.PENDING
    attempts: int = 0
    """Calls of the present phase that were answered UNKNOWN or VIOLATION."""
    next_ms: int = 0
    """Not before then is the next call due."""
    error: str = ""
    """The last error, kept after later success."""
    fence_id: str = ""
    """The fence database that answered Try."""
    result: Payload | None = None
    refusal: Refusal | None = None


class Seen(NamedTuple):
    """One branch's participant saw another branch tried, which was enlisted in the course of its Try."""

    by: int
    """branch_id"""
    branch_id: int


class Resolution(NamedTuple):
    """An operator has told what became of a branch."""

    branch_id: int
    confirmed: bool
    """Else cancelled."""
    actor: str
    reason: str
    time_ms: int
    opposite: bool
    """Whether it contradicts the decision."""
    lost: bool = False
    """The participant's database is gone for good: the branch ended without its participant having been told."""


class Run(NamedTuple):
    """Attempts of one call that failed alike, one after another."""

    phase: Phase
    error: str
    attention: bool
    """Whether a person should look because of each of them alone."""
    first_attempt: int
    last_attempt: int
    first_ms: int
    last_ms: int

    @property
    def attempts(self) -> int:
        """How many."""
        return self.last_attempt - self.first_attempt + 1


class Dropped(NamedTuple):
    """Runs of which only this is kept."""

    runs: int
    attempts: int
    first_ms: int
    last_ms: int


class End(NamedTuple):
    """When a branch has answered for good, in Try or at its end."""

    status: BranchStatus
    time_ms: int


class Past(NamedTuple):
    """What one branch went through, from the first failure of any branch of its transaction on."""

    branch_id: int
    runs: tuple[Run, ...] = ()
    """The first and the last ones, in the order of time."""
    dropped: Dropped | None = None
    """Those that were in the middle."""
    ends: tuple[End, ...] = ()


class Transaction(NamedTuple):
    """One transaction at one moment."""

    spec: Spec
    state: State
    steps: tuple[Step, ...]
    version: int = 1
    """Grows by one with each save: the compare-and-swap's operand."""
    save_id: int = 0
    """Random, made anew for each save: tells whose row it is after a COMMIT of unknown outcome (protocol A1)."""
    wake_ms: int | None = None
    """Timer, retry schedule and lease in one: from then on any coordinator may claim it. None when finished."""
    attention: Attention = Attention.NONE
    updated_ms: int = 0
    decided_ms: int = 0
    """0 while TRYING."""
    cancel_reason: str = ""
    sealed: bool = True
    """An interactive one is sealed by its Confirm; until then it is not decided by itself (protocol B1)."""
    renewed_ms: int = 0
    """The deadline, if it was moved."""
    joined: tuple[Joined, ...] = ()
    """Of the last branches: those that it did not begin with."""
    seen: tuple[Seen, ...] = ()
    resolved: tuple[Resolution, ...] = ()
    """All there ever were, in the order of time: the last one of a branch counts."""
    past: tuple[Past, ...] = ()
    """Of those branches that went through something worth telling, by branch_id."""

    @property
    def mixed(self) -> bool:
        """Whether a branch was ever resolved against the decision. Never taken back."""
        return any(resolution.opposite for resolution in self.resolved)

    def resolution_of(self, branch: int) -> Resolution | None:
        """How a branch, by its index, was resolved by hand, if it was."""
        for resolution in reversed(self.resolved):
            if resolution.branch_id == branch + 1:
                return resolution
        return None

    @property
    def deadline_ms(self) -> int:
        """When it is cancelled if it is still undecided."""
        return self.renewed_ms or self.spec.created_ms + self.spec.timeout_ms

    def next_version(self, save_id: int, wake_ms: int | None) -> Transaction:
        """The same as its next save writes it: in a third of the time of ``_replace``, as each save has it made."""
        return Transaction._make((*self[:3], self.version + 1, save_id, wake_ms, *self[6:]))

    @property
    def begun(self) -> int:
        """How many branches it began with."""
        return len(self.spec.branches) - len(self.joined)

    def errors(self) -> list[str]:
        """The last error of each branch that has one, for people."""
        return [f"branch {n}: {step.error}" for n, step in enumerate(self.steps, 1) if step.error]

    def joined_as(self, branch: int) -> Joined | None:
        """How a branch came, by its index; None if the transaction began with it."""
        index = branch - self.begun
        return self.joined[index] if index >= 0 else None

    def asks_the_same(self, spec: Spec) -> bool:
        """Whether a starting request under the same key is the same request: its branches and their order, no more.

        A smaller time-out left, other metadata (a trace id), labels or another ``wait`` do not make it another request
        (protocol B4).
        """
        mine = self.spec
        if (mine.interactive, mine.ordered) != (spec.interactive, spec.ordered):
            return False
        return mine.branches[: self.begun] == spec.branches


class Call(NamedTuple):
    """One thing owed to one participant now."""

    branch: int
    """Index into the branches, from 0 (branch_id less 1)."""
    phase: Phase
    attempt: int
    """1, 2, ... in this phase."""
    timeout_ms: int


class Reply(NamedTuple):
    """What became of one call."""

    branch: int
    phase: Phase
    outcome: Outcome
    fence_id: str = ""
    result: Payload | None = None
    refusal: Refusal | None = None
    error: str = ""
    attention: bool = False
    """With UNKNOWN: a person should look at once, more attempts would tell nothing new."""
    retry_ms: int = 0
    """With UNKNOWN: not before so many ms is it worth asking again. The back-off's cap holds for it too."""
    seen: tuple[int, ...] = ()
    """With DONE in answer to Try: the branch_ids that its participant saw tried."""


class Policy(NamedTuple):
    """The times and thresholds that the pure functions go by."""

    call_timeout_ms: int = 5_000
    lease_ms: int = 10_000
    lease_margin_ms: int = 1_000
    """How much longer than the longest call a lease must last."""
    backoff_base_ms: int = 100
    backoff_cap_ms: int = 15_000
    attention_after: int = 10
    """Attempts of one call after which a person should look."""
    linger_ms: int = 250
    """How long progress that decides nothing may wait for company before it is saved."""
    park_ms: int = 5_000
    """How long an open transaction with nothing to do stays with whoever served its initiator last."""
    call_timeouts_ms: Mapping[str, int] | None = None
    """By "participant.action" or "participant"; for all others ``call_timeout_ms``."""

    def call_timeout_of(self, branch: BranchSpec) -> int:
        """How long one call of this branch may take, in ms."""
        own = self.call_timeouts_ms
        if not own:
            return self.call_timeout_ms
        of_participant = own.get(branch.participant, self.call_timeout_ms)
        return own.get(f"{branch.participant}.{branch.action}", of_participant)

    def longest_call_of(self, spec: Spec) -> int:
        """How long any call of this transaction may take, in ms."""
        if not self.call_timeouts_ms or not spec.branches:
            return self.call_timeout_ms
        return max(self.call_timeout_of(branch) for branch in spec.branches)
