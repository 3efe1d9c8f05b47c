"""Interactive transactions over real gRPC: two coordinators on one database, and any of them serves any call."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from tests.coordinators import CALL_S, CoordinatorProcess, Refused, branch, execute_request, refused, states
from tests.postgres import PostgresServer
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import coordinator_pb2_grpc, types_pb2
from tricord.v1 import participant_pb2 as participant_pb

from .participant_server import Gate, ParticipantServer, done, refuse

pytestmark = pytest.mark.database

Stub = coordinator_pb2_grpc.CoordinatorServiceStub
SETTINGS: dict[str, Any] = {"backoff_cap_ms": 200, "call_timeout_ms": 2_000, "lease_ms": 4_000}


@pytest.fixture(scope="module")
def pair(postgres_server: PostgresServer) -> Iterator[tuple[CoordinatorProcess, CoordinatorProcess]]:
    """Two coordinators on one PostgreSQL."""
    with (
        postgres_server.lent_database() as dsn,
        CoordinatorProcess(store=dsn, **SETTINGS) as first,
        CoordinatorProcess(store=dsn, **SETTINGS) as second,
    ):
        yield first, second


@pytest.fixture
def stubs(pair: tuple[CoordinatorProcess, CoordinatorProcess]) -> tuple[Stub, Stub]:
    return pair[0].coordinator_service(), pair[1].coordinator_service()


@pytest.fixture
def bank(pair: tuple[CoordinatorProcess, CoordinatorProcess]) -> Iterator[ParticipantServer]:
    with ParticipantServer() as participant:
        pair[0].register("bank", participant.address)
        pair[1].register("bank", participant.address)
        yield participant
        for coordinator in pair:
            coordinator.withdraw("bank", participant.address)


def begin(stub: Stub, *, key: str = "", timeout_ms: int = 20_000) -> str:
    request = pb.BeginRequest(idempotency_key=key)
    request.timeout.FromMilliseconds(timeout_ms)
    answer = stub.Begin(request, timeout=CALL_S)
    assert answer.transaction.interactive
    assert not answer.transaction.sealed
    return answer.transaction.xid


def try_(stub: Stub, xid: str, key: str, wanted: pb.BranchRequest | None = None) -> pb.CoordinatorServiceTryResponse:
    request = pb.CoordinatorServiceTryRequest(xid=xid, branch_key=key, branch=wanted or branch())
    return stub.Try(request, timeout=CALL_S)


def confirm(*branch_ids: int, xid: str) -> pb.CoordinatorServiceConfirmRequest:
    return pb.CoordinatorServiceConfirmRequest(xid=xid, tried_branch_ids=branch_ids)


def get(stub: Stub, xid: str) -> types_pb2.Transaction:
    return stub.Get(pb.GetRequest(xid=xid), timeout=CALL_S).transaction


def cancel(stub: Stub, xid: str, reason: str = "") -> types_pb2.Transaction:
    return stub.Cancel(pb.CoordinatorServiceCancelRequest(xid=xid, reason=reason), timeout=CALL_S).transaction


def calls(bank: ParticipantServer, xid: str) -> list[participant_pb.Call]:
    """The calls that came for this transaction, as they came."""
    return [seen.call for seen in bank.seen() if seen.call.xid == xid]


def phases(bank: ParticipantServer, xid: str) -> list[tuple[int, int]]:
    """The branch and phase of each call that came for this transaction, sorted."""
    return sorted((call.branch_id, call.phase) for call in calls(bank, xid))


TRY, CONFIRM, CANCEL = participant_pb.PHASE_TRY, participant_pb.PHASE_CONFIRM, participant_pb.PHASE_CANCEL


def test_any_coordinator_serves_any_call(stubs: tuple[Stub, Stub], bank: ParticipantServer) -> None:
    first, second = stubs
    xid = begin(first)
    assert states(get(second, xid)) == ["TRYING"]
    for n, stub in enumerate((second, first, second), 1):
        answer = try_(stub, xid, f"k{n}")
        assert (answer.branch.branch_id, answer.branch.state) == (n, types_pb2.BRANCH_STATE_TRIED)
        assert answer.state == types_pb2.TRANSACTION_STATE_TRYING
    tx = first.Confirm(confirm(1, 2, 3, xid=xid), timeout=CALL_S).transaction
    assert states(tx) == ["CONFIRMED"] + ["CONFIRMED"] * 3
    assert tx.sealed
    # Not multiplied by the number of coordinators: each call once.
    assert phases(bank, xid) == [(n, phase) for n in (1, 2, 3) for phase in (TRY, CONFIRM)]
    assert states(second.Confirm(confirm(1, xid=xid), timeout=CALL_S).transaction)[0] == "CONFIRMED"  # same answer


def held(call: participant_pb.Call) -> participant_pb.Reply:
    result = types_pb2.Payload(data=b"held " + call.payload.data)
    return participant_pb.Reply(outcome=participant_pb.OUTCOME_DONE, result=result)


def test_a_repeated_try_is_the_same_branch(stubs: tuple[Stub, Stub], bank: ParticipantServer) -> None:
    first, second = stubs
    bank.answer = held
    xid = begin(first)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: try_(stubs[n % 2], xid, "one", branch(data=b"7")), range(8)))
    assert {answer.branch.branch_id for answer in answers} == {1}
    assert {answer.branch.result.data for answer in answers} == {b"held 7"}
    assert phases(bank, xid) == [(1, TRY)]
    for other in (branch(data=b"8"), branch(action="credit", data=b"7")):
        request = pb.CoordinatorServiceTryRequest(xid=xid, branch_key="one", branch=other)
        assert refused(second.Try, request).reason == "BRANCH_KEY_REUSED"
    cancel(first, xid)
    assert try_(second, xid, "one", branch(data=b"7")).branch.result.data == b"held 7"  # in whatever state


def test_parallel_trys_of_one_transaction(stubs: tuple[Stub, Stub], bank: ParticipantServer) -> None:
    """Each on one of two coordinators: all are stored, each is called once (protocol A2, A6)."""
    xid = begin(stubs[0])
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda n: try_(stubs[n % 2], xid, f"k{n}"), range(40)))
    ids = sorted(answer.branch.branch_id for answer in answers)
    assert ids == list(range(1, 41))
    tx = stubs[1].Confirm(confirm(*ids, xid=xid), timeout=CALL_S).transaction
    assert states(tx) == ["CONFIRMED"] * 41
    assert phases(bank, xid) == [(n, phase) for n in ids for phase in (TRY, CONFIRM)]


def test_case_18_a_refused_branch_cannot_be_swallowed(stubs: tuple[Stub, Stub], bank: ParticipantServer) -> None:
    first, second = stubs
    bank.answer = lambda call: refuse(call) if call.payload.data == b"too much" and call.phase == TRY else done(call)
    xid = begin(first)
    assert try_(first, xid, "k1").branch.state == types_pb2.BRANCH_STATE_TRIED
    answer = try_(second, xid, "k2", branch(data=b"too much"))
    assert answer.branch.refusal.reason
    assert answer.state != types_pb2.TRANSACTION_STATE_TRYING
    assert "branch 2" in answer.cancel_reason
    denied = refused(first.Confirm, confirm(1, xid=xid))
    assert (denied.code, denied.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NOT_TRYING")
    assert states(cancel(second, xid)) == ["CANCELLED"] * 3


def test_case_20_neither_decision_gives_way_to_the_other(stubs: tuple[Stub, Stub], bank: ParticipantServer) -> None:
    first, second = stubs
    xid = begin(first)
    try_(first, xid, "k1")
    assert states(first.Confirm(confirm(1, xid=xid), timeout=CALL_S).transaction)[0] == "CONFIRMED"
    denied = refused(second.Cancel, pb.CoordinatorServiceCancelRequest(xid=xid))
    assert (denied.reason, denied.metadata["state"][:7]) == ("NOT_TRYING", "CONFIRM")  # its end may not be stored yet
    late = begin(first, timeout_ms=3_000)
    try_(second, late, "k1")
    watched = list(first.Watch(pb.WatchRequest(xid=late), timeout=CALL_S))
    assert states(watched[-1].transaction) == ["CANCELLED", "CANCELLED"]
    denied = refused(second.Confirm, confirm(1, xid=late))
    assert (denied.reason, denied.metadata["state"][:6]) == ("NOT_TRYING", "CANCEL")
    assert "its timeout of 3000 ms" in denied.message
    denied = refused(second.Try, pb.CoordinatorServiceTryRequest(xid=late, branch_key="k2", branch=branch()))
    assert denied.reason == "NOT_TRYING"
    assert phases(bank, late) == [(1, TRY), (1, CANCEL)]


def test_case_21_nothing_to_decide(stubs: tuple[Stub, Stub], bank: ParticipantServer) -> None:
    first, second = stubs
    assert refused(first.Execute, pb.ExecuteRequest()).code is grpc.StatusCode.INVALID_ARGUMENT
    xid = begin(first)
    assert refused(second.Confirm, confirm(xid=xid)).reason == "NO_BRANCHES"
    tx = cancel(second, xid, "changed my mind")
    assert (states(tx), tx.cancel_reason) == (["CANCELLED"], "cancelled by its initiator: changed my mind")
    empty = begin(first, timeout_ms=200)
    assert [states(answer.transaction) for answer in second.Watch(pb.WatchRequest(xid=empty), timeout=CALL_S)][-1] == [
        "CANCELLED"
    ]
    assert (calls(bank, xid), calls(bank, empty)) == ([], [])


def test_what_was_not_seen_bars_the_confirm(stubs: tuple[Stub, Stub], bank: ParticipantServer) -> None:
    first, second = stubs
    xid = begin(first)
    try_(first, xid, "k1")
    bank.answer = gate = Gate(TRY)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(try_, second, xid, "k2")
        assert gate.reached.acquire(timeout=CALL_S)
        denied = refused(first.Confirm, confirm(1, xid=xid))
        assert (denied.reason, denied.metadata["branch_ids"]) == ("BRANCHES_NOT_TRIED", "2")
        gate.open.set()
        assert slow.result().branch.state == types_pb2.BRANCH_STATE_TRIED
    denied = refused(second.Confirm, confirm(1, xid=xid))
    assert (denied.reason, denied.metadata["branch_ids"]) == ("BRANCHES_NOT_NAMED", "2")
    assert states(get(first, xid)) == ["TRYING", "TRIED", "TRIED"]
    assert states(first.Confirm(confirm(1, 2, xid=xid), timeout=CALL_S).transaction) == ["CONFIRMED"] * 3


def test_a_try_in_doubt_is_tried_again(stubs: tuple[Stub, Stub], bank: ParticipantServer) -> None:
    attempts: list[int] = []

    def answer(call: participant_pb.Call) -> participant_pb.Reply:
        if call.phase == TRY and call.branch_id == 1:
            attempts.append(call.attempt)
            if len(attempts) < 3:
                return participant_pb.Reply(outcome=participant_pb.OUTCOME_UNKNOWN, error="not now")
        return done(call)

    bank.answer = answer
    xid = begin(stubs[0])
    assert try_(stubs[1], xid, "k1").branch.state == types_pb2.BRANCH_STATE_TRIED
    assert attempts == [1, 2, 3]
    cancel(stubs[0], xid)


def test_the_deadline_can_be_moved_while_it_is_undecided(stubs: tuple[Stub, Stub], bank: ParticipantServer) -> None:
    first, second = stubs
    xid = begin(first, timeout_ms=5_000)
    before = get(first, xid)
    request = pb.RenewRequest(xid=xid)
    request.timeout.FromMilliseconds(15_000)
    deadline = second.Renew(request, timeout=CALL_S).deadline_time
    assert deadline.ToMilliseconds() - before.create_time.ToMilliseconds() >= 15_000
    assert get(first, xid).deadline_time == deadline
    request.timeout.FromMilliseconds(24 * 3600 * 1000 - 1)
    assert states(get(second, xid)) == ["TRYING"]
    request.timeout.FromMilliseconds(24 * 3600 * 1000)
    assert refused(first.Renew, request).reason == "DEADLINE_TOO_LATE"
    request.timeout.FromMilliseconds(200)
    first.Renew(request, timeout=CALL_S)
    *_, last = second.Watch(pb.WatchRequest(xid=xid), timeout=CALL_S)
    assert states(last.transaction) == ["CANCELLED"]
    assert refused(second.Renew, request).reason == "NOT_TRYING"


def test_begin_is_idempotent(stubs: tuple[Stub, Stub], bank: ParticipantServer) -> None:
    first, second = stubs
    xid = begin(first, key="order-1")
    try_(second, xid, "k1")
    assert begin(second, key="order-1", timeout_ms=5_000) == xid
    denied = refused(first.Execute, execute_request(branch(), key="order-1"))
    assert denied.reason == "IDEMPOTENCY_KEY_REUSED"
    cancel(first, xid)


def test_what_belongs_to_other_transactions(stubs: tuple[Stub, Stub], bank: ParticipantServer) -> None:
    first, second = stubs
    bank.answer = gate = Gate(TRY)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(first.Execute, execute_request(branch(), key="busy"), timeout=CALL_S)
        assert gate.reached.acquire(timeout=CALL_S)
        xid = first.Get(pb.GetRequest(idempotency_key="busy"), timeout=CALL_S).transaction.xid
        request = pb.CoordinatorServiceTryRequest(xid=xid, branch_key="k1", branch=branch())
        assert refused(second.Try, request).reason == "SEALED"
        assert refused(second.Confirm, confirm(1, xid=xid)).reason == "NOT_INTERACTIVE"
        assert states(second.Cancel(
            pb.CoordinatorServiceCancelRequest(xid=xid, wait=pb.WAIT_DECIDED), timeout=CALL_S
        ).transaction)[0] == "CANCELLING"  # fmt: skip
        gate.open.set()
        assert states(running.result().transaction) == ["CANCELLED", "CANCELLED"]


@pytest.mark.parametrize("outcome", [{"tried": pb.Tried()}, {"refusal": types_pb2.Refusal(reason="no")}])
def test_a_report_from_another_fence_database_is_a_violation(
    stubs: tuple[Stub, Stub], bank: ParticipantServer, outcome: dict[str, Any]
) -> None:
    """As a Try's reply from there: what it has reserved, no Cancel of the registered one reaches (C3)."""
    first, second = stubs
    xid = begin(first)
    second.Enlist(pb.EnlistRequest(xid=xid, branch_key="k", branch=branch()), timeout=CALL_S)
    first.Report(pb.ReportRequest(xid=xid, branch_id=1, fence_id="fence-2", **outcome), timeout=CALL_S)
    *_, last = second.Watch(pb.WatchRequest(xid=xid), timeout=CALL_S)
    assert states(last.transaction)[0] == "CANCELLED"
    assert last.transaction.attention == types_pb2.ATTENTION_VIOLATION
    told = last.transaction.branches[0].last_error
    assert "fence database fence-2, registered is fence-1" in told
    assert phases(bank, xid) == [(1, CANCEL)]


def test_ordered_trys_wait_for_each_other(stubs: tuple[Stub, Stub], bank: ParticipantServer) -> None:
    bank.answer = lambda call: refuse(call) if call.phase == TRY and call.branch_id == 2 else done(call)
    request = execute_request(branch(), branch(), branch())
    request.ordered = True
    tx = stubs[0].Execute(request, timeout=CALL_S).transaction
    assert tx.ordered
    assert states(tx)[0] == "CANCELLED"
    trys = [(call.branch_id, call.phase) for call in calls(bank, tx.xid) if call.phase == TRY]
    assert trys == [(1, TRY), (2, TRY)]
    bank.answer = done
    tx = stubs[0].Execute(request, timeout=CALL_S).transaction
    assert states(tx) == ["CONFIRMED"] * 4
    assert [call.branch_id for call in calls(bank, tx.xid) if call.phase == TRY] == [1, 2, 3]


def test_accepted_is_answered_before_it_is_decided(stubs: tuple[Stub, Stub], bank: ParticipantServer) -> None:
    bank.answer = gate = Gate(TRY)
    request = execute_request(branch(), wait=pb.WAIT_ACCEPTED)
    tx = stubs[0].Execute(request, timeout=CALL_S).transaction
    assert states(tx)[0] == "TRYING"
    watching = stubs[1].Watch(pb.WatchRequest(xid=tx.xid), timeout=CALL_S)
    seen = [states(next(watching).transaction)[0]]
    gate.open.set()
    seen += [states(answer.transaction)[0] for answer in watching]
    assert (seen[0], seen[-1]) == ("TRYING", "CONFIRMED")


BAD: dict[str, tuple[Any, Any]] = {
    "xid": (lambda s: s.Try, pb.CoordinatorServiceTryRequest(xid="x", branch_key="k", branch=branch())),
    "branch_key": (lambda s: s.Try, pb.CoordinatorServiceTryRequest(xid="0" * 32, branch=branch())),
    "branch.participant": (
        lambda s: s.Try,
        pb.CoordinatorServiceTryRequest(xid="0" * 32, branch_key="k", branch=branch(participant="a b")),
    ),
    "tried_branch_ids[1]": (
        lambda s: s.Confirm,
        pb.CoordinatorServiceConfirmRequest(xid="0" * 32, tried_branch_ids=[1, 65]),
    ),
    "tried_branch_ids": (
        lambda s: s.Confirm,
        pb.CoordinatorServiceConfirmRequest(xid="0" * 32, tried_branch_ids=[1] * 65),
    ),
    "reason": (lambda s: s.Cancel, pb.CoordinatorServiceCancelRequest(xid="0" * 32, reason="x" * 257)),
    "wait": (lambda s: s.Cancel, pb.CoordinatorServiceCancelRequest(xid="0" * 32, wait=9)),  # type: ignore[arg-type]
    "timeout": (lambda s: s.Renew, pb.RenewRequest(xid="0" * 32)),
    "parent_branch_id": (
        lambda s: s.Enlist,
        pb.EnlistRequest(xid="0" * 32, branch_key="k", branch=branch(), parent_branch_id=65),
    ),
    "outcome": (lambda s: s.Report, pb.ReportRequest(xid="0" * 32, branch_id=1, fence_id="f")),
    "branch_id": (lambda s: s.Report, pb.ReportRequest(xid="0" * 32, fence_id="f", tried=pb.Tried())),
    "fence_id": (lambda s: s.Report, pb.ReportRequest(xid="0" * 32, branch_id=1, tried=pb.Tried())),
    "tried.result": (
        lambda s: s.Report,
        pb.ReportRequest(
            xid="0" * 32,
            branch_id=1,
            fence_id="f",
            tried=pb.Tried(result=types_pb2.Payload(data=b"x" * (64 * 1024 + 1))),
        ),
    ),
}


@pytest.mark.parametrize("field", BAD)
def test_bad_input_names_the_field(stubs: tuple[Stub, Stub], field: str) -> None:
    method, request = BAD[field]
    denied = refused(method(stubs[0]), request)
    assert denied.code is grpc.StatusCode.INVALID_ARGUMENT
    assert list(denied.fields) == [field]


def test_an_unknown_transaction(stubs: tuple[Stub, Stub], bank: ParticipantServer) -> None:
    xid = "0" * 32
    requests = {
        "Try": pb.CoordinatorServiceTryRequest(xid=xid, branch_key="k", branch=branch()),
        "Confirm": pb.CoordinatorServiceConfirmRequest(xid=xid),
        "Cancel": pb.CoordinatorServiceCancelRequest(xid=xid),
        "Enlist": pb.EnlistRequest(xid=xid, branch_key="k", branch=branch()),
        "Report": pb.ReportRequest(xid=xid, branch_id=1, fence_id="f", tried=pb.Tried()),
    }
    for name, request in requests.items():
        denied: Refused = refused(getattr(stubs[0], name), request)
        assert denied.code is grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.RpcError) as raised:
        next(iter(stubs[0].Watch(pb.WatchRequest(xid=xid), timeout=CALL_S)))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


def test_too_many_branches(stubs: tuple[Stub, Stub], bank: ParticipantServer) -> None:
    xid = begin(stubs[0])
    for n in range(64):
        try_(stubs[n % 2], xid, f"k{n}")
    request = pb.CoordinatorServiceTryRequest(xid=xid, branch_key="more", branch=branch())
    assert refused(stubs[0].Try, request).reason == "TOO_MANY_BRANCHES"
    assert refused(stubs[0].Try, pb.CoordinatorServiceTryRequest(
        xid=xid, branch_key="other", branch=branch(action="nothing"))).reason == "UNKNOWN_ACTION"  # fmt: skip
    assert len(states(cancel(stubs[1], xid))) == 65
