"""The timeline of a transaction: lines from what its message holds."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from textwrap import dedent
from typing import Any

import pytest

from coordinator.cli.output import length_text
from coordinator.cli.timeline import timeline

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def at(seconds: float | None) -> str:
    """A time as the command prints it."""
    if seconds is None:
        return ""
    return (START + timedelta(seconds=seconds)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def transaction(
    state: str,
    *branches: dict[str, Any],
    updated: float,
    decided: float | None = None,
    history: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """What ``show -o json`` has, as far as it matters."""
    return {
        "state": state, "create_time": at(0), "update_time": at(updated), "decide_time": at(decided),
        "deadline_time": at(30), "branches": [{**b, "branch_id": n} for n, b in enumerate(branches, 1)],
        "history": history,
    }  # fmt: skip


def branch(state: str, *, next_attempt: float | None = None, refused: bool = False) -> dict[str, Any]:
    """One branch."""
    refusal = {"reason": "no", "message": ""} if refused else None
    return {
        "participant": "bank", "action": "debit", "state": state, "refusal": refusal,
        "next_attempt_time": at(next_attempt),
    }  # fmt: skip


def event(
    seconds: float, what: str, branch_id: int | None = 1, *, until: float | None = None, phase: str = "CONFIRM"
) -> dict[str, Any]:
    """One event of the history; ``until``: of failures, when the last one was."""
    failed = None if until is None else {"last_time": at(until)} | ({} if what == "dropped" else {"phase": phase})
    return {"time": at(seconds), "event": what, "branch_id": branch_id, "failed": failed}


def drawn(tx: dict[str, Any], width: int = 60) -> str:
    """The lines, as a text."""
    return "\n".join(timeline(tx, width))


def bars(tx: dict[str, Any], width: int = 60) -> list[str]:
    """The branches' lines without their names."""
    return [text.partition("debit ")[2] for text in timeline(tx, width) if "bank.debit" in text]


def test_a_confirm_that_waits() -> None:
    tx = transaction("CONFIRMING", branch("TRIED", next_attempt=20), branch("CONFIRMED"), decided=5, updated=10)
    assert drawn(tx) == dedent("""\
        created 2026-01-02T03:04:05.000Z   decided +5.000s
        last change +10.000s   next attempt +20.000s
        1 bank.debit ============T-----------......................>
        2 bank.debit ============T----------C
        = Try   T tried   - Confirm or Cancel   C confirmed   . wait
        > next attempt""")


def test_a_refused_one() -> None:
    tx = transaction("CANCELLED", branch("CANCELLED"), branch("REFUSED", refused=True), decided=5, updated=10)
    assert drawn(tx) == dedent("""\
        created 2026-01-02T03:04:05.000Z   decided +5.000s
        finished +10.000s
        1 bank.debit =======================|----------------------X
        2 bank.debit =======================R
        = Try   R refused   | decided   - Confirm or Cancel
        X cancelled""")


def test_an_undecided_one() -> None:
    tx = transaction("TRYING", branch("PENDING", next_attempt=15), branch("PENDING"), branch("TRIED"), updated=10)
    assert drawn(tx) == dedent("""\
        created 2026-01-02T03:04:05.000Z   last change +10.000s
        next attempt +15.000s   deadline +30.000s
        1 bank.debit ===============?.......>
        2 bank.debit ===============?
        3 bank.debit ===============T
        = Try   T tried   ? not answered   . wait   > next attempt""")


def test_failures_and_ends_that_are_on_record() -> None:
    history = [
        event(0, "created", None), event(1, "failed", until=3, phase="TRY"), event(4, "tried"), event(4.5, "tried", 2),
        event(5, "decided", None), event(6, "failed", 2, until=9.5), event(7, "confirmed"), event(10, "confirmed", 2),
    ]  # fmt: skip
    tx = transaction(
        "CONFIRMED", branch("CONFIRMED"), branch("CONFIRMED"), decided=5, updated=10, history=history
    )  # fmt: skip
    assert drawn(tx) == dedent("""\
        created 2026-01-02T03:04:05.000Z   decided +5.000s
        finished +10.000s
        1 bank.debit =====!========!===T    ---------C
        2 bank.debit =====================T -----!---------------!-C
        = Try   T tried   - Confirm or Cancel   C confirmed
        ! failed""")


def test_a_branch_that_was_tried_and_then_cancelled() -> None:
    tx = transaction(
        "CANCELLED", branch("CANCELLED"), branch("CANCELLED"), branch("CANCELLED"), decided=5, updated=10,
        history=[event(1, "tried"), event(2, "failed", 2, until=2, phase="TRY"), event(2, "refused", 2)],
    )  # fmt: skip
    assert bars(tx) == [
        "=====T                 -----------------------X",
        "========!R             -----------------------X",
        "=======================|----------------------X",
    ]


def test_attempts_that_were_dropped() -> None:
    history = [event(2, "dropped", until=3)]
    (open_bar,) = bars(transaction("TRYING", branch("PENDING"), updated=10, history=history))
    (bar,) = bars(transaction("CONFIRMING", branch("TRIED"), decided=1, updated=10, history=history))
    assert (open_bar.count("!"), bar.partition("T")[2].count("!")) == (2, 2)


def test_a_failure_hides_no_mark() -> None:
    """It has the free place next to its time, in the part of its phase, and none where there is none."""
    history = [event(0, "failed", until=0), event(10, "failed", until=10)]
    tx = transaction("CONFIRMING", branch("TRIED", next_attempt=12), decided=0, updated=10, history=history)
    (bar,) = bars(tx)
    assert (bar[:2], bar[-1], bar.count("!")) == ("T!", ">", 2)
    soon = transaction("CONFIRMING", branch("TRIED", next_attempt=10.01), decided=5, updated=10, history=history[1:])
    assert bars(soon)[0].endswith("-!>")
    for decided in (0, 9.999):
        (bar,) = bars(transaction("CONFIRMED", branch("CONFIRMED"), decided=decided, updated=10, history=history[1:]))
        assert bar.endswith("!C" if decided == 0 else "=TC")
    assert bars(transaction("CONFIRMED", branch("CONFIRMED"), decided=0, updated=0, history=history)) == ["TC"]


def test_no_branches_yet() -> None:
    assert drawn(transaction("TRYING", updated=0)) == dedent("""\
        created 2026-01-02T03:04:05.000Z   last change +0.000s
        deadline +30.000s""")


def test_all_at_once() -> None:
    """Marks stand beside each other where their times are too near: none hides another."""
    assert bars(transaction("CONFIRMED", branch("CONFIRMED"), decided=0, updated=0)) == ["TC"]
    at_the_end = bars(transaction("CONFIRMED", branch("CONFIRMED"), decided=9.999, updated=10))
    assert [bar.strip("=") for bar in at_the_end] == ["TC"]


def test_a_clock_that_was_set_back() -> None:
    assert bars(transaction("CONFIRMED", branch("CONFIRMED"), decided=-5, updated=-3)) == ["TC"]


@pytest.mark.parametrize("state", ["PENDING", "TRIED", "REFUSED", "CONFIRMED", "CANCELLED", "SOMETHING_NEW"])
@pytest.mark.parametrize("width", [0, 60, 61, 100, 160, 1_000])
def test_no_line_is_longer_than_the_width(state: str, width: int) -> None:
    long = {**branch(state, next_attempt=7.5), "participant": "p" * 64, "action": "a" * 64}
    for decided in (None, 0, 5, 10):
        for updated in (0, 5, 10):
            lines = timeline(transaction("CONFIRMING", long, branch(state), decided=decided, updated=updated), width)
            assert max(map(len, lines)) <= min(160, max(60, width))
            assert len([text for text in lines if text[0] in "12"]) == 2


def test_lengths_of_time() -> None:
    lengths = {0.0: "0ms", -3.0: "0ms", 0.85: "850ms", 12.9: "12s", 310.0: "5m10s", 300.0: "5m", 10_920.0: "3h2m"}
    assert {seconds: length_text(seconds) for seconds in lengths} == lengths
    assert length_text(9 * 86_400 + 4 * 3_600) == "9d4h"
