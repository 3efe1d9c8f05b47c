"""The chaos runs' verdict: what was asked, told and stored becomes a history in which every fault is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from coordinator.check.events import Asked, Event
from coordinator.model import Attention, State
from examples.transfer.databases import Account, FenceRow, Stored
from participant_sdk.fence import Status
from tests.chaos.load import Told, Transfer, asked_event, told_event
from tests.chaos.verdict import stock_balances, violations

OPENING = {"alice@bank-a": Account(100), "bob@bank-b": Account(100)}
BANKS = ("bank-a", "bank-b")


class Run:
    """A run of two transfers, the first confirmed and the second cancelled before bank-b had heard of it."""

    def __init__(self) -> None:
        self.started = {key: Transfer(key, "alice@bank-a", "bob@bank-b", 5) for key in ("one", "two")}
        self.told = {"one": Told(State.CONFIRMED, "1"), "two": Told(State.CANCELLED, "2")}
        self.stored = [
            Stored("1", State.CONFIRMED, 1, "one", Attention.NONE, BANKS),
            Stored("2", State.CANCELLED, 1, "two", Attention.NONE, BANKS),
        ]
        self.rows = {
            "bank-a": [self.row("1", 1, Status.COMMITTED), self.row("2", 1, Status.ROLLBACKED)],
            "bank-b": [self.row("1", 2, Status.COMMITTED), self.row("2", 2, Status.SUSPENDED)],
        }
        self.now = {"alice@bank-a": Account(95), "bob@bank-b": Account(105)}

    @staticmethod
    def row(xid: str, branch_id: int, status: Status, *, refused: bool = False) -> FenceRow:
        return FenceRow(xid, branch_id, status, refused, 10, 20)

    @property
    def events(self) -> Sequence[Event]:
        asked: list[Event] = [asked_event(key, transfer.parts) for key, transfer in self.started.items()]
        return asked + [told_event(key, self.started[key].parts, told) for key, told in self.told.items()]

    def accounts(self) -> Mapping[str, Account]:
        return self.now

    def fence_rows(self, bank: str) -> Sequence[FenceRow]:
        return self.rows[bank]

    def transactions(self) -> Sequence[Stored]:
        return self.stored


def put(run: Run, n: int, **fields: object) -> None:
    run.stored[n] = run.stored[n]._replace(**fields)  # type: ignore[arg-type]


def put_row(run: Run, bank: str, n: int, status: Status, refused: bool = False) -> None:
    run.rows[bank][n] = run.rows[bank][n]._replace(status=status, refused=refused)


def extra(run: Run) -> None:
    run.stored.append(Stored("3", State.CANCELLED, 1, "three", Attention.NONE, ()))


BROKEN: Mapping[str, tuple[int, Callable[[Run], object]]] = {
    "told otherwise than stored": (1, lambda run: run.told.update(one=Told(State.CANCELLED, "1"))),
    "told of what is not stored": (1, lambda run: run.told.update(two=Told(State.CANCELLED, "9"))),
    "a fence row of no transaction": (1, lambda run: run.rows["bank-a"].append(run.row("9", 1, Status.SUSPENDED))),
    "a mixed ending": (2, lambda run: put_row(run, "bank-b", 0, Status.ROLLBACKED)),
    "a refused branch is confirmed": (2, lambda run: put_row(run, "bank-b", 0, Status.ROLLBACKED, refused=True)),
    "confirmed, and decided to cancel": (2, lambda run: put_row(run, "bank-a", 1, Status.COMMITTED)),
    "a contradiction": (2, lambda run: put(run, 0, attention=Attention.VIOLATION)),
    "confirmed without a fence row": (3, lambda run: run.rows["bank-b"].pop(0)),
    "left reserved": (5, lambda run: put_row(run, "bank-a", 1, Status.TRIED)),
    "confirmed twice": (5, lambda run: run.now.update({"alice@bank-a": Account(90)})),
    "at the wrong account": (5, lambda run: run.now.update({"alice@bank-a": Account(90), "bob@bank-b": Account(110)})),
    "held": (5, lambda run: run.now.update({"alice@bank-a": Account(94, held=1)})),
    "announced": (5, lambda run: run.now.update({"bob@bank-b": Account(105, incoming=1)})),
    "one request ran twice": (6, lambda run: put(run, 1, key="one")),
    "never asked": (7, extra),
    "unfinished": (11, lambda run: put(run, 0, state=State.CONFIRMING)),
    "never answered": (11, lambda run: run.told.pop("two")),
    "answered with an error": (11, lambda run: run.told.update(two=Told(None, error="OutcomeUnknown"))),
    "cancelled, and not heard of it": (11, lambda run: run.rows["bank-b"].pop(1)),
}


def test_a_good_run(tmp_path: Path) -> None:
    run = Run()
    assert violations(tmp_path, run, OPENING, run) == []
    assert (tmp_path / "history.jsonl").read_text().count("\n") == 2 * 4 + 4 + 2 + 4 + 7 + 2


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_run(what: str, tmp_path: Path) -> None:
    number, break_it = BROKEN[what]
    run = Run()
    break_it(run)
    found = violations(tmp_path, run, OPENING, run)
    assert any(line.startswith(f"invariant {number}: ") for line in found), found


def test_a_shop_counts(tmp_path: Path) -> None:
    run = Run()
    before, after = {"tea": (10, 0, 0)}, {"tea": (8, 0, 2)}
    stock = [*stock_balances("before", before), *stock_balances("after", after)]
    assert violations(tmp_path, run, OPENING, run, more=stock) == []
    stock = [*stock_balances("before", before), *stock_balances("after", {"tea": (8, 1, 2)})]
    (line,) = violations(tmp_path, run, OPENING, run, more=stock)
    assert "the sum was 10 and is 11" in line


def test_a_run_that_shows_nothing_is_told(tmp_path: Path) -> None:
    run = Run()
    run.stored, run.told, run.rows = [], {}, {"bank-a": [], "bank-b": []}
    found = violations(tmp_path, run, OPENING, run)
    assert any(line.startswith("not judged: ") for line in found), found


def test_what_was_asked_again_is_compared(tmp_path: Path) -> None:
    class Again(Run):
        @property
        def events(self) -> Sequence[Event]:
            transfer = self.started["one"]
            return [*super().events, told_event("one", transfer.parts, Told(State.CONFIRMED, "7"))]

    run = Again()
    assert isinstance(run.events[0], Asked)
    assert any("one request has run twice" in line for line in violations(tmp_path, run, OPENING, run))
