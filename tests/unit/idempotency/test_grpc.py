"""The pure parts of the gRPC door: its settings, what is stored of a call's end, what an error is told as."""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from participant_sdk.errors import ConfigurationError, IdempotencyKeyReused, InvalidRequest, TricordError
from participant_sdk.idempotency import errors
from participant_sdk.idempotency.fingerprints import RAW, RawBytes
from participant_sdk.idempotency.grpc_answers import Ending, answer_of, ending_of, state_of
from participant_sdk.idempotency.grpc_calls import Call, tenant_of
from participant_sdk.idempotency.grpc_context import Aborted, KeyedContext
from participant_sdk.idempotency.grpc_policy import NEVER_STORED, GrpcOperation, ServerStreaming, by_method
from participant_sdk.idempotency.grpc_received import Received
from participant_sdk.idempotency.grpc_spool import IN_MEMORY_MAX, Spool, split
from participant_sdk.idempotency.grpc_status import GrpcCodes
from participant_sdk.idempotency.keys import KeyRules
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.record import State

CODE = grpc.StatusCode


def policy(**settings: Any) -> GrpcOperation:
    defaults = {"operation": Operation(name="shop"), "method": "/shop.v1.Orders/Create", "tenant": None}
    return GrpcOperation(**{**defaults, **settings})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "shop.v1.Orders/Create"}, "method 'shop.v1.Orders/Create' is not of the form"),
        ({"method": "/shop.v1.Orders/Create/"}, "is not of the form"),
        ({"key_metadata": "Idempotency-Key"}, "key_metadata 'Idempotency-Key' is not a name of metadata"),
        ({"key_metadata": "key-bin"}, "key_metadata 'key-bin' holds bytes"),
        ({"key_field": "a..b"}, "key_field 'a..b' is not a path"),
        ({"kept_metadata": "receipt"}, "kept_metadata is a text"),
        ({"kept_metadata": ["grpc-status-details-bin"]}, "always kept"),
        ({"request_bytes_max": 0}, "request_bytes_max 0 is not 1 to"),
        ({"stored_codes": [CODE.NOT_FOUND], "server_streaming": ServerStreaming.TOMBSTONE}, "must be empty"),
        ({"stored_codes": [5]}, "stored_codes holds 5"),
        ({"restore": lambda answer: answer}, "restore is there without redact"),
        ({"redact": "seal"}, "redact cannot be called"),
        *(
            ({"stored_codes": [code]}, f"stored_codes holds {code.name}, after which")
            for code in sorted(NEVER_STORED, key=str)
        ),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        policy(**settings)


def test_what_is_never_an_answer() -> None:
    names = "UNAUTHENTICATED PERMISSION_DENIED RESOURCE_EXHAUSTED UNAVAILABLE DEADLINE_EXCEEDED CANCELLED ABORTED"
    assert {code.name for code in NEVER_STORED} == {*names.split(), "INTERNAL", "UNKNOWN"}


def test_two_operations_that_are_in_each_others_way() -> None:
    with pytest.raises(ConfigurationError, match="Orders/Create has two operations"):
        by_method([policy(), policy()])
    other = policy(method="/shop.v1.Orders/Change", operation=Operation(name="shop", wait_s=1))
    with pytest.raises(ConfigurationError, match="two operations have the name shop"):
        by_method([policy(), other])
    assert len(by_method([policy(), dataclasses.replace(other, operation=policy().operation)])) == 2


text = st.text(st.characters(codec="utf-8"), max_size=20)
names = st.sampled_from(["receipt", "receipt-bin", "request-id", "grpc-status-details-bin"])
pairs = st.lists(
    names.flatmap(
        lambda name: st.tuples(st.just(name), st.binary(max_size=9) if name.endswith("-bin") else st.just("v 1"))
    ),
    max_size=5,
)


@given(
    code=st.sampled_from(list(CODE)),
    message=text,
    trailing=pairs,
    body=st.binary(max_size=50),
    streamed=st.booleans(),
    initial=pairs,
)
def test_an_ending_is_the_same_again(
    code: CODE,
    message: str,
    trailing: list[tuple[str, str | bytes]],
    body: bytes,
    streamed: bool,
    initial: list[tuple[str, str | bytes]],
) -> None:
    ending = Ending(code, message, tuple(trailing), body, streamed, tuple(initial))
    kept = {"receipt", "receipt-bin"}
    said = tuple(pair for pair in trailing if pair[0] != "request-id")
    first = tuple(pair for pair in initial if pair[0] in kept)
    expected = dataclasses.replace(ending, trailing_metadata=said, initial_metadata=first)
    assert ending_of(answer_of(ending, kept)) == expected


def test_what_a_run_has_come_to() -> None:
    stored = frozenset({CODE.NOT_FOUND})
    found = {code: state_of(Ending(code), stored) for code in CODE}
    assert found.pop(CODE.OK) is State.SUCCEEDED
    assert found.pop(CODE.NOT_FOUND) is State.FAILED_FINAL
    assert set(found.values()) == {State.FAILED_RETRYABLE}


@given(st.lists(st.binary(max_size=100)))
def test_a_spool_gives_what_it_got(messages: list[bytes]) -> None:
    with Spool() as spool:
        for message in messages:
            spool.put(message)
        assert list(spool.messages()) == list(spool.messages()) == messages
        assert list(split(spool.data(1 << 20))) == messages


def test_a_spool_larger_than_memory() -> None:
    messages = [bytes([n]) * (IN_MEMORY_MAX // 2) for n in range(5)]
    with Spool() as spool:
        for message in messages:
            spool.put(message)
        assert list(spool.messages()) == messages
        assert len(spool.data(10)) == 10


ERRORS = {
    errors.KeyMissing("no key"): (CODE.INVALID_ARGUMENT, None),
    errors.KeyMalformed("bad key"): (CODE.INVALID_ARGUMENT, None),
    errors.FirstSentMalformed("no time"): (CODE.INVALID_ARGUMENT, None),
    errors.IntentTooOld(60): (CODE.FAILED_PRECONDITION, None),
    errors.TooManyKeys(1, 60, 1_200): (CODE.RESOURCE_EXHAUSTED, 1_200),
    errors.ScopeMissing("whose"): (CODE.PERMISSION_DENIED, None),
    errors.RequestTooLarge(10): (CODE.RESOURCE_EXHAUSTED, None),
    IdempotencyKeyReused("another"): (CODE.FAILED_PRECONDITION, None),
    errors.InProgress(1_500): (CODE.ABORTED, 1_500),
    errors.AnswerNotStored("done"): (CODE.FAILED_PRECONDITION, None),
    errors.RunUnknown("who knows"): (CODE.FAILED_PRECONDITION, None),
    errors.NotComparable("newer"): (CODE.FAILED_PRECONDITION, 1_000),
    errors.LeaseLost("late"): (CODE.ABORTED, 1_000),
    errors.StoreUnavailable("away", 2_000): (CODE.UNAVAILABLE, 2_000),
    InvalidRequest("no message"): (CODE.INVALID_ARGUMENT, None),
    ConfigurationError("put together wrongly"): (CODE.INTERNAL, None),
}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_what_an_error_is_told_as(error: TricordError) -> None:
    code, after_ms = ERRORS[error]
    refusal = GrpcCodes().refusal(error)
    status = status_pb2.Status.FromString(refusal.details)
    assert (refusal.code, status.code) == (code, code.value[0])
    assert refusal.message == status.message == str(error)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == (error.reason, "tricord")
    assert len(status.details) == (1 if after_ms is None else 2)
    if after_ms is not None:
        assert status.details[1].Unpack(retry)
        assert retry.retry_delay.ToMilliseconds() == after_ms


def test_every_error_is_told_as_something() -> None:
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TricordError)}
    assert kinds <= {type(error) for error in ERRORS} | {errors.IdempotencyError, TricordError}


@pytest.mark.parametrize("settings", [{"reused": CODE.ABORTED}, {"in_progress": CODE.ALREADY_EXISTS}])
def test_codes_that_do_not_fit(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        GrpcCodes(**settings)


@pytest.mark.parametrize("found", [None, "", "a\0b", "x" * 201, "é" * 101, 7])
def test_a_tenant_that_is_none(found: Any) -> None:
    with pytest.raises(errors.ScopeMissing):
        tenant_of(lambda context: found, None)


def test_a_tenant_that_cannot_be_told() -> None:
    def fails(context: Any) -> str:
        raise LookupError("no principal")

    with pytest.raises(errors.ScopeMissing):
        tenant_of(fails, None)
    assert tenant_of(lambda context: "é" * 100, None) == "é" * 100


def decode(message: bytes) -> bytes:
    if message.startswith(b"!"):
        raise DecodeError("no")
    return message


def _received(
    request: pytest.FixtureRequest,
    messages: list[bytes],
    fingerprint: Any = RAW,
    *,
    streams: bool = True,
    **settings: Any,
) -> Received:
    make = grpc.stream_unary_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
    handler: Any = make(lambda request, context: b"", request_deserializer=decode)
    got = Received(Call(policy(fingerprint=fingerprint, **settings), (("v", "2"), ("tricord-xid", "a" * 32)), handler))
    request.addfinalizer(lambda: got.__exit__(None, None, None))
    for message in messages:
        got.add(message)
    return got


Receive = Callable[..., Received]


@pytest.fixture
def received(request: pytest.FixtureRequest) -> Receive:
    """What a call has sent, closed after the test."""
    return partial(_received, request)


def test_streams_that_are_told_apart(received: Receive) -> None:
    streams: list[list[bytes]] = [[], [b""], [b"", b""], [b"ab"], [b"a", b"b"], [b"b", b"a"]]
    found = {received(stream).keyed("k", None).fingerprint.digest for stream in streams}
    assert len(found) == len(streams)
    one = received([b"a", b"b"]).keyed("k", None)
    again = received([b"a", b"b"], RawBytes(headers=("v",), revision=1)).keyed("k", None)
    assert one.matches(one.fingerprint) is True
    assert again.matches(one.fingerprint) is True  # compared as it was made
    assert one.matches(again.fingerprint) is None  # made by settings that are not known here


def test_what_is_too_large_or_no_message_is_refused_as_it_comes(received: Receive) -> None:
    for streams in (True, False):
        with pytest.raises(errors.RequestTooLarge, match="10 bytes"):
            received([b"x" * 11], streams=streams, request_bytes_max=10)
        with pytest.raises(InvalidRequest, match="Create: DecodeError: no"):
            received([b"!"], streams=streams)
    with pytest.raises(errors.RequestTooLarge):
        received([b"x" * 6, b"x" * 5], request_bytes_max=10)


def test_the_key_is_read_strictly() -> None:
    handler: Any = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")

    def key(*values: str | bytes, **settings: Any) -> str | None:
        return Call(policy(**settings), [("idempotency-key", value) for value in values], handler).metadata_key()

    assert key("k1") == key('"k1"') == "k1"
    assert key(required=False) is None
    with pytest.raises(errors.KeyMissing, match="metadata idempotency-key"):
        key()
    with pytest.raises(errors.KeyMalformed, match="metadata idempotency-key is given 2 times"):
        key("k1", "k1")
    with pytest.raises(errors.KeyMalformed, match="at most 3 are taken"):
        key("k123", key_rules=KeyRules(bytes_max=3))


def raising() -> None:
    raise LookupError


def test_a_context_notes_what_its_handler_says() -> None:
    context = KeyedContext(None)
    assert context.ending == Ending(CODE.OK)
    with context.noting():
        context.set_code(5)
        context.set_details("gone")
        context.set_trailing_metadata([("a", "b")])
        raising()
    assert context.ending == Ending(CODE.NOT_FOUND, "gone", (("a", "b"),))
    with context.noting():
        context.abort(CODE.OK, "no")
    assert context.ending.code is CODE.UNKNOWN
    with pytest.raises(Aborted):
        context.abort(99)
    assert context.ending.code is CODE.UNKNOWN
