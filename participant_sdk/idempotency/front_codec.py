"""An ended record as bytes for a front outside of this process. What cannot be read is no record.

    version (1 byte), fixed part, then each text and blob with its length, then a checksum of all of it

The version is that of this layout; a reader knows its own only, so that programs of two versions share a front.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Final

from participant_sdk.idempotency.record import KEY_HASH_BYTES, Answer, Codec, Fingerprint, Record, State

VERSION: Final = 1
_FIXED: Final = struct.Struct(f">BQ{KEY_HASH_BYTES}sBqiqqh32sBiI")
_LENGTH: Final = struct.Struct(">I")
_CHECKSUM: Final = struct.Struct(">I")
_NO_ANSWER: Final = 0
_TEXTS: Final = 4


def encode(record: Record, lives_ms: int) -> bytes:
    """The bytes, which the front will hold for `lives_ms`. Raises struct.error for values that no stored record has."""
    answer = record.answer or Answer(Codec.VALUE)
    fixed = _FIXED.pack(
        VERSION,
        lives_ms,
        record.key_hash,
        record.state,
        record.fence,
        record.attempt,
        record.age_ms,
        record.expires_left_ms or 0,
        record.fingerprint.version,
        record.fingerprint.digest,
        _NO_ANSWER if record.answer is None else answer.codec,
        answer.status,
        len(answer.headers),
    )
    texts = (record.tenant, record.operation, record.key_hint, record.reason)
    parts = [*(text.encode() for text in texts), *(part for header in answer.headers for part in header), answer.body]
    whole = b"".join([fixed, *(_LENGTH.pack(len(part)) + part for part in parts)])
    return whole + _CHECKSUM.pack(zlib.crc32(whole))


def decode(data: bytes) -> tuple[Record, int] | None:
    """The record as it was written, and `lives_ms`; None for bytes of another version, and for damaged ones."""
    try:
        return _decode(data)
    except (struct.error, ValueError):  # ValueError: a number that is no State or Codec, or bad UTF-8
        return None


def _decode(data: bytes) -> tuple[Record, int] | None:
    if data[:1] != bytes([VERSION]) or len(data) < _FIXED.size + _CHECKSUM.size:
        return None
    whole, (checksum,) = data[: -_CHECKSUM.size], _CHECKSUM.unpack(data[-_CHECKSUM.size :])
    if zlib.crc32(whole) != checksum:
        return None
    fixed = _FIXED.unpack_from(whole)
    _, lives_ms, key_hash, state, fence, attempt, age_ms, left_ms, version, digest, codec, status, headers = fixed
    parts = list(_parts(whole))
    if len(parts) != _TEXTS + 2 * headers + 1:
        return None
    tenant, operation, key_hint, reason = (part.decode() for part in parts[:_TEXTS])
    names, values = parts[_TEXTS:-1:2], parts[_TEXTS + 1 : -1 : 2]
    answer = None
    if codec != _NO_ANSWER:
        answer = Answer(Codec(codec), status, tuple(zip(names, values, strict=True)), parts[-1])
    record = Record(
        key_hash, tenant, operation, key_hint, State(state), Fingerprint(version, digest), fence, attempt, age_ms,
        expires_left_ms=left_ms, answer=answer, reason=reason,
    )  # fmt: skip
    return record, lives_ms


def _parts(whole: bytes) -> Iterator[bytes]:
    at = _FIXED.size
    while at < len(whole):
        (length,) = _LENGTH.unpack_from(whole, at)
        at += _LENGTH.size + length
        if at > len(whole):
            raise ValueError("it ends early")
        yield whole[at - length : at]
