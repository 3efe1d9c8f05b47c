"""``tricord check``: what it prints, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.check.events import Event, Fence, Row
from coordinator.check.invariants import INVARIANTS
from coordinator.cli.check import VIOLATIONS_MAX
from tests.coordinators import environment, tricord
from tests.unit.histories import Transfer, history, text

GOOD = history([Transfer(), Transfer(confirmed=False)])
MIXED: list[Event] = [Row(1, "x", "CONFIRMED"), Fence(2, "x", 1, "bank-a", "SUSPENDED")]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where the history is."""
    return tmp_path / "history.jsonl"


def test_a_history_that_holds(file: Path) -> None:
    file.write_bytes(text(GOOD))
    run = tricord("check", str(file))
    assert run.returncode == 0, run.stderr
    assert "VIOLATED:" not in run.stdout
    for invariant in INVARIANTS.values():
        assert invariant.words in run.stdout
    assert f"events: {len(GOOD)}, transactions: 2; invariants judged: 9 of 12; violations: 0" in run.stderr
    assert "needs purged" in run.stdout


def test_a_history_that_does_not(file: Path) -> None:
    file.write_bytes(text(MIXED))
    run = tricord("check", str(file))
    assert run.returncode == 6
    told = "branch 1 is cancelled, and the transaction was confirmed (lines 1, 2)"
    assert run.stdout.startswith(f"VIOLATED: invariant 2, {INVARIANTS[2].words}: x: {told}\n")
    assert "without an end, so that what is missing is not judged" in run.stderr


def test_for_machines(file: Path) -> None:
    file.write_bytes(text(MIXED))
    run = tricord("check", "-o", "json", str(file))
    verdict = json.loads(run.stdout)
    assert run.returncode == 6
    assert (verdict["events"], verdict["transactions"], verdict["ended"], verdict["not_told"]) == (2, 1, False, 0)
    (violation,) = verdict["violations"]
    assert (violation["number"], violation["subject"], violation["lines"]) == (2, "x", [1, 2])
    by_number = {each["number"]: each for each in verdict["invariants"]}
    assert by_number.keys() == INVARIANTS.keys()
    assert (by_number[2]["judged"], by_number[2]["violations"], by_number[2]["not_judged"]) == (1, 1, "")
    assert by_number[12]["not_judged"] == "a history does not show it"


def test_more_than_can_be_told(file: Path) -> None:
    file.write_bytes(text(Fence(1, f"x{n}", 1, "bank-a", "TRIED") for n in range(VIOLATIONS_MAX + 1)))
    run = tricord("check", str(file))
    assert run.returncode == 6
    assert run.stdout.count("VIOLATED: ") == VIOLATIONS_MAX
    assert f"violations: {VIOLATIONS_MAX + 1}, 1 of them not told" in run.stderr


def test_standard_input() -> None:
    command = [sys.executable, "-m", "coordinator", "check", "-"]
    good = subprocess.run(command, env=environment(), input=text(GOOD), capture_output=True, timeout=60, check=False)
    assert good.returncode == 0, good.stderr
    cut = subprocess.run(
        command, env=environment(), input=text(GOOD)[:-3], capture_output=True, timeout=60, check=False
    )
    assert (cut.returncode, cut.stdout) == (2, b"")
    assert f"tricord: standard input: line {len(GOOD)}: is cut off".encode() in cut.stderr


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "line 1: there is no event in it"),
        (text(MIXED) + b'{"event":"row","at":3,"xid":"y","state":"DONE"}\n', "line 3, field state: must be one of"),
        (b"\x00\xff\n", "line 1: is not UTF-8"),
    ],
)
def test_what_is_no_history(file: Path, content: bytes, problem: str) -> None:
    file.write_bytes(content)
    run = tricord("check", str(file))
    assert run.returncode == 2
    assert f"tricord: {file}: {problem}" in run.stderr
    assert "Traceback" not in run.stderr


def test_wrong_usage(tmp_path: Path) -> None:
    for arguments in (
        ["check"],
        ["check", str(tmp_path)],
        ["check", str(tmp_path / "none")],
        ["check", "-o", "x", "-"],
    ):
        run = tricord(*arguments)
        assert (run.returncode, run.stdout) == (2, ""), arguments


def test_its_help() -> None:
    run = tricord("check", "--help")
    assert run.returncode == 0
    text = " ".join(run.stdout.split())
    for words in ("docs/histories.md", "Exit code 0", "6: something does not", "-o, --output"):
        assert words in text
