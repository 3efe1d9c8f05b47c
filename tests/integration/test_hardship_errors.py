"""What callers are told when things go wrong: enough to act on, small enough to arrive, and no more than they may know.

An error travels in gRPC's trailing metadata; one that is too large there becomes an INTERNAL without a reason.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.coordinators import (
    CALL_S,
    CoordinatorProcess,
    Refused,
    branch,
    execute_request,
    refused,
    registration,
    states,
)
from tests.postgres import PostgresServer, free_port
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import operator_pb2, registry_pb2_grpc

from .participant_server import ParticipantServer, done

STATUS_BYTES_MAX = 4_096
MIB = 1024 * 1024


class Told(Refused):
    """How a call was refused, and what of it travelled."""

    def __init__(self, error: Any) -> None:
        super().__init__(error)
        details = [value for name, value in error.trailing_metadata() if name == "grpc-status-details-bin"]
        self.bytes = len(details[0]) if details else 0
        self.retry: duration_pb2.Duration | None = None
        status = rpc_status.from_call(error)
        self.reasons = 0
        for detail in status.details if status is not None else ():
            self.reasons += detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR)
            retry = error_details_pb2.RetryInfo()
            if detail.Unpack(retry):
                self.retry = retry.retry_delay


def told(method: Any, request: Any, timeout_s: float = CALL_S) -> Told:
    """Call, and return how it was refused."""
    try:
        answer = method(request, timeout=timeout_s)
    except grpc.RpcError as error:
        return Told(error)
    raise AssertionError(f"it was not refused but answered {str(answer)[:500]}")


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    """One coordinator for all tests here that need no store of their own."""
    with CoordinatorProcess(store=tmp_path_factory.mktemp("errors") / "tricord.db") as process:
        process.register("many", "127.0.0.1:9", {f"{n:064}": "f" for n in range(256)})
        yield process


class TestSize:
    """Every error's google.rpc.Status arrives, however much is wrong."""

    @pytest.mark.parametrize("letter", ["é", "界", "😀", "\u202e", '"', "\0"])
    @pytest.mark.parametrize("length", [64, 65, 10_000])
    def test_64_wrong_branches(self, coordinator: CoordinatorProcess, letter: str, length: int) -> None:
        name = letter * length
        wrong = branch(name, name)
        wrong.payload.content_type = name
        error = told(coordinator.coordinator_service().Execute, execute_request(*[wrong] * 64, key="k"))
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
        assert 0 < error.bytes < STATUS_BYTES_MAX
        assert "branches[0].participant" in error.fields
        assert "fields are wrong" in error.message
        assert error.reasons == 1

    def test_an_unknown_action_of_a_participant_with_256(self, coordinator: CoordinatorProcess) -> None:
        request = execute_request(branch("many", "a" * 64))
        error = told(coordinator.coordinator_service().Execute, request)
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "UNKNOWN_ACTION")
        assert 0 < error.bytes < STATUS_BYTES_MAX
        assert list(error.fields) == ["branches[0].action"]
        assert "a" * 64 in error.message

    def test_an_unknown_participant(self, coordinator: CoordinatorProcess) -> None:
        error = told(coordinator.coordinator_service().Execute, execute_request(branch("p" * 64, "a" * 64)))
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "UNKNOWN_PARTICIPANT")
        assert 0 < error.bytes < STATUS_BYTES_MAX

    def test_256_wrong_actions_of_a_registration(self, coordinator: CoordinatorProcess) -> None:
        request = registration("é" * 64, "é" * 255, {"界" * 60 + str(n): "\0" * 64 for n in range(256)})
        registry = registry_pb2_grpc.RegistryServiceStub(coordinator.channel())
        error = told(registry.RegisterParticipant, request)
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
        assert 0 < error.bytes < STATUS_BYTES_MAX
        assert {"participant", "address"} <= set(error.fields)

    def test_an_action_twice_with_a_long_name(self, coordinator: CoordinatorProcess) -> None:
        request = registration("shop", "127.0.0.1:9", {})
        for _ in range(2):
            request.actions.add(name="é" * 100_000, fence_id="f")
        registry = registry_pb2_grpc.RegistryServiceStub(coordinator.channel())
        error = told(registry.RegisterParticipant, request)
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
        assert 0 < error.bytes < STATUS_BYTES_MAX

    def test_another_fence_database_with_a_long_name(self, coordinator: CoordinatorProcess) -> None:
        """Fence ids are short, but four bytes a letter, and stand in the text and in the metadata."""
        name, address = "n" * 64, "127.0.0.1:9"
        coordinator.register(name, address, {"a" * 64: "😀" * 64})
        registry = registry_pb2_grpc.RegistryServiceStub(coordinator.channel())
        error = told(registry.RegisterParticipant, registration(name, address, {"a" * 64: "🙂" * 64}))
        assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "FENCE_DATABASE_CHANGED")
        assert error.metadata == {"stored": "😀" * 64, "given": "🙂" * 64}
        assert 0 < error.bytes < STATUS_BYTES_MAX

    def test_long_filters_of_a_list(self, coordinator: CoordinatorProcess) -> None:
        request = operator_pb2.ListRequest(filter="界" * 100_000, page_token="é" * 100_000)
        error = told(coordinator.operator_service().List, request)
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
        assert 0 < error.bytes < STATUS_BYTES_MAX


class TestLongFilters:
    """A list's filter."""

    def test_a_filter_of_three_million_characters_is_refused_quickly(self, coordinator: CoordinatorProcess) -> None:
        operator = coordinator.operator_service()
        began_s = time.monotonic()
        error = told(operator.List, operator_pb2.ListRequest(filter="(" * 3_000_000))
        assert time.monotonic() - began_s < 5.0
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
        assert error.fields == {"filter": "column 1001: the filter has 3000000 characters; the limit is 1000"}
        operator.List(operator_pb2.ListRequest(filter=" " * 1_000), timeout=CALL_S)


class TestKeysOfWithdrawnActions:
    """A key keeps its answer, also when its request could not be begun any more."""

    @pytest.fixture
    def bank(self, coordinator: CoordinatorProcess) -> Iterator[ParticipantServer]:
        with ParticipantServer() as participant:
            coordinator.register("bank", participant.address)
            yield participant

    def test_of_a_finished_transaction(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        service = coordinator.coordinator_service()
        request = execute_request(branch(), branch(action="credit"), key="before")
        before = service.Execute(request, timeout=CALL_S).transaction
        assert states(before)[0] == "CONFIRMED"
        coordinator.register("bank", bank.address, {"debit": "fence-1"})
        after = service.Execute(request, timeout=CALL_S).transaction
        assert (after.xid, states(after)) == (before.xid, states(before))
        for other in (
            execute_request(branch(), branch(action="credit", data=b"[]"), key="before"),
            execute_request(branch(action="credit"), key="before"),
            execute_request(branch("nobody"), key="before"),
            execute_request(branch(), key="before"),
        ):
            error = refused(service.Execute, other)
            assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "IDEMPOTENCY_KEY_REUSED")
            assert error.metadata == {"xid": before.xid}
        new = execute_request(branch(), branch(action="credit"), key="after")
        assert refused(service.Execute, new).reason == "UNKNOWN_ACTION"
        assert refused(service.Execute, execute_request(branch(action="credit"))).reason == "UNKNOWN_ACTION"
        assert len(bank.seen("TRY")) == 2

    def test_of_an_open_one(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        """It is waited for, as under any key."""
        bank.answer = lambda call: None
        service = coordinator.coordinator_service()
        request = execute_request(branch(action="credit"), key="open", timeout_ms=60_000)
        first = service.Execute.future(request, timeout=CALL_S)
        bank.wait_for(1)
        coordinator.register("bank", bank.address, {"debit": "fence-1"})
        second = service.Execute.future(request, timeout=CALL_S)
        bank.answer = done
        bank.break_streams()
        answers = [call.result(CALL_S).transaction for call in (first, second)]
        assert answers[0].xid == answers[1].xid
        assert [states(tx) for tx in answers] == [["CONFIRMED", "CONFIRMED"]] * 2


def _resident_mib(coordinator: CoordinatorProcess) -> int:
    assert coordinator._process is not None
    lines = Path(f"/proc/{coordinator._process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) // 1024


@pytest.mark.database
class TestStoreAway:
    """The database is gone for a while."""

    def test_what_callers_are_told(self, own_server: PostgresServer) -> None:
        """That it is away and when to ask again; its host, user and database are the operator's business."""
        dsn = own_server.create_database("a_telling_name")
        with CoordinatorProcess(store=dsn, drain_ms=0) as coordinator:
            coordinator.register("bank", "127.0.0.1:9")
            service, operator = coordinator.coordinator_service(), coordinator.operator_service()
            registry = registry_pb2_grpc.RegistryServiceStub(coordinator.channel())
            own_server.kill()
            try:
                errors = [
                    told(service.Get, pb.GetRequest(xid="0" * 32)),
                    told(service.Get, pb.GetRequest(idempotency_key="k")),
                    told(service.Execute, execute_request(branch("unknown"))),
                    told(service.Execute, execute_request(branch(action="unknown"), key="k")),
                    told(operator.Get, operator_pb2.OperatorServiceGetRequest(xid="0" * 32)),
                    told(operator.List, operator_pb2.ListRequest()),
                    told(registry.RegisterParticipant, registration("shop", f"127.0.0.1:{free_port()}")),
                ]
            finally:
                own_server.start()
            for error in errors:
                assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE")
                assert error.retry is not None
                assert 0 < error.retry.ToMilliseconds() <= 60_000
                assert error.message == "the coordinator's store does not answer; ask again"
            assert "a_telling_name" not in "".join(str(vars(error)) for error in errors)
            assert coordinator.log("rpc.store_error")  # the operator reads why
            assert refused(service.Get, pb.GetRequest(xid="0" * 32)).code is grpc.StatusCode.NOT_FOUND

    def test_beginnings_are_bounded(self, own_server: PostgresServer) -> None:
        """Many large ones, also of a client that asks for one again and again: refused, not kept in memory."""
        dsn = own_server.create_database()
        with CoordinatorProcess(store=dsn, drain_ms=0) as coordinator:
            coordinator.register("bank", "127.0.0.1:9")
            service = coordinator.coordinator_service()
            calls: list[tuple[str, Any]] = []
            own_server.kill()
            try:
                before_mib = most_mib = _resident_mib(coordinator)
                for n in range(70):
                    key = f"key {n}" if n % 2 else "one key"
                    branches = [branch(data=bytes(1_000_000))] * 7
                    request = execute_request(*branches, key=key, timeout_ms=1, wait=pb.WAIT_DECIDED)
                    call = service.Execute.future(request, timeout=CALL_S)
                    calls.append((key, call))
                    with contextlib.suppress(grpc.RpcError, grpc.FutureTimeoutError):
                        call.result(0.3)  # the refused ones answer at once
                    most_mib = max(most_mib, _resident_mib(coordinator))
            finally:
                own_server.start()
            errors = {key: call.exception() for key, call in calls if call.exception() is not None}
            kept = {key: call.result().transaction for key, call in calls if call.exception() is None}
            # 64 MiB in several forms each (as received, as stored, as sent); all 70 would be well over a gibibyte.
            assert most_mib - before_mib < 700
            assert 1 <= len(kept) <= 15
            assert {states(tx)[0] for tx in kept.values()} == {"CANCELLING"}
            for key, failure in errors.items():
                error = Told(failure)
                assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
                assert error.retry is not None
                assert 0 < error.retry.ToMilliseconds() <= 60_000
                assert "ask again" in error.message
                if key not in kept:
                    found = refused(service.Get, pb.GetRequest(idempotency_key=key))
                    assert found.code is grpc.StatusCode.NOT_FOUND
            request = execute_request(branch(), key="room again", timeout_ms=1, wait=pb.WAIT_DECIDED)
            assert states(service.Execute(request, timeout=CALL_S).transaction)[0] == "CANCELLING"
        with psycopg.connect(dsn) as connection:
            count = connection.execute("SELECT count(*) FROM tricord_transaction").fetchone()
        assert count == (len(kept) + 1,)
