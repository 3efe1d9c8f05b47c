"""The coordinator's rows of the list of cases that hurt users of other systems, by their number."""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc
import pytest

from examples.transfer.databases import eventually
from tests.coordinators import CALL_S, branch, execute_request, states, tricord
from tests.postgres import PostgresServer
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import participant_pb2 as participant_pb
from tricord.v1 import types_pb2

from .participant_server import done, refuse
from .scene import CONFIRM, TRY, Call, Reply, Scene, attempts, counted, finished, unknown


def test_case_1_a_decision_to_confirm_outlives_its_coordinator(scene: Scene) -> None:
    healed = threading.Event()
    scene.stock.answer = lambda call: unknown() if call.phase == CONFIRM and not healed.is_set() else done(call)
    coordinator = scene.coordinator()
    request = execute_request(branch(), branch("stock"), key="order", wait=pb.WAIT_DECIDED)
    tx = coordinator.coordinator_service().Execute(request, timeout=CALL_S).transaction
    assert states(tx)[0] == "CONFIRMING"
    scene.bank.wait_for(1, "CONFIRM")
    scene.stock.wait_for(3, "CONFIRM")
    for _ in range(2):
        coordinator.kill()
        before = len(scene.stock.seen("CONFIRM"))
        coordinator.start()
        scene.stock.wait_for(before + 3, "CONFIRM")
    healed.set()
    assert states(finished(coordinator.coordinator_service(), xid=tx.xid)) == ["CONFIRMED"] * 3
    assert scene.bank.seen("CANCEL") + scene.stock.seen("CANCEL") == []


def test_case_6_what_is_confirmed_is_not_confirmed_again_each_round(scene: Scene) -> None:
    rounds = 12
    scene.stock.answer = lambda call: unknown() if call.phase == CONFIRM and call.attempt < rounds else done(call)
    coordinator = scene.coordinator()
    tx = coordinator.coordinator_service().Execute(execute_request(branch(), branch("stock")), timeout=CALL_S)
    assert states(tx.transaction) == ["CONFIRMED"] * 3
    assert attempts(scene.stock, 2, CONFIRM) == list(range(1, rounds + 1))
    assert attempts(scene.bank, 1, CONFIRM) == [1]


@pytest.mark.parametrize(("timeout_ms", "end"), [(40_000, "CONFIRMED"), (3_000, "CANCELLED")])
@pytest.mark.database
def test_case_5_no_confirm_leaves_while_the_decision_cannot_be_stored(
    own_server: PostgresServer, timeout_ms: int, end: str
) -> None:
    store = own_server.create_database()
    tried, go_on = threading.Event(), threading.Event()

    def answer(call: Call) -> Reply:
        if call.phase == TRY:
            tried.set()
            assert go_on.wait(CALL_S)
        return done(call)

    with ExitStack() as stack:
        scene = Scene(stack, store)
        scene.bank.answer = answer
        coordinator = scene.coordinator(call_timeout_ms=8_000, lease_ms=10_000)
        stub = coordinator.coordinator_service()
        with ThreadPoolExecutor(1) as pool:
            request = execute_request(branch(), branch("stock"), key="order", timeout_ms=timeout_ms)
            running = pool.submit(stub.Execute, request, timeout=CALL_S)
            assert tried.wait(CALL_S)
            own_server.kill()
            go_on.set()
            eventually("the flush is lost", lambda: bool(coordinator.log("store.flush_lost")))
            if end == "CANCELLED":  # the deadline passes while the database is away
                threading.Event().wait(timeout_ms / 1000)
            assert scene.bank.seen("CONFIRM") + scene.stock.seen("CONFIRM") == []
            own_server.start()
            tx = running.result().transaction
        # A decision whose COMMIT was under way is settled by its row, and it was made in time.
        assert states(tx)[0] in {end, "CONFIRMED"}
        phases = {seen.phase for seen in scene.bank.seen() + scene.stock.seen()} - {"TRY"}
        assert phases == {"CONFIRM" if states(tx)[0] == "CONFIRMED" else "CANCEL"}


@pytest.mark.database
def test_case_12_two_scanners_send_each_call_once(shared: Scene) -> None:
    """Every Try and every Confirm fails twice: each attempt arrives once, from whichever coordinator."""
    shared.bank.answer = lambda call: unknown() if call.attempt < 3 else done(call)
    shared.stock.answer = shared.bank.answer
    stubs = [shared.coordinator(lease_ms=8_000, call_timeout_ms=5_000).coordinator_service() for _ in range(2)]
    with ThreadPoolExecutor(20) as pool:
        requests = [execute_request(branch(), branch("stock"), key=f"order-{n}") for n in range(60)]
        answers = pool.map(lambda n: stubs[n % 2].Execute(requests[n], timeout=CALL_S), range(60))
        assert all(states(answer.transaction)[0] == "CONFIRMED" for answer in answers)
    for participant in (shared.bank, shared.stock):
        calls = counted(participant)
        assert set(calls.values()) == {1}
        assert len(calls) == 60 * 2 * 3


@pytest.mark.database
def test_case_13_what_is_being_driven_is_not_adopted(shared: Scene) -> None:
    """Four slow Trys one after another take longer than a lease, which is renewed meanwhile."""
    slow = threading.Event()

    def answer(call: Call) -> Reply:
        if call.phase == TRY:
            slow.wait(0.7)  # never set: it takes so long
        return done(call)

    shared.bank.answer = answer
    first, second = shared.coordinator(), shared.coordinator()
    request = execute_request(*[branch()] * 4)
    request.ordered = True
    tx = first.coordinator_service().Execute(request, timeout=CALL_S).transaction
    assert states(tx) == ["CONFIRMED"] * 5
    assert set(counted(shared.bank).values()) == {1}
    assert second.stop() == 0
    (stopped,) = second.log("coordinator.stopped")
    assert stopped["recovered"] == 0


def test_case_24_a_no_to_confirm_is_flagged_and_never_becomes_a_cancel(scene: Scene) -> None:
    asked = itertools.count(1)

    def answer(call: Call) -> Reply:
        if call.phase == CONFIRM and next(asked) <= 3:
            return Reply(
                outcome=participant_pb.OUTCOME_REFUSED, refusal=types_pb2.Refusal(reason="limit", message="not today")
            )
        return done(call)

    scene.bank.answer = answer
    coordinator = scene.coordinator()
    request = execute_request(branch(), branch("stock"), wait=pb.WAIT_DECIDED)
    tx = coordinator.coordinator_service().Execute(request, timeout=CALL_S).transaction
    tx = finished(coordinator.coordinator_service(), xid=tx.xid)
    assert states(tx) == ["CONFIRMED"] * 3
    assert tx.attention == types_pb2.ATTENTION_VIOLATION
    assert tx.branches[0].last_error == "refused CONFIRM, which cannot be refused: limit: not today"
    assert scene.bank.seen("CANCEL") + scene.stock.seen("CANCEL") == []
    assert len(scene.bank.seen("CONFIRM")) == 4


def test_case_28_who_refused_and_why_is_stored_and_shown(scene: Scene) -> None:
    scene.stock.answer = refuse
    coordinator = scene.coordinator()
    tx = coordinator.coordinator_service().Execute(execute_request(branch(), branch("stock")), timeout=CALL_S)
    reason = "branch 2 (stock.debit) refused: insufficient_funds: only 3 left"
    assert tx.transaction.cancel_reason == reason
    coordinator.kill()
    coordinator.start()
    shown = tricord("show", tx.transaction.xid, "--endpoint", coordinator.endpoint)
    assert shown.returncode == 0, shown.stderr
    text = " ".join(shown.stdout.split())
    assert reason in text
    assert "REFUSED" in text


def test_case_4_the_deadline_ends_what_its_initiator_left(scene: Scene) -> None:
    """The initiator begins, tries, and is never heard of again; the coordinator dies too, and comes back."""
    coordinator = scene.coordinator()
    stub = coordinator.coordinator_service()
    request = pb.BeginRequest()
    request.timeout.FromMilliseconds(4_000)
    xid = stub.Begin(request, timeout=CALL_S).transaction.xid
    stub.Try(pb.CoordinatorServiceTryRequest(xid=xid, branch_key="1", branch=branch()), timeout=CALL_S)
    coordinator.kill()
    coordinator.start()
    tx = finished(coordinator.coordinator_service(), xid=xid)
    assert states(tx) == ["CANCELLED", "CANCELLED"]
    assert tx.decide_time.ToMilliseconds() - tx.deadline_time.ToMilliseconds() >= 0
    assert [seen.phase for seen in scene.bank.seen()] == ["TRY", "CANCEL"]


def until_unavailable(call: Callable[[], Any]) -> None:
    """Call it, and expect that its connection breaks."""
    with pytest.raises(grpc.RpcError) as raised:
        call()
    assert raised.value.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


def test_case_23_phase_2_goes_on_without_its_initiator(scene: Scene) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def answer(call: Call) -> Reply:
        if call.phase == CONFIRM:
            reached.set()
            assert go_on.wait(CALL_S)
        return done(call)

    scene.bank.answer = answer
    coordinator = scene.coordinator(call_timeout_ms=8_000, lease_ms=10_000)
    stub = coordinator.coordinator_service()
    running = stub.Execute.future(execute_request(branch(), branch("stock"), key="order"), timeout=CALL_S)
    assert reached.wait(CALL_S)
    running.cancel()
    until_unavailable(lambda: _raised(running))
    go_on.set()
    assert states(finished(stub, idempotency_key="order")) == ["CONFIRMED"] * 3
    again = stub.Execute(execute_request(branch(), branch("stock"), key="order"), timeout=CALL_S)
    assert states(again.transaction) == ["CONFIRMED"] * 3


def _raised(running: Any) -> Any:
    try:
        return running.result(timeout=CALL_S)
    except grpc.FutureCancelledError:
        raise running from None  # a call is its own error
