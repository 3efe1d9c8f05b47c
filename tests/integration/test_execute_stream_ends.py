"""``ExecuteStream`` when a coordinator dies, stops, or is not the only one: by the published contract alone."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from tests.coordinators import CALL_S, CoordinatorProcess, branch, execute_request, states
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import coordinator_pb2_grpc

from .conversation import Conversation, ids
from .participant_server import Gate
from .scene import CONFIRM, TRY, Scene

CALLS = 60


@contextmanager
def stub_of(coordinator: CoordinatorProcess) -> Iterator[coordinator_pb2_grpc.CoordinatorServiceStub]:
    """On a connection that is not closed before the coordinator stops."""
    with grpc.insecure_channel(coordinator.endpoint, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield coordinator_pb2_grpc.CoordinatorServiceStub(channel)


def two(key: str) -> pb.ExecuteRequest:
    """A transfer."""
    return execute_request(branch("bank"), branch("stock", "credit"), key=key)


def broken(talk: Conversation) -> tuple[list[pb.ExecuteStreamResult], grpc.StatusCode]:
    """What still comes, and how the stream breaks."""
    found: list[pb.ExecuteStreamResult] = []
    try:
        for message in talk.stream:
            found += message.results
    except grpc.RpcError as error:
        return found, error.code()
    return found, grpc.StatusCode.OK


@pytest.mark.parametrize("phase", [TRY, CONFIRM])
def test_after_a_kill_the_same_keys_have_the_same_answers(scene: Scene, phase: int) -> None:
    coordinator = scene.coordinator()
    scene.stock.answer = gate = Gate(phase)
    with stub_of(coordinator) as stub:
        talk = Conversation(stub)
        talk.send(execute_request(branch("bank"), key="answered before"))
        before = talk.results(1)[1].response.transaction
        talk.send(*[two(f"key {n}") for n in range(CALLS)])
        scene.stock.wait_for(1, "TRY" if phase == TRY else "CONFIRM")
        coordinator.kill()
        found, code = broken(talk)
        assert (found, code) == ([], grpc.StatusCode.UNAVAILABLE)
    gate.open.set()
    coordinator.start()
    again = Conversation(coordinator.coordinator_service())
    again.send(*[two(f"key {n}") for n in range(CALLS)])
    again.send(execute_request(branch("bank"), key="answered before"), first=CALLS + 1)
    results = again.results(CALLS + 1)
    assert results[CALLS + 1].response.transaction.xid == before.xid
    for n in range(CALLS):
        tx = results[n + 1].response.transaction
        assert (tx.idempotency_key, states(tx)) == (f"key {n}", ["CONFIRMED"] * 3)
    xids = {result.response.transaction.xid for result in results.values()}
    assert len(xids) == CALLS + 1
    assert {seen.call.xid for seen in scene.stock.seen()} == xids - {before.xid}  # none was begun twice
    assert not scene.bank.seen("CANCEL")


def test_a_stop_answers_what_it_has_and_ends_the_stream(scene: Scene) -> None:
    coordinator = scene.coordinator(drain_ms=50_000)
    scene.bank.answer = gate = Gate(TRY)
    with stub_of(coordinator) as stub, ThreadPoolExecutor(1) as background:
        talk, idle = Conversation(stub), Conversation(stub)
        talk.send(*[execute_request(branch("bank")) for _ in range(5)])
        scene.bank.wait_for(5, "TRY")
        stopping = background.submit(coordinator.stop)
        assert broken(idle) == ([], grpc.StatusCode.UNAVAILABLE)  # at once: nothing is owed on it
        talk.send(execute_request(branch("bank")), first=6)  # it is not read any more
        gate.open.set()
        found, code = broken(talk)
        assert (ids(found), code) == ([1, 2, 3, 4, 5], grpc.StatusCode.UNAVAILABLE)
        assert [states(result.response.transaction) for result in found] == [["CONFIRMED", "CONFIRMED"]] * 5
        assert stopping.result() == 0
    assert "Traceback" not in coordinator.text_log()


def test_a_stop_waits_no_longer_than_its_drain(scene: Scene) -> None:
    coordinator = scene.coordinator(drain_ms=300)
    scene.bank.answer = gate = Gate(TRY)
    with stub_of(coordinator) as stub:
        talk = Conversation(stub)
        talk.send(execute_request(branch("bank"), key="held"))
        scene.bank.wait_for(1, "TRY")
        assert coordinator.stop() == 0
        found, code = broken(talk)
        assert (found, code) == ([], grpc.StatusCode.UNAVAILABLE)
    assert "Traceback" not in coordinator.text_log()
    gate.open.set()
    coordinator.start()
    request = execute_request(branch("bank"), key="held")
    tx = coordinator.coordinator_service().Execute(request, timeout=CALL_S).transaction
    assert states(tx) == ["CONFIRMED", "CONFIRMED"]


@pytest.mark.database
def test_what_another_coordinator_drives_is_answered_too(shared: Scene) -> None:
    first, second = shared.coordinator(), shared.coordinator()
    shared.bank.answer = gate = Gate(TRY)
    here, there = (Conversation(each.coordinator_service()) for each in (first, second))
    here.send(*[execute_request(branch("bank"), key=f"both {n}") for n in range(3)])
    shared.bank.wait_for(3, "TRY")
    there.send(*[execute_request(branch("bank"), key=f"both {n}") for n in range(3)])
    there.send(execute_request(branch("bank"), key="both 0"), first=9, patience_ms=500)
    assert states(there.results(1)[9].response.transaction) == ["TRYING", "PENDING"]  # they are all known there now
    gate.open.set()
    mine, theirs = here.results(3), there.results(3)
    for n in (1, 2, 3):
        assert states(mine[n].response.transaction) == states(theirs[n].response.transaction) == ["CONFIRMED"] * 2
        assert mine[n].response.transaction.xid == theirs[n].response.transaction.xid


@pytest.mark.database
def test_what_another_coordinator_takes_over_is_answered_too(shared: Scene) -> None:
    """Two streams wait for one transaction; the one whose coordinator is killed breaks, the other is answered."""
    first, second = shared.coordinator(), shared.coordinator()
    shared.bank.answer = gate = Gate(CONFIRM)
    with stub_of(first) as stub:
        here, there = Conversation(stub), Conversation(second.coordinator_service())
        here.send(execute_request(branch("bank"), key="taken over"))
        shared.bank.wait_for(1, "CONFIRM")
        there.send(execute_request(branch("bank"), key="taken over"))
        first.kill()
        assert broken(here)[1] is grpc.StatusCode.UNAVAILABLE
    gate.open.set()
    assert states(there.results(1)[1].response.transaction) == ["CONFIRMED", "CONFIRMED"]
    assert len({seen.call.xid for seen in shared.bank.seen()}) == 1
