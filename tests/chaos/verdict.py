"""What must hold when the load is over: read from the databases, compared with what the clients were told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from coordinator.model import Attention, State
from examples.transfer.databases import BANKS, Account, Stored
from participant_sdk.fence import Status
from tests.chaos.load import Part, Told

SHOWN_MAX = 5


class Asked(Protocol):
    """What a client has asked for."""

    @property
    def parts(self) -> Sequence[Part]:
        """Its branches; at most one at each participant."""


class Tables(Protocol):
    """What everybody has stored."""

    def accounts(self) -> Mapping[str, Account]:
        """All accounts of all banks, as ``alice@bank-a``."""

    def fence_rows(self, bank: str, /) -> Sequence[tuple[str, Status]]:
        """The xid and status of each of a participant's fence rows."""

    def transactions(self) -> Sequence[Stored]:
        """The transactions in the coordinators' database."""


def violations(
    databases: Tables,
    opening: Mapping[str, Account],
    started: Mapping[str, Asked],
    told: Mapping[str, Told],
    participants: Sequence[str] = BANKS,
) -> list[str]:
    """What does not hold, for people; empty when all is well."""
    stored = {each.key: each for each in databases.transactions()}
    found = _accounts(databases.accounts(), opening, started, stored)
    found += _fences(databases, stored, started, participants)
    found += _told(stored, started, told)
    found += shown("unfinished", [f"{s.xid} {s.state.name}" for s in stored.values() if not s.state.finished])
    contradicted = [s.xid for s in stored.values() if s.attention is Attention.VIOLATION]
    return found + shown("a participant contradicted the protocol in", contradicted)


def _accounts(
    accounts: Mapping[str, Account],
    opening: Mapping[str, Account],
    started: Mapping[str, Asked],
    stored: Mapping[str, Stored],
) -> list[str]:
    expected = {name: account.balance for name, account in opening.items()}
    for key, each in stored.items():
        if each.state is State.CONFIRMED and key in started:
            for part in started[key].parts:
                account = f"{part.name}@{part.participant}"
                if account in expected:  # else it is no bank's
                    expected[account] += part.change
    wrong = [
        f"{name} holds {account}, must hold {expected[name]}"
        for name, account in accounts.items()
        if account != Account(expected[name])
    ]
    before = sum(account.balance for account in opening.values())
    after = sum(account.balance + account.held for account in accounts.values())
    sums = [] if before == after else [f"sums: {before} before, {after} after"]
    return sums + shown("accounts", wrong)


def _fences(
    databases: Tables, stored: Mapping[str, Stored], started: Mapping[str, Asked], participants: Sequence[str]
) -> list[str]:
    wrong = []
    allowed = {
        State.CONFIRMED: {Status.COMMITTED},
        State.CANCELLED: {Status.ROLLBACKED, Status.SUSPENDED},
    }
    owed: dict[str, dict[str, State]] = {participant: {} for participant in participants}
    for key, each in stored.items():
        for part in started[key].parts if key in started else ():
            if part.participant in each.participants:  # a block may have ended before it came to this one
                owed[part.participant][each.xid] = each.state
            elif each.state is State.CONFIRMED:
                wrong.append(f"{each.xid} is confirmed without {part.participant}")
    for participant, states in owed.items():
        fence = dict(databases.fence_rows(participant))
        wrong += [f"{participant} {xid} is TRIED" for xid, status in fence.items() if status is Status.TRIED]
        wrong += [f"{participant} knows {xid}, its coordinator does not" for xid in fence.keys() - states.keys()]
        wrong += [
            f"{participant} {xid} is {_name(fence.get(xid))}, the transaction {state.name}"
            for xid, state in states.items()
            if state in allowed and fence.get(xid) not in allowed[state]
        ]
    return shown("fence rows", wrong)


def _name(status: Status | None) -> str:
    return "nothing" if status is None else status.name


def _told(stored: Mapping[str, Stored], started: Mapping[str, Asked], told: Mapping[str, Told]) -> list[str]:
    wrong = [f"{key} is stored but was never started" for key in stored.keys() - started.keys()]
    wrong += [f"{key} was never answered" for key in started.keys() - told.keys()]
    for key, answer in told.items():
        each = stored.get(key)
        if answer.state is None:
            wrong.append(f"{key}: {answer.error}")
        elif each is None or (each.xid, each.state) != (answer.xid, answer.state):
            wrong.append(f"{key}: told {answer.state.name} {answer.xid}, stored {each}")
    return shown("answers", wrong)


def shown(what: str, cases: Sequence[str]) -> list[str]:
    """One line for all cases of one kind, if there are any."""
    if not cases:
        return []
    more = f" and {len(cases) - SHOWN_MAX} more" if len(cases) > SHOWN_MAX else ""
    return [f"{what}: {len(cases)}: {'; '.join(cases[:SHOWN_MAX])}{more}"]
