"""Any good history holds, and with one event dropped, repeated or changed in a harmful way it does not."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.check.events import Balance, Effect, End, Event, Fence, History, Row, Saved, Told
from tests.unit.histories import Transfer, history, judged, numbers

TRANSFERS = st.lists(
    st.builds(
        Transfer,
        confirmed=st.booleans(),
        cents=st.integers(1, 50),
        refused=st.booleans(),
        late=st.booleans(),
        answers=st.integers(1, 3),
        purged=st.booleans(),
    ),
    max_size=6,
)


def other(state: str) -> str:
    """The state of the other side."""
    return state.replace("CONFIRM", "?").replace("CANCELL", "CONFIRM").replace("?", "CANCELL")


DROPPED: Mapping[str, Callable[[Event], bool]] = {
    "a confirm": lambda event: isinstance(event, Effect) and event.what == "confirm",
    "a cancel": lambda event: isinstance(event, Effect) and event.what == "cancel",
    "a try": lambda event: isinstance(event, Effect) and event.what == "try" and event.branch_id == 1,
    "a row": lambda event: isinstance(event, Row),
    "a fence row": lambda event: isinstance(event, Fence) and event.branch_id == 1,
    "an answer": lambda event: isinstance(event, Told),
}
REPEATED: Mapping[str, Callable[[Event], bool]] = {
    "an effect": lambda event: isinstance(event, Effect) and event.what in ("try", "confirm", "cancel"),
}
CHANGED: Mapping[str, Callable[[Event], Event | None]] = {
    "an answer": lambda event: event._replace(state=other(event.state)) if isinstance(event, Told) else None,
    "whose answer": lambda event: event._replace(xid="f" * 32) if isinstance(event, Told) else None,
    "a row": lambda event: event._replace(state=other(event.state)) if isinstance(event, Row) else None,
    "a row's progress": lambda event: event._replace(state="TRYING") if isinstance(event, Row) else None,
    "a decision": lambda event: (
        event._replace(state=other(event.state))
        if isinstance(event, Saved) and event.state.endswith("ING") and event.state != "TRYING"
        else None
    ),
    "when it was decided": lambda event: (
        event._replace(at=event.at + 50) if isinstance(event, Saved) and event.version == 2 else None
    ),
    "a version": lambda event: event._replace(version=2) if isinstance(event, Saved) and event.version == 3 else None,
    "a fence row": lambda event: event._replace(status="TRIED") if isinstance(event, Fence) else None,
    "a balance": lambda event: event._replace(amount=event.amount + 1) if isinstance(event, Balance) else None,
    "what is reserved": lambda event: (
        event._replace(reserved=1, amount=event.amount - 1)
        if isinstance(event, Balance) and event.when == "after"
        else None
    ),
    "a change": lambda event: (
        event._replace(changes=(event.changes[0]._replace(amount=77),))
        if isinstance(event, Effect) and event.changes
        else None
    ),
    "an effect": lambda event: (
        event._replace(what="cancel", changes=()) if isinstance(event, Effect) and event.what == "confirm" else None
    ),
}


@settings(deadline=None)
@given(TRANSFERS, st.sampled_from(["times", "lines"]), st.randoms(use_true_random=False))
def test_a_good_history_holds(transfers: list[Transfer], order: str, rng: random.Random) -> None:
    events = history(transfers, order=order)
    assert [violation.text for violation in judged(events)[1]] == []
    if order == "times":  # then recorders' files may follow each other in any order
        middle = events[1:-1]
        rng.shuffle(middle)
        assert [violation.text for violation in judged([events[0], *middle, events[-1]])[1]] == []


@pytest.mark.parametrize("what", DROPPED)
@settings(max_examples=30, deadline=None)
@given(st.data(), TRANSFERS)
def test_one_event_is_missing(what: str, data: st.DataObject, transfers: list[Transfer]) -> None:
    events = history([*transfers, Transfer(confirmed=what != "a cancel")])
    places = [n for n, event in enumerate(events) if DROPPED[what](event)]
    if what == "an answer":  # a repeated one may be missing
        transfers = [transfer._replace(answers=1) for transfer in transfers]
        events = history([*transfers, Transfer()])
        places = [n for n, event in enumerate(events) if DROPPED[what](event)]
    place = data.draw(st.sampled_from(places))
    assert numbers([*events[:place], *events[place + 1 :]]), events[place]


@pytest.mark.parametrize("what", REPEATED)
@settings(max_examples=30, deadline=None)
@given(st.data(), TRANSFERS)
def test_one_event_came_twice(what: str, data: st.DataObject, transfers: list[Transfer]) -> None:
    events = history([*transfers, Transfer()])
    place = data.draw(st.sampled_from([n for n, event in enumerate(events) if REPEATED[what](event)]))
    assert numbers([*events[: place + 1], *events[place:]]) >= {3}, events[place]


@pytest.mark.parametrize("what", CHANGED)
@settings(max_examples=30, deadline=None)
@given(st.data(), TRANSFERS)
def test_one_event_is_another(what: str, data: st.DataObject, transfers: list[Transfer]) -> None:
    events = history([*transfers, Transfer()])
    changed = [(n, CHANGED[what](event)) for n, event in enumerate(events)]
    place, event = data.draw(st.sampled_from([(n, event) for n, event in changed if event is not None]))
    assert event is not None
    assert numbers([*events[:place], event, *events[place + 1 :]]), event


def test_the_histories_that_are_drawn_are_whole() -> None:
    events = history([Transfer()])
    assert isinstance(events[0], History)
    assert isinstance(events[-1], End)
