"""The gRPC service of the participants of one server, for grpc and for grpc.aio.

Protobuf ends here: a message becomes an IncomingCall, goes into its participant's lanes, and its reply becomes a
message again. Nothing is decided but whether a message is a call to a participant of this server at all; the fence
decides the rest. A stream that breaks, or a caller that gives up, never stops a call that runs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import grpc

from participant_sdk.call import Reply
from participant_sdk.errors import ConfigurationError
from participant_sdk.exchange import TaskOutbox, ThreadOutbox
from participant_sdk.fence import Phase
from participant_sdk.lanes import TaskLanes, ThreadLanes
from participant_sdk.service_fence import TaskInspections, ThreadInspections
from participant_sdk.service_inspection import TaskInspection, ThreadInspection
from participant_sdk.service_messages import (
    NO_WORKER,
    STILL_RUNNING,
    read_call,
    settle_phase,
    unary_wait,
    write_reply,
)
from tricord.v1 import participant_pb2

Lanes = TypeVar("Lanes", ThreadLanes, TaskLanes)

_NO_FENCE: Final = ""


@dataclass(frozen=True, slots=True)
class Resident(Generic[Lanes]):
    """A participant that a server serves."""

    fence_id: str
    lanes: Lanes


class Residents(Generic[Lanes]):
    """The participants of one server by name: a server can have one ParticipantService only, so they share it."""

    def __init__(self) -> None:
        self._by_name: dict[str, Resident[Lanes]] = {}
        self._left: set[str] = set()

    def add(self, name: str, fence_id: str, lanes: Lanes) -> None:
        """Serve one more; raises ConfigurationError if one of its name is served."""
        if name in self._by_name:
            raise ConfigurationError(f"the gRPC server already has a participant {name!r}")
        self._by_name = {**self._by_name, name: Resident(fence_id, lanes)}  # whole, for who reads it meanwhile

    def leave(self, name: str) -> bool:
        """One takes no more calls; whether that is true of all now."""
        self._left.add(name)
        return self._left >= self._by_name.keys()

    def submit(
        self, message: participant_pb2.Call, phase: Phase | None, put: Callable[[participant_pb2.Reply], None]
    ) -> None:
        """Have the call in `message` run, or answer it at once; `put` is called once."""
        call_id = message.call_id
        residents = self._by_name
        fence_id = self.fence_id(message.participant)

        def on_reply(reply: Reply) -> None:
            put(write_reply(call_id, reply, fence_id))

        call = read_call(message, residents, phase)
        if isinstance(call, Reply):
            on_reply(call)
        else:
            residents[call.participant].lanes.submit(call, on_reply)

    def fence_id(self, name: str) -> str:
        """The fence of that participant; of the only one, if there is none of that name."""
        residents = self._by_name
        if name not in residents and len(residents) == 1:
            (only,) = residents.values()
            return only.fence_id
        return residents[name].fence_id if name in residents else _NO_FENCE


class ThreadService(ThreadInspections):
    """ParticipantService on a `grpc.server`.

    An Exchange stream holds a worker thread of the server for its life, a unary call until its reply. So there are
    at most `streams_max` streams, and unary Trys leave workers to Confirm and Cancel.
    """

    def __init__(self) -> None:
        super().__init__()
        self._residents: Residents[ThreadLanes] = Residents()
        self._streams_max = 0
        self._unary_trys_max: int | None = None
        self._unary_trys = 0
        self._lock = threading.Lock()
        self._outboxes: set[ThreadOutbox] = set()
        self._ending = False

    def add(
        self,
        name: str,
        fence_id: str,
        lanes: ThreadLanes,
        inspection: ThreadInspection,
        streams_max: int,
        unary_trys_max: int | None,
    ) -> None:
        """Serve one more participant. They share the streams: a coordinator opens one per address."""
        with self._lock:
            self._residents.add(name, fence_id, lanes)
            self.inspections[name] = inspection
            if streams_max > self._streams_max:
                self._streams_max, self._unary_trys_max = streams_max, unary_trys_max

    def Try(self, request: participant_pb2.TryRequest, context: Any) -> participant_pb2.TryResponse:
        """See the contract."""
        with self._lock:
            has_worker = self._unary_trys_max is None or self._unary_trys < self._unary_trys_max
            self._unary_trys += has_worker
        if not has_worker:
            reply = write_reply(request.call.call_id, NO_WORKER, self._residents.fence_id(request.call.participant))
            return participant_pb2.TryResponse(reply=reply)
        try:
            return participant_pb2.TryResponse(reply=self._unary(Phase.TRY, request.call, context))
        finally:
            with self._lock:
                self._unary_trys -= 1

    def Confirm(self, request: participant_pb2.ConfirmRequest, context: Any) -> participant_pb2.ConfirmResponse:
        """See the contract."""
        return participant_pb2.ConfirmResponse(reply=self._unary(Phase.CONFIRM, request.call, context))

    def Cancel(self, request: participant_pb2.CancelRequest, context: Any) -> participant_pb2.CancelResponse:
        """See the contract."""
        return participant_pb2.CancelResponse(reply=self._unary(Phase.CANCEL, request.call, context))

    def Settle(self, request: participant_pb2.SettleRequest, context: Any) -> participant_pb2.SettleResponse:
        """See the contract."""
        return participant_pb2.SettleResponse(reply=self._unary(settle_phase(request.call), request.call, context))

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

    def leave(self, name: str) -> None:
        """A participant takes no more calls. After the last one every stream ends when its replies are sent."""
        with self._lock:
            if not self._residents.leave(name):
                return
            self._ending = True
            outboxes = list(self._outboxes)
        for outbox in outboxes:
            outbox.end()

    def _read(self, requests: Iterator[participant_pb2.ExchangeRequest], outbox: ThreadOutbox) -> None:
        try:
            for request in requests:
                outbox.expect(len(request.calls))
                for message in request.calls:
                    self._residents.submit(message, None, outbox.put)
        except Exception:  # grpc raises when the stream breaks; its callback has abandoned the outbox
            outbox.abandon()
        finally:
            outbox.end()

    def _unary(self, phase: Phase, message: participant_pb2.Call, context: Any) -> participant_pb2.Reply:
        answered: Future[participant_pb2.Reply] = Future()
        still_running = write_reply(message.call_id, STILL_RUNNING, self._residents.fence_id(message.participant))

        def settle(reply: participant_pb2.Reply) -> None:
            with suppress(InvalidStateError):  # the call is over: its reply comes too late
                answered.set_result(reply)

        self._residents.submit(message, phase, settle)
        if not context.add_callback(lambda: settle(still_running)):  # whose caller is gone must not hold a worker
            return still_running
        try:
            return answered.result(unary_wait(message))
        except FutureTimeoutError:
            return still_running


class TaskService(TaskInspections):
    """ParticipantService on a `grpc.aio.server`."""

    def __init__(self) -> None:
        super().__init__()
        self._residents: Residents[TaskLanes] = Residents()
        self._outboxes: set[TaskOutbox] = set()
        self._ending = False

    def add(self, name: str, fence_id: str, lanes: TaskLanes, inspection: TaskInspection) -> None:
        """Serve one more participant."""
        self._residents.add(name, fence_id, lanes)
        self.inspections[name] = inspection

    async def Try(self, request: participant_pb2.TryRequest, context: Any) -> participant_pb2.TryResponse:
        """See the contract."""
        return participant_pb2.TryResponse(reply=await self._unary(Phase.TRY, request.call))

    async def Confirm(self, request: participant_pb2.ConfirmRequest, context: Any) -> participant_pb2.ConfirmResponse:
        """See the contract."""
        return participant_pb2.ConfirmResponse(reply=await self._unary(Phase.CONFIRM, request.call))

    async def Cancel(self, request: participant_pb2.CancelRequest, context: Any) -> participant_pb2.CancelResponse:
        """See the contract."""
        return participant_pb2.CancelResponse(reply=await self._unary(Phase.CANCEL, request.call))

    async def Settle(self, request: participant_pb2.SettleRequest, context: Any) -> participant_pb2.SettleResponse:
        """See the contract."""
        return participant_pb2.SettleResponse(reply=await self._unary(settle_phase(request.call), request.call))

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

    def leave(self, name: str) -> None:
        """A participant takes no more calls. After the last one every stream ends when its replies are sent."""
        if not self._residents.leave(name):
            return
        self._ending = True
        for outbox in self._outboxes:
            outbox.end()

    async def _read(self, requests: AsyncIterator[participant_pb2.ExchangeRequest], outbox: TaskOutbox) -> None:
        try:
            async for request in requests:
                outbox.expect(len(request.calls))
                for message in request.calls:
                    self._residents.submit(message, None, outbox.put)
        except Exception:  # the stream broke
            outbox.abandon()
        finally:
            outbox.end()

    async def _unary(self, phase: Phase, message: participant_pb2.Call) -> participant_pb2.Reply:
        answered: asyncio.Future[participant_pb2.Reply] = asyncio.get_running_loop().create_future()

        def put(reply: participant_pb2.Reply) -> None:
            if not answered.done():  # the caller may have given up
                answered.set_result(reply)

        self._residents.submit(message, phase, put)
        try:
            return await asyncio.wait_for(answered, unary_wait(message))
        except TimeoutError:
            return write_reply(message.call_id, STILL_RUNNING, self._residents.fence_id(message.participant))
