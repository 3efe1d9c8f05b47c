"""A participant by the published contract alone, without the SDK: a small gRPC server that a test scripts.

It notes all calls in the order in which they arrive, and answers each as ``answer`` says; ``None`` means never.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple, Self

import grpc

from tests.coordinators import CALL_S
from tests.postgres import free_port
from tricord.v1 import participant_pb2 as pb
from tricord.v1 import participant_pb2_grpc, types_pb2

Answer = Callable[[pb.Call], pb.Reply | None]
Told = Callable[[pb.GetBranchRequest], pb.FenceBranch | None]
Context = grpc.ServicerContext


class Seen(NamedTuple):
    """One call as it arrived."""

    call: pb.Call
    batch: int
    """The number of its batch, from 1; 0 for a unary call."""

    @property
    def phase(self) -> str:
        return pb.Phase.Name(self.call.phase).removeprefix("PHASE_")


def done(call: pb.Call) -> pb.Reply:
    """It has happened."""
    return pb.Reply(outcome=pb.OUTCOME_DONE)


class Gate:
    """An answer: `done`, but to the calls of one phase, or those with this payload alone, only when it is opened."""

    def __init__(self, phase: int, data: bytes | None = None) -> None:
        self.open = threading.Event()
        self.reached = threading.Semaphore(0)
        """Released by each call that comes to it."""
        self._phase, self._data = phase, data

    def __call__(self, call: pb.Call) -> pb.Reply:
        if call.phase == self._phase and self._data in (None, call.payload.data):
            self.reached.release()
            assert self.open.wait(CALL_S)
        return done(call)


def fence_branch(status: Any, **more: Any) -> pb.FenceBranch:
    """A fence row of the scenes' usual action, as it was changed just now."""
    row = pb.FenceBranch(**{"action": "debit", "status": status, "finished": True, **more})
    row.update_time.GetCurrentTime()
    return row


_LEFT: dict[int, Any] = {
    pb.PHASE_TRY: pb.FENCE_STATUS_TRIED,
    pb.PHASE_CONFIRM: pb.FENCE_STATUS_COMMITTED,
    pb.PHASE_CANCEL: pb.FENCE_STATUS_ROLLBACKED,
    pb.PHASE_SETTLE_CONFIRMED: pb.FENCE_STATUS_COMMITTED,
    pb.PHASE_SETTLE_CANCELLED: pb.FENCE_STATUS_ROLLBACKED,
}


def refuse(call: pb.Call) -> pb.Reply:
    """Try is refused, everything else is done."""
    if call.phase != pb.PHASE_TRY:
        return done(call)
    refusal = types_pb2.Refusal(reason="insufficient_funds", message="only 3 left")
    return pb.Reply(outcome=pb.OUTCOME_REFUSED, refusal=refusal)


class ParticipantServer(participant_pb2_grpc.ParticipantServiceServicer):
    """One participant process's worth of server, inside the test's process."""

    def __init__(self, answer: Answer = done, *, port: int | None = None, exchange: bool = True) -> None:
        self.answer = answer
        self.fence_id = "fence-1"
        self.told: Told | None = self.as_answered
        """What GetBranch tells of a branch; None: it is not offered."""
        self._statuses: dict[tuple[str, int], tuple[Any, str]] = {}
        self.port = port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.may_read = threading.Event()
        """While it is not set, no further batch is taken off the stream."""
        self.may_read.set()
        self.streams = 0
        self._exchange = exchange
        self._seen: list[Seen] = []
        self._batches = 0
        self._changed = threading.Condition()
        self._break: list[queue.SimpleQueue[Any]] = []
        self._pool: ThreadPoolExecutor | None = None
        self._server: grpc.Server | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Serve; again after ``stop``, on the same port."""
        self._pool = ThreadPoolExecutor(64)
        options = [("grpc.so_reuseport", 0)]
        self._server = grpc.server(ThreadPoolExecutor(32), options=options)
        participant_pb2_grpc.add_ParticipantServiceServicer_to_server(self, self._server)
        assert self._server.add_insecure_port(self.address) == self.port
        self._server.start()

    def stop(self) -> None:
        """As a process that is gone: connections are cut."""
        self.may_read.set()
        self.break_streams()
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def break_streams(self) -> None:
        """End every stream with an error."""
        for replies in list(self._break):
            replies.put(None)

    def seen(self, phase: str = "") -> list[Seen]:
        """The calls so far, of one phase or of all."""
        with self._changed:
            return [seen for seen in self._seen if not phase or seen.phase == phase]

    def batches(self) -> list[list[Seen]]:
        """The calls that came in batches, by batch."""
        seen = self.seen()
        return [[one for one in seen if one.batch == n] for n in range(1, self._batches + 1)]

    def wait_for(self, count: int, phase: str = "") -> list[Seen]:
        """The calls, as soon as there are so many."""

        def enough() -> bool:
            return sum(not phase or seen.phase == phase for seen in self._seen) >= count

        with self._changed:
            if not self._changed.wait_for(enough, CALL_S):
                raise AssertionError(f"no {count} calls {phase} but {[s.phase for s in self._seen]}")
        return self.seen(phase)

    # --- the contract --------------------------------------------------------------------------------------

    def Try(self, request: pb.TryRequest, context: Context) -> pb.TryResponse:
        return pb.TryResponse(reply=self._alone(request.call, context))

    def Confirm(self, request: pb.ConfirmRequest, context: Context) -> pb.ConfirmResponse:
        return pb.ConfirmResponse(reply=self._alone(request.call, context))

    def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        return pb.CancelResponse(reply=self._alone(request.call, context))

    def Settle(self, request: pb.SettleRequest, context: Context) -> pb.SettleResponse:
        return pb.SettleResponse(reply=self._alone(request.call, context))

    def Exchange(self, request_iterator: Iterator[pb.ExchangeRequest], context: Context) -> Iterator[Any]:
        if not self._exchange:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "no Exchange here")
        replies: queue.SimpleQueue[pb.Reply | None] = queue.SimpleQueue()
        self._break.append(replies)
        context.add_callback(lambda: replies.put(None))
        self.streams += 1
        reader = threading.Thread(target=self._read, args=(request_iterator, replies))
        reader.start()
        while (reply := replies.get()) is not None:
            yield pb.ExchangeResponse(replies=[reply])
        self._break.remove(replies)
        context.abort(grpc.StatusCode.INTERNAL, "broken by the test")

    def GetFence(self, request: pb.GetFenceRequest, context: Context) -> pb.GetFenceResponse:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "no GetFence here")
        raise AssertionError("unreachable")

    def ListBranches(self, request: pb.ListBranchesRequest, context: Context) -> pb.ListBranchesResponse:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "no ListBranches here")
        raise AssertionError("unreachable")

    def GetBranch(self, request: pb.GetBranchRequest, context: Context) -> pb.GetBranchResponse:
        if self.told is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "no GetBranch here")
            raise AssertionError("unreachable")
        response = pb.GetBranchResponse(branch=self.told(request), fence_id=self.fence_id)
        response.now.GetCurrentTime()
        return response

    def as_answered(self, request: pb.GetBranchRequest) -> pb.FenceBranch | None:
        """As its answers so far would have left a fence."""
        found = self._statuses.get((request.xid, request.branch_id))
        return None if found is None else fence_branch(found[0], action=found[1])

    def CompareHolds(self, request: pb.CompareHoldsRequest, context: Context) -> pb.CompareHoldsResponse:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "no CompareHolds here")
        raise AssertionError("unreachable")

    # --- how -----------------------------------------------------------------------------------------------

    def _read(self, requests: Iterator[pb.ExchangeRequest], replies: "queue.SimpleQueue[pb.Reply | None]") -> None:
        try:
            while self.may_read.wait():
                request = next(requests)
                with self._changed:
                    self._batches += 1
                    self._seen += [Seen(call, self._batches) for call in request.calls]
                    self._changed.notify_all()
                for call in request.calls:
                    assert self._pool is not None
                    self._pool.submit(self._answer_later, call, replies)
        except (StopIteration, grpc.RpcError, RuntimeError, AssertionError):
            pass  # the stream or the server has ended
        except Exception:  # the request iterator raises a bare Exception when its call is cancelled
            pass

    def _answer_later(self, call: pb.Call, replies: "queue.SimpleQueue[pb.Reply | None]") -> None:
        reply = self._reply(call)
        if reply is not None:
            if not reply.call_id:
                reply.call_id = call.call_id
            replies.put(reply)

    def _alone(self, call: pb.Call, context: Context) -> pb.Reply:
        with self._changed:
            self._seen.append(Seen(call, 0))
            self._changed.notify_all()
        reply: pb.Reply | None = self._reply(call)
        if reply is None:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not answered")
        return reply

    def _reply(self, call: pb.Call) -> Any:
        reply = self.answer(call)
        if reply is not None and not reply.fence_id:
            reply.fence_id = self.fence_id
        if reply is not None and reply.outcome == pb.OUTCOME_DONE:
            self._statuses[call.xid, call.branch_id] = _LEFT[call.phase], call.action
        return reply
