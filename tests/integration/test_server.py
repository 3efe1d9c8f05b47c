"""The coordinator's services, over real gRPC: Execute, Get, List, registration, health and reflection."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psycopg
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.coordinators import (
    CALL_S,
    CoordinatorProcess,
    branch,
    execute_request,
    refused,
    registration,
    states,
)
from tests.postgres import free_port
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import operator_pb2, registry_pb2_grpc, types_pb2
from tricord.v1 import participant_pb2 as participant_pb

from .participant_server import Gate, ParticipantServer, done, refuse


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    """One coordinator on SQLite for all tests here: none of them disturbs another's transactions."""
    store = tmp_path_factory.mktemp("server") / "tricord.db"
    with CoordinatorProcess(store=store, backoff_cap_ms=200, call_timeout_ms=2_000) as process:
        yield process


def two(data: bytes = b"{}") -> tuple[pb.BranchRequest, pb.BranchRequest]:
    """A transfer."""
    return branch(data=data), branch(action="credit", data=data)


class TestExecute:
    """Whole transactions."""

    def test_happy(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        result = types_pb2.Payload(data=b"held", content_type="text/plain")
        bank.answer = lambda call: participant_pb.Reply(outcome=participant_pb.OUTCOME_DONE, result=result)
        request = execute_request(*two(b'{"amount": 3}'), key="happy", timeout_ms=7_000)
        tx = coordinator.coordinator_service().Execute(request, timeout=CALL_S).transaction
        assert states(tx) == ["CONFIRMED", "CONFIRMED", "CONFIRMED"]
        assert [b.result for b in tx.branches] == [result, result]
        assert [b.branch_id for b in tx.branches] == [1, 2]
        assert tx.idempotency_key == "happy"
        assert tx.timeout.ToMilliseconds() == 7_000
        assert tx.deadline_time.ToMilliseconds() - tx.create_time.ToMilliseconds() == 7_000
        assert tx.create_time.ToMilliseconds() <= tx.decide_time.ToMilliseconds() <= tx.update_time.ToMilliseconds()
        assert tx.attention == types_pb2.ATTENTION_NONE
        calls = [(s.phase, s.call.branch_id, s.call.action, s.call.participant, s.call.xid) for s in bank.seen()]
        assert sorted(calls) == sorted(
            (phase, n, action, "bank", tx.xid)
            for phase in ("TRY", "CONFIRM")
            for n, action in ((1, "debit"), (2, "credit"))
        )
        assert {s.call.payload.data for s in bank.seen()} == {b'{"amount": 3}'}

    def test_refused(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        bank.answer = lambda call: refuse(call) if call.action == "credit" else done(call)
        tx = coordinator.coordinator_service().Execute(execute_request(*two()), timeout=CALL_S).transaction
        assert states(tx) == ["CANCELLED", "CANCELLED", "CANCELLED"]
        assert (tx.branches[1].refusal.reason, tx.branches[1].refusal.message) == ("insufficient_funds", "only 3 left")
        assert tx.cancel_reason == "branch 2 (bank.credit) refused: insufficient_funds: only 3 left"
        assert {s.call.branch_id for s in bank.seen("CANCEL")} == {1, 2}
        assert not bank.seen("CONFIRM")

    def test_time_out(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        bank.answer = lambda call: None if call.phase == participant_pb.PHASE_TRY else done(call)
        request = execute_request(branch(), timeout_ms=300)
        tx = coordinator.coordinator_service().Execute(request, timeout=CALL_S).transaction
        assert states(tx) == ["CANCELLED", "CANCELLED"]
        assert "300 ms" in tx.cancel_reason

    def test_decided_is_answered_before_the_end(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        bank.answer = gate = Gate(participant_pb.PHASE_CONFIRM)
        service = coordinator.coordinator_service()
        request = execute_request(branch(), wait=pb.WAIT_DECIDED)
        tx = service.Execute(request, timeout=CALL_S).transaction
        assert states(tx) == ["CONFIRMING", "TRIED"]
        gate.open.set()
        again = execute_request(branch(), key="another", wait=pb.WAIT_UNSPECIFIED)
        assert states(service.Execute(again, timeout=CALL_S).transaction) == ["CONFIRMED", "CONFIRMED"]

    def test_the_callers_deadline_cancels_nothing(
        self, coordinator: CoordinatorProcess, bank: ParticipantServer
    ) -> None:
        """It is answered with the state of the moment, and its transaction goes on."""
        bank.answer = gate = Gate(participant_pb.PHASE_TRY)
        service = coordinator.coordinator_service()
        request = execute_request(branch(), key="short patience")
        tx = service.Execute(request, timeout=0.7).transaction
        assert states(tx) == ["TRYING", "PENDING"]
        gate.open.set()
        after = service.Execute(request, timeout=CALL_S).transaction
        assert (after.xid, states(after)) == (tx.xid, ["CONFIRMED", "CONFIRMED"])
        assert not bank.seen("CANCEL")

    @pytest.mark.parametrize("phase", [participant_pb.PHASE_TRY, participant_pb.PHASE_CONFIRM])
    def test_a_cut_connection_cancels_nothing(
        self, coordinator: CoordinatorProcess, bank: ParticipantServer, phase: "participant_pb.Phase.ValueType"
    ) -> None:
        """Case 23, rule B5: neither before the decision nor after it."""
        bank.answer = gate = Gate(phase)
        channel = coordinator.channel()
        stub = type(coordinator.coordinator_service())(channel)
        key = f"cut in phase {phase}"
        call = stub.Execute.future(execute_request(branch(), key=key), timeout=CALL_S)
        bank.wait_for(1, participant_pb.Phase.Name(phase).removeprefix("PHASE_"))
        channel.close()
        with pytest.raises((grpc.RpcError, grpc.FutureCancelledError)):
            call.result(CALL_S)
        gate.open.set()
        tx = coordinator.coordinator_service().Execute(execute_request(branch(), key=key), timeout=CALL_S).transaction
        assert states(tx) == ["CONFIRMED", "CONFIRMED"]
        assert not bank.seen("CANCEL")
        assert {s.call.xid for s in bank.seen()} == {tx.xid}


class TestKeys:
    """Idempotent starts."""

    def test_a_repeat_is_the_same_transaction(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        service = coordinator.coordinator_service()
        first = service.Execute(execute_request(*two(), key="repeat"), timeout=CALL_S).transaction
        # Another time-out or another wait does not make it another request (B4).
        request = execute_request(*two(), key="repeat", timeout_ms=1_234, wait=pb.WAIT_DECIDED)
        again = service.Execute(request, timeout=CALL_S).transaction
        assert (again.xid, again.timeout.ToMilliseconds()) == (first.xid, 30_000)
        assert len(bank.seen()) == 4

    def test_twenty_at_once(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        services = [coordinator.coordinator_service() for _ in range(4)]
        request = execute_request(*two(), key="twenty")
        calls = [services[n % 4].Execute.future(request, timeout=CALL_S) for n in range(20)]
        answers = [call.result(CALL_S).transaction for call in calls]
        assert {tx.xid for tx in answers} == {answers[0].xid}
        assert {states(tx)[0] for tx in answers} == {"CONFIRMED"}
        assert len(bank.seen()) == 4

    @pytest.mark.parametrize(
        "other",
        [two(b'{"amount": 4}'), two()[:1], (*two(), branch()), two()[::-1]],
        ids=["payload", "fewer", "more", "order"],
    )
    def test_another_request_under_the_key(
        self, coordinator: CoordinatorProcess, bank: ParticipantServer, other: tuple[pb.BranchRequest, ...]
    ) -> None:
        service = coordinator.coordinator_service()
        tx = service.Execute(execute_request(*two(), key="mine"), timeout=CALL_S).transaction
        seen = len(bank.seen())
        error = refused(service.Execute, execute_request(*other, key="mine"))
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "IDEMPOTENCY_KEY_REUSED")
        assert error.metadata == {"xid": tx.xid}
        assert list(error.fields) == ["idempotency_key"]
        assert len(bank.seen()) == seen

    def test_without_a_key_each_is_its_own(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        service = coordinator.coordinator_service()
        xids = {service.Execute(execute_request(*two()), timeout=CALL_S).transaction.xid for _ in range(3)}
        assert len(xids) == 3

    def test_equal_branches_are_two_branches(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        tx = coordinator.coordinator_service().Execute(execute_request(branch(), branch()), timeout=CALL_S).transaction
        assert states(tx) == ["CONFIRMED", "CONFIRMED", "CONFIRMED"]
        assert len(bank.seen("TRY")) == 2


class TestGet:
    """Single transactions."""

    def test_by_xid_and_by_key(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        service = coordinator.coordinator_service()
        tx = service.Execute(execute_request(*two(), key="got"), timeout=CALL_S).transaction
        dashed = f"{tx.xid[:8]}-{tx.xid[8:12]}-{tx.xid[12:]}"
        for request in (
            pb.GetRequest(xid=tx.xid),
            pb.GetRequest(xid=dashed.upper()),
            pb.GetRequest(idempotency_key="got"),
        ):
            found = service.Get(request, timeout=CALL_S).transaction
            assert found.xid == tx.xid
            assert states(found)[0] in ("CONFIRMING", "CONFIRMED")  # the last save may be on its way (B6)
        operator = coordinator.operator_service()
        by_operator = operator.Get(operator_pb2.OperatorServiceGetRequest(xid=tx.xid), timeout=CALL_S)
        assert by_operator.transaction.xid == tx.xid

    def test_what_is_not_there(self, coordinator: CoordinatorProcess) -> None:
        service, operator = coordinator.coordinator_service(), coordinator.operator_service()
        for error in (
            refused(service.Get, pb.GetRequest(xid="0" * 32)),
            refused(service.Get, pb.GetRequest(idempotency_key="never seen")),
            refused(operator.Get, operator_pb2.OperatorServiceGetRequest(xid="0" * 32)),
        ):
            assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "TRANSACTION_NOT_FOUND")


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CoordinatorProcess, list[str]]]:
    """Seven transactions: a confirmed one of bank and shop, then a cancelled and a confirmed one in turn."""
    store = tmp_path_factory.mktemp("list") / "tricord.db"
    with CoordinatorProcess(store=store) as coordinator, ParticipantServer() as server:
        server.answer = lambda call: refuse(call) if call.payload.data == b"no" else done(call)
        coordinator.register("bank", server.address)
        coordinator.register("shop", server.address)
        service = coordinator.coordinator_service()
        xids = []
        for n in range(7):
            branches = [branch(data=b"no" if n % 2 else b"yes")] + [branch("shop")] * (n == 0)
            xids.append(service.Execute(execute_request(*branches), timeout=CALL_S).transaction.xid)
        while service.Get(pb.GetRequest(xid=xids[-1]), timeout=CALL_S).transaction.state not in (3, 5):
            pass
        yield coordinator, xids


class TestList:
    """Operators' lists, on a coordinator of their own."""

    def test_filters_and_order(self, listed: tuple[CoordinatorProcess, list[str]]) -> None:
        coordinator, xids = listed

        def found(filter_: str = "", order_by: str = "") -> list[str]:
            request = operator_pb2.ListRequest(filter=filter_, order_by=order_by)
            return [tx.xid for tx in coordinator.operator_service().List(request, timeout=CALL_S).transactions]

        assert found() == xids[::-1]
        assert found(order_by="create_time desc") == xids[::-1]
        assert found(order_by="create_time") == found(order_by=" create_time  asc ") == xids
        assert found("participant = shop") == found('participant = "shop"', "create_time") == xids[:1]
        assert found("state = CANCELLED") == xids[5:0:-2]
        assert found("state = CANCELLED OR state = CONFIRMED AND participant = bank") == xids[::-1]
        assert found("state = TRYING") == []
        assert found("age >= 1h") == []
        assert found("action = debit") == found("action = bank.debit") == xids[::-1]
        assert found("action = shop.debit") == xids[:1]
        assert found("NOT action = shop.debit AND state = CONFIRMED") == xids[:1:-2]
        assert found("age < 1h AND NOT participant = shop") == xids[:0:-1]

    def test_pages(self, listed: tuple[CoordinatorProcess, list[str]]) -> None:
        coordinator, xids = listed
        operator = coordinator.operator_service()
        seen, token, pages = [], "", 0
        while pages == 0 or token:
            page = operator.List(
                operator_pb2.ListRequest(page_size=3, page_token=token, filter="participant = bank"), timeout=CALL_S
            )
            seen += [tx.xid for tx in page.transactions]
            token, pages = page.next_page_token, pages + 1
        assert (seen, pages) == (xids[::-1], 3)
        assert not operator.List(operator_pb2.ListRequest(page_size=7), timeout=CALL_S).next_page_token

    def test_a_token_belongs_to_its_filters(self, listed: tuple[CoordinatorProcess, list[str]]) -> None:
        operator = listed[0].operator_service()
        token = operator.List(operator_pb2.ListRequest(page_size=2), timeout=CALL_S).next_page_token
        for other in ({"filter": "participant = bank"}, {"order_by": "create_time"}):
            error = refused(operator.List, operator_pb2.ListRequest(page_size=2, page_token=token, **other))
            assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
            assert error.fields == {"page_token": "belongs to a request with other filters"}
        same = operator_pb2.ListRequest(page_size=3, page_token=token, filter="  ", order_by="create_time desc")
        assert [tx.xid for tx in operator.List(same, timeout=CALL_S).transactions] == listed[1][4:1:-1]

    def test_large_transactions_can_be_listed(self, tmp_path: Path) -> None:
        """A page of legal transactions must fit through, whatever their payloads' size."""
        with CoordinatorProcess(store=tmp_path / "tricord.db") as coordinator, ParticipantServer() as server:
            coordinator.register("bank", server.address)
            service = coordinator.coordinator_service()
            for _ in range(4):
                request = execute_request(*[branch(data=bytes(1024 * 1024))] * 7)
                assert states(service.Execute(request, timeout=CALL_S).transaction)[0] == "CONFIRMED"
            page = coordinator.operator_service().List(operator_pb2.ListRequest(), timeout=CALL_S)
            assert len(page.transactions) == 4


class TestRegistration:
    """Who may make participants known, and how."""

    def test_another_fence_database_is_refused_until_told(self, coordinator: CoordinatorProcess) -> None:
        registry = registry_pb2_grpc.RegistryServiceStub(coordinator.channel())
        coordinator.register("moved", "127.0.0.1:1", {"debit": "f1"})
        error = refused(registry.RegisterParticipant, registration("moved", "127.0.0.1:1", {"debit": "f2"}))
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "FENCE_DATABASE_CHANGED")
        assert error.metadata == {"stored": "f1", "given": "f2"}
        assert "replace_fence" in error.message
        coordinator.register("moved", "127.0.0.1:1", {"debit": "f2"}, replace_fence=True)
        error = refused(registry.RegisterParticipant, registration("moved", "127.0.0.1:1", {"debit": "f1"}))
        assert error.metadata == {"stored": "f2", "given": "f1"}

    @pytest.mark.parametrize("allowed", [False, True])
    def test_beyond_loopback_it_must_be_allowed(self, tmp_path: Path, allowed: bool) -> None:
        """The wildcard address is not loopback; the test still speaks to it over loopback."""
        flags = {"allow_registration": True} if allowed else {}
        listen = f"0.0.0.0:{free_port()}"
        with CoordinatorProcess(store=tmp_path / "tricord.db", listen=listen, **flags) as coordinator:
            registry = registry_pb2_grpc.RegistryServiceStub(coordinator.channel())
            request = registration("bank", "127.0.0.1:1")
            if allowed:
                registry.RegisterParticipant(request, timeout=CALL_S)
            else:
                error = refused(registry.RegisterParticipant, request)
                assert (error.code, error.reason) == (grpc.StatusCode.PERMISSION_DENIED, "REGISTRATION_NOT_ALLOWED")
                assert "--allow-registration" in error.message

    def test_it_survives_a_restart(self, tmp_path: Path) -> None:
        with ParticipantServer() as server, CoordinatorProcess(store=tmp_path / "tricord.db") as coordinator:
            coordinator.register("bank", server.address)
            coordinator.kill()
            coordinator.start()
            tx = coordinator.coordinator_service().Execute(execute_request(branch()), timeout=CALL_S).transaction
            assert states(tx)[0] == "CONFIRMED"


@pytest.mark.database
class TestTwoCoordinators:
    """Any coordinator on one PostgreSQL will do: no sticky routing."""

    @pytest.fixture
    def pair(self, pg_database: str) -> Iterator[tuple[CoordinatorProcess, CoordinatorProcess]]:
        """Two on one database."""
        with CoordinatorProcess(store=pg_database) as one, CoordinatorProcess(store=pg_database) as two_:
            yield one, two_

    def test_one_key_at_both(self, pg_database: str, pair: tuple[CoordinatorProcess, CoordinatorProcess]) -> None:
        with ParticipantServer() as server:
            pair[0].register("bank", server.address)
            services = [coordinator.coordinator_service() for coordinator in pair]
            for round_ in range(5):
                request = execute_request(*two(), key=f"round {round_}")
                with ThreadPoolExecutor(8) as pool:
                    answers = list(pool.map(lambda n, r=request: services[n % 2].Execute(r, timeout=CALL_S), range(8)))
                assert len({answer.transaction.xid for answer in answers}) == 1
                assert {states(answer.transaction)[0] for answer in answers} == {"CONFIRMED"}
            assert len(server.seen()) == 20
            error = refused(services[1].Execute, execute_request(branch(), key="round 0"))
            assert error.reason == "IDEMPOTENCY_KEY_REUSED"
        with psycopg.connect(pg_database) as connection:
            assert connection.execute("SELECT count(*) FROM tricord_transaction").fetchone() == (5,)

    def test_a_participant_that_moves_away_and_back(self, pair: tuple[CoordinatorProcess, CoordinatorProcess]) -> None:
        """The address that the store holds counts, not what one coordinator remembers of it."""
        with ParticipantServer() as server:
            pair[0].register("bank", server.address)
            pair[1].register("bank", "127.0.0.1:9")
            pair[0].register("bank", server.address)  # it is back
            pair[0].stop()  # else it might take the transaction over, and find what it remembers
            pair[1].stop()
            pair[1].start()
            request = execute_request(branch(), timeout_ms=3_000, wait=pb.WAIT_DECIDED)
            tx = pair[1].coordinator_service().Execute(request, timeout=CALL_S).transaction
            assert states(tx)[0] in ("CONFIRMING", "CONFIRMED")

    def test_an_action_that_was_added_at_the_other(self, pair: tuple[CoordinatorProcess, CoordinatorProcess]) -> None:
        with ParticipantServer() as server:
            pair[0].register("bank", server.address, {"debit": "fence-1"})
            pair[1].register("bank", server.address, {"debit": "fence-1", "credit": "fence-1"})
            request = execute_request(branch(action="credit"))
            tx = pair[0].coordinator_service().Execute(request, timeout=CALL_S).transaction
            assert states(tx)[0] == "CONFIRMED"

    def test_a_name_that_was_asked_for_too_early(self, pair: tuple[CoordinatorProcess, CoordinatorProcess]) -> None:
        """A name is looked for in the store each time before it is called unknown."""
        service = pair[0].coordinator_service()
        with ParticipantServer() as server:
            assert refused(service.Execute, execute_request(branch())).reason == "UNKNOWN_PARTICIPANT"
            pair[1].register("bank", server.address)
            assert states(service.Execute(execute_request(branch()), timeout=CALL_S).transaction)[0] == "CONFIRMED"


def test_health(coordinator: CoordinatorProcess) -> None:
    stub = health_pb2_grpc.HealthStub(coordinator.channel())
    for service in ("", "tricord.v1.CoordinatorService", "tricord.v1.OperatorService", "tricord.v1.RegistryService"):
        request = health_pb2.HealthCheckRequest(service=service)
        answer = stub.Check(request, timeout=CALL_S)  # type: ignore[attr-defined]
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection(coordinator: CoordinatorProcess) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(coordinator.channel())
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=CALL_S)  # type: ignore[operator]
    names = {service.name for service in answer.list_services_response.service}
    assert names >= {
        "tricord.v1.CoordinatorService",
        "tricord.v1.OperatorService",
        "tricord.v1.RegistryService",
        "grpc.health.v1.Health",
    }
