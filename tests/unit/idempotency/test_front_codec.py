"""A record as bytes and back; what cannot be read is no record."""

import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from participant_sdk.idempotency.front_codec import VERSION, decode, encode
from participant_sdk.idempotency.record import Answer, Codec, Fingerprint, Record, State
from participant_sdk.idempotency.testing.front_suite import record_of

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_BYTES = st.binary(max_size=30)
_LONG = st.integers(0, 2**63 - 1)
_ANSWERS = st.builds(
    Answer, st.sampled_from(Codec), st.integers(-(2**31), 2**31 - 1),
    st.lists(st.tuples(_BYTES, _BYTES), max_size=4).map(tuple), _BYTES,
)  # fmt: skip
_RECORDS = st.builds(
    Record,
    key_hash=st.binary(min_size=32, max_size=32),
    tenant=_TEXT,
    operation=_TEXT,
    key_hint=_TEXT,
    state=st.sampled_from([State.SUCCEEDED, State.FAILED_FINAL, State.TOMBSTONE]),
    fingerprint=st.builds(Fingerprint, st.integers(0, 2**15 - 1), st.binary(min_size=32, max_size=32)),
    fence=_LONG,
    attempt=st.integers(1, 2**31 - 1),
    age_ms=_LONG,
    expires_left_ms=_LONG,
    answer=st.none() | _ANSWERS,
    reason=_TEXT,
)


@given(_RECORDS, _LONG)
def test_what_is_written_is_read(record: Record, lives_ms: int) -> None:
    assert decode(encode(record, lives_ms)) == (record, lives_ms)


def test_every_changed_byte_is_seen() -> None:
    whole = encode(record_of(), 1_000)
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 0x41
        assert decode(bytes(damaged)) is None


def test_every_cut_is_seen() -> None:
    whole = encode(record_of(), 1_000)
    assert all(decode(whole[:length]) is None for length in range(len(whole)))
    assert decode(whole + b"\0") is None


def test_another_version_is_no_record() -> None:
    whole = encode(record_of(), 1_000)
    assert whole[0] == VERSION
    other = bytes([VERSION + 1]) + whole[1:-4]
    assert decode(other + zlib.crc32(other).to_bytes(4)) is None


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_no_record(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(2_000):
        assert decode(dice.randbytes(dice.randrange(300))) is None


def test_a_sound_checksum_over_nonsense_is_no_record() -> None:
    """Such as what a program writes that has made a mistake."""
    whole = encode(record_of(), 1_000)[:-4]
    dice = random.Random(1)
    for _ in range(3_000):
        changed = bytearray(whole)
        for _ in range(dice.randrange(1, 4)):
            changed[dice.randrange(1, len(changed))] = dice.randrange(256)
        data = bytes(changed[: dice.randrange(1, len(changed) + 1)])
        read = decode(data + zlib.crc32(data).to_bytes(4))
        assert read is None or isinstance(read[0], Record)
