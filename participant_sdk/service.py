"""The gRPC service of a participant, for grpc and for grpc.aio.

Protobuf ends here: a message becomes an IncomingCall, goes into the lanes, and its reply becomes a message again.
Nothing is decided but whether a message is a call to this participant at all; the fence decides the rest. A stream
that breaks, or a caller that gives up, never stops a call that runs.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Final

import grpc

from participant_sdk.call import IncomingCall, Outcome, Reply, fingerprint
from participant_sdk.exchange import TaskOutbox, ThreadOutbox
from participant_sdk.fence import Phase
from participant_sdk.lanes import TaskLanes, ThreadLanes
from participant_sdk.payload import Payload
from tricord.v1 import participant_pb2, participant_pb2_grpc, types_pb2

TIMEOUT_DEFAULT_SECONDS: Final = 5.0
TIMEOUT_MAX_SECONDS: Final = 24 * 3600.0
REPLY_MARGIN_SECONDS: Final = 0.05
MESSAGE_BYTES_MAX: Final = 16 * 1024 * 1024

_XID: Final = re.compile(r"[0-9a-f]{32}")
_ACTION: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")

_OUTCOMES: Final = {
    Outcome.DONE: participant_pb2.OUTCOME_DONE,
    Outcome.REFUSED: participant_pb2.OUTCOME_REFUSED,
    Outcome.UNKNOWN: participant_pb2.OUTCOME_UNKNOWN,
    Outcome.VIOLATION: participant_pb2.OUTCOME_VIOLATION,
}


def read_call(message: participant_pb2.Call, participant: str, phase: Phase | None = None) -> IncomingCall | Reply:
    """The call in a message, or the reply to one that cannot be taken: always UNKNOWN, nothing is stored for it.

    `phase` is that of the unary method that brought it.
    """
    if phase is None or message.phase not in (participant_pb2.PHASE_UNSPECIFIED, int(phase)):
        try:
            if phase is not None:
                raise ValueError
            phase = Phase(message.phase)
        except ValueError:
            return Reply.unknown(f"the call has phase {message.phase}, which does not fit its method")
    if message.participant != participant:
        return Reply.unknown(f"this is participant {participant!r}, not {message.participant!r}", attention=True)
    if not _XID.fullmatch(message.xid):
        return Reply.unknown("the xid is not 32 lowercase hexadecimal characters", attention=True)
    if message.branch_id < 1:
        return Reply.unknown("the branch_id is not 1 or more", attention=True)
    if not _ACTION.fullmatch(message.action):
        return Reply.unknown("the action is not 1 to 64 characters of A-Z a-z 0-9 . _ -", attention=True)
    payload = Payload(message.payload.data, message.payload.content_type)
    seconds = TIMEOUT_DEFAULT_SECONDS
    if message.HasField("timeout"):
        seconds = min(message.timeout.seconds + message.timeout.nanos / 1e9, TIMEOUT_MAX_SECONDS)
    return IncomingCall(
        phase=phase,
        xid=message.xid,
        branch_id=message.branch_id,
        participant=message.participant,
        action=message.action,
        payload=payload,
        attempt=message.attempt,
        expires_at=time.monotonic() + seconds,
        fingerprint=fingerprint(message.action, payload),
    )


def write_reply(call_id: int, reply: Reply, fence_id: str) -> participant_pb2.Reply:
    """The message of a reply."""
    message = participant_pb2.Reply(
        call_id=call_id,
        outcome=_OUTCOMES[reply.outcome],
        error=reply.error,
        attention=reply.attention,
        fence_id=fence_id,
    )
    if reply.result is not None:
        result = types_pb2.Payload(data=reply.result.data, content_type=reply.result.content_type)
        message.result.CopyFrom(result)
    if reply.refusal is not None:
        message.refusal.CopyFrom(types_pb2.Refusal(reason=reply.refusal.reason, message=reply.refusal.message))
    return message


class ThreadService(participant_pb2_grpc.ParticipantServiceServicer):
    """ParticipantService on a `grpc.server`.

    An Exchange stream holds a worker thread of the server for its life, a unary call until its reply. So there are
    at most `streams_max` streams, and unary Trys leave workers to Confirm and Cancel.
    """

    def __init__(
        self, participant: str, fence_id: str, lanes: ThreadLanes, streams_max: int, unary_trys_max: int | None
    ) -> None:
        self._participant = participant
        self._fence_id = fence_id
        self._lanes = lanes
        self._streams_max = streams_max
        self._unary_trys = None if unary_trys_max is None else threading.BoundedSemaphore(unary_trys_max)
        self._lock = threading.Lock()
        self._outboxes: set[ThreadOutbox] = set()
        self._ending = False

    def Try(self, request: participant_pb2.TryRequest, context: Any) -> participant_pb2.TryResponse:
        """See the contract."""
        if self._unary_trys is None:
            return participant_pb2.TryResponse(reply=self._unary(Phase.TRY, request.call))
        if not self._unary_trys.acquire(blocking=False):
            reply = write_reply(request.call.call_id, _NO_WORKER, self._fence_id)
            return participant_pb2.TryResponse(reply=reply)
        try:
            return participant_pb2.TryResponse(reply=self._unary(Phase.TRY, request.call))
        finally:
            self._unary_trys.release()

    def Confirm(self, request: participant_pb2.ConfirmRequest, context: Any) -> participant_pb2.ConfirmResponse:
        """See the contract."""
        return participant_pb2.ConfirmResponse(reply=self._unary(Phase.CONFIRM, request.call))

    def Cancel(self, request: participant_pb2.CancelRequest, context: Any) -> participant_pb2.CancelResponse:
        """See the contract."""
        return participant_pb2.CancelResponse(reply=self._unary(Phase.CANCEL, request.call))

    def Exchange(
        self, request_iterator: Iterator[participant_pb2.ExchangeRequest], context: Any
    ) -> Iterator[participant_pb2.ExchangeResponse]:
        """See the contract."""
        outbox = ThreadOutbox()
        with self._lock:
            full = len(self._outboxes) >= self._streams_max
            if not full:
                self._outboxes.add(outbox)
            if self._ending:
                outbox.end()
        if full:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._streams_max} Exchange streams are open")
        try:
            if not context.add_callback(outbox.abandon):
                return
            reader = threading.Thread(
                target=self._read, args=(request_iterator, outbox), name="tricord-exchange", daemon=True
            )
            reader.start()
            while replies := outbox.take():
                yield participant_pb2.ExchangeResponse(replies=replies)
        finally:
            with self._lock:
                self._outboxes.discard(outbox)

    def end_streams(self) -> None:
        """Let every stream end once the replies to its calls are sent."""
        with self._lock:
            self._ending = True
            outboxes = list(self._outboxes)
        for outbox in outboxes:
            outbox.end()

    def _read(self, requests: Iterator[participant_pb2.ExchangeRequest], outbox: ThreadOutbox) -> None:
        try:
            for request in requests:
                outbox.expect(len(request.calls))
                for message in request.calls:
                    self._submit(message, None, outbox.put)
        except Exception:  # grpc raises when the stream breaks; its callback has abandoned the outbox
            outbox.abandon()
        finally:
            outbox.end()

    def _submit(
        self, message: participant_pb2.Call, phase: Phase | None, put: Callable[[participant_pb2.Reply], None]
    ) -> None:
        call_id = message.call_id

        def on_reply(reply: Reply) -> None:
            put(write_reply(call_id, reply, self._fence_id))

        call = read_call(message, self._participant, phase)
        if isinstance(call, Reply):
            on_reply(call)
        else:
            self._lanes.submit(call, on_reply)

    def _unary(self, phase: Phase, message: participant_pb2.Call) -> participant_pb2.Reply:
        answered: Future[participant_pb2.Reply] = Future()
        self._submit(message, phase, answered.set_result)
        try:
            return answered.result(_unary_wait(message))
        except FutureTimeoutError:
            return write_reply(message.call_id, _STILL_RUNNING, self._fence_id)


class TaskService(participant_pb2_grpc.ParticipantServiceServicer):
    """ParticipantService on a `grpc.aio.server`."""

    def __init__(self, participant: str, fence_id: str, lanes: TaskLanes) -> None:
        self._participant = participant
        self._fence_id = fence_id
        self._lanes = lanes
        self._outboxes: set[TaskOutbox] = set()
        self._ending = False

    async def Try(self, request: participant_pb2.TryRequest, context: Any) -> participant_pb2.TryResponse:
        """See the contract."""
        return participant_pb2.TryResponse(reply=await self._unary(Phase.TRY, request.call))

    async def Confirm(self, request: participant_pb2.ConfirmRequest, context: Any) -> participant_pb2.ConfirmResponse:
        """See the contract."""
        return participant_pb2.ConfirmResponse(reply=await self._unary(Phase.CONFIRM, request.call))

    async def Cancel(self, request: participant_pb2.CancelRequest, context: Any) -> participant_pb2.CancelResponse:
        """See the contract."""
        return participant_pb2.CancelResponse(reply=await self._unary(Phase.CANCEL, request.call))

    async def Exchange(
        self, request_iterator: AsyncIterator[participant_pb2.ExchangeRequest], context: Any
    ) -> AsyncIterator[participant_pb2.ExchangeResponse]:
        """See the contract."""
        outbox = TaskOutbox()
        self._outboxes.add(outbox)
        if self._ending:
            outbox.end()
        reader = asyncio.get_running_loop().create_task(self._read(request_iterator, outbox))
        try:
            while replies := await outbox.take():
                yield participant_pb2.ExchangeResponse(replies=replies)
        finally:
            outbox.abandon()
            self._outboxes.discard(outbox)
            reader.cancel()

    def end_streams(self) -> None:
        """Let every stream end once the replies to its calls are sent."""
        self._ending = True
        for outbox in self._outboxes:
            outbox.end()

    async def _read(self, requests: AsyncIterator[participant_pb2.ExchangeRequest], outbox: TaskOutbox) -> None:
        try:
            async for request in requests:
                outbox.expect(len(request.calls))
                for message in request.calls:
                    self._submit(message, None, outbox.put)
        except Exception:  # the stream broke
            outbox.abandon()
        finally:
            outbox.end()

    def _submit(
        self, message: participant_pb2.Call, phase: Phase | None, put: Callable[[participant_pb2.Reply], None]
    ) -> None:
        call_id = message.call_id

        def on_reply(reply: Reply) -> None:
            put(write_reply(call_id, reply, self._fence_id))

        call = read_call(message, self._participant, phase)
        if isinstance(call, Reply):
            on_reply(call)
        else:
            self._lanes.submit(call, on_reply)

    async def _unary(self, phase: Phase, message: participant_pb2.Call) -> participant_pb2.Reply:
        answered: asyncio.Future[participant_pb2.Reply] = asyncio.get_running_loop().create_future()

        def put(reply: participant_pb2.Reply) -> None:
            if not answered.done():  # the caller may have given up
                answered.set_result(reply)

        self._submit(message, phase, put)
        try:
            return await asyncio.wait_for(answered, _unary_wait(message))
        except TimeoutError:
            return write_reply(message.call_id, _STILL_RUNNING, self._fence_id)


_NO_WORKER: Final = Reply.unknown("the participant is overloaded: too many unary Trys are waiting")
_STILL_RUNNING: Final = Reply.unknown("the call is still running")


def _unary_wait(message: participant_pb2.Call) -> float:
    """Seconds that a unary call waits for its reply: a little less than the coordinator does."""
    if not message.HasField("timeout"):
        return TIMEOUT_DEFAULT_SECONDS
    seconds = min(message.timeout.seconds + message.timeout.nanos / 1e9, TIMEOUT_MAX_SECONDS)
    return max(0.0, seconds - min(REPLY_MARGIN_SECONDS, seconds / 10))
