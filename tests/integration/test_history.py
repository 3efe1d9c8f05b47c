"""What a transaction's history tells of attempts that failed: over gRPC, by the command, and after a restart."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.coordinators import CALL_S, CoordinatorProcess, branch, execute_request, tricord
from tricord.v1 import coordinator_pb2, participant_pb2, types_pb2
from tricord.v1 import operator_pb2 as pb

from .participant_server import ParticipantServer, done

CLOSED, GONE = "the ledger is closed", "the disk is full"


class Bank:
    """Its debit's Confirm fails with the one error, then with the other, then not; its credit waits for the former."""

    def __init__(self, *errors: str) -> None:
        self.errors = [*errors]
        self.last: str | None = None
        """What every attempt fails with after these, if there is one."""
        self.calls = 0
        self._failed_once = threading.Event()
        self.server = ParticipantServer(self._answer)

    def _answer(self, call: participant_pb2.Call) -> participant_pb2.Reply:
        if call.phase != participant_pb2.PHASE_CONFIRM:
            return done(call)
        if call.action == "credit":
            assert self._failed_once.wait(CALL_S)
            return done(call)
        self.calls += 1
        if self.calls > 1:  # a second attempt: the first one's failure is stored
            self._failed_once.set()
        error = self.errors.pop(0) if self.errors else self.last
        if error is None:
            return done(call)
        return participant_pb2.Reply(outcome=participant_pb2.OUTCOME_UNKNOWN, error=error, attention=error == GONE)


@contextmanager
def coordinator(store: str | Path, bank: Bank) -> Iterator[CoordinatorProcess]:
    with CoordinatorProcess(store=store, backoff_base_ms=20, backoff_cap_ms=50, drain_ms=0) as process:
        process.register("bank", bank.server.address)
        yield process


@pytest.fixture
def bank() -> Iterator[Bank]:
    made = Bank(CLOSED, CLOSED, CLOSED, GONE, GONE)
    with made.server:
        yield made


def executed(process: CoordinatorProcess, *branches: coordinator_pb2.BranchRequest) -> str:
    request = execute_request(*branches, wait=coordinator_pb2.WAIT_DECIDED)
    xid: str = process.coordinator_service().Execute(request, timeout=CALL_S).transaction.xid
    return xid


def shown(process: CoordinatorProcess, xid: str) -> pb.OperatorServiceGetResponse:
    return process.operator_service().Get(pb.OperatorServiceGetRequest(xid=xid), timeout=CALL_S)


def finished(process: CoordinatorProcess, xid: str) -> pb.OperatorServiceGetResponse:
    """The transaction, as soon as it is finished in the store."""
    *_, last = process.coordinator_service().Watch(coordinator_pb2.WatchRequest(xid=xid), timeout=CALL_S)
    while (found := shown(process, xid)).transaction.state != last.transaction.state:
        pass
    return found


def failed_at_least(process: CoordinatorProcess, xid: str, attempts: int) -> pb.OperatorServiceGetResponse:
    while (found := shown(process, xid)).transaction.branches[0].attempts < attempts:
        pass
    return found


def failures(found: pb.OperatorServiceGetResponse) -> list[pb.FailedAttempts]:
    return [event.failed for event in found.history if event.event == "failed"]


def test_two_errors_and_a_recovery(tmp_path: Path, bank: Bank) -> None:
    with coordinator(tmp_path / "tricord.db", bank) as process:
        xid = executed(process, branch(), branch("bank", "credit"))
        found = finished(process, xid)
    events = [(event.event, event.branch_id) for event in found.history]
    assert [event for event in events if event != ("confirmed", 2)] == [
        ("created", 0), ("decided", 0), ("failed", 1), ("failed", 1), ("confirmed", 1), ("finished", 0),
    ]  # fmt: skip
    assert ("confirmed", 2) in events[3:-1]
    assert not found.transaction.branches[0].HasField("next_attempt_time")
    first, second = failures(found)
    assert (first.phase, first.attempts, first.first_attempt, first.last_attempt, first.error, first.attention) == (
        participant_pb2.PHASE_CONFIRM, 3, 1, 3, CLOSED, False,
    )  # fmt: skip
    assert (second.attempts, second.first_attempt, second.last_attempt, second.error, second.attention) == (
        2, 4, 5, GONE, True,
    )  # fmt: skip
    times = [event.time.ToMilliseconds() for event in found.history]
    assert times == sorted(times)
    start, later = (event for event in found.history if event.event == "failed")
    assert start.time.ToMilliseconds() <= first.last_time.ToMilliseconds() <= later.time.ToMilliseconds()
    assert found.transaction.decide_time.ToMilliseconds() <= start.time.ToMilliseconds()
    assert start.detail.startswith("branch 1 Confirm, attempts 1 to 3, the last at 20")
    assert start.detail.endswith(f"Z: {CLOSED}")
    assert f"Z (needs attention): {GONE}" in later.detail
    with coordinator(tmp_path / "tricord.db", bank) as process:
        assert shown(process, xid) == found


def test_of_a_smooth_one_nothing_more_is_kept(tmp_path: Path, bank: Bank) -> None:
    bank.errors.clear()
    with coordinator(tmp_path / "tricord.db", bank) as process:
        found = finished(process, executed(process, branch()))
        assert [event.event for event in found.history] == ["created", "decided", "finished"]
    assert formats(tmp_path / "tricord.db") == [1]


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.database)])
def test_a_run_goes_on_at_the_next_coordinator(request: pytest.FixtureRequest, bank: Bank, database: str) -> None:
    on_postgres = database == "postgresql"
    store = request.getfixturevalue("pg_database" if on_postgres else "tmp_path")
    store = store if on_postgres else store / "tricord.db"
    bank.errors, bank.last = [], CLOSED
    with coordinator(store, bank) as process:
        xid = executed(process, branch())
        before = failed_at_least(process, xid, 2)
        process.kill()
    bank.last = None
    with coordinator(store, bank) as process:
        (run,) = failures(found := finished(process, xid))
        assert (run.first_attempt, run.error) == (1, CLOSED)
        assert run.last_attempt >= failures(before)[0].last_attempt
        assert found.history[2].time == before.history[2].time


def test_what_failed_over_and_over_is_bounded(tmp_path: Path, bank: Bank) -> None:
    bank.errors = [f"error {n}" for n in range(1, 31)]
    with coordinator(tmp_path / "tricord.db", bank) as process:
        found = finished(process, xid := executed(process, branch()))
        told = json.loads(tricord("show", xid, "-o", "json", "--endpoint", process.endpoint).stdout)["history"]
    assert [run.error for run in failures(found)] == [f"error {n}" for n in (1, 2, 3, 4, 27, 28, 29, 30)]
    names = [event.event for event in found.history]
    assert names[2:] == [*["failed"] * 4, "dropped", *["failed"] * 4, "confirmed", "finished"]
    (dropped,) = (event for event in found.history if event.event == "dropped")
    assert (dropped.branch_id, dropped.failed.attempts, dropped.failed.runs) == (1, 22, 22)
    assert dropped.detail.startswith("branch 1: 22 more failed attempts, the last at ")
    assert [event["event"] for event in told] == names
    last_time = told[6]["failed"].pop("last_time")
    assert told[5]["time"] <= told[6]["time"] <= last_time <= told[7]["time"]
    assert (told[6]["branch_id"], told[6]["failed"]) == (1, {"attempts": 22, "runs": 22})


def formats(store: Path) -> list[int]:
    with closing(sqlite3.connect(store)) as connection:
        return [number for (number,) in connection.execute("SELECT format FROM tricord_transaction")]


def test_a_row_that_older_programs_may_read_has_no_past(tmp_path: Path, bank: Bank) -> None:
    store = tmp_path / "tricord.db"
    with coordinator(store, bank):
        pass
    bank.errors, bank.last = [], CLOSED
    for row_format in (1, 3):
        with closing(sqlite3.connect(store)) as connection:  # as `tricord migrate` leaves it without --finish, and with
            connection.execute(f"UPDATE tricord_store SET format = {row_format}, oldest_program = {row_format}")
            connection.commit()
        with coordinator(store, bank) as process:
            if row_format == 1:
                xid = executed(process, branch())
            failed_at_least(process, xid, 2 * row_format)
        assert formats(store) == [row_format]
        with coordinator(store, bank) as process:
            known = shown(process, xid).transaction.branches[0]
            assert (known.attempts >= 2, known.last_error) == (True, CLOSED)
    bank.last = None
    with coordinator(store, bank) as process:
        found = finished(process, xid)
    assert found.transaction.state == types_pb2.TRANSACTION_STATE_CONFIRMED
    (run,) = failures(found)
    assert run.first_attempt > 1, "those before the store's format was raised are not on record"


def test_the_command(tmp_path: Path, bank: Bank) -> None:
    with coordinator(tmp_path / "tricord.db", bank) as process:
        xid = executed(process, branch(), branch("bank", "credit"))
        found = finished(process, xid)
        env = {"TRICORD_ENDPOINT": process.endpoint, "COLUMNS": "100"}
        table = tricord("show", xid, env=env)
        told = json.loads(tricord("show", xid, "-o", "json", env=env).stdout)["history"]
    assert (table.returncode, table.stderr) == (0, "")
    lines = table.stdout.splitlines()
    for event in found.history:
        assert any(line.split()[1:2] == [event.event] and line.rstrip().endswith(event.detail) for line in lines), event
    bars = [line for line in lines if line.startswith(("1 bank", "2 bank"))]
    assert "!" in bars[0].partition("T")[2]
    assert "!" not in bars[1]
    assert "! failed" in table.stdout
    failed = [event for event in told if event["event"] == "failed"]
    assert [(event["branch_id"], event["failed"]["error"], event["failed"]["attention"]) for event in failed] == [
        (1, CLOSED, False), (1, GONE, True),
    ]  # fmt: skip
    assert failed[0]["time"] <= failed[0]["failed"].pop("last_time") <= failed[1]["time"]
    assert failed[0]["failed"] == {
        "attempts": 3, "phase": "CONFIRM", "first_attempt": 1, "last_attempt": 3, "error": CLOSED, "attention": False,
    }  # fmt: skip
    assert {event["event"]: event["branch_id"] for event in told}["confirmed"] == 1
    assert [event["failed"] for event in told if event["event"] in ("created", "decided", "confirmed")] == [None] * 4
