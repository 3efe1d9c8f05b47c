"""A fence is asked before a branch of it is resolved by hand, over real gRPC; what is lost; dry runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest

from tests.coordinators import CALL_S, Refused, refused, states
from tricord.v1 import operator_pb2 as pb
from tricord.v1 import participant_pb2 as participant_pb
from tricord.v1 import types_pb2

from .operator_scene import SILENT, OperatorScene, operator_scene
from .participant_server import fence_branch
from .test_operator_actions import begin
from .test_operator_resolves import CANCELLED, CONFIRMED, CONFLICT, NOBODY, resolve_request

TRIED, COMMITTED = participant_pb.FENCE_STATUS_TRIED, participant_pb.FENCE_STATUS_COMMITTED
ROLLBACKED = participant_pb.FENCE_STATUS_ROLLBACKED
FITS, CONTRADICTS, UNCLEAR = pb.FENCE_VERDICT_FITS, pb.FENCE_VERDICT_CONTRADICTS, pb.FENCE_VERDICT_UNCLEAR


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[OperatorScene]:
    """One coordinator on SQLite."""
    with operator_scene(tmp_path / "tricord.db") as made:
        yield made


def request_of(xid: str, state: Any = CONFIRMED, **more: Any) -> pb.ResolveRequest:
    request = resolve_request(xid, state)
    for name, value in more.items():
        setattr(request, name, value)
    return request


def resolve(scene: OperatorScene, xid: str, state: Any = CONFIRMED, **more: Any) -> pb.ResolveResponse:
    return scene.operators[0].Resolve(request_of(xid, state, **more), timeout=CALL_S)


def not_resolved(scene: OperatorScene, xid: str, state: Any = CONFIRMED, **more: Any) -> Refused:
    """How it is refused; and nothing but the record of that is stored."""
    before = scene.get(xid)
    answer = refused(scene.operators[0].Resolve, request_of(xid, state, **more))
    assert answer.code is CONFLICT
    assert scene.get(xid) == before
    asked, last = scene.audit(xid)[-2:]
    assert (asked.outcome, last.outcome) == (pb.AUDIT_OUTCOME_ASKED, pb.AUDIT_OUTCOME_REFUSED)
    after = json.loads(last.after)
    assert (after["error"], after["message"]) == (answer.reason, answer.message)
    assert after["fence"] == json.loads(asked.before)["fence"] == answer.metadata["fence"]
    return answer


@pytest.mark.parametrize(
    ("status", "opposite", "state"), [(COMMITTED, CANCELLED, "cancelled"), (ROLLBACKED, CONFIRMED, "confirmed")]
)
def test_what_the_fence_contradicts_is_refused_unless_forced(
    scene: OperatorScene, status: Any, opposite: Any, state: str
) -> None:
    xid = scene.stuck()
    row = fence_branch(status)
    scene.bank.told = lambda request: row
    answer = not_resolved(scene, xid, opposite)
    assert answer.reason == "FENCE_CONTRADICTS"
    name = participant_pb.FenceStatus.Name(status).removeprefix("FENCE_STATUS_")
    since = row.update_time.ToDatetime().isoformat(timespec="seconds")
    assert f"cannot be resolved as {state}" in answer.message
    assert f"participant bank contradicts: {name} since {since[:10]}" in answer.message
    assert "--force" in answer.message
    assert [seen.phase for seen in scene.bank.seen()] == ["TRY", "CONFIRM"]
    response = resolve(scene, xid, opposite, force=True)
    assert (response.fence_verdict, response.transaction.branches[0].resolution.actor) == (CONTRADICTS, "alice")
    asked, last = scene.audit(xid)[-2:]
    for text in (asked.before, last.after):
        facts = json.loads(text)
        assert (facts["forced"], facts["fence"]) == (True, response.fence)
    assert response.fence.startswith(f"{name} since ")


@pytest.mark.parametrize("status", [None, TRIED, participant_pb.FENCE_STATUS_SUSPENDED, COMMITTED])
def test_what_fits_is_recorded(scene: OperatorScene, status: Any) -> None:
    xid = scene.stuck()
    scene.bank.told = lambda request: None if status is None else fence_branch(status)
    response = resolve(scene, xid)
    assert response.fence_verdict == FITS
    assert states(scene.finished(xid)) == ["CONFIRMED", "CONFIRMED"]
    done = json.loads(scene.audit(xid)[-1].after)
    assert done["fence"] == response.fence
    assert "forced" not in done


def test_force_where_nothing_contradicts_changes_nothing_but_the_record(scene: OperatorScene) -> None:
    xid = scene.stuck()
    scene.bank.told = lambda request: fence_branch(TRIED)
    would = resolve(scene, xid, force=True, dry_run=True)
    assert (would.fence_verdict, would.refusal) == (FITS, "")
    assert scene.get(xid).branches[0].HasField("resolution") is False
    response = resolve(scene, xid, force=True)
    assert response.fence_verdict == FITS
    tx = scene.finished(xid)
    assert (states(tx), tx.mixed) == (["CONFIRMED", "CONFIRMED"], False)
    assert json.loads(scene.audit(xid)[-1].after)["forced"] is True


def test_a_fence_that_cannot_be_asked_is_no_yes(scene: OperatorScene) -> None:
    xid = scene.stuck()
    waits = threading.Event()

    def never(request: participant_pb.GetBranchRequest) -> participant_pb.FenceBranch:
        waits.wait()
        return fence_branch(TRIED)

    def runs(request: participant_pb.GetBranchRequest) -> participant_pb.FenceBranch:
        return fence_branch(TRIED, finished=False, external=True, running=True)

    told: list[tuple[Any, str]] = [
        (None, "does not offer GetBranch (no GetBranch here)"),
        (runs, "its external Try may still be running"),
        (never, "Deadline Exceeded"),
    ]
    for telling, said in told:
        scene.bank.told = telling
        answer = not_resolved(scene, xid)
        assert answer.reason == "FENCE_UNCLEAR"
        for words in (said, "--force", "--lost"):
            assert words in answer.message
    waits.set()
    scene.bank.told, scene.bank.fence_id = scene.bank.as_answered, "another"
    assert "stands on fence database another, Try was answered by fence-1" in not_resolved(scene, xid).message
    scene.bank.fence_id = "fence-1"
    scene.bank.stop()
    assert not_resolved(scene, xid).reason == "FENCE_UNCLEAR"
    response = resolve(scene, xid, force=True)
    assert (response.fence_verdict, json.loads(scene.audit(xid)[-1].after)["forced"]) == (UNCLEAR, True)
    assert states(scene.get(xid)) == ["CONFIRMING", "TRIED"]  # it does not rest before it is written down
    scene.bank.start()
    scene.retry(xid)
    assert states(scene.finished(xid)) == ["CONFIRMED", "CONFIRMED"]


def test_another_instance_may_speak_for_the_fence(scene: OperatorScene) -> None:
    xid = scene.stuck()
    scene.coordinators[0].register("bank", "127.0.0.1:1")  # nobody is there
    assert resolve(scene, xid).fence_verdict == FITS


def test_a_lost_database_ends_the_branch_at_once(scene: OperatorScene) -> None:
    xid = scene.stuck(shop="fine")
    while states(scene.get(xid)) != ["CONFIRMING", "TRIED", "CONFIRMED"]:
        pass
    answer = not_resolved(scene, xid, lost=True)
    assert (answer.reason, "--lost" in answer.message) == ("PARTICIPANT_ANSWERS", True)
    scene.bank.told = None
    assert not_resolved(scene, xid, lost=True).reason == "PARTICIPANT_ANSWERS"  # an older one is there as well
    scene.bank.stop()
    tx = resolve(scene, xid, CANCELLED, lost=True).transaction
    assert states(tx) == states(scene.finished(xid)) == ["CONFIRMED", "CANCELLED", "CONFIRMED"]
    assert (tx.mixed, tx.attention) == (True, types_pb2.ATTENTION_VIOLATION)
    assert tx.branches[0].resolution.lost
    done = json.loads(scene.audit(xid)[-1].after)
    assert (done["lost"], done["branches"][0]["lost"]) == (True, True)
    scene.bank.start()
    assert resolve(scene, xid, CANCELLED, lost=True).transaction == tx  # a repeat
    answer = refused(scene.operators[0].Resolve, request_of(xid, lost=True))
    assert (answer.code, answer.reason) == (CONFLICT, "ANSWERED")
    assert {seen.phase for seen in scene.bank.seen()} == {"TRY", "CONFIRM"}


def test_lost_against_one_that_answers_is_forced(scene: OperatorScene) -> None:
    xid = scene.stuck(bank=SILENT)
    scene.bank.wait_for(1, "CONFIRM")
    tx = resolve(scene, xid, CANCELLED, lost=True, force=True).transaction
    assert (states(tx), tx.mixed) == (["CONFIRMED", "CANCELLED"], True)
    assert states(scene.finished(xid)) == ["CONFIRMED", "CANCELLED"]  # though its Confirm is out
    assert json.loads(scene.audit(xid)[-1].after)["forced"]


def test_a_dry_run_says_what_would_come_of_it_and_changes_nothing(scene: OperatorScene) -> None:
    xid, trying = scene.stuck(), begin(scene)
    before = scene.get(xid)
    would = resolve(scene, xid, CANCELLED, dry_run=True)
    assert (would.fence_verdict, would.refusal) == (FITS, "")
    assert would.fence.startswith("TRIED since ")
    assert (would.transaction.mixed, would.transaction.branches[0].resolution.resolved_state) == (True, CANCELLED)
    assert states(resolve(scene, xid, dry_run=True, lost=True, force=True).transaction) == ["CONFIRMED", "CONFIRMED"]
    scene.bank.told = lambda request: fence_branch(COMMITTED)
    would = resolve(scene, xid, CANCELLED, dry_run=True)
    assert (would.fence_verdict, "contradicts: COMMITTED since" in would.refusal) == (CONTRADICTS, True)
    assert would.transaction.mixed is False
    assert resolve(scene, xid, CANCELLED, dry_run=True, force=True).refusal == ""
    assert "TRYING" not in resolve(scene, trying, dry_run=True).refusal
    assert "has no branch 1" in resolve(scene, trying, dry_run=True).refusal
    answer = refused(scene.operators[0].Resolve, request_of(NOBODY, dry_run=True))
    assert answer.code is grpc.StatusCode.NOT_FOUND
    assert scene.get(xid) == before
    assert scene.audit() == []
    assert [seen.phase for seen in scene.bank.seen()] == ["TRY", "CONFIRM"]


def test_who_is_refused_anyway_or_repeats_asks_no_fence(scene: OperatorScene) -> None:
    asked: list[participant_pb.GetBranchRequest] = []

    def told(request: participant_pb.GetBranchRequest) -> participant_pb.FenceBranch:
        asked.append(request)
        return fence_branch(TRIED)

    scene.bank.told = told
    xid = scene.stuck()
    scene.settles.clear()
    resolve(scene, xid)
    (request,) = asked
    assert (request.participant, request.xid, request.branch_id) == ("bank", xid, 1)
    assert resolve(scene, xid).fence_verdict == pb.FENCE_VERDICT_UNSPECIFIED
    scene.settles.set()
    scene.retry(xid)
    scene.finished(xid)
    assert refused(scene.operators[0].Resolve, request_of(xid, CANCELLED)).reason == "ANSWERED"
    assert len(asked) == 1


@pytest.mark.database
def test_what_ends_a_transaction_by_hand_is_stored_before_it_is_told(pg_database: str) -> None:
    with operator_scene(pg_database) as scene, ThreadPoolExecutor() as pool:
        xid = scene.stuck()
        scene.bank.stop()
        with psycopg.connect(pg_database) as holder:
            holder.execute("SELECT 1 FROM tricord_transaction WHERE xid = %s FOR UPDATE", [bytes.fromhex(xid)])
            told = pool.submit(resolve, scene, xid, lost=True)
            with psycopg.connect(pg_database, autocommit=True) as looker:
                blocked = "SELECT count(*) FROM pg_stat_activity WHERE cardinality(pg_blocking_pids(pid)) > 0"
                while looker.execute(blocked).fetchone() == (0,):
                    pass
            assert not wait([told], timeout=1).done
        assert states(told.result(CALL_S).transaction) == ["CONFIRMED", "CONFIRMED"]
        assert scene.get(xid).branches[0].resolution.lost
        scene.bank.start()
