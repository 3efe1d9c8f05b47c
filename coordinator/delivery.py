"""Calls to participants.

There is one ``Link`` per address: one two-way ``Exchange`` stream on which calls leave in batches, gathered while the
last batch was being written, phase 2 before Try. Each call has a deadline of its own; each ends in exactly one reply.
A broken stream makes the calls that were on it UNKNOWN and nothing else. Calls that were aboard a broken stream go
out alone, as unary calls, so that one that kills its participant (or the stream) takes no other with it again; after
three such accidents it stays alone (protocol E1). A participant without ``Exchange`` gets unary calls only.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import structlog
from google.protobuf.duration_pb2 import Duration

from tricord.v1 import participant_pb2 as pb
from tricord.v1 import participant_pb2_grpc as pb_grpc
from tricord.v1 import types_pb2

from .model import Call, Outcome, Payload, Phase, Refusal, Reply, Spec
from .orders import BRANCHES_MAX
from .participants import Participants
from .wire import CONTENT_TYPE_CHARS_MAX, FENCE_ID_CHARS_MAX, MESSAGE_BYTES_MAX, RESULT_BYTES_MAX

_log = structlog.get_logger(__name__)

BATCH_CALLS_MAX = 256
BATCH_BYTES_MAX = 1024 * 1024
"""A batch is cut there; a single larger call travels alone."""
SILENT_MAX = 32
"""Calls in a row that time out on a stream before it is given up."""
SUSPECTS_MAX = 10_000
ACCIDENTS_MAX = 3
_UNARY_AGAIN_S = 60.0
"""How long a participant without ``Exchange`` is believed to have none."""
_ASK_S = 2.0
"""How long a participant may take to end a stream on which nothing was written."""

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


class _Pending:
    """A call that waits for its reply."""

    __slots__ = (
        "aboard",
        "branch",
        "deadline_s",
        "message",
        "on_reply",
        "phase",
        "sent",
        "suspect_key",
        "timeout_ms",
    )

    def __init__(self, message: pb.Call, call: Call, deadline_s: float, on_reply: OnReply) -> None:
        self.message = message
        self.branch = call.branch
        self.phase = call.phase
        self.timeout_ms = call.timeout_ms
        self.deadline_s = deadline_s
        self.on_reply = on_reply
        self.sent = False
        self.aboard = False  # of the stream; a call that goes alone never is
        self.suspect_key = (message.xid, message.branch_id, int(call.phase))


class Delivery:
    """Sends calls to participants by name."""

    def __init__(self, participants: Participants) -> None:
        self._participants = participants
        self._links: dict[str, Link] = {}
        self._retired: set[Link] = set()

    def send(self, xid: str, spec: Spec, call: Call, on_reply: OnReply) -> None:
        """Start one call. ``on_reply`` is called exactly once, never before this returns."""
        branch = spec.branches[call.branch]
        row = self._participants.find(branch.participant)
        if row is None:
            # Perhaps only not heard of yet here, after a take-over: nothing to alarm a person with at once.
            error = f"participant {branch.participant} is not registered"
            reply = Reply(call.branch, call.phase, Outcome.UNKNOWN, error=error)
            asyncio.get_running_loop().call_soon(on_reply, reply)
            return
        link = self._links.get(row.address)
        if link is None:
            link = self._links[row.address] = Link(row.address)
            self._retire_others()
        expected = row.fence_id(branch.action)
        link.send(_message(xid, spec, call), call, lambda reply: on_reply(_from_registered(reply, expected)))

    def _retire_others(self) -> None:
        """Let go of addresses that no participant has any more, once their last calls are answered."""
        addresses = self._participants.addresses()
        for address in [address for address in self._links if address not in addresses]:
            link = self._links.pop(address)
            self._retired.add(link)
            link.retire().add_done_callback(functools.partial(self._forget, link))

    def _forget(self, link: Link, _task: asyncio.Task[None]) -> None:
        self._retired.discard(link)

    async def close(self) -> None:
        """End all streams; calls that are still out become UNKNOWN."""
        await asyncio.gather(*(link.close() for link in [*self._links.values(), *self._retired]))


class Link:
    """The calls to one address."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._loop = asyncio.get_running_loop()
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub: pb_grpc.ParticipantServiceAsyncStub = pb_grpc.ParticipantServiceStub(self._channel)
        self._pending: dict[int, _Pending] = {}
        self._phase2: deque[_Pending] = deque()
        self._tries: deque[_Pending] = deque()
        self._deadlines = _Deadlines(self._loop, self._time_out)
        self._suspects: OrderedDict[tuple[str, int, int], int] = OrderedDict()
        self._unary_until_s = 0.0
        self._next_id = 0
        self._stream: Any = None
        self._given_up = False
        self._write_failed = False
        self._silent = 0  # calls of the stream that timed out since the last reply
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stream_task = self._spawn(self._run())

    def send(self, message: pb.Call, call: Call, on_reply: OnReply) -> None:
        """Start one call; it ends in exactly one reply."""
        self._next_id += 1
        message.call_id = self._next_id
        pending = _Pending(message, call, self._loop.time() + call.timeout_ms / 1000, on_reply)
        self._pending[message.call_id] = pending
        self._deadlines.add(message.call_id, pending)
        alone = bool(self._suspects) and pending.suspect_key in self._suspects
        if alone or self._loop.time() < self._unary_until_s:
            self._spawn(self._send_alone(pending))
            return
        (self._tries if call.phase is Phase.TRY else self._phase2).append(pending)
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
                self._fail_queued(f"participant at {self.address} cannot be reached")
                continue
            self._silent = 0
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
        state = self._channel.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.READY:
            if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                return False
            await self._channel.wait_for_state_change(state)
            state = self._channel.get_state(try_to_connect=True)
        return True

    async def _write(self, stream: Any, reader: asyncio.Task[None]) -> None:
        """Write batches until the stream breaks."""
        while not reader.done():
            batch = self._take_batch()
            if batch:
                await stream.write(pb.ExchangeRequest(calls=batch))
                continue
            self._wake.clear()
            await self._wake.wait()

    def _take_batch(self) -> list[pb.Call]:
        """The next calls, phase 2 first; those whose time is up are not sent any more."""
        batch: list[pb.Call] = []
        size = 0
        for queue in (self._phase2, self._tries):
            while queue and len(batch) < BATCH_CALLS_MAX:
                pending = queue[0]
                if pending.message.call_id not in self._pending:
                    queue.popleft()  # withdrawn
                    continue
                size += len(pending.message.payload.data) + 200
                if pending.message.metadata:
                    size += _metadata_bytes(pending.message)
                if batch and size > BATCH_BYTES_MAX:
                    return batch
                queue.popleft()
                pending.sent = pending.aboard = True
                batch.append(pending.message)
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
            why = f"the stream broke: {code.name}: {error.details()}"
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
        self._fail(aboard, why)

    # --- one call alone ------------------------------------------------------------------------------------

    async def _send_alone(self, pending: _Pending) -> None:
        left_s = pending.deadline_s - self._loop.time()
        if left_s <= 0 or pending.message.call_id not in self._pending:
            return  # its deadline answers
        pending.sent = True
        pending.aboard = False
        message = pending.message
        try:
            if pending.phase is Phase.TRY:
                reply = (await self._stub.Try(pb.TryRequest(call=message), timeout=left_s)).reply
            elif pending.phase is Phase.CONFIRM:
                reply = (await self._stub.Confirm(pb.ConfirmRequest(call=message), timeout=left_s)).reply
            else:
                reply = (await self._stub.Cancel(pb.CancelRequest(call=message), timeout=left_s)).reply
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                self._fail([pending], f"{error.code().name}: {error.details()}")
            return
        if self._suspects.get(pending.suspect_key, 0) < ACCIDENTS_MAX:
            self._suspects.pop(pending.suspect_key, None)
        reply.call_id = message.call_id
        self._answer(reply)

    # --- replies -------------------------------------------------------------------------------------------

    def _answer(self, reply: pb.Reply) -> None:
        pending = self._pending.pop(reply.call_id, None)
        self._silent = 0
        if pending is not None:  # else too late: its time-out has answered
            self._deadlines.remove(reply.call_id)
            pending.on_reply(_reply(pending, reply))

    def _time_out(self, call_id: int) -> None:
        pending = self._pending.get(call_id)
        if pending is None:
            return
        if pending.sent:
            why = f"no answer from {self.address} within {pending.timeout_ms} ms"
        else:
            why = f"could not be sent to {self.address} within {pending.timeout_ms} ms"
        self._fail([pending], why)
        if pending.aboard or not pending.sent:
            self._silent += 1
            if self._silent == SILENT_MAX and self._stream is not None:
                # It answers pings, or its proxy does, and no calls. Only a new stream can get past that.
                self._given_up = True
                self._stream.cancel()

    def _fail_queued(self, why: str) -> None:
        queued = [*self._phase2, *self._tries]
        self._phase2.clear()
        self._tries.clear()
        self._fail(queued, why)

    def _fail(self, pendings: list[_Pending], why: str) -> None:
        for pending in pendings:
            if self._pending.pop(pending.message.call_id, None) is not None:
                self._deadlines.remove(pending.message.call_id)
                pending.on_reply(Reply(pending.branch, pending.phase, Outcome.UNKNOWN, error=why))

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _Deadlines:
    """One timer for all calls of a link.

    Nearly all calls have the same time-out, so their deadlines come in the order in which they were added: a dict
    keeps them. The few with less (a transaction's deadline is near) are kept in a heap.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, time_out: Callable[[int], None]) -> None:
        self._loop = loop
        self._time_out = time_out
        self._even: dict[int, float] = {}
        self._last_s = 0.0
        self._odd: list[tuple[float, int]] = []
        self._odd_live: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, call_id: int, pending: _Pending) -> None:
        """Watch one more call."""
        deadline_s = pending.deadline_s
        if deadline_s >= self._last_s:
            self._last_s = deadline_s
            self._even[call_id] = deadline_s
        else:
            heapq.heappush(self._odd, (deadline_s, call_id))
            self._odd_live.add(call_id)
        if self._timer is None or deadline_s < self._timer.when():
            self._arm(deadline_s)

    def remove(self, call_id: int) -> None:
        """Watch a call no longer."""
        if self._even.pop(call_id, None) is None:
            self._odd_live.discard(call_id)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, when_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        now_s = self._loop.time() + 0.001  # some event loops' clocks step by milliseconds
        late = []
        for call_id, deadline_s in self._even.items():
            if deadline_s > now_s:
                break
            late.append(call_id)
        while self._odd and (self._odd[0][0] <= now_s or self._odd[0][1] not in self._odd_live):
            _, call_id = heapq.heappop(self._odd)
            if call_id in self._odd_live:
                late.append(call_id)
        for call_id in late:
            self._time_out(call_id)
        times = [self._odd[0][0]] if self._odd else []
        if self._even:
            times.append(next(iter(self._even.values())))
        if times:
            self._arm(min(times))


# --- between the wire and the model -----------------------------------------------------------------------

_OUTCOMES = {
    pb.OUTCOME_DONE: Outcome.DONE,
    pb.OUTCOME_REFUSED: Outcome.REFUSED,
    pb.OUTCOME_VIOLATION: Outcome.VIOLATION,
}


def _message(xid: str, spec: Spec, call: Call) -> pb.Call:
    branch = spec.branches[call.branch]
    message = pb.Call(
        phase=call.phase,  # type: ignore[arg-type]  # the same numbers; a test compares them
        xid=xid,
        branch_id=call.branch + 1,
        participant=branch.participant,
        action=branch.action,
        payload=types_pb2.Payload(data=branch.payload.data, content_type=branch.payload.content_type),
        attempt=call.attempt,
        timeout=Duration(seconds=call.timeout_ms // 1000, nanos=call.timeout_ms % 1000 * 1_000_000),
    )
    if spec.metadata:
        message.metadata.update(spec.metadata)
    return message


def _metadata_bytes(message: pb.Call) -> int:
    return sum(len(key) + len(value.encode()) + 8 for key, value in message.metadata.items())


def _reply(pending: _Pending, reply: pb.Reply) -> Reply:
    outcome = _OUTCOMES.get(reply.outcome, Outcome.UNKNOWN)
    excess = _excess(reply)
    if excess and outcome is not Outcome.UNKNOWN:
        # Nothing that is asked again would be answered otherwise: of a Try it is a refusal.
        fence_id = reply.fence_id[:FENCE_ID_CHARS_MAX]
        return Reply(pending.branch, pending.phase, Outcome.VIOLATION, fence_id, error=excess)
    result = None
    refusal = None
    if outcome is Outcome.DONE and reply.HasField("result"):
        result = Payload(reply.result.data, reply.result.content_type)
    elif outcome is Outcome.REFUSED:
        refusal = Refusal(reply.refusal.reason or "refused", reply.refusal.message)
    error = reply.error
    if not error and outcome in (Outcome.UNKNOWN, Outcome.VIOLATION):
        error = f"the participant answered {outcome.name} and gave no reason"
    seen = tuple(reply.tried_branch_ids)
    return Reply(
        pending.branch, pending.phase, outcome, reply.fence_id, result, refusal, error, reply.attention, seen=seen
    )


def _excess(reply: pb.Reply) -> str:
    """What in a reply is beyond its limit; empty if nothing is."""
    size = len(reply.result.data)
    if size > RESULT_BYTES_MAX:
        return f"Try returned a result of {size} bytes; the limit is {RESULT_BYTES_MAX}"
    if len(reply.result.content_type) > CONTENT_TYPE_CHARS_MAX:
        return f"the result's content_type is longer than {CONTENT_TYPE_CHARS_MAX} characters"
    if len(reply.tried_branch_ids) > BRANCHES_MAX:
        return f"tried_branch_ids has {len(reply.tried_branch_ids)} branches; the limit is {BRANCHES_MAX}"
    if len(reply.fence_id) > FENCE_ID_CHARS_MAX:
        return f"fence_id is longer than {FENCE_ID_CHARS_MAX} characters"
    return ""


def _from_registered(reply: Reply, fence_id: str) -> Reply:
    """An answer out of another database than the registered one says nothing about this branch (protocol C3)."""
    if not fence_id or reply.fence_id == fence_id or reply.outcome in (Outcome.UNKNOWN, Outcome.VIOLATION):
        return reply
    error = f"answered by fence database {reply.fence_id or '(none named)'}, registered is {fence_id}"
    return reply._replace(outcome=Outcome.VIOLATION, error=error, result=None, refusal=None)
