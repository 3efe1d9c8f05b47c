"""The client, sync and asyncio, against a server that answers as a coordinator would, one answer per request."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

from participant_sdk import (
    AsyncTricordClient,
    BranchState,
    ConfigurationError,
    IdempotencyKeyReused,
    InvalidRequest,
    OutcomeUnknown,
    RequestFailed,
    TransactionCancelled,
    TransactionNotFound,
    TransactionState,
    TricordClient,
    UnknownParticipant,
    Wait,
    branch,
)
from participant_sdk.client_request import new_key
from tricord.v1 import coordinator_pb2, coordinator_pb2_grpc, types_pb2

TRYING = types_pb2.TRANSACTION_STATE_TRYING
CONFIRMING = types_pb2.TRANSACTION_STATE_CONFIRMING
CONFIRMED = types_pb2.TRANSACTION_STATE_CONFIRMED
CANCELLING = types_pb2.TRANSACTION_STATE_CANCELLING
CANCELLED = types_pb2.TRANSACTION_STATE_CANCELLED

XID = "0" * 31 + "1"
DEBIT = branch("bank-a", "debit", {"amount": 1})
CREDIT = branch("bank-b", "credit", b"raw")


@dataclass(frozen=True)
class Held:
    hold: int


def transaction(state: Any, **fields: Any) -> types_pb2.Transaction:
    return types_pb2.Transaction(xid=XID, state=state, **fields)


def refused() -> types_pb2.Transaction:
    branches = [
        types_pb2.Branch(branch_id=1, participant="bank-a", action="debit", state=types_pb2.BRANCH_STATE_CANCELLED),
        types_pb2.Branch(
            branch_id=2,
            participant="bank-b",
            action="credit",
            state=types_pb2.BRANCH_STATE_REFUSED,
            refusal=types_pb2.Refusal(reason="closed", message="account is closed"),
        ),
    ]
    return transaction(CANCELLED, branches=branches, cancel_reason="branch 2 refused")


def status(code: grpc.StatusCode, reason: str = "", retry_s: float = 0.0, **fields: str) -> Callable[[Any], Any]:
    """An answer that is a gRPC error with details, as google.rpc.Status carries them."""
    rich = status_pb2.Status(code=code.value[0], message=f"about {reason}")
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(int(retry_s * 1000))
    for detail in (
        retry,
        error_details_pb2.ErrorInfo(reason=reason, domain="tricord"),
        error_details_pb2.BadRequest(
            field_violations=[
                error_details_pb2.BadRequest.FieldViolation(field=name.replace("__", "."), description=text)
                for name, text in fields.items()
            ]
        ),
    ):
        packed = AnyMessage()
        packed.Pack(detail)
        rich.details.append(packed)

    async def answer(context: Any) -> None:
        if reason:
            context.set_trailing_metadata((("grpc-status-details-bin", rich.SerializeToString()),))
        await context.abort(code, rich.message)

    return answer


class Coordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Gives the answers in order, the last one for ever; keeps the requests."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.requests: list[Any] = []

    async def _next(self, request: Any, context: Any) -> types_pb2.Transaction:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            await answer(context)
            raise AssertionError("not reached")
        found: types_pb2.Transaction = answer
        return found

    async def Execute(self, request: Any, context: Any) -> coordinator_pb2.ExecuteResponse:
        return coordinator_pb2.ExecuteResponse(transaction=await self._next(request, context))

    async def Get(self, request: Any, context: Any) -> coordinator_pb2.GetResponse:
        return coordinator_pb2.GetResponse(transaction=await self._next(request, context))

    async def LookUp(self, request: Any, context: Any) -> coordinator_pb2.LookUpResponse:
        """The state of one transaction, and for another a state that nobody knows."""
        found = await self._next(request, context)
        answers = [
            coordinator_pb2.TransactionProgress(xid=found.xid, state=found.state),
            coordinator_pb2.TransactionProgress(xid="a" * 32, state=99),  # type: ignore[arg-type]
        ]
        return coordinator_pb2.LookUpResponse(transactions=answers, store_id="store", incarnation=7)


class Client:
    """Either client, called from asyncio."""

    def __init__(self, kind: str, endpoint: str) -> None:
        self._sync = TricordClient(endpoint) if kind == "sync" else None
        self._async = AsyncTricordClient(endpoint) if kind == "async" else None

    async def execute(self, *branches: Any, **arguments: Any) -> Any:
        if self._sync is not None:
            return await asyncio.to_thread(self._sync.execute, *branches, **arguments)
        assert self._async is not None
        return await self._async.execute(*branches, **arguments)

    async def get(self, **arguments: Any) -> Any:
        if self._sync is not None:
            return await asyncio.to_thread(self._sync.get, **arguments)
        assert self._async is not None
        return await self._async.get(**arguments)

    async def close(self) -> None:
        if self._sync is not None:
            self._sync.close()
        if self._async is not None:
            await self._async.close()


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()  # type: ignore[abstract]


@pytest.fixture
async def endpoint(coordinator: Coordinator) -> AsyncIterator[str]:
    server, address = await serve(coordinator)
    yield address
    await server.stop(None)


async def serve(coordinator: Coordinator, port: int = 0) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(coordinator, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, f"127.0.0.1:{bound}"


@pytest.fixture(params=["sync", "async"])
async def client(request: pytest.FixtureRequest, endpoint: str) -> AsyncIterator[Client]:
    client = Client(request.param, endpoint)
    yield client
    await client.close()


async def test_a_confirmed_transaction_is_returned(coordinator: Coordinator, client: Client) -> None:
    done = transaction(CONFIRMED, idempotency_key="order-1")
    done.branches.add(
        branch_id=1,
        participant="bank-a",
        action="debit",
        state=types_pb2.BRANCH_STATE_CONFIRMED,
        result=types_pb2.Payload(data=b'{"hold":7}', content_type="application/json"),
    )
    coordinator.answers = [done]
    found = await client.execute(DEBIT, CREDIT, idempotency_key="order-1", timeout=2.5)
    assert (found.xid, found.state) == (XID, TransactionState.CONFIRMED)
    (first,) = found.branches
    assert first.state is BranchState.CONFIRMED
    assert first.result.decode(Held) == Held(7)
    (request,) = coordinator.requests
    assert request.idempotency_key == "order-1"
    assert request.timeout.ToMilliseconds() == 2500
    assert request.wait == coordinator_pb2.WAIT_FINISHED
    assert [(each.participant, each.action, each.payload.data) for each in request.branches] == [
        ("bank-a", "debit", b'{"amount":1}'),
        ("bank-b", "credit", b"raw"),
    ]


async def test_a_refusal_tells_who_and_why(coordinator: Coordinator, client: Client) -> None:
    coordinator.answers = [refused()]
    with pytest.raises(TransactionCancelled) as caught:
        await client.execute(DEBIT, CREDIT)
    refusal = caught.value.refusal
    assert refusal is not None
    assert (refusal.branch_id, refusal.participant, refusal.reason) == (2, "bank-b", "closed")
    assert caught.value.transaction.xid == XID
    assert str(caught.value) == f"transaction {XID} was cancelled: bank-b/credit refused: closed (account is closed)"


async def test_cancelled_by_time_has_no_refusal(coordinator: Coordinator, client: Client) -> None:
    coordinator.answers = [transaction(CANCELLED, cancel_reason="deadline")]
    with pytest.raises(TransactionCancelled, match="was cancelled: deadline") as caught:
        await client.execute(DEBIT)
    assert caught.value.refusal is None


async def test_decided_is_enough_where_only_that_is_waited_for(coordinator: Coordinator, client: Client) -> None:
    coordinator.answers = [transaction(CONFIRMING)]
    assert (await client.execute(DEBIT, wait=Wait.DECIDED)).state is TransactionState.CONFIRMING
    coordinator.answers = [transaction(CANCELLING)]
    with pytest.raises(TransactionCancelled):
        await client.execute(DEBIT, wait=Wait.DECIDED)


async def test_it_asks_again_with_the_same_key_while_the_transaction_runs(
    coordinator: Coordinator, client: Client
) -> None:
    coordinator.answers = [transaction(TRYING), transaction(CONFIRMING), transaction(CONFIRMED)]
    assert (await client.execute(DEBIT)).state is TransactionState.CONFIRMED
    assert len(coordinator.requests) == 3
    assert len({request.SerializeToString(deterministic=True) for request in coordinator.requests}) == 1
    assert len(coordinator.requests[0].idempotency_key) == 32


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ],
)
async def test_it_asks_again_after_what_may_pass(coordinator: Coordinator, client: Client, code: Any) -> None:
    coordinator.answers = [status(code), status(code, "STORE_UNAVAILABLE"), transaction(CONFIRMED)]
    assert (await client.execute(DEBIT)).state is TransactionState.CONFIRMED
    assert len({request.idempotency_key for request in coordinator.requests}) == 1


@pytest.mark.parametrize(
    ("answer", "error", "reason"),
    [
        (status(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", branches="is empty"), InvalidRequest, None),
        (status(grpc.StatusCode.FAILED_PRECONDITION, "UNKNOWN_PARTICIPANT"), UnknownParticipant, None),
        (status(grpc.StatusCode.FAILED_PRECONDITION, "UNKNOWN_ACTION"), UnknownParticipant, None),
        (status(grpc.StatusCode.FAILED_PRECONDITION, "IDEMPOTENCY_KEY_REUSED"), IdempotencyKeyReused, None),
        (status(grpc.StatusCode.PERMISSION_DENIED, "NOT_ALLOWED"), RequestFailed, "NOT_ALLOWED"),
        (status(grpc.StatusCode.UNAUTHENTICATED), RequestFailed, "UNAUTHENTICATED"),
        (status(grpc.StatusCode.UNIMPLEMENTED), ConfigurationError, "CONFIGURATION"),
        (status(grpc.StatusCode.RESOURCE_EXHAUSTED, "INVALID_REQUEST"), InvalidRequest, None),
    ],
)
async def test_a_definite_answer_is_raised_at_once(
    coordinator: Coordinator, client: Client, answer: Any, error: type[Any], reason: str | None
) -> None:
    coordinator.answers = [answer]
    with pytest.raises(error) as caught:
        await client.execute(DEBIT)
    assert type(caught.value) is error
    assert len(coordinator.requests) == 1
    if reason is not None:
        assert caught.value.reason == reason


async def test_an_invalid_request_names_its_fields(coordinator: Coordinator, client: Client) -> None:
    coordinator.answers = [status(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", branches__payload="too large")]
    with pytest.raises(InvalidRequest) as caught:
        await client.execute(DEBIT)
    assert caught.value.fields == {"branches.payload": "too large"}
    assert not caught.value.retryable


async def test_when_patience_is_over_the_outcome_is_unknown(coordinator: Coordinator, client: Client) -> None:
    coordinator.answers = [transaction(CONFIRMING)]
    with pytest.raises(OutcomeUnknown, match="still CONFIRMING") as caught:
        await client.execute(DEBIT, idempotency_key="order-1", patience=0.3)
    assert caught.value.idempotency_key == "order-1"
    assert caught.value.retryable
    assert caught.value.transaction is not None
    assert caught.value.transaction.xid == XID


async def test_it_waits_as_long_as_the_coordinator_asks(coordinator: Coordinator, client: Client) -> None:
    busy = status(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED", retry_s=0.7)
    coordinator.answers = [busy, busy, transaction(CONFIRMED)]
    started = time.monotonic()
    assert (await client.execute(DEBIT)).state is TransactionState.CONFIRMED
    assert time.monotonic() - started >= 1.4
    assert len(coordinator.requests) == 3
    coordinator.answers = [busy]
    with pytest.raises(OutcomeUnknown, match="OVERLOADED"):  # it would have to wait for longer than it may
        await client.get(xid=XID, patience=0.5)
    assert len(coordinator.requests) == 4


async def test_a_coordinator_that_is_away_is_waited_for(coordinator: Coordinator) -> None:
    for kind in ("sync", "async"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        client = Client(kind, f"127.0.0.1:{port}")
        try:
            with pytest.raises(OutcomeUnknown, match="UNAVAILABLE") as caught:
                await client.execute(DEBIT, patience=0.2)
            assert caught.value.transaction is None
            coordinator.answers = [transaction(CONFIRMED)]
            calling = asyncio.create_task(client.execute(DEBIT, idempotency_key=caught.value.idempotency_key))
            server, _ = await serve(coordinator, port)
            assert (await calling).state is TransactionState.CONFIRMED
            await server.stop(None)
        finally:
            await client.close()


async def test_get(coordinator: Coordinator, client: Client) -> None:
    coordinator.answers = [status(grpc.StatusCode.UNAVAILABLE), transaction(CANCELLING, attention=3)]
    found = await client.get(xid=XID)
    assert (found.state, found.needs_attention) == (TransactionState.CANCELLING, True)
    assert coordinator.requests[-1].xid == XID
    await client.get(idempotency_key="order-1")
    assert coordinator.requests[-1].idempotency_key == "order-1"


async def test_get_of_what_is_not_there(coordinator: Coordinator, client: Client) -> None:
    coordinator.answers = [status(grpc.StatusCode.NOT_FOUND, "TRANSACTION_NOT_FOUND")]
    with pytest.raises(TransactionNotFound):
        await client.get(xid=XID)
    for arguments in ({}, {"xid": XID, "idempotency_key": "k"}):
        with pytest.raises(InvalidRequest, match="either"):
            await client.get(**arguments)


async def test_what_cannot_be_sent_is_refused_here(coordinator: Coordinator, client: Client) -> None:
    with pytest.raises(InvalidRequest, match="bank-a/debit cannot be sent"):
        branch("bank-a", "debit", 5)
    with pytest.raises(InvalidRequest, match="key is empty"):
        await client.execute(DEBIT, idempotency_key="")
    with pytest.raises(InvalidRequest, match="timeout"):
        await client.execute(DEBIT, timeout=float("nan"))
    assert coordinator.requests == []


def test_keys_sort_by_their_time() -> None:
    keys = [new_key() for _ in range(1000)]
    assert len(set(keys)) == 1000
    assert all(len(key) == 32 and key[12] == "7" and key[16] in "89ab" for key in keys)
    assert [key[:12] for key in keys] == sorted(key[:12] for key in keys)
