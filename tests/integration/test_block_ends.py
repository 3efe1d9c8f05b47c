# ruff: noqa: PT012 - what leaving a block raises is what is looked at
"""How a block ends when something is in its way: an earlier run, a cancelled task, a closed client, a swallowed error.

Sync and asyncio, against a real coordinator.
"""

import asyncio
import contextvars
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from participant_sdk import (
    AlreadyDecided,
    AsyncTricordClient,
    ConfigurationError,
    OutcomeUnknown,
    RequestFailed,
    TransactionCancelled,
    TransactionState,
    TricordClient,
    branch,
    current_xid,
)
from tests.coordinators import CALL_S, CoordinatorProcess
from tricord.v1 import participant_pb2 as pb

from .initiator import Initiator
from .participant_server import ParticipantServer, done

DEBIT, CREDIT = branch("bank", "debit", {"cents": 5}), branch("bank", "credit", {"cents": 5})
CONFIRMED, CANCELLED = TransactionState.CONFIRMED, TransactionState.CANCELLED
DONE = (TransactionState.CONFIRMING, CONFIRMED)
NOTHING_HAPPENED = (TransactionState.CANCELLING, CANCELLED)
LIMIT_S = 15.0
"""Much longer than anything here takes, much shorter than the patience of a block."""


class Gate:
    """A bank that does not answer the calls of one phase, or of one action's Try, before `opened` is set."""

    def __init__(self, phase: "pb.Phase.ValueType", action: str = "") -> None:
        self.opened = threading.Event()
        self._phase, self._action = phase, action

    def __call__(self, call: pb.Call) -> pb.Reply:
        if call.phase == self._phase and self._action in ("", call.action) and not self.opened.is_set():
            return pb.Reply(outcome=pb.OUTCOME_UNKNOWN)
        return done(call)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    with CoordinatorProcess(store=tmp_path / "tricord.db", backoff_base_ms=20, backoff_cap_ms=200) as process:
        yield process


@pytest.fixture
def bank(coordinator: CoordinatorProcess) -> Iterator[ParticipantServer]:
    with ParticipantServer() as participant:
        coordinator.register("bank", participant.address)
        yield participant


@pytest.fixture(params=["sync", "async"])
async def client(
    request: pytest.FixtureRequest, coordinator: CoordinatorProcess, bank: ParticipantServer
) -> AsyncIterator[Initiator]:
    made = Initiator(request.param, coordinator.endpoint)
    yield made
    await made.close()


async def test_a_block_is_not_run_again_under_the_key_of_a_decided_one(
    client: Initiator, bank: ParticipantServer
) -> None:
    async with client.block(idempotency_key="order-1", timeout=20) as first:
        await first.try_(DEBIT)
    calls = len(bank.seen())
    with pytest.raises(AlreadyDecided, match=r"is CONFIRM(ED|ING) already") as raised:
        async with client.block(idempotency_key="order-1", timeout=20):
            raise AssertionError("the body ran again")
    assert (raised.value.xid, raised.value.state in DONE, len(bank.seen())) == (first.xid, True, calls)
    assert len(raised.value.transaction.branches) == 1
    with pytest.raises(ZeroDivisionError):
        async with client.block(idempotency_key="order-2", timeout=20) as first:
            raise ZeroDivisionError
    with pytest.raises(AlreadyDecided) as raised:
        await client.block(idempotency_key="order-2", timeout=20).__aenter__()
    assert (raised.value.xid, raised.value.state in NOTHING_HAPPENED) == (first.xid, True)


async def test_nor_is_what_another_block_confirmed_meanwhile(client: Initiator, bank: ParticipantServer) -> None:
    with pytest.raises(AlreadyDecided) as raised:
        async with client.block(idempotency_key="order-1", timeout=20) as second:
            async with client.block(idempotency_key="order-1", timeout=20) as first:
                await first.try_(DEBIT, branch_key="debit")
            assert first.xid == second.xid
            for _ in range(2):
                with pytest.raises(AlreadyDecided):  # swallowed, it is raised again at the end
                    await second.try_(DEBIT, branch_key="debit")
            with pytest.raises(AlreadyDecided):
                await second.renew(60)
    assert raised.value.state in DONE
    assert len(bank.seen("TRY")) == 1


async def test_a_key_takes_up_what_is_still_open(client: Initiator, bank: ParticipantServer) -> None:
    first = client.block(idempotency_key="order-1", timeout=20)
    await first.__aenter__()
    await first.try_(DEBIT, branch_key="debit")  # and the process dies
    async with client.block(idempotency_key="order-1", timeout=20) as second:
        await second.try_(DEBIT, branch_key="debit")
    assert (second.xid, second.ended.state, len(bank.seen("TRY"))) == (first.xid, CONFIRMED, 1)
    await first.__aexit__(None, None, None)  # it was not dead after all: the answer is the same
    assert first.ended.state is CONFIRMED


async def test_without_their_keys_the_branches_of_the_first_run_bar_the_confirm(
    client: Initiator, bank: ParticipantServer
) -> None:
    await (await client.block(idempotency_key="order-1", timeout=20).__aenter__()).try_(DEBIT)
    with pytest.raises(RequestFailed) as raised:
        async with client.block(idempotency_key="order-1", timeout=20) as tx:
            await tx.try_(DEBIT)
    assert raised.value.reason == "BRANCHES_NOT_NAMED"
    assert (await client.watched(xid=tx.xid))[-1] is CANCELLED
    assert not bank.seen("CONFIRM")


async def test_patience_is_each_calls_own(client: Initiator, bank: ParticipantServer) -> None:
    def late(call: pb.Call) -> pb.Reply:
        if call.phase == pb.PHASE_TRY:
            time.sleep(0.5)
        return done(call)

    bank.answer = late
    async with client.block(timeout=60, patience=3) as tx:
        await asyncio.sleep(3.1)  # as long as a person thinks
        await tx.try_(DEBIT)
    assert tx.ended.state is CONFIRMED


async def test_the_reason_tells_no_more_than_the_errors_type(client: Initiator) -> None:
    with pytest.raises(ValueError, match="4111"):
        async with client.block(timeout=20) as tx:
            await tx.try_(DEBIT)
            raise ValueError("card 4111 1111 1111 1111")
    await client.watched(xid=tx.xid)
    assert (await client.get(xid=tx.xid)).cancel_reason == "cancelled by its initiator: ValueError"


async def test_a_task_is_cancelled_while_its_block_waits_for_the_confirm(
    coordinator: CoordinatorProcess, bank: ParticipantServer
) -> None:
    bank.answer = gate = Gate(pb.PHASE_CONFIRM)
    xids = []

    async def buy(client: AsyncTricordClient, *, early: bool) -> None:
        async with client.transaction(timeout=20) as tx:
            xids.append(tx.xid)
            await tx.try_(DEBIT)
            if early:
                await tx.confirm()

    async with AsyncTricordClient(coordinator.endpoint) as client:
        for number, early in enumerate((False, True), 1):
            task = asyncio.create_task(buy(client, early=early))
            while len({seen.call.xid for seen in bank.seen("CONFIRM")}) < number:
                await asyncio.to_thread(bank.wait_for, len(bank.seen("CONFIRM")) + 1, "CONFIRM")
            task.cancel()
            await asyncio.wait([task], timeout=LIMIT_S)
            assert task.done(), "it went on waiting for its Confirm"
            assert task.cancelled()
        gate.opened.set()
        for xid in xids:
            assert [each.state async for each in client.watch(xid=xid)][-1] is CONFIRMED


async def test_a_block_is_left_in_another_context(coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
    async with AsyncTricordClient(coordinator.endpoint) as client:
        tx = client.transaction(timeout=20)
        await asyncio.create_task(tx.__aenter__())
        await tx.try_(DEBIT)
        await tx.__aexit__(None, None, None)
        assert tx.ended is not None
        assert (tx.ended.state, current_xid()) == (CONFIRMED, None)


def test_a_context_that_took_the_block_over_is_rid_of_it(
    coordinator: CoordinatorProcess, bank: ParticipantServer
) -> None:
    with TricordClient(coordinator.endpoint) as client:
        block = client.transaction(timeout=20)
        entered = contextvars.copy_context()
        tx = entered.run(block.__enter__)
        tx.try_(DEBIT)
        left = entered.copy()
        assert left.run(current_xid) == tx.xid
        left.run(block.__exit__, None, None, None)
        assert tx.ended is not None
        assert (tx.ended.state, left.run(current_xid), current_xid()) == (CONFIRMED, None, None)


async def test_a_client_is_closed_while_a_confirm_is_on_its_way(
    client: Initiator, coordinator: CoordinatorProcess, bank: ParticipantServer
) -> None:
    bank.answer = gate = Gate(pb.PHASE_CONFIRM)
    block = client.block(timeout=20)

    async def buy() -> None:
        async with block as tx:
            await tx.try_(DEBIT)

    task = asyncio.create_task(buy())
    await asyncio.to_thread(bank.wait_for, 1, "CONFIRM")
    await client.close()
    with pytest.raises(OutcomeUnknown, match="the client is closed") as raised:
        await asyncio.wait_for(task, CALL_S)
    assert (raised.value.xid, raised.value.idempotency_key) == (block.xid, block.idempotency_key)
    gate.opened.set()
    other = Initiator("async", coordinator.endpoint)
    assert (await other.watched(xid=raised.value.xid))[-1] is CONFIRMED
    await other.close()
    with pytest.raises(ConfigurationError, match="the client is closed"):
        await client.block(timeout=20).__aenter__()


async def test_a_client_is_closed_before_the_confirm(client: Initiator) -> None:
    with pytest.raises(ConfigurationError, match="the client is closed"):
        async with client.block(timeout=20) as tx:
            await tx.try_(DEBIT)
            await client.close()


async def test_a_block_that_cancels_ends_quietly(client: Initiator, bank: ParticipantServer) -> None:
    async with client.block(timeout=20) as tx:
        await tx.try_(DEBIT)
        assert (await tx.cancel("no seat")).state in NOTHING_HAPPENED
        with pytest.raises(TransactionCancelled):
            await tx.try_(CREDIT)
    assert (await client.watched(xid=tx.xid))[-1] is CANCELLED
    assert tx.ended.cancel_reason == "cancelled by its initiator: no seat"
    assert not bank.seen("CONFIRM")


async def test_a_cancel_that_comes_after_a_confirm_of_which_nothing_was_heard(
    client: Initiator, bank: ParticipantServer
) -> None:
    bank.answer = gate = Gate(pb.PHASE_CONFIRM)
    async with client.block(timeout=20, patience=2) as tx:
        await tx.try_(DEBIT)
        with pytest.raises(OutcomeUnknown, match="it is still CONFIRMING"):
            await tx.confirm()
        with pytest.raises(RequestFailed, match="cannot be cancelled"):
            await tx.cancel()
        gate.opened.set()
    assert tx.ended.state is CONFIRMED


async def test_an_unknown_try_that_is_swallowed(client: Initiator, bank: ParticipantServer) -> None:
    bank.answer = Gate(pb.PHASE_TRY, "credit")
    with pytest.raises(TransactionCancelled, match="not known whether bank/credit was tried") as raised:
        async with client.block(timeout=20, patience=2) as tx:
            await tx.try_(DEBIT)
            with pytest.raises(OutcomeUnknown) as unknown:
                await tx.try_(CREDIT)
            assert (unknown.value.xid, unknown.value.idempotency_key) == (tx.xid, tx.idempotency_key)
    assert raised.value.transaction.xid == tx.xid
    assert (await client.watched(xid=tx.xid))[-1] is CANCELLED
    assert not bank.seen("CONFIRM")


async def test_it_may_be_asked_again_by_its_branch_key(client: Initiator, bank: ParticipantServer) -> None:
    bank.answer = gate = Gate(pb.PHASE_TRY, "credit")
    async with client.block(timeout=20, patience=2.5) as tx:
        with pytest.raises(OutcomeUnknown):
            await tx.try_(CREDIT, branch_key="credit")
        gate.opened.set()
        await tx.try_(CREDIT, branch_key="credit")
    assert (tx.ended.state, len(tx.branches)) == (CONFIRMED, 1)


async def test_a_try_that_was_not_waited_for_bars_the_confirm(
    coordinator: CoordinatorProcess, bank: ParticipantServer
) -> None:
    async with AsyncTricordClient(coordinator.endpoint) as client:
        with pytest.raises(TransactionCancelled, match="not known whether bank/credit was tried"):
            async with client.transaction(timeout=20) as tx:
                await tx.try_(DEBIT)
                with coordinator.hung(), pytest.raises(TimeoutError):  # the coordinator never hears of it
                    await asyncio.wait_for(tx.try_(CREDIT), 0.2)
    assert not bank.seen("CONFIRM")
