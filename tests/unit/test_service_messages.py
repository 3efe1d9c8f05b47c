"""What a participant reads out of a call's message, and what it does not take."""

import pytest

from participant_sdk.call import IncomingCall, Outcome, Reply
from participant_sdk.service_messages import read_call
from tricord.v1 import participant_pb2

LARGEST = {f"{n:064}": "漢" * 256 for n in range(16)}


def message(metadata: dict[str, str]) -> participant_pb2.Call:
    return participant_pb2.Call(
        phase=participant_pb2.PHASE_CANCEL, xid="0" * 32, branch_id=1, participant="bank", action="debit",
        metadata=metadata,
    )  # fmt: skip


@pytest.mark.parametrize("metadata", [{}, {"tenant": "a"}, LARGEST, {"a key": "of\nan initiator\u202e"}])
def test_metadata_is_handed_on(metadata: dict[str, str]) -> None:
    """The coordinator has checked it. What is printable differs between versions of Unicode: only its size counts."""
    call = read_call(message(metadata), ["bank"])
    assert isinstance(call, IncomingCall)
    assert call.metadata == metadata


def test_metadata_is_no_part_of_what_makes_a_call_the_same() -> None:
    one, two = (read_call(message({"trace": trace}), ["bank"]) for trace in "12")
    assert isinstance(one, IncomingCall)
    assert isinstance(two, IncomingCall)
    assert (one.fingerprint, one.identity, one.key) == (two.fingerprint, two.identity, two.key)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({**LARGEST, "one more": ""}, "the metadata has 17 entries; the limit is 16"),
        ({"k" * 65: ""}, "a key of the metadata has 65 characters; the limit is 64"),
        ({"k": "v" * 257}, "a value of the metadata has 257 characters; the limit is 256"),
    ],
)
def test_metadata_beyond_its_limit_is_unknown_and_calls_a_person(metadata: dict[str, str], said: str) -> None:
    assert read_call(message(metadata), ["bank"]) == Reply(Outcome.UNKNOWN, error=said, attention=True)
