"""The history checker: a good history holds, and histories that break an invariant are found, by its number."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from coordinator.check.events import (
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
)
from coordinator.check.invariants import INVARIANTS
from tests.unit.histories import COMPLETE, Transfer, history, judged, numbers

X, Y = "a" * 32, "b" * 32
A, B = "bank-a", "bank-b"
ALL = History(0, complete=COMPLETE)
EFFECTS = History(0, complete=("effect",))


def test_a_good_history_holds() -> None:
    transfers = [
        Transfer(),
        Transfer(confirmed=False),
        Transfer(confirmed=False, refused=True),
        Transfer(confirmed=False, late=True, answers=2),
        Transfer(purged=True),
    ]
    verdict, found = judged(history(transfers))
    assert found == []
    assert (verdict.transactions, verdict.ended) == (5, True)
    assert {each.number for each in verdict.invariants if each.judged} == set(INVARIANTS) - {12}


def test_what_a_history_does_not_show_is_not_judged() -> None:
    verdict, found = judged([Told(1, "k", X, state="CONFIRMED")])
    assert found == []
    assert [each.judged for each in verdict.invariants] == [0] * len(INVARIANTS)
    assert [each.not_judged for each in verdict.invariants if not each.not_judged] == []
    assert not verdict.ended


def decided(side: str = "CONFIRM", at: int = 10) -> list[Event]:
    return [Saved(1, X, "TRYING", 1), Saved(at, X, f"{side}ING", 2)]


def effect(at: int, branch_id: int, what: str, place: int = 0) -> Effect:
    return Effect(at, X, branch_id, A if branch_id == 1 else B, what, place)


BROKEN: Sequence[tuple[str, int, list[int], list[Event]]] = [
    ("decided both ways", 1, [1, 2], [Saved(1, X, "CONFIRMING"), Saved(2, X, "CANCELLING")]),
    ("record against record", 1, [1, 2], [Saved(1, X, "CONFIRMING"), Row(2, X, "CANCELLED")]),
    ("told against record", 1, [1, 2], [Told(1, "k", X, state="CONFIRMED"), Row(2, X, "CANCELLED", "k")]),
    ("effect before decision", 1, [2, 3], [*decided(), effect(9, 1, "confirm")]),
    ("cancel before decision", 1, [2, 3], [*decided("CANCELL"), effect(9, 1, "cancel")]),
    ("told before decision", 1, [2, 3], [*decided(), Told(9, "k", X, state="CONFIRMED")]),
    ("called before decision", 1, [2, 3], [*decided(), Called(9, X, 1, A, "CONFIRM")]),
    ("called the other way", 1, [2, 3], [*decided(), Called(11, X, 1, A, "CANCEL")]),
    ("never decided", 1, [2], [History(0, complete=("saved",)), effect(1, 1, "suspended"), End(9)]),
    ("on no record", 1, [2], [History(0, complete=("row",)), effect(1, 1, "try"), End(9)]),
    ("told, and not decided", 1, [1, 2], [Told(1, "k", X, state="CONFIRMED"), Row(2, X, "TRYING")]),
    ("two branches", 2, [1, 2], [effect(1, 1, "confirm"), effect(1, 2, "cancel")]),
    ("one branch", 2, [1, 2], [effect(1, 1, "confirm"), Fence(2, X, 1, A, "SUSPENDED")]),
    ("against its decision", 2, [1, 2], [Row(1, X, "CANCELLED"), Fence(2, X, 1, A, "COMMITTED")]),
    ("against its answer", 2, [1, 2], [Told(1, "k", X, state="CONFIRMED"), Fence(2, X, 1, A, "ROLLBACKED")]),
    ("refused, and confirmed", 2, [1, 2], [Row(1, X, "CONFIRMED"), effect(1, 2, "refused")]),
    ("contradicted", 2, [1], [Row(1, X, "CONFIRMED", attention="VIOLATION")]),
    ("confirmed twice", 3, [1, 2], [effect(1, 1, "confirm"), effect(2, 1, "confirm")]),
    ("tried twice", 3, [1, 2], [effect(1, 1, "try"), effect(2, 1, "try")]),
    ("cancelled twice", 3, [1, 2], [effect(1, 1, "cancel"), effect(2, 1, "cancel")]),
    ("cancelled, not tried", 3, [2], [EFFECTS, effect(1, 1, "cancel"), End(9)]),
    ("confirmed, not tried", 3, [2], [EFFECTS, effect(1, 1, "confirm"), End(9)]),
    ("tried, not confirmed", 3, [2, 3], [EFFECTS, effect(1, 1, "try"), Row(2, X, "CONFIRMED"), End(9)]),
    (
        "a participant is missing", 3, [2, 4],
        [History(0, complete=("fence",)), Asked(1, "k", participants=(A, B)), Fence(2, X, 1, A, "COMMITTED"),
         Row(3, X, "CONFIRMED", "k"), End(9)],
    ),
    ("no fence row", 3, [2], [History(0, complete=("fence",)), effect(1, 1, "try"), End(9)]),
    ("late try", 4, [1, 2], [effect(1, 1, "suspended"), effect(2, 1, "try")]),
    ("late try by its fence row", 4, [1, 2], [effect(1, 1, "try"), Fence(9, X, 1, A, "SUSPENDED")]),
    ("try after its cancel", 4, [1, 2], [effect(1, 1, "cancel"), effect(2, 1, "try")]),
    ("try after its cancel by place", 4, [1, 2], [effect(5, 1, "cancel", 1), effect(5, 1, "try", 2)]),
    ("reserved by a fence row", 5, [1], [Fence(1, X, 1, A, "TRIED")]),
    ("reserved by effects", 5, [2, 3], [EFFECTS, effect(1, 1, "try"), Row(2, X, "CANCELLED"), End(9)]),
    ("reserved by a balance", 5, [1], [Balance(1, "after", "cents", "n", 5, 1)]),
    ("a sum", 5, [1, 2], [Balance(1, "before", "cents", "n", 5), Balance(2, "after", "cents", "n", 6)]),
    (
        "an account", 5, [4, 5],
        [EFFECTS, effect(1, 1, "try"), Effect(2, X, 1, A, "confirm", changes=(Change("c", "n", -1),)),
         Balance(1, "before", "c", "n", 5), Balance(2, "after", "c", "n", 5), End(9)],
    ),
    ("told otherwise", 6, [1, 2], [Told(1, "k", X, state="CONFIRMED"), Told(2, "k", X, state="CANCELLED")]),
    ("ran twice", 6, [1, 2], [Told(1, "k", X, state="CONFIRMED"), Told(2, "k", Y, state="CONFIRMED")]),
    ("ran twice by records", 6, [1, 2], [Row(1, X, "CONFIRMED", "k"), Row(2, Y, "CONFIRMED", "k")]),
    (
        "another result", 6, [1, 2],
        [Told(1, "k", X, state="CONFIRMED", results={"1": "r"}),
         Told(2, "k", X, state="CONFIRMED", results={"1": "s", "2": "t"})],
    ),
    (
        "ran, then turned down", 6, [1, 2],
        [Told(1, "k", X, "f", "CONFIRMED"), Told(2, "k", fingerprint="f", rejected="no such participant")],
    ),
    (
        "two requests ran", 7, [3, 4],
        [Asked(1, "k", fingerprint="f"), Asked(2, "k", fingerprint="g"), Told(3, "k", X, state="CONFIRMED"),
         Told(4, "k", Y, state="CONFIRMED")],
    ),
    (
        "another request was answered", 7, [1, 2],
        [Told(1, "k", X, "f", "CONFIRMED"), Told(2, "k", X, "g", "CONFIRMED")],
    ),
    ("never asked", 7, [2], [History(0, complete=("asked",)), Row(1, X, "CONFIRMED", "k"), End(9)]),
    ("a version twice", 8, [1, 2], [Saved(1, X, "TRYING", 2, "c1"), Saved(2, X, "TRYING", 2, "c2")]),
    ("an older version", 8, [2, 3], [Saved(1, X, "TRYING", 1), Saved(2, X, "TRYING", 3), Saved(3, X, "TRYING", 2)]),
    ("backwards", 9, [1, 2], [Saved(1, X, "CONFIRMED"), Saved(2, X, "CONFIRMING")]),
    ("backwards by version", 9, [1, 2], [Saved(1, X, "TRYING", 2), Saved(1, X, "CANCELLING", 1)]),
    ("backwards at rest", 9, [1, 2], [Saved(1, X, "CONFIRMING"), Row(2, X, "TRYING")]),
    ("called when purged", 10, [1, 2], [Purged(1, X, 1, A), Called(2, X, 1, A, "TRY")]),
    ("effect when purged", 10, [1, 2], [Purged(1, X, 1, A), effect(2, 1, "try")]),
    ("purged too early", 10, [2, 3], [Saved(1, X, "TRYING"), Purged(2, X, 1, A), Saved(3, X, "CONFIRMING")]),
    ("purged and never finished", 10, [1, 2], [Saved(1, X, "TRYING"), Purged(2, X, 1, A), End(9)]),
    ("unfinished", 11, [1], [Row(1, X, "CONFIRMING"), End(9)]),
    (
        "a branch has not heard of it", 11, [2],
        [History(0, complete=("fence",)), Row(1, X, "CANCELLED", participants=(A, B)), Fence(2, X, 1, A, "SUSPENDED"),
         End(9)],
    ),
    ("unfinished by saves", 11, [2], [History(0, complete=("saved",)), Saved(1, X, "TRYING"), End(9)]),
    ("unanswered", 11, [2], [History(0, complete=("told",)), Asked(1, "k"), End(9)]),
    (
        "answered with errors", 11, [2, 3],
        [History(0, complete=("told",)), Asked(1, "k"), Told(2, "k", error="e"), End(9)],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("number", "lines", "events"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_broken_history_is_found(number: int, lines: list[int], events: list[Event]) -> None:
    found = judged(sorted(events, key=lambda event: isinstance(event, End)))[1]
    assert [(violation.number, violation.lines) for violation in found if violation.number == number] == [
        (number, lines)
    ]
    assert {violation.number for violation in found} == {number}, [violation.text for violation in found]
    assert INVARIANTS[number].words in found[0].text
    assert str(lines[0]) in found[0].text


def test_every_invariant_that_a_history_can_show_is_broken_here() -> None:
    assert {case[1] for case in BROKEN} == {number for number, each in INVARIANTS.items() if each.needs}


GOOD: Sequence[tuple[str, list[Event]]] = [
    ("resolved against the decision", [
        Row(1, X, "CONFIRMED", attention="VIOLATION"), effect(2, 1, "confirm"), Resolved(3, X, 2, "cancelled"),
        Fence(4, X, 2, B, "ROLLBACKED"),
    ]),
    ("the place in the database counts, not the clock", [effect(2, 1, "try", 1), effect(1, 1, "cancel", 2)]),
    ("purged when finished", [
        Saved(1, X, "CONFIRMING"), Saved(2, X, "CONFIRMED"), Purged(3, X, 1, A), Purged(4, X),
    ]),
    ("forgotten", [History(0, complete=("row",)), effect(1, 1, "try"), Purged(9, X), End(9)]),
    ("another request is turned down", [
        Asked(1, "k", fingerprint="f"), Told(2, "k", X, "f", "CONFIRMED"), Asked(3, "k", fingerprint="g"),
        Told(4, "k", fingerprint="g", rejected="it is another request's key"),
    ]),
    ("turned down, then ran", [
        Told(1, "k", fingerprint="f", rejected="no such participant"), Told(2, "k", X, "f", "CONFIRMED"),
    ]),
    ("a repeated save", [Saved(1, X, "TRYING", 1, "c1"), Saved(2, X, "TRYING", 1, "c1")]),
    ("confirming after confirmed", [Told(1, "k", X, state="CONFIRMED"), Told(2, "k", X, state="CONFIRMING")]),
    ("an error, then an answer", [
        History(0, complete=("told",)), Asked(1, "k"), Told(2, "k", error="e"), Told(3, "k", X, state="CONFIRMED"),
        End(4),
    ]),
    ("unfinished without an end", [ALL, Asked(1, "k"), Saved(2, X, "TRYING", 1), effect(3, 1, "try")]),
    ("accounts that are not known before", [Balance(2, "after", "cents", "n", 6)]),
    ("within the skew", [History(0, skew_ms=5), Saved(6, X, "CONFIRMING"), effect(1, 1, "confirm")]),
    ("told when the record had been read", [Row(1, X, "TRYING"), Told(2, "k", X, state="CONFIRMED")]),
    ("saved within the skew", [History(0, skew_ms=5), Saved(1, X, "CONFIRMED"), Saved(3, X, "CONFIRMING")]),
    ("purged within the skew", [History(0, skew_ms=5), Purged(1, X, 1, A), effect(2, 1, "cancel")]),
    ("at the same time", [effect(1, 1, "cancel"), effect(1, 1, "try")]),
    ("not all was saved down to the end", [Saved(1, X, "TRYING"), End(9)]),
    ("not all was written down", [
        Asked(1, "k", participants=(A, B)), Row(2, X, "CONFIRMED", "k"), Fence(3, X, 1, A, "COMMITTED"), End(9),
    ]),
    ("not all was written down, and cancelled", [
        effect(1, 1, "try"), Row(2, X, "CANCELLED", participants=(A, B)), End(9),
    ]),
    ("confirmed by hand", [
        History(0, complete=("effect", "fence")), Asked(1, "k", participants=(A,)), effect(1, 1, "try"),
        Row(2, X, "CONFIRMED", "k", participants=(A,)), Resolved(3, X, 1, "confirmed"), Fence(4, X, 1, A, "COMMITTED"),
        End(9),
    ]),
    ("confirmed by hand for one that has lost its database", [
        EFFECTS, Asked(1, "k", participants=(A,)), Row(2, X, "CONFIRMED", "k"), Resolved(3, X, 1, "confirmed"),
        Called(4, X, 1, A, "SETTLE"), End(9),
    ]),
    ("cancelled by hand", [
        History(0, complete=("effect", "fence")), effect(1, 1, "try"), Row(2, X, "CANCELLED", participants=(A,)),
        Resolved(3, X, 1, "cancelled"), Fence(4, X, 1, A, "ROLLBACKED"), End(9),
    ]),
    ("in the order of lines", [
        History(0, order="lines"), Saved(6, X, "CONFIRMING"), effect(1, 1, "confirm"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize("events", [case[1] for case in GOOD], ids=[case[0] for case in GOOD])
def test_what_only_looks_broken_holds(events: list[Event]) -> None:
    assert [violation.text for violation in judged(events)[1]] == []


def test_the_skew_has_an_end() -> None:
    late: list[Event] = [History(0, skew_ms=5), Saved(7, X, "CONFIRMING"), effect(1, 1, "confirm")]
    assert numbers(late) == {1}
    swapped: list[Event] = [History(0, order="lines"), effect(9, 1, "confirm"), Saved(1, X, "CONFIRMING")]
    assert numbers(swapped) == {1}


def test_a_closed_transaction_is_judged_like_one_at_the_end() -> None:
    events: list[Event] = [ALL, Asked(1, "k"), Saved(1, X, "CONFIRMING"), effect(2, 1, "try"), Closed(3, X)]
    verdict, found = judged([*events, Asked(4, "k2")])
    assert {violation.number for violation in found} == {1, 3, 11}
    assert (verdict.transactions, verdict.ended) == (1, False)


def test_a_key_is_forgotten_with_its_transaction() -> None:
    one: list[Event] = [Asked(1, "k"), Told(2, "k", X, state="CONFIRMED"), Closed(3, X)]
    again: list[Event] = [Asked(4, "k"), Told(5, "k", Y, state="CONFIRMED"), Closed(6, Y)]
    assert numbers([*one, *again]) == set()
    assert numbers([*one[:2], *again[:2]]) == {6}
