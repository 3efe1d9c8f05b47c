"""What is stored under an idempotency key, as values.

Times are what is left of them by the database's clock when the record was read (ms; not above 0: it has passed), so
that no program's own clock is ever compared with another's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, unique
from typing import Final

KEY_HASH_BYTES: Final = 32


@unique
class State(IntEnum):
    """How far the work under a key has come. The numbers are stored."""

    PROCESSING = 0
    """Somebody runs it, until its lease ends."""
    SUCCEEDED = 1
    """Done; the answer is replayed."""
    FAILED_FINAL = 2
    """It said no for good; the answer is replayed, and nothing of the work stayed."""
    FAILED_RETRYABLE = 3
    """It failed and left nothing; the same request may run again."""
    UNKNOWN = 4
    """It may or may not have had its effect: a person, or a reconciliation, has to say which. Never runs again."""
    TOMBSTONE = 5
    """Done, but its answer could not be stored: a repeat is told so, and does not run."""

    @property
    def ended(self) -> bool:
        """Whether a repeat is answered from the record alone, until it expires."""
        return self in (State.SUCCEEDED, State.FAILED_FINAL, State.TOMBSTONE)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a request was, in 32 bytes. `version`: the algorithm that made it; old ones are kept for ever."""

    version: int
    digest: bytes


@unique
class Codec(IntEnum):
    """How `Answer` is to be read. The numbers are stored."""

    HTTP = 1
    """status: the HTTP status; headers and body as they were."""
    GRPC = 2
    """status: the gRPC code; body: the serialized message; headers: trailing metadata."""
    VALUE = 3
    """A function's result; body: written by the operation's own codec."""
    ERROR = 4
    """An exception that the operation stores; body: written by the operation's own codec."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What is said again to every repeat, byte for byte."""

    codec: Codec
    status: int = 0
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""

    @property
    def bytes_held(self) -> int:
        """What it takes in memory and in the store, about, in bytes."""
        return len(self.body) + sum([len(name) + len(value) + 8 for name, value in self.headers]) + 64


def answer_given(hook: str, given: object) -> Answer:
    """What a user's hook has given. Raises TypeError if it is no Answer."""
    if not isinstance(given, Answer):
        raise TypeError(f"{hook} has given a {type(given).__name__}, not an Answer")
    return given


@dataclass(frozen=True, slots=True)
class Record:
    """The record of one key, as it was read."""

    key_hash: bytes
    tenant: str
    operation: str
    key_hint: str
    """The first characters of the key, for people; "" where the operation keeps none."""
    state: State
    fingerprint: Fingerprint
    fence: int
    """Grows with each run under this key, also over a record that was swept: what a zombie's write is refused by."""
    attempt: int
    """How many runs have been begun, from 1."""
    age_ms: int
    """Since the record was made."""
    lease_left_ms: int = 0
    expires_left_ms: int | None = None
    """None: it does not expire (it is processed, or UNKNOWN)."""
    recovery_point: str | None = None
    """Of a phased run: the last phase that was committed."""
    phase_data: bytes | None = None
    """Of a phased run: what its phases returned."""
    answer: Answer | None = None
    reason: str = ""
    """Of UNKNOWN and of what an operator did: why."""
