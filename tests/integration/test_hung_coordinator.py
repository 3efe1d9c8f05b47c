"""Coordinators that hang or have too much to do, as initiators meet them: sync and asyncio, real processes."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from participant_sdk import ConfigurationError, OutcomeUnknown, TransactionNotFound, TransactionState, branch
from participant_sdk.client_watching import STREAM_SECONDS
from participant_sdk.coordinator_messages import read_failure
from tests.coordinators import CALL_S, CoordinatorProcess
from tricord.v1 import coordinator_pb2 as pb

from .initiator import Initiator
from .participant_server import ParticipantServer

DEBIT = branch("bank", "debit", {"cents": 5})
CONFIRMED, CANCELLED = TransactionState.CONFIRMED, TransactionState.CANCELLED
PATIENCE_S = 8.0


@pytest.fixture
def other(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    """The one that is to hang. It has another store, of which nobody asks anything."""
    with CoordinatorProcess(store=tmp_path / "other.db") as process:
        yield process


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    with CoordinatorProcess(store=tmp_path / "tricord.db", live_max=1) as process:
        yield process


@pytest.fixture
def bank(coordinator: CoordinatorProcess) -> Iterator[ParticipantServer]:
    with ParticipantServer() as participant:
        coordinator.register("bank", participant.address)
        yield participant


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def client(kind: str, coordinator: CoordinatorProcess) -> AsyncIterator[Initiator]:
    made = Initiator(kind, coordinator.endpoint)
    yield made
    await made.close()


async def connected(kind: str, *coordinators: CoordinatorProcess) -> Initiator:
    """A client of several, that has a connection to the first."""
    made = Initiator(kind, ",".join(each.endpoint for each in coordinators))
    with pytest.raises(TransactionNotFound):
        await made.get(idempotency_key="no-such-order")
    return made


async def test_the_next_address_is_asked_within_patience(
    kind: str, other: CoordinatorProcess, coordinator: CoordinatorProcess, bank: ParticipantServer
) -> None:
    executing, reading, adding = [await connected(kind, other, coordinator) for _ in range(3)]
    with other.hung():
        done = await executing.execute(DEBIT, patience=PATIENCE_S)
        assert done.state is CONFIRMED
        reads = [reading.get(xid=done.xid, patience=PATIENCE_S) for _ in range(4)]  # that fail together move on by one
        assert {each.state for each in await asyncio.gather(*reads)} == {CONFIRMED}
        async with adding.block(timeout=30, patience=PATIENCE_S) as tx:
            await tx.try_(DEBIT)
        assert tx.ended.state is CONFIRMED
    for each in (executing, reading, adding):
        await each.close()


async def test_one_that_was_never_connected_to_is_passed_over(
    kind: str, other: CoordinatorProcess, coordinator: CoordinatorProcess, bank: ParticipantServer
) -> None:
    with other.hung():
        client = Initiator(kind, f"{other.endpoint},{coordinator.endpoint}")
        done = await client.execute(DEBIT, patience=PATIENCE_S)
        assert (await client.watched(xid=done.xid))[-1] is CONFIRMED
        await client.close()


async def test_a_watch_asks_elsewhere(
    kind: str, other: CoordinatorProcess, coordinator: CoordinatorProcess, bank: ParticipantServer, client: Initiator
) -> None:
    done = await client.execute(DEBIT)
    watching = await connected(kind, other, coordinator)
    with other.hung():
        states = await asyncio.wait_for(watching.watched(xid=done.xid, patience=PATIENCE_S), CALL_S)
    assert states[-1] is CONFIRMED
    await watching.close()


async def test_a_watch_of_a_coordinator_that_hangs_ends_clearly(
    coordinator: CoordinatorProcess, bank: ParticipantServer, client: Initiator
) -> None:
    async with client.block(timeout=60) as tx:
        await tx.try_(DEBIT)
        with coordinator.hung(), pytest.raises(OutcomeUnknown, match="cannot be watched") as raised:
            await asyncio.wait_for(client.watched(xid=tx.xid, patience=2), CALL_S)
    assert raised.value.xid == tx.xid


async def test_a_watch_lasts_while_nothing_happens(client: Initiator, bank: ParticipantServer) -> None:
    patience = 3.0
    assert patience / 2 < STREAM_SECONDS  # each stream is shorter than what is watched
    tx = client.block(timeout=5)
    await tx.__aenter__()
    assert (await client.watched(xid=tx.xid, patience=patience))[-1] is CANCELLED


async def test_a_watch_ends_when_its_client_is_closed(
    kind: str, coordinator: CoordinatorProcess, bank: ParticipantServer, client: Initiator
) -> None:
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    watching = Initiator(kind, coordinator.endpoint)

    def watch(xid: str) -> None:
        for _ in watching.made.watch(xid=xid):
            loop.call_soon_threadsafe(told.set)

    async def watch_async(xid: str) -> None:
        async for _ in watching.made.watch(xid=xid):
            told.set()

    async with client.block(timeout=60) as tx:
        task = asyncio.create_task(watch_async(tx.xid) if kind == "async" else asyncio.to_thread(watch, tx.xid))
        await told.wait()
        await watching.close()
        with pytest.raises(ConfigurationError, match="the client is closed"):
            await asyncio.wait_for(task, CALL_S)


async def test_a_coordinator_with_too_much_to_do_is_asked_when_it_says(
    coordinator: CoordinatorProcess, bank: ParticipantServer, client: Initiator
) -> None:
    async with client.block(timeout=60) as tx:
        await tx.try_(DEBIT)
        with pytest.raises(grpc.RpcError) as refused:
            coordinator.coordinator_service().Begin(pb.BeginRequest(idempotency_key="order-1"), timeout=CALL_S)
        failure = read_failure(refused.value)
        assert (failure.code, failure.retry_after) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 1.0)
        with pytest.raises(OutcomeUnknown, match="OVERLOADED"):
            await client.execute(DEBIT, patience=failure.retry_after / 2)
        later = asyncio.create_task(client.execute(DEBIT, patience=CALL_S))
    assert (await later).state is CONFIRMED
