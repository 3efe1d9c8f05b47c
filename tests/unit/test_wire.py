"""Between the wire and the model: the numbers are the same, and nothing is lost on the way out."""

from enum import IntEnum
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2

from coordinator import errors, ids, wire
from coordinator.model import (
    Attention,
    BranchSpec,
    BranchStatus,
    Outcome,
    Payload,
    Phase,
    Refusal,
    Spec,
    State,
    Step,
    Transaction,
)
from tricord.v1 import coordinator_pb2, participant_pb2, types_pb2


@pytest.mark.parametrize(
    ("model", "proto", "prefix"),
    [
        (State, types_pb2.TransactionState, "TRANSACTION_STATE_"),
        (BranchStatus, types_pb2.BranchState, "BRANCH_STATE_"),
        (Phase, participant_pb2.Phase, "PHASE_"),
        (Outcome, participant_pb2.Outcome, "OUTCOME_"),
    ],
)
def test_numbers_of_the_model_are_those_of_the_protos(model: type[IntEnum], proto: Any, prefix: str) -> None:
    numbers = {member.name: int(member) for member in model}
    assert {"UNSPECIFIED": 0, **numbers} == {name.removeprefix(prefix): number for name, number in proto.items()}


def test_attention_has_names_for_all() -> None:
    names = {types_pb2.Attention.Name(wire._ATTENTION[a]).removeprefix("ATTENTION_"): a.name for a in Attention}
    assert names == {a.name: a.name for a in Attention}


def test_a_transaction_on_the_wire() -> None:
    spec = Spec(
        ids.new_xid(1_700_000_000_123), b"shop\0order-1", 1_700_000_000_123, 30_500,
        (BranchSpec("bank", "debit", Payload(b"\x00\x01", "application/json")), BranchSpec("shop", "sell")),
    )  # fmt: skip
    steps = (
        Step(BranchStatus.TRIED, 2, 1_700_000_001_000, "late", "f", Payload(b"r", "text/plain")),
        Step(BranchStatus.REFUSED, refusal=Refusal("sold_out", "none left")),
    )
    tx = Transaction(
        spec, State.CANCELLING, steps, 7, 1, 5, Attention.RETRYING, 1_700_000_000_900, 1_700_000_000_800, "why"
    )
    message = wire.transaction_message(tx)
    assert message.xid == spec.xid.hex()
    assert (message.idempotency_key, message.version, message.cancel_reason) == ("order-1", 7, "why")
    assert message.state == types_pb2.TRANSACTION_STATE_CANCELLING
    assert message.attention == types_pb2.ATTENTION_RETRYING
    assert message.create_time.ToMilliseconds() == 1_700_000_000_123
    assert message.deadline_time.ToMilliseconds() == 1_700_000_030_623
    assert message.decide_time.ToMilliseconds() == 1_700_000_000_800
    assert message.timeout.ToMilliseconds() == 30_500
    one, two = message.branches
    assert (one.branch_id, one.attempts, one.last_error, one.result.data) == (1, 2, "late", b"r")
    assert one.next_attempt_time.ToMilliseconds() == 1_700_000_001_000
    assert one.payload == types_pb2.Payload(data=b"\x00\x01", content_type="application/json")
    assert (two.refusal.reason, two.refusal.message) == ("sold_out", "none left")
    assert not two.HasField("result")
    assert not message.metadata
    with_metadata = tx._replace(spec=spec._replace(metadata=(("tenant", "a"), ("trace", "1"))))
    assert dict(wire.transaction_message(with_metadata).metadata) == {"tenant": "a", "trace": "1"}
    undecided = wire.transaction_message(tx._replace(state=State.TRYING, decided_ms=0))
    assert not undecided.HasField("decide_time")


@pytest.mark.parametrize(
    ("seconds", "nanos", "ms"), [(0, 1, 1), (0, 999_999, 1), (0, 1_000_000, 1), (1, 1, 1_001), (-1, 0, -1_000)]
)
def test_durations_round_up(seconds: int, nanos: int, ms: int) -> None:
    assert wire.duration_ms(Duration(seconds=seconds, nanos=nanos)) == ms


def test_keys_of_two_namespaces_never_meet() -> None:
    wrong: list[errors.Violation] = []
    pairs = [("", "a"), ("a", ""), ("a", "b"), ("ab", "c"), ("a", "bc"), ("", "abc")]
    stored = {wire.read_key(key, namespace, wrong) for namespace, key in pairs}
    assert len(stored) == len(pairs)


@pytest.mark.parametrize(
    "text", ["", "12", "g" * 32, "0" * 31, "0" * 33, "-" * 32, "\uff10" * 32, " " * 32, "0x" + "0" * 30]
)
def test_what_is_no_xid(text: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        wire.read_xid(text)


def test_xids_of_a_look_up_are_taken_once_each_in_their_order() -> None:
    first, second = "ab" * 16, "CD" * 16
    assert wire.read_xids([second, first, second.lower(), f"{first[:8]}-{first[8:]}"]) == [b"\xcd" * 16, b"\xab" * 16]
    assert len(wire.read_xids([f"{n:032x}" for n in range(1_000)])) == 1_000


def test_a_requests_metadata_is_kept_in_the_order_of_its_keys() -> None:
    """What is stored does not depend on how a client's map happens to be ordered."""
    branch = coordinator_pb2.BranchRequest(participant="bank", action="debit")
    request = coordinator_pb2.ExecuteRequest(branches=[branch], metadata={"b": "2", "a": "1", "c": ""})
    assert wire.Starting.of_execute(request, "", 1_000).metadata == (("a", "1"), ("b", "2"), ("c", ""))
    request.ClearField("metadata")
    assert wire.Starting.of_execute(request, "", 1_000).metadata == ()


def test_xids_sort_by_time() -> None:
    times = [1, 2, 1_700_000_000_000, 1_700_000_000_001, 2**47]
    made = [ids.new_xid(t) for t in times]
    assert made == sorted(made)
    assert {(x[6] >> 4, x[8] >> 6) for x in made} == {(7, 2)}
    assert len({ids.new_xid(5) for _ in range(1_000)}) == 1_000


@pytest.mark.parametrize("kind", [errors.RpcError, *errors.RpcError.__subclasses__()])
def test_every_error_says_what_programs_need(kind: type[errors.RpcError]) -> None:
    violation = errors.Violation("field", "is wrong")
    if kind is errors.InvalidRequest:
        error: errors.RpcError = errors.InvalidRequest(violation)
    else:
        error = kind("text", reason="WHY", violations=(violation,), metadata={"a": "b"}, retry_s=1.5)
    status = wire.error_status(error)
    assert status.code == getattr(code_pb2, kind.code.name)
    assert isinstance(kind.code, grpc.StatusCode)
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad)
    assert (info.domain, info.reason) == ("tricord", error.reason)
    assert [(v.field, v.description) for v in bad.field_violations] == [("field", "is wrong")]
    if kind is not errors.InvalidRequest:
        retry = error_details_pb2.RetryInfo()
        assert status.details[2].Unpack(retry)
        assert retry.retry_delay.ToMilliseconds() == 1_500
