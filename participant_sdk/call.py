"""A call on its way through the SDK: what arrives, what the handler sees, what is answered.

Plain immutable values. Protobuf stops at `service`, SQL in `databases`; between them only these travel, so the
fence's steps, the lanes and the handlers can be read and tested without either.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Any, Final, Generic, TypeVar

from participant_sdk.fence import Phase
from participant_sdk.payload import Payload

T = TypeVar("T")

FINGERPRINT_ALGORITHM: Final = 1
"""SHA-256 over action, content type and payload bytes, each with its length before it. Stored beside each digest."""


@unique
class Outcome(Enum):
    """What is known about a call after it was handled."""

    DONE = "done"
    """It happened, now or before; its effect is committed."""
    REFUSED = "refused"
    """A Try was refused for good; it left nothing behind."""
    UNKNOWN = "unknown"
    """Not known to have happened, nor not to have: it will be repeated."""
    VIOLATION = "violation"
    """It contradicts what is stored; nothing was run."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a Try said no: `reason` for programs, `message` for people."""

    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one call. `attention`: more failures need not be waited for before a person looks.

    `tried_branch_ids`: what a Try that was done saw tried by services that it called itself.
    """

    outcome: Outcome
    result: Payload | None = None
    refusal: Refusal | None = None
    error: str = ""
    attention: bool = False
    tried_branch_ids: frozenset[int] = frozenset()

    @classmethod
    def unknown(cls, error: str, *, attention: bool = False) -> Reply:
        """The outcome is not known; `error` says why, for people."""
        return cls(Outcome.UNKNOWN, error=error, attention=attention)

    @classmethod
    def refused(cls, refusal: Refusal) -> Reply:
        """Try said no."""
        return cls(Outcome.REFUSED, refusal=refusal)


@dataclass(frozen=True, slots=True)
class IncomingCall:
    """One call as it arrived, checked but not decoded. `expires_at` is a reading of `time.monotonic()`."""

    phase: Phase
    xid: str
    branch_id: int
    participant: str
    action: str
    payload: Payload
    attempt: int
    expires_at: float
    fingerprint: bytes
    metadata: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def key(self) -> tuple[str, int]:
        """Which fence row it meets."""
        return self.xid, self.branch_id

    @property
    def identity(self) -> tuple[Phase, str, bytes]:
        """Two calls of one branch with equal identities are the same call, repeated."""
        return self.phase, self.participant, self.fingerprint

    def seconds_left(self) -> float:
        """Seconds until the coordinator stops waiting; negative when it has stopped."""
        return self.expires_at - time.monotonic()

    def __str__(self) -> str:
        return f"{self.phase.name.capitalize()} {self.participant}/{self.action} {self.xid}#{self.branch_id}"


def fingerprint(action: str, payload: Payload) -> bytes:
    """The digest that tells "the same call again" from "another call with the same branch" (algorithm 1)."""
    digest = hashlib.sha256()
    for part in (action.encode(), payload.content_type.encode(), payload.data):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """What a handler is called with: `def debit(call: Call[Debit], db: Connection) -> Held`.

    `payload` is the initiator's, decoded into T. In Confirm and Cancel `result` is what Try returned (decoded into
    the Try handler's return annotation if it has one), else None. `xid` and `branch_id` together name the branch
    for ever: good keys for what the handler stores. `metadata` is what the initiator sent along (a tenant, a trace),
    the same in every phase. The defaults are for calling a handler from a unit test.
    """

    payload: T
    xid: str = "0" * 32
    branch_id: int = 1
    participant: str = ""
    action: str = ""
    attempt: int = 1
    result: Any = None
    metadata: Mapping[str, str] = field(default_factory=dict, hash=False)
    expires_at: float = field(default=float("inf"), repr=False)

    @property
    def deadline(self) -> float:
        """Seconds until the coordinator stops waiting for this call's reply, never below 0.

        What is committed after that still counts: the repeat is answered from the fence.
        """
        return max(0.0, self.expires_at - time.monotonic())
