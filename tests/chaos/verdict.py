"""What must hold when the load is over: read from the databases, compared with what the clients were told."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.model import Attention, State
from examples.transfer.databases import BANKS, Account, Databases, Stored
from participant_sdk.fence import Status
from tests.chaos.load import Told, Transfer

SHOWN_MAX = 5


def violations(
    databases: Databases,
    opening: Mapping[str, Account],
    started: Mapping[str, Transfer],
    told: Mapping[str, Told],
) -> list[str]:
    """What does not hold, for people; empty when all is well."""
    stored = {each.key: each for each in databases.transactions()}
    found = _accounts(databases.accounts(), opening, started, stored)
    found += _fences(databases, stored)
    found += _told(stored, started, told)
    found += _shown("unfinished", [f"{s.xid} {s.state.name}" for s in stored.values() if not s.state.finished])
    contradicted = [s.xid for s in stored.values() if s.attention is Attention.VIOLATION]
    return found + _shown("a participant contradicted the protocol in", contradicted)


def _accounts(
    accounts: Mapping[str, Account],
    opening: Mapping[str, Account],
    started: Mapping[str, Transfer],
    stored: Mapping[str, Stored],
) -> list[str]:
    expected = {name: account.balance for name, account in opening.items()}
    for key, each in stored.items():
        if each.state is State.CONFIRMED and key in started:
            expected[started[key].source] -= started[key].cents
            expected[started[key].target] += started[key].cents
    wrong = [
        f"{name} holds {account}, must hold {expected[name]}"
        for name, account in accounts.items()
        if account != Account(expected[name])
    ]
    before = sum(account.balance for account in opening.values())
    after = sum(account.balance + account.held for account in accounts.values())
    sums = [] if before == after else [f"sums: {before} before, {after} after"]
    return sums + _shown("accounts", wrong)


def _fences(databases: Databases, stored: Mapping[str, Stored]) -> list[str]:
    allowed = {
        State.CONFIRMED: {Status.COMMITTED},
        State.CANCELLED: {Status.ROLLBACKED, Status.SUSPENDED},
    }
    states = {each.xid: each.state for each in stored.values()}
    wrong = []
    for bank in BANKS:
        fence = dict(databases.fence_rows(bank))
        wrong += [f"{bank} {xid} is TRIED" for xid, status in fence.items() if status is Status.TRIED]
        wrong += [f"{bank} knows {xid}, the coordinator does not" for xid in fence.keys() - states.keys()]
        wrong += [
            f"{bank} {xid} is {_name(fence.get(xid))}, the transaction {state.name}"
            for xid, state in states.items()
            if state in allowed and fence.get(xid) not in allowed[state]
        ]
    return _shown("fence rows", wrong)


def _name(status: Status | None) -> str:
    return "nothing" if status is None else status.name


def _told(stored: Mapping[str, Stored], started: Mapping[str, Transfer], told: Mapping[str, Told]) -> list[str]:
    wrong = [f"{key} is stored but was never started" for key in stored.keys() - started.keys()]
    wrong += [f"{key} was never answered" for key in started.keys() - told.keys()]
    for key, answer in told.items():
        each = stored.get(key)
        if answer.state is None:
            wrong.append(f"{key}: {answer.error}")
        elif each is None or (each.xid, each.state) != (answer.xid, answer.state):
            wrong.append(f"{key}: told {answer.state.name} {answer.xid}, stored {each}")
    return _shown("answers", wrong)


def _shown(what: str, cases: list[str]) -> list[str]:
    if not cases:
        return []
    more = f" and {len(cases) - SHOWN_MAX} more" if len(cases) > SHOWN_MAX else ""
    return [f"{what}: {len(cases)}: {'; '.join(cases[:SHOWN_MAX])}{more}"]
