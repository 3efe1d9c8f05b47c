"""An `ExecuteStream` at the client: for threads, and for tasks; `client_stream` says what goes on it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Final

import grpc

from participant_sdk.client_asking import CLOSED, Answer, Ask
from participant_sdk.client_stream import ENDED, TOO_LATE, Stream, Told
from participant_sdk.coordinator_messages import Failure, read_failure
from participant_sdk.errors import printable
from tricord.v1 import coordinator_pb2

IDLE_SECONDS: Final = 10.0
"""A stream that carries nothing for so long is ended."""


class ThreadStream(Stream):
    """One stream, for threads: gRPC's thread writes, and one of its own reads."""

    def __init__(self, stub: Any) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._stream = stub.ExecuteStream(self._messages())
        self._reader = threading.Thread(target=self._read, name="tricord-execute-stream", daemon=True)
        self._reader.start()

    def ask(self, ask: Ask) -> Answer:
        """The answer or a Failure; None: ask alone."""
        answers: list[Answer] = []
        answered = threading.Lock()
        answered.acquire()

        def tell(answer: Answer) -> None:
            answers.append(answer)
            answered.release()

        with self._changed:
            if self._calls.over:
                return None
            call_id = self._calls.add(ask, tell)
            self._changed.notify()
        silent = False
        try:
            if answered.acquire(timeout=ask.seconds):
                return answers[0]
        finally:
            with self._changed:
                silent = self._calls.withdraw(call_id)
        if silent:
            self.end(TOO_LATE)
        return TOO_LATE

    def close(self) -> None:
        """End it; whoever waits is told that the client is closed."""
        self.end(Failure(grpc.StatusCode.CANCELLED, CLOSED))
        self._reader.join()

    def end(self, failure: Failure) -> None:
        """Give it up."""
        with self._changed:
            told = self._calls.end(failure)
            self._changed.notify()
        self._stream.cancel()
        _tell(told)

    def _messages(self) -> Iterator[coordinator_pb2.ExecuteStreamRequest]:
        """What is written, by gRPC's thread."""
        while True:
            with self._changed:
                while (message := self._calls.cut()) is None:
                    if not self._calls.over and not self._changed.wait(IDLE_SECONDS):
                        self._calls.over = self._calls.idle
                    if self._calls.over:
                        return
            yield message

    def _read(self) -> None:
        failure = ENDED
        try:
            for response in self._stream:
                with self._changed:
                    told = self._calls.heard(response)
                _tell(told)
        except grpc.RpcError as error:
            failure = read_failure(error)
        finally:
            self.end(failure)


class TaskStream(Stream):
    """As `ThreadStream`, for one event loop."""

    def __init__(self, stub: Any) -> None:
        super().__init__()
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._stream = stub.ExecuteStream()
        self._writer: asyncio.Task[None] | None = None
        self._reader = self._loop.create_task(self._read())

    async def ask(self, ask: Ask) -> Answer:
        """As `ThreadStream.ask`."""
        answered: asyncio.Future[Answer] = self._loop.create_future()

        def tell(answer: Answer) -> None:
            if not answered.done():
                answered.set_result(answer)

        if self._calls.over:
            return None
        call_id = self._calls.add(ask, tell)
        self._changed.set()
        timer = self._loop.call_later(ask.seconds, tell, TOO_LATE)
        try:
            answer = await answered
        finally:
            timer.cancel()
            silent = self._calls.withdraw(call_id)
        if silent and answer is TOO_LATE:
            self.end(TOO_LATE)
        return answer

    async def close(self) -> None:
        """As `ThreadStream.close`."""
        self.end(Failure(grpc.StatusCode.CANCELLED, CLOSED))
        await asyncio.wait([self._reader])

    def end(self, failure: Failure) -> None:
        """Give it up."""
        _tell(self._calls.end(failure))
        self._changed.set()
        self._stream.cancel()

    async def _read(self) -> None:
        failure = ENDED
        try:
            # The first is empty. A write before it might meet the end of its stream, which hides why it has ended.
            while (response := await self._stream.read()) is not grpc.aio.EOF:
                _tell(self._calls.heard(response))
                if self._writer is None:
                    self._writer = self._loop.create_task(self._write())
            code = await self._stream.code()
            if code is not grpc.StatusCode.OK:
                failure = Failure(code, printable(await self._stream.details() or ""))
        except grpc.RpcError as error:
            failure = read_failure(error)
        finally:
            self.end(failure)
            if self._writer is not None:
                self._writer.cancel()

    async def _write(self) -> None:
        with contextlib.suppress(
            grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError
        ):  # the reader learns why
            while not self._calls.over:
                if (message := self._calls.cut()) is not None:
                    await self._stream.write(message)
                else:
                    await self._wait()
            await self._stream.done_writing()

    async def _wait(self) -> None:
        """For something to write, but not for ever."""
        self._changed.clear()
        timer = self._loop.call_later(IDLE_SECONDS, self._end_idle)
        await self._changed.wait()
        timer.cancel()

    def _end_idle(self) -> None:
        self._calls.over = self._calls.over or self._calls.idle
        self._changed.set()


def _tell(told: Told) -> None:
    for tell, answer in told:
        tell(answer)
