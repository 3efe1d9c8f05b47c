"""Operators' actions as commands: processes, exit codes, what is printed where."""

from __future__ import annotations

import getpass
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.coordinators import START_S, environment, tricord
from tricord.v1 import participant_pb2

from .operator_scene import OperatorScene, operator_scene
from .participant_server import fence_branch
from .test_operator_actions import begin

OK, ERROR, USAGE, NOT_FOUND, CONFLICT, UNAVAILABLE = 0, 1, 2, 3, 4, 5
BECAUSE = ("--reason", "order 7 is a duplicate")


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[OperatorScene]:
    with operator_scene(tmp_path / "tricord.db") as made:
        yield made


def run(scene: OperatorScene, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, with this coordinator's address in the environment."""
    return tricord(*arguments, env={"TRICORD_ENDPOINT": scene.coordinators[0].endpoint})


def fails(ran: subprocess.CompletedProcess[str], code: int, *said: str) -> None:
    """It ended with this code, and told on standard error what is wrong, without a traceback."""
    assert (ran.returncode, ran.stdout) == (code, ""), ran.stderr
    assert "Traceback" not in ran.stderr
    for words in said:
        assert words in ran.stderr


def test_retry_one(scene: OperatorScene) -> None:
    xid = scene.stuck()
    scene.mended.set()
    ran = run(scene, "retry", xid, "--reason", "open again", "--actor", "alice", "-o", "jsonl")
    assert (ran.returncode, ran.stderr) == (OK, "")
    assert json.loads(ran.stdout)["xid"] == xid
    scene.finished(xid)
    fails(run(scene, "retry", xid), CONFLICT, f"transaction {xid} is CONFIRMED")
    fails(run(scene, "retry", "0" * 32), NOT_FOUND, "there is no transaction")


def test_retry_many(scene: OperatorScene) -> None:
    xids = [scene.stuck() for _ in range(2)]
    counted = run(scene, "retry", "--participant", "bank", "--dry-run")
    assert (counted.returncode, counted.stdout, counted.stderr) == (OK, "2 would be retried\n", "")
    none = run(scene, "retry", "--participant", "bank", "--state", "cancelling", "-o", "json")
    assert json.loads(none.stdout) == {
        "participant": "bank", "filter": "", "dry_run": False, "count": 0, "failed_xids": [],
    }  # fmt: skip
    assert run(scene, "retry", "--older-than", "1h").stdout == "0 retried\n"
    of = ("retry", "--participant", "bank", "--older-than", "0s", "--dry-run")
    assert run(scene, *of).stdout == "2 would be retried\n"
    scene.mended.set()
    assert run(scene, "retry", "--participant", "bank").stdout == "2 retried\n"
    assert {scene.finished(xid).state for xid in xids} == {3}
    assert run(scene, "retry", "--participant", "bank").stdout == "0 retried\n"


def test_cancel(scene: OperatorScene) -> None:
    xid = begin(scene)
    fails(run(scene, "cancel", xid, *BECAUSE), USAGE, "--yes")
    assert scene.audit() == []
    ran = run(scene, "cancel", xid, *BECAUSE, "--yes", "--actor", "bob")
    assert (ran.returncode, ran.stderr) == (OK, "")
    assert "cancelled by an operator (bob): order 7 is a duplicate" in ran.stdout
    fails(run(scene, "cancel", xid, *BECAUSE, "--yes"), CONFLICT, "is CANCELLED and cannot be cancelled any more")


@pytest.mark.parametrize(("answer", "code"), [("y\n", OK), ("n\n", ERROR)])
def test_cancel_asks_at_a_terminal(scene: OperatorScene, answer: str, code: int) -> None:
    xid = begin(scene)
    ours, theirs = pty.openpty()
    try:
        os.write(ours, answer.encode())
        command = [sys.executable, "-m", "coordinator", "cancel", xid, *BECAUSE]
        env = {**environment(), "TRICORD_ENDPOINT": scene.coordinators[0].endpoint}
        ran = subprocess.run(command, env=env, stdin=theirs, capture_output=True, text=True, timeout=START_S)
    finally:
        os.close(ours)
        os.close(theirs)
    assert ran.returncode == code, ran.stderr
    assert f"Cancel transaction {xid}? [y/N]" in ran.stderr
    assert scene.get(xid).state == (5 if code == OK else 1)


def test_audit_and_history(scene: OperatorScene) -> None:
    xid, other = begin(scene), scene.stuck()
    run(scene, "cancel", xid, *BECAUSE, "--yes")
    run(scene, "retry", other, "--actor", "alice")
    head, *rows = run(scene, "audit").stdout.splitlines()
    assert head.split() == ["TIME", "ACTION", "OUTCOME", "ACTOR", "XID", "REASON", "BEFORE", "AFTER"]
    assert [row.split()[1:5] for row in rows] == [
        ["retry", "DONE", "alice", other],
        ["retry", "ASKED", "alice", other],
        ["cancel", "DONE", getpass.getuser(), xid],
        ["cancel", "ASKED", getpass.getuser(), xid],
    ]
    assert rows[2].split()[5:] == ["order", "7", "is", "a", "duplicate", "TRYING", "CANCELLED"]
    lines = [json.loads(line) for line in run(scene, "audit", xid, "-o", "jsonl").stdout.splitlines()]
    assert [(line["outcome"], line["before"]["state"]) for line in lines] == [("DONE", "TRYING"), ("ASKED", "TRYING")]
    assert lines[0]["asked_id"] == lines[1]["id"]
    page = run(scene, "audit", "--limit", "1", "-o", "json", "--newer-than", "1h")
    token = json.loads(page.stdout)["next_page_token"]
    assert f"more: --page-token {token}" in run(scene, "audit", "--limit", "1", "--newer-than", "1h").stderr
    rest = run(scene, "audit", "-o", "json", "--newer-than", "1h", "--page-token", token)
    assert len(json.loads(rest.stdout)["records"]) == 3
    assert json.loads(run(scene, "audit", "-o", "json", "--older-than", "1h").stdout)["records"] == []
    shown = json.loads(run(scene, "show", xid, "-o", "json").stdout)
    assert [event["event"] for event in shown["history"]] == ["created", "decided", "finished", "cancel"]
    table = run(scene, "show", xid).stdout
    assert "to cancel: cancelled by an operator" in table
    assert "done: order 7 is a duplicate" in table


def test_cancel_many(scene: OperatorScene) -> None:
    xids, decided = [begin(scene) for _ in range(2)], scene.stuck()
    of = ("cancel", "--filter", "NOT participant = shop", "--older-than", "0s")
    counted = run(scene, *of, "--dry-run")
    assert (counted.returncode, counted.stderr) == (OK, "")
    assert counted.stdout == "2 would be cancelled, 1 left alone: decided before\n"
    fails(run(scene, *of, "--yes"), USAGE, "Missing option '--reason'")
    fails(run(scene, *of, *BECAUSE), USAGE, "say --yes")
    assert scene.audit() == []
    done = json.loads(run(scene, *of, *BECAUSE, "--yes", "-o", "json").stdout)
    assert done == {
        "filter": "age >= 0s AND (NOT participant = shop)", "dry_run": False, "count": 2, "failed_xids": [],
        "left_alone": 1,
    }  # fmt: skip
    assert {scene.get(xid).cancel_reason[:9] for xid in xids} == {"cancelled"}
    assert scene.get(decided).cancel_reason == ""


def resolve_command(xid: str) -> tuple[str, ...]:
    return ("resolve", xid, "1", "--as", "cancelled", *BECAUSE)


def test_resolve_asks_the_fence(scene: OperatorScene) -> None:
    command = resolve_command(xid := scene.stuck())
    would = run(scene, *command, "--dry-run")
    assert (would.returncode, would.stderr) == (OK, "")
    told = dict(line.strip().split(maxsplit=1) for line in would.stdout.replace("would be", "would_be").splitlines())
    assert told["fence"].startswith("FITS: TRIED since ")
    assert told["would_be"] == "recorded; its participant is told until it has written it down"
    assert told["mixed"] == "True: for ever"
    scene.bank.told = lambda request: fence_branch(participant_pb2.FENCE_STATUS_COMMITTED)
    fails(run(scene, *command, "--yes"), CONFLICT, "contradicts: COMMITTED since", "--force")
    would = run(scene, *command, "--dry-run", "-o", "json")
    assert (would.returncode, "contradicts" in would.stderr) == (CONFLICT, True)
    facts = json.loads(would.stdout)
    assert (facts["fence_verdict"], facts["transaction"]["mixed"]) == ("CONTRADICTS", False)
    ran = run(scene, *command, "--force", "--yes")
    assert (ran.returncode, ran.stderr.startswith("forced; the fence: COMMITTED since ")) == (OK, True)
    assert scene.get(xid).mixed


def test_resolve_what_is_lost(scene: OperatorScene) -> None:
    command = resolve_command(xid := scene.stuck())
    fails(run(scene, *command, "--lost", "--yes"), CONFLICT, "is there, so its database is not lost")
    fails(run(scene, *command, "--lost"), USAGE, "it goes with --yes")
    scene.bank.stop()
    fails(run(scene, *command, "--yes"), CONFLICT, "cannot be asked", "--force", "--lost")
    assert not scene.get(xid).branches[0].HasField("resolution")
    lost = run(scene, *command, "--lost", "--yes", "-o", "json")
    assert (lost.returncode, json.loads(lost.stdout)["branches"][0]["resolution"]["lost"]) == (OK, True)
    shown = run(scene, "show", xid).stdout
    assert ", its database being lost: order 7 is a duplicate" in shown
    assert run(scene, "audit", xid).stdout.splitlines()[1].rstrip().endswith("CONFIRMED lost")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cancel", *BECAUSE], "name either XID or --filter"),
        (["cancel", "0" * 32, "--participant", "bank", *BECAUSE], "name either XID or --filter"),
        (["cancel", "0" * 32, "--dry-run", *BECAUSE], "--dry-run goes with --filter"),
        (["cancel", "--filter", "state = OPEN", *BECAUSE], "the filter is wrong at column 9"),
        (["cancel", "--label", "x", "--yes"], "--label"),
        (["retry", "--filter", "state ="], "the filter is wrong at"),
        (["retry"], "name either XID or --participant"),
        (["retry", "0" * 32, "--participant", "bank"], "name either XID or --participant"),
        (["retry", "0" * 32, "--dry-run"], "go with --participant"),
        (["retry", "0" * 32, "--older-than", "1h"], "name either XID or --participant"),
        (["retry", "--participant", "bank", "--state", "confirmed"], "'confirmed' is not one of"),
        (["retry", "nonsense"], "xid: "),
        (["retry", "0" * 32, "--actor", "x" * 65], "actor: needs 1 to 64"),
        (["retry", "--participant", "no name"], "participant: "),
        (["cancel", "0" * 32, "--yes"], "--reason"),
        (["cancel", "0" * 32, "--yes", "--reason", ""], "reason: is needed"),
        (["cancel", "0" * 32, "--yes", "--reason", "x" * 501], "reason: has 501 characters; the limit is 500"),
        (["audit", "nonsense"], "xid: "),
        (["audit", "--limit", "0"], "--limit"),
        (["audit", "--page-token", "x"], "page_token: is not a token"),
    ],
)
def test_wrong_usage(reader: OperatorScene, arguments: list[str], said: str) -> None:
    fails(run(reader, *arguments), USAGE, said)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorScene]:
    """One for all tests that change nothing."""
    with operator_scene(tmp_path_factory.mktemp("cli") / "tricord.db") as made:
        yield made


@pytest.mark.parametrize("arguments", [["retry", "0" * 32], ["cancel", "0" * 32, *BECAUSE, "--yes"], ["audit"]])
def test_no_coordinator(arguments: list[str]) -> None:
    fails(tricord(*arguments, "--endpoint", "127.0.0.1:1"), UNAVAILABLE, "127.0.0.1:1")
