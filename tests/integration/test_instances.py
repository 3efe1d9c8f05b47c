"""Several instances of a participant, dead ones, hung ones, and such as move, over real gRPC."""

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from examples.transfer.databases import eventually
from tests.coordinators import CALL_S, CoordinatorProcess, branch, execute_request, refused, registration, states
from tests.postgres import free_port
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import coordinator_pb2_grpc, registry_pb2_grpc, types_pb2
from tricord.v1 import participant_pb2 as participant_pb

from .participant_server import ParticipantServer, done

TRY, CONFIRM = participant_pb.PHASE_TRY, participant_pb.PHASE_CONFIRM
Stub = coordinator_pb2_grpc.CoordinatorServiceStub


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    """Quick to retry, and calls that soon time out."""
    with CoordinatorProcess(
        store=tmp_path / "tricord.db", backoff_base_ms=20, backoff_cap_ms=1_000, call_timeout_ms=800, lease_ms=4_000
    ) as process:
        yield process


def execute(stub: Stub, *participants: str, timeout_ms: int = 40_000) -> types_pb2.Transaction:
    request = execute_request(*(branch(name) for name in participants), timeout_ms=timeout_ms)
    return stub.Execute(request, timeout=CALL_S).transaction


class TestSeveral:
    def test_case_35_load_spreads_over_instances(self, coordinator: CoordinatorProcess) -> None:
        stub = coordinator.coordinator_service()
        with ParticipantServer() as one, ParticipantServer() as two, ParticipantServer() as three:
            for server in (one, two, three):
                coordinator.register("bank", server.address)
            for _ in range(30):
                assert states(execute(stub, "bank", "bank"))[0] == "CONFIRMED"
            counts = [len(server.seen()) for server in (one, two, three)]
            assert sum(counts) == 120
            assert min(counts) >= 30
            assert [server.streams for server in (one, two, three)] == [1, 1, 1]  # one stream each

    def test_case_35_calls_follow_a_move(self, coordinator: CoordinatorProcess) -> None:
        """Also those of a transaction that is open meanwhile."""
        stub = coordinator.coordinator_service()

        def about_to_move(call: participant_pb.Call) -> participant_pb.Reply:
            if call.phase == CONFIRM:
                return participant_pb.Reply(outcome=participant_pb.OUTCOME_UNKNOWN, error="about to move")
            return done(call)

        with ThreadPoolExecutor(1) as pool, ParticipantServer(about_to_move) as old, ParticipantServer() as new:
            coordinator.register("bank", old.address)
            running = pool.submit(execute, stub, "bank")
            old.wait_for(1, "CONFIRM")
            coordinator.register("bank", new.address)
            coordinator.withdraw("bank", old.address)
            assert states(running.result()) == ["CONFIRMED", "CONFIRMED"]
            assert new.seen("CONFIRM")

    def test_a_dead_instance_is_passed_over(self, coordinator: CoordinatorProcess) -> None:
        stub = coordinator.coordinator_service()
        with ParticipantServer() as one, ParticipantServer() as two:
            for server in (one, two):
                coordinator.register("bank", server.address)
            assert states(execute(stub, "bank"))[0] == "CONFIRMED"
            two.stop()
            for _ in range(10):
                assert states(execute(stub, "bank", "bank"))[0] == "CONFIRMED"

    def test_case_36_another_service_under_the_same_name(self, coordinator: CoordinatorProcess) -> None:
        coordinator.register("bank", "127.0.0.1:9", {"debit": "fence-1", "credit": "fence-1"})
        stub = registry_pb2_grpc.RegistryServiceStub(coordinator.channel())
        request = registration("bank", "127.0.0.1:10", {"debit": "fence-1", "ship": "fence-1"})
        denied = refused(stub.RegisterParticipant, request)
        assert (denied.code, denied.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "ACTIONS_DIFFER")
        assert denied.metadata == {"address": "127.0.0.1:9", "only_there": "credit", "only_here": "ship"}
        answer = stub.RegisterParticipant(
            registration("bank", "127.0.0.1:9", {"debit": "fence-1", "credit": "fence-1"})
        )
        assert answer.heartbeat_interval.seconds == 10


class TestDeadAndHung:
    def test_case_16_a_dead_participant_holds_up_nobody_else(self, coordinator: CoordinatorProcess) -> None:
        """The first branch's participant dies in phase 2: the others' Confirms are done at once."""
        stub = coordinator.coordinator_service()
        with ExitStack() as stack:
            dead = stack.enter_context(ParticipantServer(lambda call: None if call.phase == CONFIRM else done(call)))
            banks = [stack.enter_context(ParticipantServer()) for _ in range(2)]
            coordinator.register("dead", dead.address)
            for n, bank in enumerate(banks):
                coordinator.register(f"bank-{n}", bank.address)
            request = execute_request(branch("dead"), branch("bank-0"), branch("bank-1"), wait=pb.WAIT_DECIDED)
            tx = stub.Execute(request, timeout=CALL_S).transaction
            for bank in banks:
                bank.wait_for(1, "CONFIRM")
            dead.stop()
            assert states(execute(stub, "bank-0", "bank-1"))[0] == "CONFIRMED"
            found = stub.Get(pb.GetRequest(xid=tx.xid), timeout=CALL_S).transaction
            assert states(found)[:2] == ["CONFIRMING", "TRIED"]
            dead.answer = done
            dead.start()
            *_, last = stub.Watch(pb.WatchRequest(xid=tx.xid), timeout=CALL_S)
            assert states(last.transaction) == ["CONFIRMED"] * 4

    def test_case_19_one_that_never_answers_ends_by_the_calls_own_deadline(
        self, coordinator: CoordinatorProcess
    ) -> None:
        stub = coordinator.coordinator_service()
        with ParticipantServer(lambda call: None) as hung, ParticipantServer() as bank, ThreadPoolExecutor(60) as pool:
            coordinator.register("hung", hung.address)
            coordinator.register("bank", bank.address)
            stuck = [pool.submit(execute, stub, "hung", timeout_ms=3_000) for _ in range(50)]
            hung.wait_for(50, "TRY")
            for _ in range(20):
                assert states(execute(stub, "bank"))[0] == "CONFIRMED"
            eventually("the breaker opens", lambda: bool(coordinator.log("delivery.breaker_open")))
            hung.answer = done
            for running in stuck:
                tx = running.result()
                assert states(tx)[0] in {"CANCELLED", "CONFIRMED"}
                assert "no answer from" in tx.branches[0].last_error or "failed again" in tx.branches[0].last_error

    def test_calls_to_a_dead_address_are_not_sent_but_now_and_then(self, coordinator: CoordinatorProcess) -> None:
        """And when somebody is there again, they are, within the back-off's cap."""
        stub = coordinator.coordinator_service()
        port = free_port()
        coordinator.register("bank", f"127.0.0.1:{port}")
        with ThreadPoolExecutor(40) as pool:
            running = [pool.submit(execute, stub, "bank") for _ in range(40)]
            eventually("the breaker opens", lambda: bool(coordinator.log("delivery.breaker_open")))
            tried = time.monotonic()
            with ParticipantServer(port=port) as bank:
                assert {states(future.result())[0] for future in running} == {"CONFIRMED"}
                assert time.monotonic() - tried < CALL_S
                calls = Counter((seen.call.xid, seen.phase) for seen in bank.seen())
                assert set(calls.values()) == {1}
        assert coordinator.log("delivery.breaker_closed")
