"""The client never takes an uncertain outcome for a definite one, and never lets anything raw out."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from participant_sdk import (
    ConfigurationError,
    IdempotencyKeyReused,
    InvalidRequest,
    OutcomeUnknown,
    RequestFailed,
    branch,
)
from tests.contract.participant.test_client import (
    CONFIRMING,
    DEBIT,
    TRYING,
    Client,
    Coordinator,
    serve,
    status,
    transaction,
)
from tricord.v1 import coordinator_pb2_grpc

UNAVAILABLE = status(grpc.StatusCode.UNAVAILABLE)
DEFINITE = [
    status(grpc.StatusCode.UNIMPLEMENTED),
    status(grpc.StatusCode.PERMISSION_DENIED),
    status(grpc.StatusCode.FAILED_PRECONDITION),
    status(grpc.StatusCode.DATA_LOSS),
    status(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
    status(grpc.StatusCode.FAILED_PRECONDITION, "UNKNOWN_ACTION"),
    status(grpc.StatusCode.NOT_FOUND),
]


@pytest.fixture
def answering() -> Coordinator:
    return Coordinator()  # type: ignore[abstract]


@pytest.fixture(params=["sync", "async"])
async def asking(request: pytest.FixtureRequest, answering: Coordinator) -> AsyncIterator[Client]:
    server, address = await serve(answering)
    client = Client(request.param, address)
    yield client
    await client.close()
    await server.stop(None)


async def test_a_definite_failure_after_one_that_may_have_begun_it_is_unknown(
    answering: Coordinator, asking: Client
) -> None:
    """The first request may be stored: what a proxy says about the second says nothing about it."""
    for answer in DEFINITE:
        answering.answers = [UNAVAILABLE, answer]
        with pytest.raises(OutcomeUnknown, match=r"key order-1 .* with this idempotency_key again") as caught:
            await asking.execute(DEBIT, idempotency_key="order-1")
        assert (caught.value.idempotency_key, caught.value.transaction) == ("order-1", None)


@pytest.mark.parametrize("state", [TRYING, CONFIRMING])
async def test_a_definite_failure_after_the_transaction_was_seen_is_unknown(
    answering: Coordinator, asking: Client, state: Any
) -> None:
    for answer in DEFINITE:
        answering.answers = [transaction(state), answer]
        with pytest.raises(OutcomeUnknown) as caught:
            await asking.execute(DEBIT)
        assert caught.value.transaction is not None


async def test_a_key_that_belongs_to_another_request_stays_definite(answering: Coordinator, asking: Client) -> None:
    answering.answers = [UNAVAILABLE, status(grpc.StatusCode.FAILED_PRECONDITION, "IDEMPOTENCY_KEY_REUSED")]
    with pytest.raises(IdempotencyKeyReused):
        await asking.execute(DEBIT)


async def test_a_failure_before_anything_was_sent_leaves_a_definite_answer_definite(answering: Coordinator) -> None:
    server, address = await serve(answering)
    await server.stop(None)
    answering.answers = [status(grpc.StatusCode.PERMISSION_DENIED)]
    for kind in ("sync", "async"):
        client = Client(kind, address)
        try:
            calling = asyncio.create_task(client.execute(DEBIT))
            with pytest.raises(OutcomeUnknown, match="failed to connect"):
                await client.execute(DEBIT, patience=0.2)
            server, _ = await serve(answering, int(address.rpartition(":")[2]))
            with pytest.raises(RequestFailed):
                await calling
            await server.stop(None)
        finally:
            await client.close()


async def test_what_is_too_large_is_told_by_which_way_it_went(answering: Coordinator) -> None:
    small = grpc.aio.server(options=[("grpc.max_receive_message_length", 1000)])
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(answering, small)
    mute = grpc.aio.server(options=[("grpc.max_send_message_length", 1000)])
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(answering, mute)
    ports = [server.add_insecure_port("127.0.0.1:0") for server in (small, mute)]
    await asyncio.gather(small.start(), mute.start())
    answering.answers = [transaction(CONFIRMING, cancel_reason="x" * 2000)]
    for kind in ("sync", "async"):
        to_small, to_mute = (Client(kind, f"127.0.0.1:{port}") for port in ports)
        with pytest.raises(InvalidRequest, match="larger than max"):
            await to_small.execute(branch("bank-a", "debit", b"x" * 2000))
        with pytest.raises(InvalidRequest, match="larger than max"):
            await to_small.execute(branch("bank-a", "debit", b"x" * 17 * 1024 * 1024))
        with pytest.raises(OutcomeUnknown, match="larger than max"):
            await to_mute.execute(DEBIT)
        with pytest.raises(RequestFailed, match="larger than max"):
            await to_mute.get(idempotency_key="order-1")
        await to_small.close()
        await to_mute.close()
    await asyncio.gather(small.stop(None), mute.stop(None))


async def test_a_client_closed_under_way_does_not_know(answering: Coordinator, asking: Client) -> None:
    arrived, let_go = asyncio.Event(), asyncio.Event()

    async def hang(context: Any) -> None:
        arrived.set()
        await let_go.wait()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "too late")

    answering.answers = [hang]
    calling = asyncio.create_task(asking.execute(DEBIT, idempotency_key="order-1"))
    await arrived.wait()
    await asking.close()
    with pytest.raises(OutcomeUnknown, match="the client is closed") as caught:
        await calling
    assert caught.value.idempotency_key == "order-1"
    for wrong in (asking.execute(DEBIT), asking.get(idempotency_key="order-1")):
        with pytest.raises(ConfigurationError, match="the client is closed"):
            await wrong
    let_go.set()


async def test_a_cancelled_call_is_cancelled(answering: Coordinator) -> None:
    server, address = await serve(answering)
    arrived = asyncio.Event()

    async def hang(context: Any) -> None:
        arrived.set()
        await asyncio.Event().wait()

    answering.answers = [hang]
    client = Client("async", address)
    calling = asyncio.create_task(client.execute(DEBIT))
    await arrived.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    await client.close()
    await server.stop(None)


async def test_what_cannot_be_sent_is_always_an_invalid_request(answering: Coordinator, asking: Client) -> None:
    endless: dict[str, Any] = {}
    endless["it"] = endless
    with pytest.raises(InvalidRequest, match="contains itself"):
        branch("bank-a", "debit", endless)
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        branch("bank-a", "debit", {"name": "\ud800"})
    for timeout in (1e300, -1e300, 1e12, float("inf")):
        with pytest.raises(InvalidRequest) as caught:
            await asking.execute(DEBIT, timeout=timeout)
        assert list(caught.value.fields) == ["timeout"]
    with pytest.raises(InvalidRequest, match="idempotency key cannot be sent"):
        await asking.execute(DEBIT, idempotency_key="\ud800")
    for wrong in (branch("bank-\ud800", "debit", {}), branch("bank-a", "\ud800", {})):
        with pytest.raises(InvalidRequest, match="cannot be sent") as caught:
            await asking.execute(DEBIT, wrong)
        assert list(caught.value.fields) == ["branches[1]"]
    for arguments in ({"xid": "\ud800"}, {"idempotency_key": "\ud800"}):
        with pytest.raises(InvalidRequest, match="cannot be sent"):
            await asking.get(**arguments)
    assert answering.requests == []


async def test_the_message_of_an_unknown_outcome_says_what_to_do(answering: Coordinator, asking: Client) -> None:
    answering.answers = [transaction(TRYING)]
    with pytest.raises(OutcomeUnknown, match="still TRYING; execute the same branches with this idempotency_key again"):
        await asking.execute(DEBIT, patience=0.2)
