"""The initiator's client: run a transaction and learn its outcome for certain, or that it is not certain.

    client = TricordClient("127.0.0.1:7800")
    client.execute(branch("bank-a", "debit", Debit("alice", 30)), branch("bank-b", "credit", Credit("bob", 30)))

Every request carries an idempotency key, so that asking again is always safe: lost connections and coordinators that
start again are met by the same request with the same key, for as long as the caller's patience lasts. That is
written once, in `client_asking`; `TricordClient` carries its steps out on grpc, `AsyncTricordClient` on grpc.aio.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any, Final, Self

import grpc

from participant_sdk.client_asking import CLOSED, Answer, Ask, Asking, Closed, Pause, start_execute, start_get
from participant_sdk.client_request import BranchRequest, Wait
from participant_sdk.coordinator_messages import Failure, read_failure
from participant_sdk.transaction import Transaction
from tricord.v1 import coordinator_pb2, coordinator_pb2_grpc

CHANNEL_OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.max_send_message_length", 16 * 1024 * 1024),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


class TricordClient:
    """Starts transactions at the coordinator at `endpoint` ("host:port"). Safe for threads; close it at the end."""

    def __init__(self, endpoint: str) -> None:
        self._channel = grpc.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
        self._stub = coordinator_pb2_grpc.CoordinatorServiceStub(self._channel)
        self._closed = False

    def execute(
        self,
        *branches: BranchRequest,
        idempotency_key: str | None = None,
        timeout: float | None = None,
        wait: Wait = Wait.FINISHED,
        patience: float | None = None,
    ) -> Transaction:
        """Run all branches as one transaction; returns it when it is confirmed (with DECIDED: decided to be).

        `timeout` is the transaction's, in seconds: undecided after that, it is cancelled. `patience` (default:
        timeout + 30) is how many seconds this call goes on asking. With an `idempotency_key` of your own a repeat
        of this call, even by another process, is the same transaction and gives the same answer.

        Raises TransactionCancelled (decided; nothing happened), OutcomeUnknown (patience over; it carries the key),
        InvalidRequest, UnknownParticipant, IdempotencyKeyReused, RequestFailed (nothing was started),
        ConfigurationError (no coordinator answers there, or this client is closed).
        """
        return self._run(start_execute(branches, idempotency_key, timeout, wait, patience))

    def get(self, *, xid: str | None = None, idempotency_key: str | None = None, patience: float = 10.0) -> Transaction:
        """Read a transaction in whatever state. Raises TransactionNotFound, OutcomeUnknown (not reached)."""
        return self._run(start_get(xid, idempotency_key, patience))

    def close(self) -> None:
        """Close the connection. Transactions that run go on; who waits for one is told that it is not known."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _run(self, asking: Asking) -> Transaction:
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
            if isinstance(ask.request, coordinator_pb2.ExecuteRequest):
                return self._stub.Execute(ask.request, timeout=ask.seconds)
            return self._stub.Get(ask.request, timeout=ask.seconds)
        except grpc.RpcError as error:
            return read_failure(error)
        except ValueError:  # closed between the look and the call
            if not self._is_closed():
                raise
            return Closed()


class AsyncTricordClient:
    """As `TricordClient`, on asyncio. Make and use it in one event loop."""

    def __init__(self, endpoint: str) -> None:
        self._channel = grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
        self._stub = coordinator_pb2_grpc.CoordinatorServiceStub(self._channel)
        self._closed = False

    async def execute(
        self,
        *branches: BranchRequest,
        idempotency_key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - the transaction's, not this call's
        wait: Wait = Wait.FINISHED,
        patience: float | None = None,
    ) -> Transaction:
        """See `TricordClient.execute`. Cancelling this call does not cancel the transaction."""
        return await self._run(start_execute(branches, idempotency_key, timeout, wait, patience))

    async def get(
        self, *, xid: str | None = None, idempotency_key: str | None = None, patience: float = 10.0
    ) -> Transaction:
        """See `TricordClient.get`."""
        return await self._run(start_get(xid, idempotency_key, patience))

    async def close(self) -> None:
        """As `TricordClient.close`."""
        self._closed = True
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, asking: Asking) -> Transaction:
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
            if isinstance(ask.request, coordinator_pb2.ExecuteRequest):
                return await self._stub.Execute(ask.request, timeout=ask.seconds)
            return await self._stub.Get(ask.request, timeout=ask.seconds)
        except grpc.RpcError as error:
            return read_failure(error)
        except asyncio.CancelledError:  # grpc.aio's word for "closed under way", and asyncio's for "cancelled"
            task = asyncio.current_task()
            if not self._is_closed() or task is None or task.cancelling():
                raise
            return Failure(grpc.StatusCode.CANCELLED, CLOSED)
