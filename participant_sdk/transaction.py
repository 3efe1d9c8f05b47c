"""A transaction as its initiator sees it: immutable values, free of protobuf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, unique

from participant_sdk.payload import Payload


@unique
class TransactionState(Enum):
    """TRYING → CONFIRMING → CONFIRMED, or TRYING → CANCELLING → CANCELLED."""

    UNKNOWN = "UNKNOWN"
    """A state that this version of the SDK does not know."""
    TRYING = "TRYING"
    """Undecided."""
    CONFIRMING = "CONFIRMING"
    """Decided: every branch will be confirmed."""
    CONFIRMED = "CONFIRMED"
    """Every branch has been confirmed, unless the transaction is `mixed`."""
    CANCELLING = "CANCELLING"
    """Decided: every branch will be cancelled."""
    CANCELLED = "CANCELLED"
    """Every branch has been cancelled, unless the transaction is `mixed`."""

    @property
    def finished(self) -> bool:
        """Whether no call of the transaction is owed to any participant any more. False where it is not known."""
        return self in (TransactionState.CONFIRMED, TransactionState.CANCELLED)


@unique
class BranchState(Enum):
    """How far one branch has come."""

    UNKNOWN = "UNKNOWN"
    PENDING = "PENDING"
    TRIED = "TRIED"
    REFUSED = "REFUSED"
    CONFIRMED = "CONFIRMED"
    CANCELLED = "CANCELLED"


@dataclass(frozen=True, slots=True)
class BranchRefusal:
    """Who said no, and why: `reason` for programs, `message` for people."""

    branch_id: int
    participant: str
    action: str
    reason: str
    message: str

    def __str__(self) -> str:
        text = f"{self.participant}/{self.action} refused: {self.reason}"
        return f"{text} ({self.message})" if self.message else text


@dataclass(frozen=True, slots=True)
class Branch:
    """One branch. `result` is what its Try returned: `branch.result.decode(Held)`."""

    branch_id: int
    participant: str
    action: str
    payload: Payload
    state: BranchState
    result: Payload | None
    refusal: BranchRefusal | None
    attempts: int
    last_error: str
    resolved: BranchState | None = None
    """CONFIRMED or CANCELLED, if an operator has resolved it so by hand."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """A transaction as the coordinator last told it. Times are the coordinator's, in UTC; None: not yet."""

    xid: str
    idempotency_key: str
    state: TransactionState
    needs_attention: bool
    branches: tuple[Branch, ...]
    cancel_reason: str
    created_at: datetime | None
    decided_at: datetime | None
    metadata: Mapping[str, str] = field(default_factory=dict, hash=False)
    """What the initiator sent along."""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    """What people find it by."""
    mixed: bool = False
    """An operator has resolved a branch by hand against the decision: not every branch ended as `state` says."""

    @property
    def refusal(self) -> BranchRefusal | None:
        """The first branch's refusal, if any branch was refused."""
        return next((branch.refusal for branch in self.branches if branch.refusal is not None), None)


@dataclass(frozen=True, slots=True)
class LookedUp:
    """How far some transactions have come, by what the coordinator's store holds durably.

    One that is not in `states` has no record there: that is "unknown", never "cancelled".
    """

    states: Mapping[str, TransactionState]
    """By xid."""
    store_id: str
    """Names the store that was read; made with it, and never changed."""
    incarnation: int
    """Which history of that store was read: another number after a failover or a restore. 0: not known."""
