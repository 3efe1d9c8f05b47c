"""SIGTERM to a coordinator whose clients have interactive transactions open: another one serves the rest of them."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from participant_sdk import TransactionState, TricordClient, branch
from tests.coordinators import CoordinatorProcess

from .participant_server import ParticipantServer, done
from .scene import CONFIRM, TRY, Call, Reply, Scene, counted

pytestmark = pytest.mark.database

DRAIN_MS = 500
END_S = DRAIN_MS / 1_000 + 15.0
"""Some two seconds are promised; the rest is for a busy machine."""
DEBIT = branch("bank", "debit", {})
RESERVE = branch("stock", "debit", {})


def two(scene: Scene, lease_ms: int) -> tuple[CoordinatorProcess, CoordinatorProcess, str]:
    """Two coordinators on one store, and their addresses for a client, which asks the first one first."""
    first, second = (
        scene.coordinator(drain_ms=DRAIN_MS, call_timeout_ms=lease_ms - 1_000, lease_ms=lease_ms, backoff_cap_ms=200)
        for _ in range(2)
    )
    return first, second, f"{first.endpoint},{second.endpoint}"


def ends_in_time(coordinator: CoordinatorProcess) -> None:
    """SIGTERM, and what must come of it."""
    began_s = time.monotonic()
    assert coordinator.stop() == 0, coordinator.text_log()
    assert time.monotonic() - began_s < END_S
    assert "Traceback" not in coordinator.text_log()
    assert len(coordinator.log("coordinator.stopped")) == 1


def phases(participant: ParticipantServer) -> list[str]:
    """What it was asked, in order."""
    return [seen.phase for seen in participant.seen()]


@pytest.mark.parametrize("asked_of_the_second_before", [False, True])
def test_a_client_that_thinks_goes_on_at_another_coordinator(shared: Scene, asked_of_the_second_before: bool) -> None:
    first, second, endpoints = two(shared, 10_000)
    with TricordClient(endpoints) as client, TricordClient(second.endpoint) as other:
        with client.transaction(timeout=60) as tx:
            tx.try_(DEBIT)
            if asked_of_the_second_before:
                assert other.get(xid=tx.xid).state is TransactionState.TRYING
            ends_in_time(first)  # while the client thinks
            assert other.get(xid=tx.xid).state is TransactionState.TRYING  # it cancelled nothing
            tx.try_(RESERVE)
        assert tx.ended is not None
        assert tx.ended.state is TransactionState.CONFIRMED
    assert phases(shared.bank) == phases(shared.stock) == ["TRY", "CONFIRM"]
    assert second.stop() == 0


@pytest.mark.parametrize("held_phase", [TRY, CONFIRM])
def test_a_call_that_outlasts_the_drain_is_asked_of_another_coordinator(shared: Scene, held_phase: int) -> None:
    """Whoever waits for its answer is told by the other one, and the branch is the same."""
    first, _, endpoints = two(shared, 5_000)
    go_on = threading.Event()

    def answer(call: Call) -> Reply:
        if call.phase == held_phase:
            go_on.wait()
        return done(call)

    def buy() -> TransactionState:
        with client.transaction(timeout=60) as tx:
            tx.try_(DEBIT)
            tx.try_(RESERVE)
        assert tx.ended is not None
        return tx.ended.state

    shared.stock.answer = answer
    with TricordClient(endpoints) as client, ThreadPoolExecutor(1) as pool:
        buying = pool.submit(buy)
        try:
            shared.stock.wait_for(1 if held_phase == TRY else 2)
            ends_in_time(first)
        finally:
            go_on.set()
        assert buying.result() is TransactionState.CONFIRMED
    assert phases(shared.bank) == ["TRY", "CONFIRM"]
    called = phases(shared.stock)  # once more what was asked when the first one ended: the same call of the same branch
    assert called == (["TRY", "TRY", "CONFIRM"] if held_phase == TRY else ["TRY", "CONFIRM", "CONFIRM"])
    assert set(counted(shared.stock)) == {
        (seen.call.xid, 2, phase, 1) for seen in shared.stock.seen() for phase in (1, 2)
    }
