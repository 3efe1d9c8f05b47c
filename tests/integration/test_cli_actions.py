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

from .operator_scene import OperatorScene, operator_scene
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
    assert json.loads(none.stdout) == {"participant": "bank", "dry_run": False, "count": 0, "failed_xids": []}
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["retry"], "name either XID or --participant"),
        (["retry", "0" * 32, "--participant", "bank"], "name either XID or --participant"),
        (["retry", "0" * 32, "--dry-run"], "go with --participant"),
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
