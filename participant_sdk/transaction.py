"""A transaction as its initiator sees it: immutable values, free of protobuf."""

from __future__ import annotations

from dataclasses import dataclass
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
    """Every branch has been confirmed."""
    CANCELLING = "CANCELLING"
    """Decided: every branch will be cancelled."""
    CANCELLED = "CANCELLED"
    """Every branch has been cancelled."""


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

    @property
    def refusal(self) -> BranchRefusal | None:
        """The first branch's refusal, if any branch was refused."""
        return next((branch.refusal for branch in self.branches if branch.refusal is not None), None)
