"""The initiator's metadata: stored with the transaction, and handed to its participants with every call."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.coordinators import CALL_S, CoordinatorProcess, branch, execute_request, states, tricord
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import operator_pb2, participant_pb2, types_pb2

from .participant_server import ParticipantServer, done, refuse

METADATA = {"tenant": "a", "trace.id-1": "00-4bf9 é 漢", "empty": "", "_": "v" * 256, "k" * 64: "é" * 256}
LARGEST = {f"{n:064}": "😀" * 256 for n in range(16)}
"""17 KiB: 64 calls with it are more than a batch may have."""
MIB = 1024 * 1024
SHORT: dict[str, Any] = {"call_timeout_ms": 1_000, "lease_ms": 2_000, "backoff_cap_ms": 200}


@pytest.fixture(params=["stream", "unary"])
def bank(request: pytest.FixtureRequest) -> Iterator[ParticipantServer]:
    """A participant that says yes to everything, with `Exchange` and without."""
    with ParticipantServer(exchange=request.param == "stream") as participant:
        yield participant


@pytest.fixture
def coordinator(tmp_path: Path, bank: ParticipantServer) -> Iterator[CoordinatorProcess]:
    """A coordinator on SQLite that knows the participant."""
    store = tmp_path / "tricord.db"
    with CoordinatorProcess(store=store, backoff_base_ms=20, backoff_cap_ms=100) as process:
        process.register("bank", bank.address)
        yield process


def request_with(metadata: dict[str, str], *branches: pb.BranchRequest, key: str = "") -> pb.ExecuteRequest:
    """A request to run a transaction; one branch if none is given."""
    request = execute_request(*(branches or (branch(),)), key=key)
    request.metadata.update(metadata)
    return request


def execute(coordinator: CoordinatorProcess, request: pb.ExecuteRequest) -> types_pb2.Transaction:
    """Run to the end."""
    return coordinator.coordinator_service().Execute(request, timeout=CALL_S).transaction


def test_every_call_of_every_phase_carries_it(coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
    bank.answer = lambda call: refuse(call) if call.action == "credit" else done(call)
    confirmed = execute(coordinator, request_with(METADATA, branch(), branch()))
    cancelled = execute(coordinator, request_with(METADATA, branch(), branch(action="credit")))
    assert [states(confirmed)[0], states(cancelled)[0]] == ["CONFIRMED", "CANCELLED"]
    assert dict(confirmed.metadata) == dict(cancelled.metadata) == METADATA
    seen = [(s.phase, s.call.branch_id, dict(s.call.metadata)) for s in bank.seen()]
    assert len(seen) == 8
    assert {phase for phase, _, _ in seen} == {"TRY", "CONFIRM", "CANCEL"}
    assert all(metadata == METADATA for _, _, metadata in seen)


def test_repeated_calls_carry_it(coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
    def unknown_at_first(call: participant_pb2.Call) -> participant_pb2.Reply:
        return participant_pb2.Reply(outcome=participant_pb2.OUTCOME_UNKNOWN) if call.attempt < 3 else done(call)

    bank.answer = unknown_at_first
    assert states(execute(coordinator, request_with(METADATA)))[0] == "CONFIRMED"
    assert [(s.call.attempt, dict(s.call.metadata)) for s in bank.seen()] == [(n, METADATA) for n in (1, 2, 3)] * 2


def test_without_it_nothing_is_sent(coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
    tx = execute(coordinator, request_with({}))
    assert not tx.metadata
    assert [dict(s.call.metadata) for s in bank.seen()] == [{}, {}]


def test_get_and_show_tell_it_and_a_list_does_not(coordinator: CoordinatorProcess) -> None:
    tx = execute(coordinator, request_with(METADATA, key="shown"))
    service = coordinator.coordinator_service()
    for by in (pb.GetRequest(xid=tx.xid), pb.GetRequest(idempotency_key="shown")):
        assert dict(service.Get(by, timeout=CALL_S).transaction.metadata) == METADATA
    run = tricord("show", tx.xid, "-o", "json", env={"TRICORD_ENDPOINT": coordinator.endpoint})
    assert json.loads(run.stdout)["metadata"] == METADATA
    table = tricord("show", tx.xid, env={"TRICORD_ENDPOINT": coordinator.endpoint}).stdout
    assert [line.split()[1] for line in table.splitlines() if line.startswith("metadata")][-1] == "trace.id-1=00-4bf9"
    page = coordinator.operator_service().List(operator_pb2.ListRequest(), timeout=CALL_S)
    assert [(each.xid, dict(each.metadata)) for each in page.transactions] == [(tx.xid, {})]


def test_the_same_key_with_other_metadata_is_the_same_request(
    coordinator: CoordinatorProcess, bank: ParticipantServer
) -> None:
    """B4: a retry has another trace id. The first one's metadata stays."""
    first = execute(coordinator, request_with({"trace": "1"}, key="order-1"))
    for metadata in ({"trace": "2"}, {}, {"trace": "1", "more": "x"}):
        again = execute(coordinator, request_with(metadata, key="order-1"))
        assert (again.xid, dict(again.metadata)) == (first.xid, {"trace": "1"})
    assert len(bank.seen()) == 2


def test_the_largest_fits_into_batches(coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
    """It counts in a batch's bytes: a participant's gRPC takes no more than 4 MiB by default (E1)."""
    tx = execute(coordinator, request_with(LARGEST, *[branch()] * 64))
    assert states(tx)[0] == "CONFIRMED"
    assert dict(tx.metadata) == LARGEST
    sizes = [sum(seen.call.ByteSize() for seen in batch) for batch in bank.batches()]
    assert all(size <= MIB for size in sizes)
    assert len(bank.seen()) == 128
    assert all(dict(seen.call.metadata) == LARGEST for seen in bank.seen())


class TestRecovery:
    """It is read from the store by whoever drives next: after a crash, and at another coordinator."""

    @pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.database)])
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> str:
        """Where the transactions are kept."""
        if request.param == "sqlite":
            return str(tmp_path / "tricord.db")
        dsn: str = request.getfixturevalue("pg_database")
        return dsn

    @pytest.mark.parametrize("phase", ["TRY", "CONFIRM", "CANCEL"])
    def test_after_a_crash(self, store: str, phase: str) -> None:
        gate = threading.Event()

        def answer(call: participant_pb2.Call) -> participant_pb2.Reply | None:
            if call.phase == participant_pb2.Phase.Value(f"PHASE_{phase}") and not gate.is_set():
                return None
            return refuse(call) if phase == "CANCEL" else done(call)

        with ParticipantServer(answer) as bank, CoordinatorProcess(store=store, **SHORT) as coordinator:
            coordinator.register("bank", bank.address)
            service = coordinator.coordinator_service()
            request = request_with(METADATA, key="order-1")
            lost = service.Execute.future(request, timeout=CALL_S)
            before = bank.wait_for(1, phase)
            coordinator.kill()
            assert lost.exception(CALL_S) is not None
            gate.set()
            called = len(bank.seen(phase))
            coordinator.start()
            bank.wait_for(called + 1, phase)  # from recovery: nobody has asked for it again
            tx = execute(coordinator, request_with({"trace": "another"}, key="order-1"))
            assert (tx.xid, dict(tx.metadata)) == (before[0].call.xid, METADATA)
            assert states(tx)[0] == ("CANCELLED" if phase == "CANCEL" else "CONFIRMED")
            assert all(dict(seen.call.metadata) == METADATA for seen in bank.seen())

    @pytest.mark.database
    def test_at_another_coordinator(self, pg_database: str) -> None:
        """The one that began it is killed and stays away."""
        gate = threading.Event()

        def answer(call: participant_pb2.Call) -> participant_pb2.Reply | None:
            return done(call) if gate.is_set() or call.phase == participant_pb2.PHASE_TRY else None

        with (
            ParticipantServer(answer) as bank,
            CoordinatorProcess(store=pg_database, **SHORT) as first,
            CoordinatorProcess(store=pg_database, **SHORT) as second,
        ):
            first.register("bank", bank.address)
            request = request_with(METADATA, key="order-1")
            request.wait = pb.WAIT_DECIDED
            xid = execute(first, request).xid
            bank.wait_for(1, "CONFIRM")
            first.kill()
            gate.set()
            tx = execute(second, request_with({}, key="order-1"))
            assert (tx.xid, states(tx)[0], dict(tx.metadata)) == (xid, "CONFIRMED", METADATA)
            assert all(dict(seen.call.metadata) == METADATA for seen in bank.seen())
