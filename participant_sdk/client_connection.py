"""A connection to the coordinator that carries out what `client_asking` says: on grpc, and on grpc.aio.

Only what differs between the two stacks is here, so that every question to the coordinator, and what its answer or
its silence means, is written once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import grpc

from participant_sdk.client_asking import CLOSED, METHODS, Answer, Ask, Asking, Closed, Pause
from participant_sdk.client_stream import Streams
from participant_sdk.client_streams import TaskStream, ThreadStream
from participant_sdk.client_watching import Watching
from participant_sdk.coordinator_messages import Failure, read_failure
from participant_sdk.errors import ConfigurationError
from participant_sdk.transaction import Transaction
from tricord.v1 import coordinator_pb2_grpc
from tricord.v1.coordinator_pb2 import ExecuteRequest

T = TypeVar("T")

CHANNEL_OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.max_send_message_length", 16 * 1024 * 1024),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


def endpoints_of(endpoint: str) -> list[str]:
    """The addresses that it names, separated by commas."""
    return [each.strip() for each in endpoint.split(",") if each.strip()] or [endpoint]


class CoordinatorConnection:
    """Asks the coordinator at `endpoint` ("host:port"). Safe for threads; close it at the end.

    Of several coordinators on one database, "host:port,host:port", the next is asked when one does not answer: any of
    them can.
    """

    def __init__(self, endpoint: str) -> None:
        self._channels = [grpc.insecure_channel(each, options=CHANNEL_OPTIONS) for each in endpoints_of(endpoint)]
        self._stubs = [coordinator_pb2_grpc.CoordinatorServiceStub(channel) for channel in self._channels]
        self._streams = Streams(lambda turn: ThreadStream(self._stubs[turn]))
        self._streams_lock = threading.Lock()
        self._turn = 0
        self._closed = False

    def close(self) -> None:
        """Close the connection. Transactions that run go on; who waits for an answer is told that it is not known."""
        self._closed = True
        with self._streams_lock:
            streams = self._streams.all()
        for stream in streams:
            stream.close()
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _run(self, asking: Asking[T]) -> T:
        """Carry out the steps; returns or raises what they do."""
        try:
            step = next(asking)
            while True:
                match step:
                    case Ask():
                        step = asking.send(self._ask(step))
                    case Pause(seconds):
                        time.sleep(seconds)
                        step = next(asking)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    def _watch(self, watching: Watching) -> Iterator[Transaction]:
        while True:
            if self._closed:
                raise ConfigurationError(CLOSED)
            failure: Failure | None = None
            stream: Any = None
            turn = self._turn
            try:
                stream = self._stubs[turn].Watch(watching.request, timeout=watching.opening())
                for response in stream:
                    transaction = watching.heard(response)
                    if transaction is not None:
                        yield transaction
                        if transaction.state.finished:
                            return
            except grpc.RpcError as error:
                failure = read_failure(error)
                if not watching.had_its_time(failure):
                    self._pass_over(turn, failure)
            finally:
                if stream is not None:
                    stream.cancel()
            time.sleep(watching.broke(failure))

    def _pass_over(self, turn: int, failure: Failure) -> None:
        """Whoever may not have been reached, or has too much to do, is not asked next."""
        if failure.retryable and self._turn == turn:  # of many calls that fail with one coordinator, one moves on
            self._turn = (turn + 1) % len(self._stubs)

    def _is_closed(self) -> bool:  # a type checker takes an attribute for unchanged
        return self._closed

    def _ask(self, ask: Ask) -> Answer:
        if self._closed:
            return Closed()
        turn = self._turn
        try:
            answer = self._execute(turn, ask) if type(ask.request) is ExecuteRequest else self._call(turn, ask)
        except ValueError:  # closed between the look and the call
            if not self._is_closed():
                raise
            return Closed()
        if isinstance(answer, Failure):
            self._pass_over(turn, answer)
        return answer

    def _execute(self, turn: int, ask: Ask) -> Answer:
        """By a stream, if others do so just now."""
        gives_up_at = time.monotonic() + ask.seconds
        with self._streams_lock:
            stream = self._streams.enter(turn, ask)
        try:
            answer = None if stream is None else stream.ask(ask)
            return self._call(turn, ask.within(gives_up_at)) if answer is None else answer
        except ValueError:
            if stream is None or not self._is_closed():
                raise
            return Failure(grpc.StatusCode.CANCELLED, CLOSED)  # the stream may have carried it
        finally:
            with self._streams_lock:
                self._streams.leave()

    def _call(self, turn: int, ask: Ask) -> Answer:
        try:
            return getattr(self._stubs[turn], METHODS[type(ask.request)])(ask.request, timeout=ask.seconds)
        except grpc.RpcError as error:
            return read_failure(error)


class AsyncCoordinatorConnection:
    """As `CoordinatorConnection`, on asyncio. Make and use it in one event loop."""

    def __init__(self, endpoint: str) -> None:
        self._channels = [grpc.aio.insecure_channel(each, options=CHANNEL_OPTIONS) for each in endpoints_of(endpoint)]
        self._stubs: list[coordinator_pb2_grpc.CoordinatorServiceAsyncStub] = [
            coordinator_pb2_grpc.CoordinatorServiceStub(channel) for channel in self._channels
        ]
        self._streams = Streams(lambda turn: TaskStream(self._stubs[turn]))
        self._turn = 0
        self._closed = False

    async def close(self) -> None:
        """As `CoordinatorConnection.close`."""
        self._closed = True
        for stream in self._streams.all():
            await stream.close()
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, asking: Asking[T]) -> T:
        """As `CoordinatorConnection._run`."""
        try:
            step = next(asking)
            while True:
                match step:
                    case Ask():
                        step = asking.send(await self._ask(step))
                    case Pause(seconds):
                        await asyncio.sleep(seconds)
                        step = next(asking)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    async def _watch(self, watching: Watching) -> AsyncIterator[Transaction]:
        while True:
            if self._closed:
                raise ConfigurationError(CLOSED)
            failure: Failure | None = None
            stream: Any = None
            turn = self._turn
            try:
                stream = self._stubs[turn].Watch(watching.request, timeout=watching.opening())
                async for response in stream:
                    transaction = watching.heard(response)
                    if transaction is not None:
                        yield transaction
                        if transaction.state.finished:
                            return
            except grpc.RpcError as error:
                failure = read_failure(error)
                if not watching.had_its_time(failure):
                    self._pass_over(turn, failure)
            except asyncio.CancelledError:
                if not self._is_closed_under_way():
                    raise
            finally:
                if stream is not None:
                    stream.cancel()
            await asyncio.sleep(watching.broke(failure))

    def _pass_over(self, turn: int, failure: Failure) -> None:
        """Whoever may not have been reached, or has too much to do, is not asked next."""
        if failure.retryable and self._turn == turn:  # of many calls that fail with one coordinator, one moves on
            self._turn = (turn + 1) % len(self._stubs)

    def _is_closed_under_way(self) -> bool:
        """What a CancelledError means: it is grpc.aio's word for that, and asyncio's for a task that is cancelled."""
        task = asyncio.current_task()
        return self._closed and task is not None and not task.cancelling()

    async def _ask(self, ask: Ask) -> Answer:
        if self._closed:
            return Closed()
        turn = self._turn
        try:
            execute = type(ask.request) is ExecuteRequest
            answer = await (self._execute(turn, ask) if execute else self._call(turn, ask))
        except asyncio.CancelledError:
            if not self._is_closed_under_way():
                raise
            return Failure(grpc.StatusCode.CANCELLED, CLOSED)
        if isinstance(answer, Failure):
            self._pass_over(turn, answer)
        return answer

    async def _execute(self, turn: int, ask: Ask) -> Answer:
        """As `CoordinatorConnection._execute`."""
        gives_up_at = time.monotonic() + ask.seconds
        stream = self._streams.enter(turn, ask)
        try:
            answer = None if stream is None else await stream.ask(ask)
            if answer is None and self._closed:
                return Failure(grpc.StatusCode.CANCELLED, CLOSED)  # the stream may have carried it
            return await self._call(turn, ask.within(gives_up_at)) if answer is None else answer
        finally:
            self._streams.leave()

    async def _call(self, turn: int, ask: Ask) -> Answer:
        try:
            return await getattr(self._stubs[turn], METHODS[type(ask.request)])(ask.request, timeout=ask.seconds)
        except grpc.RpcError as error:
            return read_failure(error)
