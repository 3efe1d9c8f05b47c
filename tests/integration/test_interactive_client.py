# ruff: noqa: PT012 - what leaving a block raises is what is looked at
"""The initiator's interactive transactions, sync and asyncio, against real coordinators."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from participant_sdk import (
    AlreadyDecided,
    AsyncTricordClient,
    InvalidRequest,
    OutcomeUnknown,
    RequestFailed,
    TransactionCancelled,
    TransactionState,
    TricordClient,
    Wait,
    branch,
    current_xid,
)
from tests.coordinators import CALL_S, CoordinatorProcess
from tests.postgres import free_port
from tricord.v1 import coordinator_pb2, types_pb2
from tricord.v1 import participant_pb2 as participant_pb

from .initiator import Initiator
from .participant_server import ParticipantServer, refuse

TRY, CONFIRM = participant_pb.PHASE_TRY, participant_pb.PHASE_CONFIRM
CONFIRMED, CANCELLED = TransactionState.CONFIRMED, TransactionState.CANCELLED


def held(call: participant_pb.Call) -> participant_pb.Reply:
    result = types_pb2.Payload(data=b'{"hold":%d}' % call.branch_id, content_type="application/json")
    return participant_pb.Reply(outcome=participant_pb.OUTCOME_DONE, result=result if call.phase == TRY else None)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    settings: dict[str, Any] = {"backoff_base_ms": 20, "backoff_cap_ms": 200, "call_timeout_ms": 2_000}
    with CoordinatorProcess(store=tmp_path / "tricord.db", **settings) as process:
        yield process


@pytest.fixture
def bank(coordinator: CoordinatorProcess) -> Iterator[ParticipantServer]:
    with ParticipantServer(held) as participant:
        coordinator.register("bank", participant.address)
        yield participant


@pytest.fixture
def client(coordinator: CoordinatorProcess, bank: ParticipantServer) -> Iterator[TricordClient]:
    with TricordClient(coordinator.endpoint) as made:
        yield made


DEBIT = branch("bank", "debit", {"cents": 5})
CREDIT = branch("bank", "credit", {"cents": 5})


def phases(bank: ParticipantServer) -> list[tuple[int, str]]:
    return sorted((seen.call.branch_id, seen.phase) for seen in bank.seen())


def test_leaving_the_block_confirms(client: TricordClient, bank: ParticipantServer) -> None:
    with client.transaction(timeout=20, metadata={"tenant": "t1"}) as tx:
        assert current_xid() == tx.xid
        assert tx.try_(DEBIT, dict[str, int]) == {"hold": 1}
        assert tx.try_all(CREDIT, CREDIT)[1] is not None
        assert [each.branch_id for each in tx.branches] == [1, 2, 3]
    assert current_xid() is None
    assert tx.ended is not None
    assert tx.ended.state is CONFIRMED
    assert client.get(xid=tx.xid).metadata == {"tenant": "t1"}
    assert phases(bank) == [(n, phase) for n in (1, 2, 3) for phase in ("CONFIRM", "TRY")]


@pytest.mark.parametrize("error", [ValueError("no seats"), KeyboardInterrupt()])
def test_an_exception_cancels_and_goes_on(client: TricordClient, bank: ParticipantServer, error: BaseException) -> None:
    with pytest.raises(type(error)), client.transaction(timeout=20) as tx:
        tx.try_(DEBIT)
        raise error
    *_, last = client.watch(xid=tx.xid)
    assert last.state is CANCELLED
    assert type(error).__name__ in last.cancel_reason


def test_case_18_a_refused_branch_cannot_be_swallowed(client: TricordClient, bank: ParticipantServer) -> None:
    bank.answer = lambda call: refuse(call) if call.action == "credit" else held(call)
    with pytest.raises(TransactionCancelled) as raised, client.transaction(timeout=20) as tx:
        tx.try_(DEBIT)
        with pytest.raises(TransactionCancelled) as refused:
            tx.try_(CREDIT)
        assert refused.value.refusal is not None
        assert (refused.value.refusal.reason, refused.value.refusal.branch_id) == ("insufficient_funds", 2)
    assert raised.value.transaction.xid == tx.xid
    *_, last = client.watch(xid=tx.xid)
    assert last.state is CANCELLED


def test_case_18_nor_one_of_which_nothing_was_heard(client: TricordClient, bank: ParticipantServer) -> None:
    bank.answer = lambda call: None if call.action == "credit" and call.phase == TRY else held(call)
    with pytest.raises(TransactionCancelled, match="not known whether bank/credit"):  # noqa: SIM117 - the block's end
        with client.transaction(timeout=20, patience=2) as tx:
            tx.try_(DEBIT)
            with pytest.raises(OutcomeUnknown):
                tx.try_(CREDIT)
    *_, last = client.watch(xid=tx.xid)
    assert last.state is CANCELLED
    assert (1, "CONFIRM") not in phases(bank)


def test_an_empty_block_leaves_nothing_open(client: TricordClient) -> None:
    with client.transaction(timeout=20) as tx:
        pass
    assert client.get(xid=tx.xid).state is CANCELLED


def test_case_20_a_confirm_after_the_deadline(client: TricordClient, bank: ParticipantServer) -> None:
    with pytest.raises(TransactionCancelled, match="timeout of 1500 ms"), client.transaction(timeout=1.5) as tx:
        tx.try_(DEBIT)
        list(client.watch(xid=tx.xid))
    with client.transaction(timeout=20) as tx:
        tx.try_(DEBIT)
        tx.confirm()
        with pytest.raises(RequestFailed) as raised:
            tx.cancel()
        assert raised.value.reason == "NOT_TRYING"


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_the_deadline_moves(kind: str, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
    stub, client = coordinator.coordinator_service(), Initiator(kind, coordinator.endpoint)

    def deadline() -> int:
        return stub.Get(coordinator_pb2.GetRequest(xid=tx.xid), timeout=CALL_S).transaction.deadline_time.seconds

    async with client.block(timeout=20) as tx:
        before = deadline()
        await tx.try_(DEBIT)
        await tx.renew(3_600)
        assert 3_500 < deadline() - before < 3_700
        with pytest.raises(RequestFailed) as raised:
            await tx.renew(24 * 3_600)
        assert raised.value.reason == "DEADLINE_TOO_LATE"
        for wrong in (0, -1, 25 * 3_600, float("nan"), 1e15):
            with pytest.raises(InvalidRequest) as invalid:
                await tx.renew(wrong)
            assert list(invalid.value.fields) == ["timeout"]
    assert tx.ended.state is CONFIRMED
    with pytest.raises(AlreadyDecided):
        await tx.renew(60)
    await client.close()


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_all_are_tried_at_once(kind: str, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
    together = threading.Barrier(3)

    def meets(call: participant_pb.Call) -> participant_pb.Reply:
        if call.phase == TRY:
            together.wait(CALL_S)  # each is under way before any is answered
        return held(call)

    client = Initiator(kind, coordinator.endpoint)
    bank.answer = meets
    async with client.block(timeout=CALL_S) as tx:
        assert await tx.try_all() == []
        results = await tx.try_all(DEBIT, CREDIT, DEBIT)
        assert sorted(each.decode(dict[str, int])["hold"] for each in results) == [1, 2, 3]
    assert (tx.ended.state, len(tx.branches)) == (CONFIRMED, 3)
    bank.answer = lambda call: refuse(call) if call.action == "credit" else held(call)
    with pytest.raises(TransactionCancelled, match="insufficient_funds"):
        async with client.block(timeout=20) as tx:
            with pytest.raises(TransactionCancelled):
                await tx.try_all(DEBIT, CREDIT)
    assert (await client.watched(xid=tx.xid))[-1] is CANCELLED
    await client.close()


def test_ordered_and_accepted(client: TricordClient, bank: ParticipantServer) -> None:
    tx = client.execute(DEBIT, CREDIT, ordered=True, wait=Wait.ACCEPTED)
    seen = [each.state for each in client.watch(idempotency_key=tx.idempotency_key)]
    assert seen[-1] is CONFIRMED
    assert [seen.call.branch_id for seen in bank.seen("TRY")] == [1, 2]


async def test_the_same_on_asyncio(coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
    async with AsyncTricordClient(coordinator.endpoint) as client:
        async with client.transaction(timeout=20) as tx:
            assert await tx.try_(DEBIT, dict[str, int]) == {"hold": 1}
            assert len(await tx.try_all(CREDIT, CREDIT)) == 2
        assert [each.state async for each in client.watch(xid=tx.xid)][-1] is CONFIRMED
        with pytest.raises(ZeroDivisionError):
            async with client.transaction(timeout=20) as tx:
                await tx.try_(DEBIT)
                raise ZeroDivisionError
        assert [each.state async for each in client.watch(xid=tx.xid)][-1] is CANCELLED

        async def stays() -> None:
            async with client.transaction(timeout=20) as tx:
                xids.append(tx.xid)
                await tx.try_(DEBIT)
                tried.set()
                await asyncio.Event().wait()

        xids: list[str] = []
        tried = asyncio.Event()
        task = asyncio.create_task(stays())
        await tried.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [each.state async for each in client.watch(xid=xids[0])][-1] is CANCELLED


def test_a_coordinator_that_starts_over_loses_nothing(coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
    """The Confirm's answer is lost with its coordinator; the next endpoint that is asked is dead, too."""
    go_on, reached = threading.Event(), threading.Event()

    def answer(call: participant_pb.Call) -> participant_pb.Reply:
        if call.phase == CONFIRM and not go_on.is_set():
            reached.set()
            return participant_pb.Reply(outcome=participant_pb.OUTCOME_UNKNOWN)
        return held(call)

    bank.answer = answer

    def start_over() -> None:
        assert reached.wait(CALL_S)
        coordinator.kill()
        go_on.set()
        coordinator.start()

    helper = threading.Thread(target=start_over)
    helper.start()
    try:
        with (
            TricordClient(f"{coordinator.endpoint},127.0.0.1:{free_port()}") as client,
            client.transaction(timeout=30) as tx,
        ):
            tx.try_(DEBIT)
    finally:
        helper.join(CALL_S)
    assert tx.ended is not None
    assert tx.ended.state is CONFIRMED


INITIATOR = """
import sys
from participant_sdk import TricordClient, branch
with TricordClient(sys.argv[1]) as client, client.transaction(timeout=4) as tx:
    tx.try_(branch("bank", "debit", {"cents": 5}))
    print(tx.xid, flush=True)
    sys.stdin.read()
"""


def test_case_4_an_initiator_that_is_killed_in_its_block(
    coordinator: CoordinatorProcess, bank: ParticipantServer, client: TricordClient
) -> None:
    command = [sys.executable, "-c", INITIATOR, coordinator.endpoint]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        xid = process.stdout.readline().strip()
        os.kill(process.pid, signal.SIGKILL)
    *_, last = client.watch(xid=xid)
    assert last.state is CANCELLED
    assert "its timeout of 4000 ms" in last.cancel_reason
    assert phases(bank) == [(1, "CANCEL"), (1, "TRY")]
