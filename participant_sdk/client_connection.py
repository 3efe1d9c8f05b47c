"""A connection to the coordinator that carries out what `client_asking` says: on grpc, and on grpc.aio.

Only what differs between the two stacks is here, so that every question to the coordinator, and what its answer or
its silence means, is written once.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import grpc

from participant_sdk.client_asking import CLOSED, Answer, Ask, Asking, Closed, Pause
from participant_sdk.coordinator_messages import Failure, read_failure
from tricord.v1 import coordinator_pb2, coordinator_pb2_grpc

T = TypeVar("T")

CHANNEL_OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.max_send_message_length", 16 * 1024 * 1024),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


class CoordinatorConnection:
    """Asks the coordinator at `endpoint` ("host:port"). Safe for threads; close it at the end."""

    def __init__(self, endpoint: str) -> None:
        self._channel = grpc.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
        self._stub = coordinator_pb2_grpc.CoordinatorServiceStub(self._channel)
        self._closed = False

    def close(self) -> None:
        """Close the connection. Transactions that run go on; who waits for an answer is told that it is not known."""
        self._closed = True
        self._channel.close()

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

    def _is_closed(self) -> bool:  # a type checker takes an attribute for unchanged
        return self._closed

    def _ask(self, ask: Ask) -> Answer:
        if self._closed:
            return Closed()
        try:
            match ask.request:
                case coordinator_pb2.ExecuteRequest():
                    return self._stub.Execute(ask.request, timeout=ask.seconds)
                case coordinator_pb2.LookUpRequest():
                    return self._stub.LookUp(ask.request, timeout=ask.seconds)
                case _:
                    return self._stub.Get(ask.request, timeout=ask.seconds)
        except grpc.RpcError as error:
            return read_failure(error)
        except ValueError:  # closed between the look and the call
            if not self._is_closed():
                raise
            return Closed()


class AsyncCoordinatorConnection:
    """As `CoordinatorConnection`, on asyncio. Make and use it in one event loop."""

    def __init__(self, endpoint: str) -> None:
        self._channel = grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
        self._stub = coordinator_pb2_grpc.CoordinatorServiceStub(self._channel)
        self._closed = False

    async def close(self) -> None:
        """As `CoordinatorConnection.close`."""
        self._closed = True
        await self._channel.close()

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

    def _is_closed(self) -> bool:  # a type checker takes an attribute for unchanged
        return self._closed

    async def _ask(self, ask: Ask) -> Answer:
        if self._closed:
            return Closed()
        try:
            match ask.request:
                case coordinator_pb2.ExecuteRequest():
                    return await self._stub.Execute(ask.request, timeout=ask.seconds)
                case coordinator_pb2.LookUpRequest():
                    return await self._stub.LookUp(ask.request, timeout=ask.seconds)
                case _:
                    return await self._stub.Get(ask.request, timeout=ask.seconds)
        except grpc.RpcError as error:
            return read_failure(error)
        except asyncio.CancelledError:  # grpc.aio's word for "closed under way", and asyncio's for "cancelled"
            task = asyncio.current_task()
            if not self._is_closed() or task is None or task.cancelling():
                raise
            return Failure(grpc.StatusCode.CANCELLED, CLOSED)
