"""A branch is resolved by hand, over real gRPC: what is recorded, what its participant is told, when it rests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest

from participant_sdk import TricordClient
from tests.coordinators import CALL_S, refused, states, tricord
from tricord.v1 import operator_pb2 as pb
from tricord.v1 import types_pb2

from .operator_scene import BROKEN, OperatorScene, operator_scene
from .test_operator_actions import begin

CONFIRMED, CANCELLED = types_pb2.BRANCH_STATE_CONFIRMED, types_pb2.BRANCH_STATE_CANCELLED
CONFLICT = grpc.StatusCode.FAILED_PRECONDITION
BY_HAND = "booked by hand, ticket 17"
NOBODY = "0" * 32


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[OperatorScene]:
    """One coordinator on SQLite."""
    with operator_scene(tmp_path / "tricord.db") as made:
        yield made


def resolve_request(xid: str, state: Any = CONFIRMED, branch_id: int = 1) -> pb.ResolveRequest:
    return pb.ResolveRequest(xid=xid, branch_id=branch_id, resolved_state=state, actor="alice", reason=BY_HAND)


def resolve(scene: OperatorScene, xid: str, state: Any = CONFIRMED) -> types_pb2.Transaction:
    return scene.operators[0].Resolve(resolve_request(xid, state), timeout=CALL_S).transaction


def phases(scene: OperatorScene) -> list[str]:
    return [seen.phase for seen in scene.bank.seen() if seen.phase != "TRY"]


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "unary"])
def test_by_the_decision(tmp_path: Path, exchange: bool) -> None:
    with operator_scene(tmp_path / "tricord.db", exchange=exchange) as scene:
        xid = scene.stuck()
        resolution = resolve(scene, xid).branches[0].resolution
        assert (resolution.resolved_state, resolution.actor, resolution.reason) == (CONFIRMED, "alice", BY_HAND)
        tx = scene.finished(xid)
        assert (states(tx), tx.mixed) == (["CONFIRMED", "CONFIRMED"], False)
        assert phases(scene) == ["CONFIRM", "SETTLE_CONFIRMED"]
        assert tx.branches[0].resolution.time.ToMilliseconds() >= tx.decide_time.ToMilliseconds()


def test_against_the_decision_is_mixed_for_ever(scene: OperatorScene) -> None:
    xid = scene.stuck(bank=BROKEN, shop="fine")
    scene.settles.clear()
    tx = resolve(scene, xid, CANCELLED)
    assert (tx.mixed, tx.attention) == (True, types_pb2.ATTENTION_VIOLATION)
    scene.bank.wait_for(1, "SETTLE_CANCELLED")
    while scene.get(xid).branches[0].last_error != "not yet":  # it does not rest before it is acknowledged
        pass
    assert states(scene.get(xid)) == ["CONFIRMING", "TRIED", "CONFIRMED"]
    scene.coordinators[0].stop()
    scene.coordinators[0].start()
    scene.operators[0] = scene.coordinators[0].operator_service()
    scene.settles.set()
    tx = scene.finished(xid)
    assert states(tx) == ["CONFIRMED", "CANCELLED", "CONFIRMED"]
    assert (tx.mixed, tx.attention) == (True, types_pb2.ATTENTION_VIOLATION)
    assert phases(scene).count("CONFIRM") == 1
    with TricordClient(scene.coordinators[0].endpoint) as client:
        assert client.get(xid=xid).mixed


def test_it_may_be_reversed_until_it_is_acknowledged(scene: OperatorScene) -> None:
    xid = scene.stuck()
    scene.settles.clear()
    resolve(scene, xid, CANCELLED)
    assert resolve(scene, xid, CANCELLED).branches[0].resolution.actor == "alice"  # a repeat changes nothing
    scene.bank.wait_for(1, "SETTLE_CANCELLED")
    tx = resolve(scene, xid, CONFIRMED)
    assert (tx.mixed, tx.branches[0].resolution.resolved_state) == (True, CONFIRMED)
    scene.settles.set()
    assert states(scene.finished(xid)) == ["CONFIRMED", "CONFIRMED"]
    answer = refused(scene.operators[0].Resolve, resolve_request(xid, CANCELLED))
    assert (answer.code, answer.reason) == (CONFLICT, "ANSWERED")
    assert "has answered for good" in answer.message


def test_what_cannot_be_resolved(scene: OperatorScene) -> None:
    trying, done = begin(scene), scene.stuck(bank="fine", shop=BROKEN)
    while states(scene.get(done))[1] != "CONFIRMED":
        scene.retry(done)
    for request, reason in (
        (resolve_request(trying), "UNKNOWN_BRANCH"),
        (resolve_request(done, branch_id=3), "UNKNOWN_BRANCH"),
        (resolve_request(done), "ANSWERED"),
    ):
        answer = refused(scene.operators[0].Resolve, request)
        assert (answer.code, answer.reason) == (CONFLICT, reason)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"branch_id": 0}, "branch_id"),
        ({"branch_id": 65}, "branch_id"),
        ({"resolved_state": types_pb2.BRANCH_STATE_TRIED}, "resolved_state"),
        ({"resolved_state": 0}, "resolved_state"),
        ({"reason": ""}, "reason"),
        ({"actor": ""}, "actor"),
    ]
    for changes, field in bad:
        request = resolve_request(done)
        for name, value in changes.items():
            setattr(request, name, value)
        assert refused(scene.operators[0].Resolve, request).fields.keys() == {field}
    assert refused(scene.operators[0].Resolve, resolve_request(NOBODY)).code == grpc.StatusCode.NOT_FOUND


@pytest.mark.database
def test_not_while_an_older_program_may_use_the_store(pg_database: str) -> None:
    with operator_scene(pg_database) as scene:
        xid = scene.stuck()
    with psycopg.connect(pg_database) as connection:
        connection.execute("UPDATE tricord_store SET format = 2, oldest_program = 2")
    with operator_scene(pg_database) as scene:
        answer = refused(scene.operators[0].Resolve, resolve_request(xid))
        assert (answer.code, answer.reason) == (CONFLICT, "STORE_FORMAT")
        assert "migrate --finish" in answer.message
        assert not scene.get(xid).branches[0].HasField("resolution")
        assert [record.outcome for record in scene.audit(xid)] == [
            pb.AUDIT_OUTCOME_ASKED, pb.AUDIT_OUTCOME_REFUSED,
        ]  # fmt: skip


def test_the_command(scene: OperatorScene) -> None:
    xid = scene.stuck()
    env = {"TRICORD_ENDPOINT": scene.coordinators[0].endpoint}
    command = ["resolve", xid, "1", "--as", "cancelled", "--reason", BY_HAND, "--actor", "alice"]
    unsure = tricord(*command, env=env)
    assert (unsure.returncode, unsure.stdout) == (2, "")
    assert "--yes" in unsure.stderr
    ran = tricord(*command, "--yes", "-o", "json", env=env)
    assert (ran.returncode, ran.stderr) == (0, "")
    told = json.loads(ran.stdout)
    assert (told["mixed"], told["branches"][0]["resolution"]["as"]) == (True, "CANCELLED")
    scene.finished(xid)
    assert tricord(*command, "--yes", env=env).returncode == 4
    assert tricord("resolve", xid, "0", *command[3:], "--yes", env=env).returncode == 2
    shown = tricord("show", xid, env=env).stdout
    assert "CANCELLED by alice at " in shown
    assert "mixed" in shown
    assert f"done: {BY_HAND}" in shown
    assert "MIXED VIOLATION" in tricord("list", env=env).stdout
