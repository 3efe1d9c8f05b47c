"""The initiator's client: run a transaction and learn its outcome for certain, or that it is not certain.

    client = TricordClient("127.0.0.1:7800")
    client.execute(branch("bank-a", "debit", Debit("alice", 30)), branch("bank-b", "credit", Credit("bob", 30)))

Every request carries an idempotency key, so that asking again is always safe: lost connections and coordinators that
start again are met by the same request with the same key, for as long as the caller's patience lasts. What the
client sends, when it asks again and what it raises is written once, as a generator of steps; `TricordClient` carries
them out on grpc, `AsyncTricordClient` on grpc.aio.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum, unique
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

import grpc

from participant_sdk.coordinator_messages import Failure, error_of, read_failure, read_transaction, write_payload
from participant_sdk.errors import InvalidRequest, OutcomeUnknown, TransactionCancelled
from participant_sdk.payload import Payload, encode
from participant_sdk.transaction import Transaction, TransactionState
from tricord.v1 import coordinator_pb2, coordinator_pb2_grpc

TIMEOUT_ASSUMED_SECONDS: Final = 30.0
"""The coordinator's default time-out of a transaction, where the caller names none."""
PATIENCE_BEYOND_SECONDS: Final = 30.0
ASK_SECONDS_MAX: Final = 30.0
PAUSE_FIRST_SECONDS: Final = 0.05
PAUSE_MAX_SECONDS: Final = 2.0

CHANNEL_OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.max_send_message_length", 16 * 1024 * 1024),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


@unique
class Wait(Enum):
    """What `execute` waits for."""

    DECIDED = coordinator_pb2.WAIT_DECIDED
    """The decision is durable; the branches are being confirmed."""
    FINISHED = coordinator_pb2.WAIT_FINISHED
    """Every branch has been confirmed or cancelled."""


@dataclass(frozen=True, slots=True)
class BranchRequest:
    """One branch to run; made by `branch`."""

    participant: str
    action: str
    payload: Payload


def branch(participant: str, action: str, payload: object) -> BranchRequest:
    """A branch of a transaction: `action` of `participant` with a dataclass, protobuf message, dict or bytes.

    Raises InvalidRequest if the payload is none of those or cannot be encoded.
    """
    try:
        return BranchRequest(participant, action, encode(payload))
    except (TypeError, ValueError) as error:
        text = f"the payload of {participant}/{action} cannot be sent: {error}"
        raise InvalidRequest(text, {"payload": str(error)}) from None


def new_key() -> str:
    """A fresh idempotency key: a UUIDv7 (RFC 9562) in hexadecimal, so that keys sort by their time."""
    value = int.from_bytes(os.urandom(16), "big")
    value = (time.time_ns() // 1_000_000) << 80 | value & ((1 << 80) - 1)
    value = value & ~(0xF << 76) | 7 << 76
    value = value & ~(0b11 << 62) | 0b10 << 62
    return f"{value:032x}"


@dataclass(frozen=True, slots=True)
class Ask:
    """Send `request` and wait up to `seconds`; gives the response or a Failure."""

    request: coordinator_pb2.ExecuteRequest | coordinator_pb2.GetRequest
    seconds: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait so many seconds."""

    seconds: float


Answer: TypeAlias = coordinator_pb2.ExecuteResponse | coordinator_pb2.GetResponse | Failure | None
Asking: TypeAlias = Generator[Ask | Pause, Answer, Transaction]


def _request_of(
    branches: tuple[BranchRequest, ...], key: str, timeout: float | None, wait: Wait
) -> coordinator_pb2.ExecuteRequest:
    if not key:
        raise InvalidRequest("the idempotency key is empty", {"idempotency_key": "is empty"})
    if timeout is not None and not math.isfinite(timeout):
        raise InvalidRequest(f"the timeout is {timeout}", {"timeout": "is not a finite number of seconds"})
    request = coordinator_pb2.ExecuteRequest(
        idempotency_key=key,
        branches=[
            coordinator_pb2.BranchRequest(
                participant=each.participant, action=each.action, payload=write_payload(each.payload)
            )
            for each in branches
        ],
        wait=wait.value,
    )
    if timeout is not None:
        request.timeout.FromNanoseconds(round(timeout * 1e9))
    return request


def executing(request: coordinator_pb2.ExecuteRequest, wait: Wait, patience: float) -> Asking:
    """Ask until the transaction has the state that is waited for; returns it confirmed, or raises.

    `patience` is in seconds. Raises TransactionCancelled, OutcomeUnknown, or what `error_of` says.
    """
    clock = time.monotonic
    gives_up_at = clock() + patience
    seen: Transaction | None = None
    why = "there was no time to ask"
    tries = 0
    while (left := gives_up_at - clock()) > 0:
        asked_at = clock()
        answer = yield Ask(request, min(left, ASK_SECONDS_MAX))
        if isinstance(answer, coordinator_pb2.ExecuteResponse):
            seen = read_transaction(answer.transaction)
            if _is_outcome(seen, wait):
                return _confirmed(seen)
            why = f"it is still {seen.state.value}"
            tries = 0 if clock() - asked_at >= 1 else tries + 1
        elif isinstance(answer, Failure):
            if not answer.retryable:
                raise error_of(answer)
            why = str(answer)
            tries += 1
        longest = min(PAUSE_MAX_SECONDS, PAUSE_FIRST_SECONDS * 2 ** min(tries, 10))
        yield Pause(min(random.uniform(0, longest), max(0.0, gives_up_at - clock())))
    key = request.idempotency_key
    raise OutcomeUnknown(f"the outcome of the transaction with key {key} is not known yet: {why}", key, seen)


def _is_outcome(transaction: Transaction, wait: Wait) -> bool:
    if wait is Wait.DECIDED and transaction.state in (TransactionState.CONFIRMING, TransactionState.CANCELLING):
        return True
    return transaction.state in (TransactionState.CONFIRMED, TransactionState.CANCELLED)


def _confirmed(transaction: Transaction) -> Transaction:
    if transaction.state in (TransactionState.CANCELLING, TransactionState.CANCELLED):
        raise TransactionCancelled(transaction, transaction.refusal)
    return transaction


def getting(request: coordinator_pb2.GetRequest, patience: float) -> Asking:
    """Read a transaction, asking again while the coordinator cannot be reached."""
    gives_up_at = time.monotonic() + patience
    tries = 0
    while True:
        answer = yield Ask(request, max(0.1, gives_up_at - time.monotonic()))
        if isinstance(answer, coordinator_pb2.GetResponse):
            return read_transaction(answer.transaction)
        if isinstance(answer, Failure):
            if not answer.retryable:
                raise error_of(answer)
            if time.monotonic() >= gives_up_at:
                raise OutcomeUnknown(f"the coordinator cannot be asked: {answer}", request.idempotency_key)
        tries += 1
        longest = min(PAUSE_MAX_SECONDS, PAUSE_FIRST_SECONDS * 2 ** min(tries, 10))
        yield Pause(min(random.uniform(0, longest), max(0.0, gives_up_at - time.monotonic())))


def _start_execute(
    branches: tuple[BranchRequest, ...],
    idempotency_key: str | None,
    timeout: float | None,
    wait: Wait,
    patience: float | None,
) -> Asking:
    request = _request_of(branches, new_key() if idempotency_key is None else idempotency_key, timeout, wait)
    if patience is None:
        patience = (TIMEOUT_ASSUMED_SECONDS if timeout is None else max(timeout, 0)) + PATIENCE_BEYOND_SECONDS
    return executing(request, wait, patience)


def _start_get(xid: str | None, idempotency_key: str | None, patience: float) -> Asking:
    if (xid is None) == (idempotency_key is None):
        raise InvalidRequest("name either the xid or the idempotency_key")
    if xid is not None:
        return getting(coordinator_pb2.GetRequest(xid=xid), patience)
    return getting(coordinator_pb2.GetRequest(idempotency_key=idempotency_key or ""), patience)


class TricordClient:
    """Starts transactions at the coordinator at `endpoint` ("host:port"). Safe for threads; close it at the end."""

    def __init__(self, endpoint: str) -> None:
        self._channel = grpc.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
        self._stub = coordinator_pb2_grpc.CoordinatorServiceStub(self._channel)

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
        InvalidRequest, UnknownParticipant, IdempotencyKeyReused, RequestFailed (nothing was started).
        """
        return self._run(_start_execute(branches, idempotency_key, timeout, wait, patience))

    def get(self, *, xid: str | None = None, idempotency_key: str | None = None, patience: float = 10.0) -> Transaction:
        """Read a transaction in whatever state. Raises TransactionNotFound, OutcomeUnknown (not reached)."""
        return self._run(_start_get(xid, idempotency_key, patience))

    def close(self) -> None:
        """Close the connection. Transactions that run go on."""
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

    def _ask(self, ask: Ask) -> Answer:
        try:
            if isinstance(ask.request, coordinator_pb2.ExecuteRequest):
                return self._stub.Execute(ask.request, timeout=ask.seconds)
            return self._stub.Get(ask.request, timeout=ask.seconds)
        except grpc.RpcError as error:
            return read_failure(error)


class AsyncTricordClient:
    """As `TricordClient`, on asyncio. Make and use it in one event loop."""

    def __init__(self, endpoint: str) -> None:
        self._channel = grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
        self._stub = coordinator_pb2_grpc.CoordinatorServiceStub(self._channel)

    async def execute(
        self,
        *branches: BranchRequest,
        idempotency_key: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - the transaction's, not this call's
        wait: Wait = Wait.FINISHED,
        patience: float | None = None,
    ) -> Transaction:
        """See `TricordClient.execute`. Cancelling this call does not cancel the transaction."""
        return await self._run(_start_execute(branches, idempotency_key, timeout, wait, patience))

    async def get(
        self, *, xid: str | None = None, idempotency_key: str | None = None, patience: float = 10.0
    ) -> Transaction:
        """See `TricordClient.get`."""
        return await self._run(_start_get(xid, idempotency_key, patience))

    async def close(self) -> None:
        """Close the connection. Transactions that run go on."""
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

    async def _ask(self, ask: Ask) -> Answer:
        try:
            if isinstance(ask.request, coordinator_pb2.ExecuteRequest):
                return await self._stub.Execute(ask.request, timeout=ask.seconds)
            return await self._stub.Get(ask.request, timeout=ask.seconds)
        except grpc.RpcError as error:
            return read_failure(error)
