"""Good histories, to be broken: transfers of cents between accounts of two banks, told of by everybody."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from coordinator.check.events import (
    Asked,
    Balance,
    Called,
    Change,
    Effect,
    End,
    Event,
    Fence,
    History,
    Purged,
    Row,
    Saved,
    Told,
    to_json_line,
)
from coordinator.check.invariants import Violation
from coordinator.check.judge import Verdict, judge
from coordinator.check.reading import events

COMPLETE = ("asked", "told", "saved", "effect", "resolved", "row", "fence")
BANKS = ("bank-a", "bank-b")
CENTS = 1_000


class Transfer(NamedTuple):
    """One good transaction."""

    confirmed: bool = True
    cents: int = 5
    refused: bool = False
    """By its second branch, where it is cancelled; else its deadline cancels it."""
    late: bool = False
    """Where it is cancelled without refusal: the second branch's Try never came before its Cancel."""
    answers: int = 1
    purged: bool = False


def transaction(number: int, transfer: Transfer, start: int) -> list[Event]:
    """Its events, in order, 1 ms apart."""
    xid, key = f"{number:032x}", f"key-{number}"
    told, went = ("CONFIRMED", "confirm") if transfer.confirmed else ("CANCELLED", "cancel")
    second = "try"
    if not transfer.confirmed and (transfer.refused or transfer.late):
        second = "refused" if transfer.refused else ""
    found: list[Event] = [Asked(0, key, fingerprint=f"f{number}", participants=BANKS), Saved(0, xid, "TRYING", 1, "c1")]
    found += [Called(0, xid, 1, BANKS[0], "TRY"), Effect(0, xid, 1, BANKS[0], "try", 1)]
    found += [Effect(0, xid, 2, BANKS[1], second, 1)] if second else []
    found.append(Saved(0, xid, f"{told[:-2]}ING", 2, "c1"))
    for branch_id, (bank, change) in enumerate(zip(BANKS, (-transfer.cents, transfer.cents), strict=True), 1):
        found.append(Called(0, xid, branch_id, bank, went.upper()))
        changes = (Change("cents", f"n@{bank}", change),) if transfer.confirmed else ()
        what = went if branch_id == 1 or second == "try" else "suspended" if not second else ""
        found += [Effect(0, xid, branch_id, bank, what, 2, changes)] if what else []
    answer = Told(0, key, xid, f"f{number}", told, results={"1": "hold-1"})
    found += [answer] * transfer.answers
    found += [Saved(0, xid, told, 3, "c2"), Row(0, xid, told, key)]
    found += [Purged(0, xid, 1, BANKS[0])] if transfer.purged else []
    status = "COMMITTED" if transfer.confirmed else "ROLLBACKED"
    found += [] if transfer.purged else [Fence(0, xid, 1, BANKS[0], status)]
    found.append(Fence(0, xid, 2, BANKS[1], status if second else "SUSPENDED"))
    return [event._replace(at=start + n) for n, event in enumerate(found)]


def history(transfers: Sequence[Transfer] = (Transfer(),), *, order: str = "times") -> list[Event]:
    """A whole history, with balances and an end."""
    found: list[Event] = [History(0, order=order, complete=COMPLETE)]
    found += [Balance(1, "before", "cents", f"n@{bank}", CENTS) for bank in BANKS]
    for number, transfer in enumerate(transfers, 1):
        found += transaction(number, transfer, 100 * number)
    moved = sum(transfer.cents for transfer in transfers if transfer.confirmed)
    last = 100 * (len(transfers) + 1)
    after = zip(BANKS, (CENTS - moved, CENTS + moved), strict=True)
    found += [Balance(last, "after", "cents", f"n@{bank}", cents) for bank, cents in after]
    return [*found, End(last)]


def text(history: Iterable[Event]) -> bytes:
    """Its file."""
    return "".join(map(to_json_line, history)).encode()


def judged(history: Iterable[Event]) -> tuple[Verdict, list[Violation]]:
    """The verdict on a history, by way of its file."""
    found: list[Violation] = []
    return judge(events(io.BytesIO(text(history))), found.append), found


def numbers(history: Iterable[Event]) -> set[int]:
    """The invariants that a history violates."""
    return {violation.number for violation in judged(history)[1]}
