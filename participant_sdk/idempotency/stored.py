"""How a record stands in the table: its columns as values, and what may not stand there."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, TypeVar

from participant_sdk.idempotency.errors import NotComparable, ScopeMissing
from participant_sdk.idempotency.machine import TRANSITIONS
from participant_sdk.idempotency.operation import NAME_BYTES_MAX, TENANT_BYTES_MAX
from participant_sdk.idempotency.record import KEY_HASH_BYTES, Answer, Codec, Fingerprint, Record, State
from participant_sdk.idempotency.store import Claim, Outcome

N = TypeVar("N", State, Codec)

_COLUMNS: Final = (
    "tenant, operation, key_hint, state, fingerprint_version, {}, fence, attempt, {{now_ms}} - created_ms, "
    "lease_until_ms - {{now_ms}}, expires_ms - {{now_ms}}, recovery_point, {}, codec, status, {}, {}, reason"
)
_BYTES: Final = ("fingerprint", "phase_data", "headers", "body")
COLUMNS: Final = _COLUMNS.format(*_BYTES)
"""What `record_of` takes."""
COLUMNS_IN_HEX: Final = _COLUMNS.format(*(f"encode({column}, 'hex')" for column in _BYTES))
"""The same for `record_of_texts`."""
COLUMNS_COUNT: Final = 18
_STATES: Final[dict[bytes | None, State]] = {b"%d" % state: state for state in State}
_CODECS: Final[dict[bytes | None, Codec]] = {b"%d" % codec: codec for codec in Codec}
OWNER_CHARS_MAX: Final = 100
POINT_CHARS_MAX: Final = 100
HINT_CHARS_MAX: Final = 16
REASON_CHARS_MAX: Final = 2_000
_LENGTHS: Final = struct.Struct(">II")


def record_of(key_hash: bytes, values: Sequence[Any]) -> Record:
    """The record that was read. Raises NotComparable for one that only a newer program can read."""
    tenant, operation, hint, state, version, digest, fence, attempt, age, lease, expires, *rest = values
    point, phase_data, codec, status, headers, body, reason = rest
    answer = None
    if codec is not None:
        answer = Answer(known(Codec, codec), int(status or 0), headers_of(bytes(headers or b"")), bytes(body or b""))
    return Record(
        key_hash=key_hash,
        tenant=tenant,
        operation=operation,
        key_hint=hint,
        state=known(State, state),
        fingerprint=Fingerprint(int(version), bytes(digest)),
        fence=int(fence),
        attempt=int(attempt),
        age_ms=int(age),
        lease_left_ms=int(lease or 0),
        expires_left_ms=None if expires is None else int(expires),
        recovery_point=point,
        phase_data=None if phase_data is None else bytes(phase_data),
        answer=answer,
        reason=reason or "",
    )


def known(kind: type[N], number: Any) -> N:
    """The State or Codec that is stored as a number. Raises NotComparable for one that a newer program has written."""
    try:
        return kind(int(number))
    except ValueError:
        raise NotComparable(
            f"the record of this key was written by a newer program: its {kind.__name__.lower()} {int(number)} is not "
            "known here"
        ) from None


def lock_number(key_hash: bytes) -> int:
    """The advisory lock that PostgreSQL holds for an atomic run of the key."""
    return int.from_bytes(key_hash[:8], "big", signed=True)


def record_of_texts(key_hash: bytes, texts: Sequence[bytes | None]) -> Record:
    """As `record_of`, of columns that were read in hexadecimal, as PostgreSQL's text."""
    tenant, operation, hint, state, version, digest, fence, attempt, age, lease, expires, *rest = texts
    point, phase_data, codec, status, headers, body, reason = rest
    answer = None
    if codec is not None:
        stored_headers = headers_of(bytes.fromhex(headers.decode())) if headers else ()
        stored_body = bytes.fromhex(body.decode()) if body else b""
        answer = Answer(
            _CODECS[codec] if codec in _CODECS else known(Codec, codec), int(status or 0), stored_headers, stored_body
        )
    return Record(
        key_hash,
        (tenant or b"").decode(),
        (operation or b"").decode(),
        (hint or b"").decode(),
        _STATES[state] if state in _STATES else known(State, state),
        Fingerprint(int(version or 0), bytes.fromhex((digest or b"").decode())),
        int(fence or 0),
        int(attempt or 0),
        int(age or 0),
        int(lease or 0),
        None if expires is None else int(expires),
        None if point is None else point.decode(),
        None if phase_data is None else bytes.fromhex(phase_data.decode()),
        answer,
        (reason or b"").decode(),
    )


def headers_as_bytes(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """All of them, in their order, each name and value with its length."""
    return b"".join(_LENGTHS.pack(len(name), len(value)) + name + value for name, value in headers)


def headers_of(stored: bytes) -> tuple[tuple[bytes, bytes], ...]:
    """The other way round."""
    headers, at = [], 0
    while at < len(stored):
        name, value = _LENGTHS.unpack_from(stored, at)
        at += _LENGTHS.size
        headers.append((stored[at : at + name], stored[at + name : at + name + value]))
        at += name + value
    return tuple(headers)


def ended_values(outcome: Outcome) -> tuple[Any, ...]:
    """reason, codec, status, headers, body."""
    reason = clean(outcome.reason, REASON_CHARS_MAX) or None
    answer = outcome.answer
    if answer is None:
        return reason, None, None, None, None
    return reason, int(answer.codec), answer.status, headers_as_bytes(answer.headers) or None, answer.body


def clean(text: str, chars_max: int) -> str:
    """Text for people, as every database can store it."""
    return text and text.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")[:chars_max]


def check(claim: Claim) -> None:
    """Raises ScopeMissing for a tenant that cannot be stored, and ValueError for what no door should have let in."""
    _check_texts(claim.tenant, claim.operation, claim.owner)
    if len(claim.key_hash) != KEY_HASH_BYTES:
        raise ValueError(f"key_hash has {len(claim.key_hash)} bytes, not {KEY_HASH_BYTES}")
    if len(claim.fingerprint.digest) > 32 or not 0 <= claim.fingerprint.version < 1 << 15:
        raise ValueError("the fingerprint is longer than 32 bytes, or its version is not 0 to 32767")
    if not 0 <= claim.lease_ms < 1 << 40:
        raise ValueError(f"lease_ms {claim.lease_ms} is not 0 to {(1 << 40) - 1}")


@lru_cache(maxsize=1024)
def _check_texts(tenant: str, operation: str, owner: str) -> None:
    if (fault := _fault(tenant, TENANT_BYTES_MAX)) is not None:
        raise ScopeMissing(f"the tenant {fault}")
    for field, text, bytes_max in (("operation", operation, NAME_BYTES_MAX), ("owner", owner, OWNER_CHARS_MAX)):
        if (fault := _fault(text, bytes_max)) is not None:
            raise ValueError(f"{field} {fault}")


def check_outcome(outcome: Outcome, before: State | None) -> None:
    """Raises ValueError for what is no end of a run, or may not follow."""
    if outcome.state is State.PROCESSING or outcome.state not in TRANSITIONS[before]:
        raise ValueError(f"{outcome.state.name} is no end of a run")
    if (outcome.ttl_ms is None) != (outcome.state is State.UNKNOWN):
        raise ValueError(f"ttl_ms {outcome.ttl_ms}: all but UNKNOWN expires")
    if outcome.ttl_ms is not None and not 0 <= outcome.ttl_ms < 1 << 40:
        raise ValueError(f"ttl_ms {outcome.ttl_ms} is not 0 to {(1 << 40) - 1}")


def check_point(point: str) -> None:
    """Raises ValueError for a recovery point's name that cannot be stored."""
    if (fault := _fault(point, POINT_CHARS_MAX)) is not None:
        raise ValueError(f"recovery point {fault}")


def _fault(text: str, bytes_max: int) -> str | None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return "holds half of a surrogate pair"
    if "\0" in text:
        return "holds a NUL"
    return f"has {size} bytes, and may have {bytes_max}" if size > bytes_max else None
