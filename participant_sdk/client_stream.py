"""`execute` calls that run at once, over one `ExecuteStream`: which they are, what is written, and who is told what.

Calls that gather while one message is being written leave in the next. A call's answer, failure and time-out are what
they would be of a unary call. A stream that breaks leaves its calls in doubt, as a lost connection does: they are asked
again. One that ends in a way that a call of it may have caused, or that the coordinator does not have, leaves them to
be asked again alone, as unary calls.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, NamedTuple, TypeVar

import grpc

from participant_sdk.client_asking import Answer, Ask
from participant_sdk.coordinator_messages import Failure, read_stream_failure
from tricord.v1 import coordinator_pb2

MESSAGE_CALLS_MAX: Final = 256
MESSAGE_BYTES_MAX: Final = 1024 * 1024
"""A message is cut there."""
CALL_BYTES_MAX: Final = 256 * 1024
"""A larger call goes alone."""
_ENDS: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.OK,
    }
)
"""How a stream ends that was the network's, or the coordinator's, and no call's doing."""

TOO_LATE: Final = Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "the coordinator has not answered in time")
ENDED: Final = Failure(grpc.StatusCode.UNAVAILABLE, "the coordinator has ended the stream")

Tell = Callable[[Answer], None]
Told = list[tuple[Tell, Answer]]


class _Call(NamedTuple):
    ask: Ask
    size: int
    asked_at: float
    tell: Tell


class StreamCalls:
    """The calls of one stream. What they are told is returned, so that it is told without any lock held."""

    def __init__(self) -> None:
        self.over = False
        """Whether it takes no more calls."""
        self.unimplemented = False
        """Whether the coordinator has no such stream."""
        self._calls: dict[int, _Call] = {}
        self._waiting: deque[int] = deque()
        self._next_id = 0
        self._heard_at = 0.0

    @property
    def idle(self) -> bool:
        """Whether nothing waits for an answer."""
        return not self._calls

    def add(self, ask: Ask, tell: Tell) -> int:
        """One more call; `tell` is given its answer, or None if it is to be asked alone. Returns its id."""
        self._next_id += 1
        self._calls[self._next_id] = _Call(ask, ask.request.ByteSize(), time.monotonic(), tell)
        self._waiting.append(self._next_id)
        return self._next_id

    def cut(self) -> coordinator_pb2.ExecuteStreamRequest | None:
        """The next message to write, if there is something to send."""
        request: coordinator_pb2.ExecuteStreamRequest | None = None
        size = 0
        while self._waiting and (request is None or len(request.calls) < MESSAGE_CALLS_MAX):
            call = self._calls.get(self._waiting[0])
            if call is not None:  # else nobody waits for it any more
                size += call.size
                if request is not None and size > MESSAGE_BYTES_MAX:
                    break
                request = request or coordinator_pb2.ExecuteStreamRequest()
                patience_ms = max(1, int(call.ask.seconds * 1000))
                added = request.calls.add(call_id=self._waiting[0], patience_ms=patience_ms)
                added.request.CopyFrom(call.ask.request)  # type: ignore[arg-type]  # only such requests come here
            self._waiting.popleft()
        return request

    def heard(self, response: coordinator_pb2.ExecuteStreamResponse) -> Told:
        """Answers have come."""
        if response.results:
            self._heard_at = time.monotonic()
        told: Told = []
        for result in response.results:
            call = self._calls.pop(result.call_id, None)
            if call is None:
                continue  # it came too late
            match result.WhichOneof("outcome"):
                case "response":
                    told.append((call.tell, result.response))
                case "error":
                    told.append((call.tell, read_stream_failure(result.error)))
                case _:
                    told.append((call.tell, Failure(grpc.StatusCode.UNKNOWN, "an answer without an outcome")))
        return told

    def withdraw(self, call_id: int) -> bool:
        """Nobody waits for this answer any more; whether the stream was silent since it was asked for."""
        call = self._calls.pop(call_id, None)
        return call is not None and call.asked_at >= self._heard_at

    def end(self, failure: Failure) -> Told:
        """The stream is over."""
        self.over = True
        self.unimplemented = self.unimplemented or failure.code is grpc.StatusCode.UNIMPLEMENTED
        answer: Answer = failure if failure.code in _ENDS else None
        told: Told = [(call.tell, answer) for call in self._calls.values()]
        self._calls.clear()
        self._waiting.clear()
        return told


def fits(ask: Ask) -> bool:
    """Whether a call may go by a stream: a large one has nothing to gain, and holds the others up."""
    return ask.request.ByteSize() <= CALL_BYTES_MAX


class Stream:
    """One stream, in either form."""

    def __init__(self) -> None:
        self._calls = StreamCalls()

    @property
    def over(self) -> bool:
        """Whether it takes no more calls."""
        return self._calls.over

    @property
    def unimplemented(self) -> bool:
        """Whether the coordinator has no such stream."""
        return self._calls.unimplemented


S = TypeVar("S", bound=Stream)


class Streams(Generic[S]):
    """Which calls go by which stream: those that run while another one does, by one stream for each coordinator.

    A call that runs alone goes by unary, which answers it sooner.
    """

    def __init__(self, open_stream: Callable[[int], S]) -> None:
        self._open_stream = open_stream
        self._running = 0
        self._streams: dict[int, S] = {}

    def enter(self, turn: int, ask: Ask) -> S | None:
        """One more call runs, at that coordinator; the stream that it goes by, None if it goes alone."""
        self._running += 1
        if self._running == 1 or not fits(ask):
            return None
        stream = self._streams.get(turn)
        if stream is not None and stream.unimplemented:
            return None
        if stream is None or stream.over:
            stream = self._streams[turn] = self._open_stream(turn)
        return stream

    def leave(self) -> None:
        """It runs no more."""
        self._running -= 1

    def all(self) -> list[S]:
        """Those that were opened last."""
        return list(self._streams.values())
