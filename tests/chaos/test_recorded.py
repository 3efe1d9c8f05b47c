"""What coordinators write down of their saves and calls: judged, merged, and seen to show what must not be."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from coordinator.check.events import Called, End, Event, History, Saved, to_json_line
from coordinator.check.invariants import Violation
from coordinator.check.judge import Verdict, judge
from coordinator.check.reading import HistoryError
from coordinator.model import State
from examples.transfer.bank import Credit, Debit
from examples.transfer.databases import eventually
from examples.transfer.gate import Gate
from participant_sdk import Transaction, TransactionState, TricordClient, branch
from tests.chaos.recorded import SUFFIX, merge, program, read
from tests.postgres import PostgresServer
from tests.processes import Cast, fresh_databases

TRANSFERS = 20
RESULT_S = 60.0


def judged(events: Iterable[Event]) -> tuple[Verdict, list[Violation]]:
    """The verdict on what was written down."""
    found: list[Violation] = []
    history = [History(0, complete=["saved", "called"]), *events, End(time.time_ns() // 1_000_000)]
    return judge(enumerate(history, 1), found.append), found


def transfer(client: TricordClient, key: str) -> Transaction:
    """Send money from alice to bob."""
    debit, credit = branch("bank-a", "debit", Debit("alice", 1)), branch("bank-b", "credit", Credit("bob", 1))
    return client.execute(debit, credit, idempotency_key=key)


def broken_program(how: str, folder: Path, name: str) -> Sequence[str]:
    """A coordinator that is broken on purpose."""
    return (*program(folder, name), *(["--broken", how] if how else []))


@pytest.mark.parametrize("how", ["", "decide_then_save"])
def test_a_decision_is_on_record_before_its_calls(how: str, tmp_path: Path) -> None:
    def start(folder: Path, name: str) -> Sequence[str]:
        return broken_program(how, folder, name)

    with fresh_databases(tmp_path) as databases, Cast(tmp_path, databases, program=start) as cast:
        with TricordClient(cast.endpoints[0]) as client:
            for number in range(TRANSFERS):
                assert transfer(client, f"{number}").state is TransactionState.CONFIRMED
        cast.settle()
    events = list(merge(tmp_path))
    verdict, found = judged(events)
    by_number = {each.number: each for each in verdict.invariants}
    assert [by_number[number].judged for number in (1, 8, 9)] == [TRANSFERS] * 3
    calls = [event for event in events if isinstance(event, Called)]
    assert len({(call.xid, call.branch_id, call.phase) for call in calls}) == 4 * TRANSFERS
    if not how:
        assert found == []
    else:  # a save may take less than the clock's millisecond
        assert {violation.number for violation in found} == {1}
        assert "CONFIRM before the decision was saved" in found[0].text


@pytest.mark.parametrize("how", ["", "accept_stale_saves"])
def test_a_save_after_a_take_over(how: str, tmp_path: Path, postgres_server: PostgresServer) -> None:
    """One coordinator stands still for longer than its lease, with a transaction that the other brings to its end."""

    def start(folder: Path, name: str) -> Sequence[str]:
        return broken_program(how, folder, name)

    with ExitStack() as parts:
        databases = parts.enter_context(fresh_databases(tmp_path, postgres_server))
        background = parts.enter_context(ThreadPoolExecutor(1))
        gate = parts.enter_context(Gate())
        cast = parts.enter_context(Cast(tmp_path, databases, coordinators=2, gate=gate.address, program=start))
        parts.callback(gate.release)
        client = parts.enter_context(TricordClient(cast.endpoints[0]))
        hold = gate.hold("bank-b", "TRY")
        asleep: Future[Transaction] = background.submit(transfer, client, "one")
        xid = hold.wait().xid
        cast.coordinators[0].freeze()
        hold.release()
        eventually("the other has confirmed it", lambda: databases.state(xid) is State.CONFIRMED)
        cast.coordinators[0].thaw()
        asleep.result(RESULT_S)
        cast.settle()
        for coordinator in cast.coordinators:
            assert coordinator.stop() == 0
    _, found = judged(merge(tmp_path))
    if not how:
        assert found == []
    else:
        assert 8 in {violation.number for violation in found}
        assert any("was saved twice" in violation.what for violation in found)


def written(path: Path, *events: Event, rest: str = "") -> None:
    """A file of one start."""
    path.write_text("".join(map(to_json_line, events)) + rest)


def test_a_version_counts_from_when_anybody_knew_it(tmp_path: Path) -> None:
    """A coordinator stands still between its COMMIT and its line, while another reads what was saved, and goes on."""
    second = Saved(10, "01", "CONFIRMING", 2, "a7")
    third, call = Saved(12, "01", "CONFIRMED", 3, "b1"), Called(11, "01", 1, "bank-a", "CONFIRM")
    written(tmp_path / f"one.1{SUFFIX}", second._replace(at=50))
    written(tmp_path / f"two.1{SUFFIX}", second, call, third)
    assert judged(merge(tmp_path))[1] == []
    written(tmp_path / f"two.1{SUFFIX}", call, third)
    assert [violation.number for violation in judged(merge(tmp_path))[1]] == [1, 8]


def test_only_a_last_line_may_be_cut_off(tmp_path: Path) -> None:
    path, saved = tmp_path / f"one.1{SUFFIX}", Saved(10, "01", "TRYING", 1, "a7")
    written(path, saved, rest='{"event":"saved","at":11,"xi')
    assert read(path) == [saved]
    written(path, saved, rest='{"event":"saved","at":11,"xi\n' + to_json_line(saved))
    with pytest.raises(HistoryError, match="line 2"):
        read(path)
