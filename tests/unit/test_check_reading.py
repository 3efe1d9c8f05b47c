"""What is no history: the line and the field are named. And the lines that are written are read as they were meant."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from coordinator.check.events import (
    KINDS,
    RECORDS,
    Asked,
    Balance,
    Called,
    Change,
    Closed,
    Effect,
    End,
    Event,
    Fence,
    History,
    Purged,
    Resolved,
    Row,
    Saved,
    Told,
    to_json_line,
)
from coordinator.check.judge import judge
from coordinator.check.reading import LINE_BYTES_MAX, TEXT_MAX, HistoryError, event_of, events

EVERY: list[Event] = [
    History(1, 1, "lines", 5, ("told", "row")),
    Asked(1, "k", "x", "f", ("bank-a", "bank-a")),
    Told(2, "k", "x", "f", "CONFIRMED", results={"1": "r", "12": ""}),
    Told(2, "k", error="nobody answers"),
    Told(2, xid="x", rejected="it is another request's key"),
    Saved(3, "x", "TRYING", 1, "c1"),
    Called(4, "x", 1, "bank-a", "SETTLE"),
    Effect(5, "x", 1, "bank-a", "confirm", 7, (Change("cents", "é", -1), Change("cents", "m", 2**63 - 1))),
    Resolved(6, "x", 1, "cancelled", "ann"),
    Purged(7, "x", 1, "bank-a"),
    Purged(7, "x"),
    Row(8, "x", "CANCELLED", "k", "RETRYING"),
    Fence(9, "x", 1, "bank-a", "SUSPENDED"),
    Balance(10, "before", "cents", "n", -5, 2),
    Closed(11, "x"),
    End(12),
]


@pytest.mark.parametrize("event", EVERY, ids=lambda event: type(event).__name__)
def test_an_event_is_read_as_it_was_written(event: Event) -> None:
    assert event_of(to_json_line(event).encode(), 1) == event


def test_every_kind_is_read_here() -> None:
    assert {type(event) for event in EVERY} == set(KINDS.values())
    assert len(RECORDS) == len(KINDS) - 3


def line(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def saved(**fields: Any) -> bytes:
    return line(**{"event": "saved", "at": 1, "xid": "x", "state": "TRYING", **fields})


def effect(*changes: Any) -> bytes:
    return line(event="effect", at=1, xid="x", branch_id=1, participant="p", what="confirm", changes=[*changes])


CHANGE = {"unit": "u", "account": "a", "amount": 1}
BAD: list[tuple[bytes, str, str]] = [
    (b"\n", "", "is empty"),
    (b"{\n", "", "is not JSON"),
    (b'{"event": "end", "at": 1', "", "is cut off"),
    (b'{"event": "end", "at": 1} x\n', "", "column 27"),
    (b"[" * 100_000 + b"\n", "", "is not JSON"),
    (b'{"at": ' + b"1" * 5_000 + b"}\n", "", "is not JSON"),
    (b'{"at": NaN}\n', "", "NaN is no number"),
    (b'{"event": "\xff"}\n', "", "is not UTF-8: byte 12"),
    (b'{"event": "end", "at": 1, "at": 2}\n', "at", "stands there twice"),
    (b"7\n", "", "must be a JSON object, and is 7"),
    (b" " * LINE_BYTES_MAX + b"7\n", "", f"is longer than {LINE_BYTES_MAX} bytes"),
    (line(at=1), "event", "is missing"),
    (line(event="begun", at=1), "event", 'is none of history, asked, told, .*: "begun"'),
    (line(event=["end"], at=1), "event", "is none of"),
    (line(event="end"), "at", "is missing; end must have it"),
    (line(event="end", at=1, xid="x"), "xid", "is not known; end has at"),
    (line(event="end", at="1"), "at", 'must be a whole number from 0 to 9223372036854775807, and is "1"'),
    (line(event="end", at=True), "at", "and is true"),
    (line(event="end", at=1.0), "at", "and is 1.0"),
    (line(event="end", at=-1), "at", "and is -1"),
    (line(event="end", at=2**63), "at", "and is 9223372036854775808"),
    (line(event="history", at=1, format=2), "format", "must be 1"),
    (line(event="history", at=1, complete=["row", "end"]), "complete[1]", "must be one of asked, told"),
    (line(event="history", at=1, complete="row"), "complete", "must be a list"),
    (line(event="history", at=1, order="none"), "order", "must be one of times, lines"),
    (saved(state="BEGUN"), "state", "must be one of TRYING, CONFIRMING, .*BEGUN"),
    (saved(state=1), "state", "and is 1"),
    (saved(xid=""), "xid", f"must be text of 1 to {TEXT_MAX} characters"),
    (saved(xid="x" * (TEXT_MAX + 1)), "xid", "must be text"),
    (saved(xid=None), "xid", "and is null"),
    (saved(version=0), "version", "from 1"),
    (line(event="fence", at=1, xid="x", branch_id=0, participant="p", status="TRIED"), "branch_id", "from 1"),
    (line(event="asked", at=1), "key", "there must be a key or an xid"),
    (line(event="asked", at=1, key="k", participants=["p", 7]), "participants[1]", "and is 7"),
    (line(event="told", at=1, key="k"), "state", "one of state, error and rejected"),
    (
        line(event="told", at=1, key="k", xid="x", state="TRYING", error="e"),
        "state",
        "one of state, error and rejected",
    ),
    (line(event="told", at=1, key="k", state="TRYING"), "xid", "is missing"),
    (line(event="told", at=1, key="k", error="e", results={"0": "r"}), "results.0", "is no branch_id"),
    (line(event="told", at=1, key="k", error="e", results={"1": 5}), "results.1", "and is 5"),
    (line(event="told", at=1, key="k", error="e", results=[]), "results", "must be an object"),
    (line(event="purged", at=1, xid="x", branch_id=1), "participant", "beside branch_id"),
    (
        line(event="effect", at=1, xid="x", branch_id=1, participant="p", what="try", changes=[CHANGE]),
        "changes",
        "only",
    ),
    (effect({**CHANGE, "amount": "5"}), "changes[0].amount", 'and is "5"'),
    (effect(CHANGE, {"unit": "u", "account": "a"}), "changes[1].amount", "is missing"),
    (effect({**CHANGE, "more": 1}), "changes[0].more", "is not known"),
    (effect(7), "changes[0]", "must be an object, and is 7"),
]


@pytest.mark.parametrize(("bad", "field", "problem"), BAD)
def test_what_is_no_event(bad: bytes, field: str, problem: str) -> None:
    good = to_json_line(Asked(1, "k")).encode()
    with pytest.raises(HistoryError, match=problem) as raised:
        list(events(io.BytesIO(good + bad)))
    assert (raised.value.line, raised.value.field) == (2, field)
    assert str(raised.value).startswith(f"line 2, field {field}: " if field else "line 2: ")
    assert len(str(raised.value)) < 500


def test_the_last_line_needs_no_line_end() -> None:
    assert list(events(io.BytesIO(to_json_line(End(1)).encode().rstrip()))) == [(1, End(1))]


@pytest.mark.parametrize(
    ("history", "problem"),
    [
        ([], "line 1: there is no event in it"),
        ([Asked(1, "k"), History(1)], "line 2, field event: history must be the first event"),
        ([End(1), Asked(1, "k")], "line 2: stands behind the end, which is in line 1"),
        ([Closed(1, "x"), Row(1, "x", "TRYING")], "line 2, field xid: was closed in line 1"),
        ([Closed(1, "x"), Closed(1, "x")], "line 2, field xid: was closed in line 1 already"),
        ([Balance(1, "after", "u", "a", 1)] * 2, "line 2, field account: its balance after stands in line 1 already"),
    ],
)
def test_events_that_make_no_history(history: list[Event], problem: str) -> None:
    with pytest.raises(HistoryError) as raised:
        judge(enumerate(history, 1), print)
    assert str(raised.value) == problem
