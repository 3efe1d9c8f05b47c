"""What operators see besides transactions: participants and figures, over gRPC and by the command."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.coordinators import CALL_S, CoordinatorProcess, branch, execute_request, refused, tricord
from tests.postgres import PostgresServer, free_port
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import operator_pb2, participant_pb2, types_pb2

from .participant_server import ParticipantServer, done, refuse
from .test_health import NOT_SERVING, killed

OK, USAGE, NOT_FOUND, UNAVAILABLE = 0, 2, 3, 5


def stuck_in_confirm(call: participant_pb2.Call) -> participant_pb2.Reply:
    """Confirm fails, whatever else is done."""
    if call.phase == participant_pb2.PHASE_CONFIRM:
        return participant_pb2.Reply(outcome=participant_pb2.OUTCOME_UNKNOWN, error="the ledger is closed")
    return done(call)


@pytest.fixture
def bank() -> Iterator[ParticipantServer]:
    """A participant that answers."""
    with ParticipantServer() as server:
        yield server


@pytest.fixture
def coordinator(tmp_path: Path, bank: ParticipantServer) -> Iterator[CoordinatorProcess]:
    """A coordinator whose configuration names ``bank`` and a ``museum`` where nobody is; ``bank`` registers too."""
    nowhere = f"127.0.0.1:{free_port()}"
    static = {
        "bank": {"addresses": [bank.address], "actions": ["debit", "credit"]},
        "museum": {"addresses": [nowhere], "actions": ["visit"]},
    }
    with CoordinatorProcess(
        store=tmp_path / "tricord.db", participants=json.dumps(static), backoff_cap_ms=100, attention_after=3
    ) as process:
        process.register("bank", bank.address, {"debit": "fence-1", "credit": "fence-1"})
        process.register("shop", bank.address, {"sell": "fence-1", "refund": "fence-1"})
        process.register("shop", f"127.0.0.1:{free_port()}", {"sell": "fence-1"})
        yield process


def begun(coordinator: CoordinatorProcess, *branches: pb.BranchRequest) -> str:
    """A transaction that is under way; its xid."""
    request = execute_request(*branches, timeout_ms=60_000, wait=pb.WAIT_ACCEPTED)
    xid: str = coordinator.coordinator_service().Execute(request, timeout=CALL_S).transaction.xid
    return xid


def participants(coordinator: CoordinatorProcess, **fields: Any) -> dict[str, operator_pb2.ParticipantStatus]:
    """What ListParticipants answers, by name."""
    request = operator_pb2.ListParticipantsRequest(**fields)
    response = coordinator.operator_service().ListParticipants(request, timeout=CALL_S)
    return {participant.name: participant for participant in response.participants}


def until(read: Callable[[], Any], reached: Callable[[Any], bool]) -> Any:
    """Read until it is as wanted; the suite's own time-out ends what never is."""
    while not reached(seen := read()):
        pass
    return seen


class TestListParticipants:
    """OperatorService.ListParticipants."""

    def test_where_each_is_from(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        found = participants(coordinator)
        assert list(found) == ["bank", "museum", "shop"]
        assert list(found["bank"].actions) == ["credit", "debit"]
        (address,) = found["bank"].addresses
        assert (address.address, address.configured, address.registered) == (bank.address, True, True)
        assert address.seen_time.seconds > 0
        assert not address.HasField("health")  # never called
        (address,) = found["museum"].addresses
        assert (address.configured, address.registered, address.HasField("seen_time")) == (True, False, False)
        shops = {address.address: address for address in found["shop"].addresses}
        assert [(a.configured, a.registered) for a in shops.values()] == [(False, True)] * 2
        assert list(shops.pop(bank.address).missing_actions) == []
        assert [list(a.missing_actions) for a in shops.values()] == [["refund"]]

    def test_breaker_and_backlog(self, coordinator: CoordinatorProcess) -> None:
        begun(coordinator, branch(), branch("museum", "visit"))
        begun(coordinator, branch("museum", "visit"))

        def is_open(found: dict[str, operator_pb2.ParticipantStatus]) -> bool:
            health = found["museum"].addresses[0].health
            return health.breaker in (operator_pb2.BREAKER_STATE_OPEN, operator_pb2.BREAKER_STATE_HALF_OPEN)

        found = until(lambda: participants(coordinator), is_open)
        health = found["museum"].addresses[0].health
        assert health.failures >= 5
        assert health.last_error
        assert health.since_time.seconds > 0
        answered = found["bank"].addresses[0].health
        assert (answered.breaker, answered.failures) == (operator_pb2.BREAKER_STATE_CLOSED, 0)
        backlog = {name: participant.open_transactions for name, participant in found.items()}
        assert backlog == {"bank": 1, "museum": 2, "shop": 0}
        assert found["bank"].oldest_create_time.seconds > 0
        assert not found["shop"].HasField("oldest_create_time")
        assert not found["bank"].more_open

    def test_one_by_name(self, coordinator: CoordinatorProcess) -> None:
        assert list(participants(coordinator, participant="museum")) == ["museum"]
        method = coordinator.operator_service().ListParticipants
        unknown = refused(method, operator_pb2.ListParticipantsRequest(participant="nobody"))
        assert (unknown.code.name, unknown.reason) == ("NOT_FOUND", "PARTICIPANT_NOT_FOUND")
        assert "nobody" in unknown.message

    def test_pages(self, coordinator: CoordinatorProcess) -> None:
        seen: list[str] = []
        token = ""
        while True:
            request = operator_pb2.ListParticipantsRequest(page_size=1, page_token=token)
            response = coordinator.operator_service().ListParticipants(request, timeout=CALL_S)
            seen += [participant.name for participant in response.participants]
            token = response.next_page_token
            if not token:
                break
        assert seen == ["bank", "museum", "shop"]

    @pytest.mark.parametrize(
        ("field", "value"), [("page_size", 1001), ("participant", "a b"), ("page_token", "no/token")]
    )
    def test_bad_input(self, coordinator: CoordinatorProcess, field: str, value: Any) -> None:
        request = operator_pb2.ListParticipantsRequest(**{field: value})
        said = refused(coordinator.operator_service().ListParticipants, request)
        assert said.code.name == "INVALID_ARGUMENT"
        assert list(said.fields) == [field]


def test_a_participant_that_nobody_knows_any_more_keeps_its_backlog(tmp_path: Path) -> None:
    store = tmp_path / "tricord.db"
    static = {"museum": {"addresses": [f"127.0.0.1:{free_port()}"], "actions": ["visit"]}}
    with CoordinatorProcess(store=store, participants=json.dumps(static), drain_ms=0) as first:
        begun(first, branch("museum", "visit"))
    with CoordinatorProcess(store=store) as second:
        found = participants(second)["museum"]
        assert (list(found.addresses), list(found.actions), found.open_transactions) == ([], [], 1)
        table = tricord("participants", env={"TRICORD_ENDPOINT": second.endpoint}).stdout
        assert "(nowhere)" in table


class TestGetStatistics:
    """OperatorService.GetStatistics."""

    def statistics(self, coordinator: CoordinatorProcess) -> operator_pb2.GetStatisticsResponse:
        request = operator_pb2.GetStatisticsRequest()
        answer: operator_pb2.GetStatisticsResponse = coordinator.operator_service().GetStatistics(
            request, timeout=CALL_S
        )
        return answer

    def test_what_is_open(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        service = coordinator.coordinator_service()
        service.Execute(execute_request(branch()), timeout=CALL_S)
        bank.answer = refuse
        service.Execute(execute_request(branch()), timeout=CALL_S)
        bank.answer = stuck_in_confirm
        begun(coordinator, branch())
        service.Begin(pb.BeginRequest(), timeout=CALL_S)

        def count(seen: operator_pb2.GetStatisticsResponse) -> dict[str, tuple[int, int, int]]:
            return {
                types_pb2.TransactionState.Name(s.state).removeprefix("TRANSACTION_STATE_"): (
                    s.count,
                    s.attention_retrying,
                    s.attention_violation,
                )
                for s in seen.open.states
            }

        wanted = {"TRYING": (1, 0, 0), "CONFIRMING": (1, 1, 0), "CANCELLING": (0, 0, 0)}
        seen = until(lambda: self.statistics(coordinator), lambda seen: count(seen)["CONFIRMING"][1] == 1)
        assert count(seen) == wanted
        assert seen.open.oldest_create_time.seconds > 0
        assert (seen.open.late, seen.open.more_open) == (0, False)
        own = seen.coordinator
        assert (own.begun, own.confirmed, own.cancelled) == (4, 1, 1)
        assert own.serving
        assert own.flushes > 0
        assert own.live_max == 20_000
        assert own.uptime.ToMilliseconds() > 0
        assert (own.store_format, own.schema_revision) == (3, "0003")
        assert own.store_id

    def test_nothing_is_open(self, coordinator: CoordinatorProcess) -> None:
        seen = self.statistics(coordinator)
        assert [state.count for state in seen.open.states] == [0, 0, 0]
        assert not seen.open.HasField("oldest_create_time")

    @pytest.mark.database
    @pytest.mark.parametrize("away", ["hangs", "is gone"])
    def test_its_own_while_the_store_is_away(self, own_server: PostgresServer, away: str) -> None:
        with CoordinatorProcess(store=own_server.create_database()) as process:
            with own_server.frozen() if away == "hangs" else killed(own_server):
                assert not self.statistics(process).HasField("open")  # also before that counts as silent
                stub: Any = health_pb2_grpc.HealthStub(process.channel())
                watching = stub.Watch(health_pb2.HealthCheckRequest(), timeout=CALL_S)
                assert NOT_SERVING in (answer.status for answer in watching)
                tried = until(lambda: process.log("statistics.store_error"), bool)
                seen = self.statistics(process)
                assert (seen.coordinator.serving, seen.HasField("open")) == (False, False)
                run = tricord("stats", env={"TRICORD_ENDPOINT": process.endpoint})
                assert (run.returncode, run.stderr) == (OK, "")
                assert "NO: the store does not answer" in run.stdout
            until(lambda: self.statistics(process), lambda seen: seen.coordinator.serving and seen.HasField("open"))
            watching.cancel()
            assert process.stop() == 0
            assert process.log("statistics.store_error") == tried  # of a silent one nothing is asked in vain
