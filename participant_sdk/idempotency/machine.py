"""The pure rules of an idempotency record: what a request that meets one may do, and what may become of it.

Pure: no clock, no database, no library of any door. Every door and every mode asks `verdict`; every write follows
`TRANSITIONS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, unique
from typing import Final

from participant_sdk.idempotency.record import Fingerprint, Record, State


@unique
class Verdict(Enum):
    """What a request that has met a record, or none, may do."""

    RUN = "RUN"
    """Nothing stands in the way: make a new record, or replace the one that was met, which has expired."""
    RUN_AGAIN = "RUN_AGAIN"
    """Take the record over, if its fence is still the one that was met: with the next fence and attempt."""
    REPLAY = "REPLAY"
    """Give the stored answer."""
    IN_PROGRESS = "IN_PROGRESS"
    """Another one runs it: wait, or tell the caller to come back."""
    MISMATCH = "MISMATCH"
    """The key belongs to another request."""
    NOT_COMPARABLE = "NOT_COMPARABLE"
    """The record's fingerprint is of an algorithm that this program does not know: refuse, never run."""
    GIVE_UP = "GIVE_UP"
    """Its lease ran out and it must not run again: store UNKNOWN, if the fence is still the one that was met."""
    UNKNOWN = "UNKNOWN"
    """Whether it had its effect is not known; only a person or a reconciliation can say."""
    NO_ANSWER = "NO_ANSWER"
    """It was done, and its answer is not stored."""


@unique
class TakeOver(Enum):
    """What may happen to a run whose lease has ended without an outcome: its process died, or hangs."""

    AUTO = "auto"
    """It runs again. Right where all effects are in the local transaction that completes it."""
    ONLY_IF_REENTRANT = "only_if_reentrant"
    """It runs again if the operation's `reentrant` says so of the record, such as by its recovery point."""
    NEVER = "never"
    """It becomes UNKNOWN."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What an operation says about repeats."""

    operation: str
    take_over: TakeOver
    reentrant: Callable[[Record], bool] | None
    attempts_max: int
    """Runs that may end without an outcome before the record becomes UNKNOWN."""


_KNOWN: Final = frozenset({State.SUCCEEDED, State.FAILED_FINAL, State.FAILED_RETRYABLE, State.TOMBSTONE})

TRANSITIONS: Final[dict[State | None, frozenset[State]]] = {
    None: frozenset({State.PROCESSING, *_KNOWN}),
    State.PROCESSING: frozenset(State),  # PROCESSING again: it was taken over
    State.FAILED_RETRYABLE: frozenset({State.PROCESSING, *_KNOWN}),
    State.UNKNOWN: _KNOWN,
    State.SUCCEEDED: frozenset(),
    State.FAILED_FINAL: frozenset(),
    State.TOMBSTONE: frozenset(),
}
"""What may follow what. From None: no record, or one that has expired. In atomic mode a record is born ended."""


def verdict(record: Record | None, matches: Callable[[Fingerprint], bool | None], rules: Rules) -> Verdict:
    """What a request may do that has met `record`.

    `matches` compares the request with a stored fingerprint: None if it is of an unknown algorithm. It is asked on
    every path, also where the request would only wait or run again: the key of one request never serves another.
    """
    if record is None or has_expired(record):
        return Verdict.RUN
    same = matches(record.fingerprint)
    if same is None:
        return Verdict.NOT_COMPARABLE
    if not same or record.operation != rules.operation:
        return Verdict.MISMATCH
    match record.state:
        case State.SUCCEEDED | State.FAILED_FINAL:
            return Verdict.REPLAY
        case State.TOMBSTONE:
            return Verdict.NO_ANSWER
        case State.UNKNOWN:
            return Verdict.UNKNOWN
        case State.FAILED_RETRYABLE:
            return Verdict.RUN_AGAIN
        case State.PROCESSING:
            return _over(record, rules) if record.lease_left_ms <= 0 else Verdict.IN_PROGRESS


def has_expired(record: Record) -> bool:
    """Whether it is as if it were not there. What is processed or UNKNOWN has no time at which it expires."""
    left_ms = None if record.state in (State.PROCESSING, State.UNKNOWN) else record.expires_left_ms
    return left_ms is not None and left_ms <= 0


def _over(record: Record, rules: Rules) -> Verdict:
    """The lease has ended, and nobody has said what became of the run."""
    if record.attempt >= rules.attempts_max:
        return Verdict.GIVE_UP
    match rules.take_over:
        case TakeOver.AUTO:
            return Verdict.RUN_AGAIN
        case TakeOver.ONLY_IF_REENTRANT:
            return Verdict.RUN_AGAIN if rules.reentrant is not None and rules.reentrant(record) else Verdict.GIVE_UP
        case TakeOver.NEVER:
            return Verdict.GIVE_UP
