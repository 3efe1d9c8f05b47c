"""The calls to one address: one two-way ``Exchange`` stream, written in batches, and calls that go alone.

Calls leave in batches, gathered while the last batch was being written, phase 2 before Try. Each has a deadline of
its own; each ends in exactly one reply. A broken stream makes the calls that were on it UNKNOWN and nothing else.
Calls that were aboard a broken stream go out alone, as unary calls, so that one that kills its participant (or the
stream) takes no other with it again; after three such accidents it stays alone (protocol E1). A participant without
``Exchange`` gets unary calls only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import structlog

from tricord.v1 import participant_pb2 as pb
from tricord.v1 import participant_pb2_grpc as pb_grpc

from .delivery_breaker import OPEN_MS_MAX, SILENT_MAX, Breaker
from .delivery_deadlines import Deadlines
from .delivery_messages import call_bytes, reply_of, write_call
from .model import Call, Outcome, Phase, Reply, Spec
from .wire import MESSAGE_BYTES_MAX

_log = structlog.get_logger(__name__)

BATCH_CALLS_MAX = 256
BATCH_BYTES_MAX = 1024 * 1024
"""A batch is cut there; a single larger call travels alone."""
CALLS_MAX = 4_096
"""Calls that wait to be sent or answered, at one address."""
BYTES_MAX = 64 * 1024 * 1024
"""Of those, all together."""
SUSPECTS_MAX = 10_000
ACCIDENTS_MAX = 3
_UNARY_AGAIN_S = 60.0
"""How long a participant without ``Exchange`` is believed to have none."""
_ASK_S = 2.0
"""How long a participant may take to end a stream on which nothing was written."""
_PROBE_CONNECT_S = 1.5
"""How long a probe, or what an operator retries, waits for a connection: gRPC's own next attempt comes within 1.2 s."""

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # how long one attempt to connect may take, for all its name
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.enable_retries", 0),
)

OnReply = Callable[[Reply], None]
_TRY = Phase.TRY
"""Looked up in this module for each call: see ``machine``."""


class _Pending:
    """A call that waits for its reply."""

    __slots__ = ("aboard", "call", "call_id", "deadline_s", "fence_id", "on_reply", "sent", "size", "spec", "xid")

    def __init__(
        self, xid: str, spec: Spec, call: Call, call_id: int, deadline_s: float, on_reply: OnReply, fence_id: str
    ) -> None:
        self.xid = xid
        self.spec: Spec | None = spec
        """None when it has ended: it may stand in a queue that nobody empties."""
        self.call = call
        self.call_id = call_id
        self.size = call_bytes(spec, call.branch)
        self.deadline_s = deadline_s
        self.on_reply = on_reply
        self.fence_id = fence_id
        self.sent = False
        self.aboard = False  # of the stream; a call that goes alone never is

    @property
    def suspect_key(self) -> tuple[str, int, int]:
        """What names it among the suspects, also when it is sent again."""
        return self.xid, self.call.branch, int(self.call.phase)

    def write(self, message: pb.Call) -> None:
        """Fill an empty message with the call."""
        assert self.spec is not None
        write_call(message, self.xid, self.spec, self.call)
        message.call_id = self.call_id


def could_not_connect(error: grpc.aio.AioRpcError) -> bool:
    """Whether that is all there is to it: gRPC's own text names every address it has tried, twice."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and "failed to connect" in (error.details() or "")


class Link:
    """The calls to one address."""

    def __init__(self, address: str, pause_ms_max: int = OPEN_MS_MAX) -> None:
        self.address = address
        self._loop = asyncio.get_running_loop()
        self.breaker = Breaker(address, pause_ms_max, self._loop.time)
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub: pb_grpc.ParticipantServiceAsyncStub = pb_grpc.ParticipantServiceStub(self._channel)
        self._pending: dict[int, _Pending] = {}
        self._bytes = 0
        self._phase2: deque[_Pending] = deque()
        self._tries: deque[_Pending] = deque()
        self._deadlines = Deadlines(self._loop, self._time_out)
        self._suspects: OrderedDict[tuple[str, int, int], int] = OrderedDict()
        self._unary_until_s = 0.0
        self._next_id = 0
        self._stream: Any = None
        self._given_up = False
        self._write_failed = False
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._reconnected: asyncio.Task[None] | None = None
        self._stream_task = self._spawn(self._run())

    @property
    def in_flight(self) -> int:
        """Calls that wait to be sent or answered."""
        return len(self._pending)

    def takes(self) -> bool:
        """Whether a call may be sent now; else ``hindrance`` says why not."""
        return (
            (self.breaker.closed or self.breaker.admits_probe())
            and len(self._pending) < CALLS_MAX
            and self._bytes < BYTES_MAX
        )

    def hindrance(self) -> str:
        """Why it takes no call."""
        breaker = self.breaker
        if breaker.closed:
            return f"{len(self._pending)} calls with {self._bytes} bytes are on their way to {self.address}"
        return f"not sent to {self.address}, which failed again and again: {breaker.last_error}"

    def send(self, xid: str, spec: Spec, call: Call, on_reply: OnReply, fence_id: str = "") -> None:
        """Start one call; it ends in exactly one reply, which counts only if it comes from that fence database."""
        self._next_id = call_id = self._next_id + 1
        now_s = self._loop.time()
        pending = _Pending(xid, spec, call, call_id, now_s + call.timeout_ms / 1000, on_reply, fence_id)
        self._pending[call_id] = pending
        self._bytes += pending.size
        self._deadlines.add(call_id, pending.deadline_s)
        if not self.breaker.closed:
            self.breaker.begin_probe(call_id)
        alone = bool(self._suspects) and pending.suspect_key in self._suspects
        if alone or now_s < self._unary_until_s:
            self._spawn(self._send_alone(pending))
            return
        (self._tries if call.phase is _TRY else self._phase2).append(pending)
        self._wake.set()

    def retire(self) -> asyncio.Task[None]:
        """Close when the last call has ended. No call may be sent after this."""
        return self._spawn(self._close_when_idle())

    async def _close_when_idle(self) -> None:
        if self._pending:  # each ends at its deadline at the latest
            await asyncio.sleep(max(p.deadline_s for p in self._pending.values()) - self._loop.time() + 0.1)
        self._tasks.discard(asyncio.current_task())  # close() must not end itself
        await self.close()

    async def close(self) -> None:
        """End the stream; calls that are still out become UNKNOWN."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail(list(self._pending.values()), "the coordinator stops")
        self._deadlines.close()
        await self._channel.close()

    # --- the stream ----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Keep a stream while there is something to send."""
        while True:
            await self._wake.wait()
            if not self._phase2 and not self._tries:
                self._wake.clear()
                continue
            if not await self._connected():
                self._fail_queued(self._away())
                continue
            self._given_up = False
            self._write_failed = False
            self._stream = stream = self._stub.Exchange()
            reader = self._spawn(self._read(stream))
            try:
                await self._write(stream, reader)
            except grpc.aio.AioRpcError:
                self._write_failed = True  # known before the reader runs again; it learns why
            except (asyncio.InvalidStateError, grpc.aio.UsageError):
                pass  # the reader learns why
            except asyncio.CancelledError:
                if self._stream_task.cancelling():
                    raise
                # Only the stream was given up, in the middle of a write.
            finally:
                stream.cancel()
            await asyncio.wait([reader])

    async def _connected(self) -> bool:
        """Whether the address can be reached; waits only while it is being tried."""
        # Of a probe, and of what an operator retries, one more attempt is wanted, not the last one's outcome.
        give_up_s = self._loop.time() + (_PROBE_CONNECT_S if self.breaker.probe else 0.0)
        state = self._channel.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.READY:
            timeout_s = None
            if state is grpc.ChannelConnectivity.SHUTDOWN:
                return False
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                timeout_s = max(give_up_s, self.breaker.trusted_s + _PROBE_CONNECT_S) - self._loop.time()
                if timeout_s <= 0:
                    return False
            if self._reconnected is None or self._reconnected.done():  # kept: gRPC could not be told to forget it
                self._reconnected = self._spawn(self._channel.wait_for_state_change(state))
            await asyncio.wait([self._reconnected], timeout=timeout_s)
            state = self._channel.get_state(try_to_connect=True)
        return True

    async def _write(self, stream: Any, reader: asyncio.Task[None]) -> None:
        """Write batches until the stream breaks."""
        while not reader.done():
            batch = self._take_batch()
            if batch.calls:
                await stream.write(batch)
                continue
            self._wake.clear()
            await self._wake.wait()

    def _take_batch(self) -> pb.ExchangeRequest:
        """The next calls, phase 2 first; those whose time is up are not sent any more."""
        batch = pb.ExchangeRequest()
        calls = batch.calls
        count = size = 0
        for queue in (self._phase2, self._tries):
            while queue and count < BATCH_CALLS_MAX:
                pending = queue[0]
                if pending.call_id not in self._pending:
                    queue.popleft()  # withdrawn
                    continue
                size += pending.size
                if count and size > BATCH_BYTES_MAX:
                    return batch
                queue.popleft()
                pending.sent = pending.aboard = True
                pending.write(calls.add())
                count += 1
        return batch

    async def _read(self, stream: Any) -> None:
        """Take replies until the stream ends, then settle what was on it."""
        why = "the participant ended the stream"
        code = None
        answered = False
        try:
            while True:
                response = await stream.read()
                if response is grpc.aio.EOF:
                    break
                answered = True
                for reply in response.replies:
                    self._answer(reply)
            code = await stream.code()
        except grpc.aio.AioRpcError as error:
            code = error.code()
            why = self._away() if could_not_connect(error) else f"the stream broke: {code.name}: {error.details()}"
            if code is grpc.StatusCode.INTERNAL and self._write_failed and not answered:
                code = await self._ask()
        except asyncio.CancelledError:
            if not self._stream_task.cancelling():
                why = "the stream was cancelled"
        finally:
            if self._given_up:
                why = f"the stream was given up: {SILENT_MAX} calls in a row were not answered"
            self._broken(code, why)
            self._wake.set()

    async def _ask(self) -> grpc.StatusCode:
        """How a stream ends on which nothing is written.

        A write that meets the end of its stream fails, and gRPC then puts INTERNAL in the place of the code that the
        participant gave: of one without ``Exchange``, UNIMPLEMENTED.
        """
        stream: Any = self._stub.Exchange(timeout=_ASK_S)
        try:
            with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.InternalError):  # it has ended already
                await stream.wait_for_connection()
                await stream.done_writing()
            return await stream.code()  # type: ignore[no-any-return]
        finally:
            stream.cancel()

    def _broken(self, code: grpc.StatusCode | None, why: str) -> None:
        aboard = [pending for pending in self._pending.values() if pending.aboard]
        if code is grpc.StatusCode.UNIMPLEMENTED:
            _log.info("delivery.unary_only", address=self.address)
            self._unary_until_s = self._loop.time() + _UNARY_AGAIN_S
            waiting = [*aboard, *self._phase2, *self._tries]
            self._phase2.clear()
            self._tries.clear()
            for pending in waiting:
                self._spawn(self._send_alone(pending))
            return
        if not aboard:
            return
        _log.warning("delivery.stream_broken", address=self.address, calls=len(aboard), why=why)
        for pending in aboard:
            self._suspects[pending.suspect_key] = self._suspects.pop(pending.suspect_key, 0) + 1
        while len(self._suspects) > SUSPECTS_MAX:
            self._suspects.popitem(last=False)
        self.breaker.failed(why)
        self._fail(aboard, why)

    # --- one call alone ------------------------------------------------------------------------------------

    async def _send_alone(self, pending: _Pending) -> None:
        left_s = pending.deadline_s - self._loop.time()
        if left_s <= 0 or pending.call_id not in self._pending:
            return  # its deadline answers
        pending.sent = True
        pending.aboard = False
        message = pb.Call()
        pending.write(message)
        phase, suspect_key = pending.call.phase, pending.suspect_key
        try:
            if phase is Phase.TRY:
                reply = (await self._stub.Try(pb.TryRequest(call=message), timeout=left_s)).reply
            elif phase is Phase.CONFIRM:
                reply = (await self._stub.Confirm(pb.ConfirmRequest(call=message), timeout=left_s)).reply
            elif phase is Phase.CANCEL:
                reply = (await self._stub.Cancel(pb.CancelRequest(call=message), timeout=left_s)).reply
            else:
                reply = (await self._stub.Settle(pb.SettleRequest(call=message), timeout=left_s)).reply
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                why = self._away() if could_not_connect(error) else f"{error.code().name}: {error.details()}"
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    self.breaker.failed(why)
                self._fail([pending], why)
            return
        if self._suspects.get(suspect_key, 0) < ACCIDENTS_MAX:
            self._suspects.pop(suspect_key, None)
        reply.call_id = message.call_id
        self._answer(reply)

    # --- replies -------------------------------------------------------------------------------------------

    def _answer(self, reply: pb.Reply) -> None:
        call_id = reply.call_id
        pending = self._pending.pop(call_id, None)
        if not self.breaker.spotless:
            self.breaker.answered()
        if pending is not None:  # else too late: its time-out has answered
            self._bytes -= pending.size
            self._deadlines.remove(call_id)
            call = pending.call
            pending.on_reply(reply_of(call.branch, call.phase, reply, pending.fence_id))

    def _time_out(self, call_id: int) -> None:
        pending = self._pending.get(call_id)
        if pending is None:
            return
        if pending.sent:
            why = f"no answer from {self.address} within {pending.call.timeout_ms} ms"
        else:
            why = f"could not be sent to {self.address} within {pending.call.timeout_ms} ms"
        opened = self.breaker.timed_out(pending.call.timeout_ms, why)
        is_probe = self.breaker.probe == call_id
        self._fail([pending], why)
        if (opened or is_probe) and self._stream is not None:
            # It answers pings, or its proxy does, and no calls. Only a new stream can get past that.
            self._given_up = True
            self._stream.cancel()

    def _away(self) -> str:
        return f"participant at {self.address} cannot be reached"

    def _fail_queued(self, why: str) -> None:
        queued = [*self._phase2, *self._tries]
        self._phase2.clear()
        self._tries.clear()
        self.breaker.failed(why)
        self._fail(queued, why)

    def _fail(self, pendings: list[_Pending], why: str) -> None:
        for pending in pendings:
            call_id = pending.call_id
            if self._pending.pop(call_id, None) is not None:
                self._bytes -= pending.size
                pending.spec = None
                self._deadlines.remove(call_id)
                if call_id == self.breaker.probe:
                    self.breaker.probe_failed()
                pending.on_reply(Reply(pending.call.branch, pending.call.phase, Outcome.UNKNOWN, error=why))

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
