"""``ExecuteStream``: many transactions on one stream, each answered as it finishes.

What a call asks for is checked and begun as ``Execute`` has it. While it runs it costs no task: the engine tells of
each change, one timer serves all deadlines of a stream, and the answers that gather while one message is being written
leave in the next. A stream holds a bounded number of calls; beyond it nothing is read, until gRPC's flow control holds
the caller up. A stream that ends cancels nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Final, Protocol

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from tricord.v1 import coordinator_pb2 as pb

from .delivery_deadlines import Deadlines
from .engine import Engine, Until
from .errors import InvalidRequest, TooLate, Unavailable, Violation
from .journal import Started
from .model import Transaction
from .rpc import status_of
from .server_open import answer_s, until_of
from .wire import Starting, error_status, write_transaction

RESULTS_MAX: Final = 256
RESULTS_BYTES_MAX: Final = 1024 * 1024
"""A message is cut there; a single larger result travels alone."""
BYTES_MAX: Final = 64 * 1024 * 1024
"""Of the requests of a stream that are not answered yet: beyond it nothing is read."""
TURN_CALLS: Final = 64
"""So many calls are taken in at a time, before others have their turn."""
BUSY_CALLS, BUSY_LINGER_S = 128, 0.002
"""With so many calls on a stream, answers are gathered for so long. They come in bursts, from each flush and batch; so
few transactions take so long that this adds a few per cent to it, and saves most of the messages."""


class Host(Protocol):
    """What the streams of a coordinator have in common."""

    engine: Engine
    calls_max: int
    """Calls of one stream that are not answered yet."""

    def read(self, request: pb.ExecuteRequest, /) -> Starting:
        """Check a request. Raises InvalidRequest."""

    def start(self, starting: Starting, /) -> asyncio.Future[Started]:
        """Begin a transaction. Raises what hinders it, the future too."""


class Call:
    """A call that waits for its answer."""

    __slots__ = ("call_id", "done", "size", "stream", "tx", "until")

    def __init__(self, stream: CallStream, call_id: int, until: Until, size: int) -> None:
        self.stream = stream
        self.call_id = call_id
        self.until = until
        self.size = size
        self.tx: Transaction | None = None
        """The transaction as it was last seen, when it is begun."""
        self.done = False

    def begun(self, started: asyncio.Future[Started]) -> None:
        """It is stored, or is not to be; whatever has become of the stream."""
        if started.cancelled():
            return  # the coordinator has ended
        error = started.exception()
        if isinstance(error, Exception):
            self.fail(error)
            return
        engine = self.stream.engine
        tx = engine.newest(started.result().tx)
        if not self.moved(tx):
            engine.tell(tx, self.moved)

    def moved(self, tx: Transaction) -> bool:
        """As an engine's waiter: answered once it has come far enough."""
        if not self.done:
            self.tx = tx
            if self.until(tx):
                self.stream.answer(self, tx)
        return self.done

    def fail(self, error: Exception) -> None:
        """As far as it is not answered yet."""
        if not self.done:
            self.stream.withdraw(self)
            self.stream.answer(self, status_of(error, "CoordinatorService.ExecuteStream"))


class CallStream:
    """One stream, while it lasts."""

    def __init__(self, host: Host) -> None:
        self.calls: dict[int, Call] = {}
        """Not answered yet."""
        self._host = host
        self.engine = host.engine
        self._ready: deque[tuple[Call, Transaction | status_pb2.Status]] = deque()
        """Answered, and not sent yet."""
        self._bytes = 0
        self._loop = asyncio.get_running_loop()
        self._deadlines = Deadlines(self._loop, self._time_out)
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._reading = True
        self._ending: Exception | None = None

    # --- what comes in -------------------------------------------------------------------------------------

    async def read(self, requests: AsyncIterator[pb.ExecuteStreamRequest]) -> None:
        """Take calls in, as far as there is room, until the caller has ended its side."""
        try:
            async for request in requests:
                for n, call in enumerate(request.calls):
                    if n % TURN_CALLS == TURN_CALLS - 1:
                        await asyncio.sleep(0)
                    while not self._has_room():
                        self._room.clear()
                        await self._room.wait()
                    if self._ending is not None:
                        return
                    self._take(call)
        except DecodeError:
            self.end(InvalidRequest(Violation("message", "is no ExecuteStreamRequest")))
        except Exception as error:
            self.end(error)
        finally:
            self._reading = False
            self._changed.set()

    def end(self, error: Exception) -> None:
        """Read no more, and end with this error: at once, but for Unavailable, when all is answered."""
        self._ending = error
        self._room.set()
        self._changed.set()

    def _has_room(self) -> bool:
        calls = len(self.calls) + len(self._ready)
        return self._ending is not None or (calls < self._host.calls_max and self._bytes < BYTES_MAX)

    def _take(self, message: pb.ExecuteStreamCall) -> None:
        call = Call(self, message.call_id, until_of(message.request.wait), 0)
        if call.call_id in self.calls:
            text = f"is {call.call_id}, as that of another call that is not answered yet"
            self._refuse(call, InvalidRequest(Violation("call_id", text)))
            return
        try:
            starting = self._host.read(message.request)
        except InvalidRequest as error:
            self._refuse(call, error)
            return
        call.size = starting.size
        self._bytes += starting.size
        self.calls[call.call_id] = call
        if message.patience_ms:
            self._deadlines.add(call.call_id, self._loop.time() + answer_s(message.patience_ms / 1000))
        try:
            self._host.start(starting).add_done_callback(call.begun)
        except Exception as error:
            call.fail(error)

    def _refuse(self, call: Call, error: InvalidRequest) -> None:
        call.done = True
        self._ready.append((call, error_status(error)))
        self._changed.set()

    # --- what goes out -------------------------------------------------------------------------------------

    def answer(self, call: Call, outcome: Transaction | status_pb2.Status) -> None:
        """The call has its answer."""
        call.done = True
        del self.calls[call.call_id]
        self._deadlines.remove(call.call_id)
        self._ready.append((call, outcome))
        self._changed.set()

    async def responses(self) -> AsyncIterator[pb.ExecuteStreamResponse]:
        """The answers, until there are no more to come. Raises the error that ends the stream."""
        while True:
            if self._ending is not None and not isinstance(self._ending, Unavailable):
                raise self._ending
            if self._ready:
                if len(self.calls) >= BUSY_CALLS and len(self._ready) < RESULTS_MAX:
                    await asyncio.sleep(BUSY_LINGER_S)
                yield self._cut()
                continue
            if not self.calls and self._ending is not None:
                raise self._ending
            if not self.calls and not self._reading:
                return
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> None:
        """Nobody waits for what is not answered yet."""
        self._ending = self._ending or Unavailable("the stream is over")
        self._room.set()
        self._deadlines.close()
        for call in self.calls.values():
            call.done = True
            self.withdraw(call)
        self.calls.clear()

    def withdraw(self, call: Call) -> None:
        """The engine need not tell of its transaction any more."""
        if call.tx is not None:
            self.engine.forget(call.tx, call.moved)

    def _cut(self) -> pb.ExecuteStreamResponse:
        """The next message."""
        response = pb.ExecuteStreamResponse()
        size = 0
        while self._ready and len(response.results) < RESULTS_MAX:
            call, outcome = self._ready[0]
            result = response.results.add(call_id=call.call_id)
            if isinstance(outcome, Transaction):
                write_transaction(result.response.transaction, outcome)
            else:
                result.error.code, result.error.message = outcome.code, outcome.message
                result.error.details.extend(outcome.details)
            size += result.ByteSize()
            if size > RESULTS_BYTES_MAX and len(response.results) > 1:
                del response.results[-1]
                break
            self._ready.popleft()
            self._bytes -= call.size
        self._room.set()
        return response

    def _time_out(self, call_id: int) -> None:
        call = self.calls.get(call_id)
        if call is None:
            return
        if call.tx is None:
            call.fail(TooLate("it is not known whether the transaction will be stored"))
            return
        self.withdraw(call)
        self.answer(call, self.engine.newest(call.tx))
