"""Which `execute` calls go by a stream, what is written on it, and who is told what when it ends."""

from typing import Any

import grpc
import pytest

from participant_sdk.client_asking import Answer, Ask
from participant_sdk.client_stream import (
    CALL_BYTES_MAX,
    ENDED,
    MESSAGE_BYTES_MAX,
    MESSAGE_CALLS_MAX,
    TOO_LATE,
    Stream,
    StreamCalls,
    Streams,
)
from participant_sdk.coordinator_messages import Failure
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import types_pb2


def ask(size: int = 0, seconds: float = 5.0) -> Ask:
    payload = types_pb2.Payload(data=bytes(size))
    return Ask(pb.ExecuteRequest(branches=[pb.BranchRequest(payload=payload)]), seconds)


class Heard:
    """What each call was told, by its number."""

    def __init__(self, calls: StreamCalls, count: int, size: int = 0) -> None:
        self.answers: dict[int, Answer] = {}
        self.ids = [calls.add(ask(size), self._teller(n)) for n in range(count)]

    def _teller(self, n: int) -> Any:
        return lambda answer: self.answers.__setitem__(n, answer)


def tell(told: Any) -> None:
    for teller, answer in told:
        teller(answer)


def test_messages_are_cut_by_number_and_bytes() -> None:
    calls = StreamCalls()
    Heard(calls, MESSAGE_CALLS_MAX + 10)
    Heard(calls, 9, MESSAGE_BYTES_MAX // 4)
    sizes = []
    while (message := calls.cut()) is not None:
        assert message.ByteSize() <= MESSAGE_BYTES_MAX + MESSAGE_CALLS_MAX * 8
        sizes.append(len(message.calls))
    assert sizes == [MESSAGE_CALLS_MAX, 13, 3, 3]
    assert calls.cut() is None


def test_the_coordinator_is_told_how_long_each_waits() -> None:
    calls = StreamCalls()
    for seconds in (5.0, 0.1, 0.0001):
        calls.add(ask(seconds=seconds), lambda answer: None)
    message = calls.cut()
    assert message is not None
    assert [call.patience_ms for call in message.calls] == [5_000, 100, 1]


def test_each_call_is_told_its_own_answer_once() -> None:
    calls = StreamCalls()
    heard = Heard(calls, 3)
    error = pb.ExecuteStreamError(code=grpc.StatusCode.NOT_FOUND.value[0], message="no")
    results = [
        pb.ExecuteStreamResult(call_id=heard.ids[2], response=pb.ExecuteResponse()),
        pb.ExecuteStreamResult(call_id=heard.ids[0], error=error),
        pb.ExecuteStreamResult(call_id=heard.ids[1]),
        pb.ExecuteStreamResult(call_id=heard.ids[0], response=pb.ExecuteResponse()),
        pb.ExecuteStreamResult(call_id=999, response=pb.ExecuteResponse()),
    ]
    tell(calls.heard(pb.ExecuteStreamResponse(results=results)))
    assert heard.answers == {
        0: Failure(grpc.StatusCode.NOT_FOUND, "no"),
        1: Failure(grpc.StatusCode.UNKNOWN, "an answer without an outcome"),
        2: pb.ExecuteResponse(),
    }
    assert calls.idle


def test_what_nobody_waits_for_is_not_sent() -> None:
    calls = StreamCalls()
    heard = Heard(calls, 3)
    calls.withdraw(heard.ids[1])
    message = calls.cut()
    assert message is not None
    assert [call.call_id for call in message.calls] == [heard.ids[0], heard.ids[2]]


def test_a_stream_is_silent_if_it_said_nothing_since_the_call() -> None:
    calls = StreamCalls()
    first, other = Heard(calls, 2).ids
    calls.heard(pb.ExecuteStreamResponse())  # the first message of a stream answers nothing
    assert calls.withdraw(other)
    calls.heard(pb.ExecuteStreamResponse(results=[pb.ExecuteStreamResult(call_id=other)]))
    second = Heard(calls, 1).ids[0]
    assert not calls.withdraw(first)
    assert calls.withdraw(second)
    assert not calls.withdraw(second)  # it is gone


@pytest.mark.parametrize(
    ("code", "in_doubt"),
    [
        (code, code.name in ("UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED"))
        for code in grpc.StatusCode
        if code.value[0]
    ],
)
def test_how_it_ends_says_whether_its_calls_go_alone(code: grpc.StatusCode, in_doubt: bool) -> None:
    calls = StreamCalls()
    heard = Heard(calls, 2)
    failure = Failure(code, "broken")
    tell(calls.end(failure))
    assert heard.answers == dict.fromkeys(range(2), failure if in_doubt else None)
    assert calls.over
    assert calls.idle
    assert calls.cut() is None
    assert calls.unimplemented == (code is grpc.StatusCode.UNIMPLEMENTED)


@pytest.mark.parametrize("failure", [ENDED, TOO_LATE])
def test_a_call_on_a_stream_that_ended_may_have_arrived(failure: Failure) -> None:
    assert failure.retryable
    assert failure.may_have_arrived


class Opened(Stream):
    """A stream that a test ends."""

    def end(self, code: grpc.StatusCode) -> None:
        self._calls.end(Failure(code, "it has ended"))


def test_a_lone_call_goes_alone_and_those_beside_another_by_one_stream() -> None:
    streams = Streams(lambda turn: Opened())
    for _ in range(3):
        assert streams.enter(0, ask()) is None
        streams.leave()
    assert streams.enter(0, ask()) is None
    second, third = streams.enter(0, ask()), streams.enter(0, ask())
    assert second is not None
    assert second is third
    assert streams.enter(1, ask()) not in (None, second)  # another coordinator
    assert streams.enter(0, ask(CALL_BYTES_MAX)) is None  # too large
    for _ in range(5):
        streams.leave()
    assert streams.enter(0, ask()) is None


def test_one_that_is_over_is_replaced_and_one_that_is_not_there_never() -> None:
    streams = Streams(lambda turn: Opened())
    streams.enter(0, ask())
    first = streams.enter(0, ask())
    assert first is not None
    first.end(grpc.StatusCode.UNAVAILABLE)
    second = streams.enter(0, ask())
    assert second not in (None, first)
    assert second is not None
    second.end(grpc.StatusCode.UNIMPLEMENTED)
    for _ in range(3):
        assert streams.enter(0, ask()) is None
    assert streams.enter(1, ask()) is not None
