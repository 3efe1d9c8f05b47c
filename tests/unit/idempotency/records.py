"""Records for tests that need some."""

from dataclasses import replace
from typing import Any

from participant_sdk.idempotency.record import Answer, Codec, Fingerprint, Record, State

HEADERS = ((b"content-type", b"application/json"), (b"x-shop", b"one"), (b"x-shop", b"two"), (b"x-empty", b""))
ANSWER = Answer(Codec.HTTP, 201, HEADERS, b'{"order": 42}\x00\xff')


def record_of(key: int = 1, **changes: Any) -> Record:
    """A record that has ended; `changes` are its other fields."""
    record = Record(
        key_hash=key.to_bytes(32),
        tenant="ömer",
        operation="orders.create",
        key_hint="3f2a",
        state=State.SUCCEEDED,
        fingerprint=Fingerprint(1, bytes(range(32))),
        fence=1_800_000_000_000_000,
        attempt=1,
        age_ms=5_000,
        expires_left_ms=60_000,
        answer=ANSWER,
    )
    return replace(record, **changes)
