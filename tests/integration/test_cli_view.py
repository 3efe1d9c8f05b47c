"""``tricord participants``, ``stats`` and ``watch``: processes, exit codes, what is printed where."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.coordinators import CALL_S, CoordinatorProcess, branch, environment, execute_request, tricord
from tests.postgres import free_port
from tricord.v1 import coordinator_pb2 as pb

from .participant_server import ParticipantServer, done
from .test_operator_view import NOT_FOUND, OK, UNAVAILABLE, USAGE, begun, stuck_in_confirm, until

INTERRUPTED = 130
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


@pytest.fixture
def bank() -> Iterator[ParticipantServer]:
    """A participant that confirms nothing."""
    with ParticipantServer(stuck_in_confirm) as server:
        yield server


@pytest.fixture
def coordinator(tmp_path: Path, bank: ParticipantServer) -> Iterator[CoordinatorProcess]:
    """A coordinator with that bank."""
    with CoordinatorProcess(
        store=tmp_path / "tricord.db", backoff_cap_ms=100, attention_after=2, drain_ms=0
    ) as process:
        process.register("bank", bank.address)
        yield process


def run(coordinator: CoordinatorProcess, *arguments: str) -> str:
    """What a command prints that must succeed."""
    ended = tricord(*arguments, env={"TRICORD_ENDPOINT": coordinator.endpoint})
    assert (ended.returncode, ended.stderr) == (OK, "")
    return ended.stdout


@contextmanager
def started(coordinator: CoordinatorProcess, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A command that goes on; killed at the end if it still does."""
    command = [sys.executable, "-m", "coordinator", *arguments]
    env = {**environment(), "TRICORD_ENDPOINT": coordinator.endpoint}
    with subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: "subprocess.Popen[str]") -> str:
    """Its next line."""
    assert process.stdout is not None
    text = process.stdout.readline()
    assert text, process.stderr.read() if process.stderr else ""
    return text


def stuck(coordinator: CoordinatorProcess) -> str:
    """A transaction that is not confirmed and has attention for it; its xid."""
    xid = begun(coordinator, branch())
    service = coordinator.coordinator_service()
    until(lambda: service.Get(pb.GetRequest(xid=xid), timeout=CALL_S).transaction.attention, lambda seen: seen == 2)
    return xid


class TestParticipants:
    """``tricord participants``."""

    def test_as_tables(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        stuck(coordinator)
        head, row = run(coordinator, "participants").splitlines()
        names = ["NAME", "ADDRESS", "FROM", "SEEN", "BREAKER", "FAILS", "OPEN", "OLDEST"]
        assert head.split() == names  # no LAST ERROR: the bank answers
        cells = row.split()
        assert (cells[:3], cells[4:7]) == (["bank", bank.address, "registered"], ["CLOSED", "0", "1"])
        wide = run(coordinator, "participants", "-o", "wide").splitlines()
        assert "ACTIONS" in wide[0]
        assert "credit,debit" in wide[1]

    def test_as_json(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        coordinator.register("shop", bank.address)
        stuck(coordinator)
        found = json.loads(run(coordinator, "participants", "-o", "json"))["participants"]
        assert [participant["name"] for participant in found] == ["bank", "shop"]
        lines = run(coordinator, "participants", "-o", "jsonl").splitlines()
        assert [json.loads(text)["name"] for text in lines] == ["bank", "shop"]
        (only,) = json.loads(run(coordinator, "participants", "bank", "-o", "json"))["participants"]
        assert (only["open_transactions"], only["more_open"]) == (1, False)
        (address,) = only["addresses"]
        assert address["health"]["breaker"] == "CLOSED"
        assert TIME.fullmatch(address["seen_time"])
        assert TIME.fullmatch(only["oldest_create_time"])

    def test_exit_codes(self, coordinator: CoordinatorProcess) -> None:
        env = {"TRICORD_ENDPOINT": coordinator.endpoint}
        for name, code in (("nobody", NOT_FOUND), ("no body", USAGE)):
            ended = tricord("participants", name, env=env)
            assert (ended.returncode, ended.stdout) == (code, "")
            assert ended.stderr.startswith("tricord: ")
        for command in ("participants", "stats", "watch"):
            ended = tricord(command, "--endpoint", f"127.0.0.1:{free_port()}")
            assert (ended.returncode, ended.stdout) == (UNAVAILABLE, "")
            assert "TRICORD_ENDPOINT" in ended.stderr


def test_stats(coordinator: CoordinatorProcess) -> None:
    stuck(coordinator)
    table = run(coordinator, "stats")
    assert re.search(r"^CONFIRMING +1 +1 +0 +0 *$", table, re.MULTILINE), table
    assert re.search(r"^serving +yes *$", table, re.MULTILINE), table
    figures = json.loads(run(coordinator, "stats", "-o", "json"))
    assert figures["open"]["states"]["CONFIRMING"] == {
        "count": 1,
        "attention": {"RETRYING": 1, "VIOLATION": 0, "STUCK": 0},
    }
    assert figures["coordinator"]["begun"] == 1


class TestWatchOne:
    """``tricord watch XID``."""

    def test_until_it_is_finished(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        xid = stuck(coordinator)
        with started(coordinator, "watch", xid) as process:
            first = line(process)
            assert TIME.match(first)
            for words in ("CONFIRMING", "attention=RETRYING", "1 bank.debit TRIED", "[the ledger is closed]"):
                assert words in first
            bank.answer = done
            out, err = process.communicate(timeout=CALL_S)
        assert (process.returncode, err) == (OK, "")
        last = out.splitlines()[-1]
        assert " CONFIRMED " in last
        assert "1 bank.debit CONFIRMED" in last

    def test_as_lines_of_json(self, coordinator: CoordinatorProcess) -> None:
        request = execute_request(branch(data=b"1"), timeout_ms=60_000, wait=pb.WAIT_ACCEPTED)
        xid = coordinator.coordinator_service().Execute(request, timeout=CALL_S).transaction.xid
        with started(coordinator, "watch", xid, "-o", "jsonl") as process:
            versions: list[int] = []
            while len(versions) < 3:
                tx = json.loads(line(process))
                assert tx["xid"] == xid
                versions.append(tx["version"])
        assert versions == sorted(set(versions))

    def test_beyond_a_restart_of_the_coordinator(
        self, coordinator: CoordinatorProcess, bank: ParticipantServer
    ) -> None:
        xid = stuck(coordinator)
        with started(coordinator, "watch", xid) as process:
            line(process)
            coordinator.kill()
            coordinator.start()
            bank.answer = done
            out, err = process.communicate(timeout=CALL_S)
        assert (process.returncode, err) == (OK, "")
        assert " CONFIRMED " in out.splitlines()[-1]

    def test_one_that_hangs_is_not_waited_for(self, coordinator: CoordinatorProcess) -> None:
        with coordinator.hung():
            ended = tricord("watch", "0" * 32, env={"TRICORD_ENDPOINT": coordinator.endpoint})
        assert (ended.returncode, ended.stdout) == (UNAVAILABLE, "")

    def test_ctrl_c(self, coordinator: CoordinatorProcess) -> None:
        xid = stuck(coordinator)
        for arguments in (["watch", xid], ["watch"]):
            with started(coordinator, *arguments) as process:
                line(process)
                process.send_signal(signal.SIGINT)
                _, err = process.communicate(timeout=CALL_S)
            assert (process.returncode, err) == (INTERRUPTED, "")

    def test_wrong_ones(self, coordinator: CoordinatorProcess) -> None:
        env = {"TRICORD_ENDPOINT": coordinator.endpoint}
        for arguments, code, words in (
            (["0" * 32], NOT_FOUND, "there is no transaction"),
            (["nonsense"], USAGE, "32 hexadecimal digits"),
            (["0" * 32, "--count", "1"], USAGE, "without XID"),
            (["--every", "0"], USAGE, "--every"),
            (["--count", "0"], USAGE, "--count"),
        ):
            ended = tricord("watch", *arguments, env=env)
            assert (ended.returncode, ended.stdout) == (code, "")
            assert words in ended.stderr


class TestWatchAll:
    """``tricord watch``."""

    def test_a_line_of_json_each_time(self, coordinator: CoordinatorProcess) -> None:
        xid = stuck(coordinator)
        views = [json.loads(text) for text in run(coordinator, "watch", "--count", "2", "--every", "0.1").splitlines()]
        assert len(views) == 2
        assert views[0]["time"] < views[1]["time"]
        assert views[1]["open"]["states"]["CONFIRMING"]["count"] == 1
        assert [tx["xid"] for tx in views[1]["attention"]] == [xid]

    def test_goes_on_when_the_coordinator_comes_back(self, coordinator: CoordinatorProcess) -> None:
        with started(coordinator, "watch", "--every", "0.1") as process:
            assert "error" not in json.loads(line(process))
            coordinator.kill()
            until(lambda: json.loads(line(process)), lambda view: "error" in view)
            coordinator.start()
            until(lambda: json.loads(line(process)), lambda view: "error" not in view)

    def test_on_a_terminal(self, coordinator: CoordinatorProcess) -> None:
        xid = stuck(coordinator)
        text = on_a_terminal(coordinator, "watch", "--count", "2", "--every", "0.1")
        assert text.count("\x1b[2J") == 2  # it was cleared
        assert text.count("Ctrl-C ends") == 2
        for words in (xid, "CONFIRMING", "RETRYING", "bank.debit: the ledger is closed", "serving"):
            assert words in text


def on_a_terminal(coordinator: CoordinatorProcess, *arguments: str) -> str:
    """What a command writes to a terminal, until it ends."""
    ours, theirs = pty.openpty()
    env: dict[str, Any] = {**environment(), "TRICORD_ENDPOINT": coordinator.endpoint, "COLUMNS": "120", "TERM": "xterm"}
    with subprocess.Popen([sys.executable, "-m", "coordinator", *arguments], env=env, stdin=theirs, stdout=theirs):
        os.close(theirs)
        text = b""
        try:
            while some := os.read(ours, 65536):
                text += some
        except OSError:  # so Linux says that the other side has closed it
            pass
        finally:
            os.close(ours)
    return text.decode()
