"""What must hold when the load is over: a history of all that was asked, told and stored, judged by ``tricord check``.

Clients write down what they ask and are told (``load``, ``crowd``), coordinators what they save and send
(``recorded``); the effects and fence rows are read from the participants' databases, the endings from the
coordinators', when all is at rest. The file stays where the logs are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from coordinator.check.events import RECORDS, Balance, Change, Effect, End, Event, Fence, History, Row, to_json_line
from coordinator.check.invariants import Violation
from coordinator.check.judge import judge
from coordinator.check.reading import events
from examples.transfer.databases import BANKS, Account, FenceRow, Stored
from participant_sdk.fence import Status
from tests.chaos.load import Part, now_ms
from tests.chaos.recorded import files, merge

SHOWN_MAX = 5
RECORDED = ("saved", "called")
MUST_BE_JUDGED = frozenset({1, 2, 3, 4, 5, 7, 11})
"""A run whose history shows nothing of these invariants has shown nothing."""
MUST_BE_JUDGED_IF_RECORDED = MUST_BE_JUDGED | {8, 9}


class Asked(Protocol):
    """What a client has asked for."""

    @property
    def parts(self) -> Sequence[Part]:
        """Its branches; at most one at each participant."""


class Clients(Protocol):
    """What all of them have asked for and were told."""

    @property
    def started(self) -> Mapping[str, Asked]:
        """By idempotency key."""

    @property
    def events(self) -> Sequence[Event]:
        """As events of a history."""


class Tables(Protocol):
    """What everybody has stored."""

    def accounts(self) -> Mapping[str, Account]:
        """All accounts of all banks, as ``alice@bank-a``."""

    def fence_rows(self, bank: str, /) -> Sequence[FenceRow]:
        """A participant's fence rows."""

    def transactions(self) -> Sequence[Stored]:
        """The transactions in the coordinators' database."""


def violations(
    folder: Path,
    tables: Tables,
    opening: Mapping[str, Account],
    clients: Clients,
    participants: Sequence[str] = BANKS,
    more: Iterable[Balance] = (),
) -> list[str]:
    """What does not hold, for people; empty when all is well. ``more``: balances that are no accounts of banks."""
    path = folder / "history.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for event in _history(folder, tables, opening, clients, participants, more):
            file.write(to_json_line(event))
    found: list[Violation] = []
    with path.open("rb") as written:
        verdict = judge(events(written), found.append)
    must_be = MUST_BE_JUDGED_IF_RECORDED if files(folder) else MUST_BE_JUDGED
    not_judged = [each.words for each in verdict.invariants if each.number in must_be and each.not_judged]
    by_number = {number: [v.text for v in found if v.number == number] for number in sorted({v.number for v in found})}
    lines = [line for number, texts in by_number.items() for line in shown(f"invariant {number}", texts)]
    return lines + (shown("not judged", not_judged) if clients.started else [])


def _history(
    folder: Path,
    tables: Tables,
    opening: Mapping[str, Account],
    clients: Clients,
    participants: Sequence[str],
    more: Iterable[Balance],
) -> Iterator[Event]:
    yield History(now_ms(), complete=[kind for kind in RECORDS if kind not in RECORDED or files(folder)])
    yield from _account_balances("before", opening)
    yield from more
    yield from clients.events
    yield from merge(folder)
    parts: dict[str, Sequence[Part]] = {}
    for stored in tables.transactions():
        if stored.key in clients.started:
            parts[stored.xid] = clients.started[stored.key].parts
        names = [name for name in stored.participants if name]  # a block may have ended before its first branch
        yield Row(now_ms(), stored.xid, stored.state.name, stored.key, stored.attention.name, names)
    for participant in participants:
        for row in tables.fence_rows(participant):
            mine = [part for part in parts.get(row.xid, ()) if part.participant == participant]
            yield from _effects(participant, row, [change for part in mine for change in _changes(part, opening)])
            yield Fence(now_ms(), row.xid, row.branch_id, participant, row.status.name)
    yield from _account_balances("after", tables.accounts())
    yield End(now_ms())


def _effects(participant: str, row: FenceRow, changes: Sequence[Change]) -> Iterator[Effect]:
    """What the fence row says was committed together with it."""
    mine = (row.xid, row.branch_id, participant)
    if row.status is Status.SUSPENDED:
        yield Effect(row.modified_ms, *mine, "suspended")
    elif row.refused:
        yield Effect(row.modified_ms, *mine, "refused")
    else:
        yield Effect(row.created_ms, *mine, "try")
        if row.status is Status.COMMITTED:
            yield Effect(row.modified_ms, *mine, "confirm", changes=changes)
        elif row.status is Status.ROLLBACKED:
            yield Effect(row.modified_ms, *mine, "cancel")


def _changes(part: Part, accounts: Mapping[str, Account]) -> Sequence[Change]:
    account = f"{part.name}@{part.participant}"
    if account in accounts:
        return (Change("cents", account, part.change),)
    return Change("units", f"{part.name} free", part.change), Change("units", f"{part.name} sold", -part.change)


def _account_balances(when: str, accounts: Mapping[str, Account]) -> Iterator[Balance]:
    for name, account in accounts.items():
        yield Balance(now_ms(), when, "cents", name, account.balance, account.held)
        yield Balance(now_ms(), when, "cents announced", name, account.incoming)


def stock_balances(when: str, stock: Mapping[str, tuple[int, int, int]]) -> Iterator[Balance]:
    """Units of each item of a shop: free, held, sold."""
    for item, (free, held, sold) in stock.items():
        yield Balance(now_ms(), when, "units", f"{item} free", free, held)
        yield Balance(now_ms(), when, "units", f"{item} sold", sold)


def shown(what: str, cases: Sequence[str]) -> list[str]:
    """One line for all cases of one kind, if there are any."""
    if not cases:
        return []
    more = f" and {len(cases) - SHOWN_MAX} more" if len(cases) > SHOWN_MAX else ""
    return [f"{what}: {len(cases)}: {'; '.join(cases[:SHOWN_MAX])}{more}"]
