"""A participant with one account that every call moves, by an action that batches and by one that does not.

``python -m benchmarks.hot_account DSN`` serves on a free loopback port, and says which.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, create_engine, text

from participant_sdk import Call, Participant

BATCHED, ALONE = "debit_together", "debit"
ACCOUNT: Final = 1
CREATE: Final = "CREATE TABLE account (id bigint PRIMARY KEY, balance bigint, held bigint) WITH (fillfactor = 50)"
_HOLD: Final = text("UPDATE account SET held = held + :amount WHERE id = :account AND balance - held >= :amount")
_TAKE: Final = text(
    "UPDATE account SET balance = balance - :amount, held = held - :amount WHERE id = :account AND held >= :amount"
)


@dataclass
class Debit:
    """What is taken, and from where."""

    account: int
    amount: int


def _move(call: Call[Debit], db: Connection, statement: object) -> None:
    values = {"account": call.payload.account, "amount": call.payload.amount}
    if db.execute(statement, values).rowcount != 1:  # type: ignore[call-overload]
        raise RuntimeError("there is not enough in the account")


def hold(call: Call[Debit], db: Connection) -> None:
    """Try."""
    _move(call, db, _HOLD)


def take(call: Call[Debit], db: Connection) -> None:
    """Confirm."""
    _move(call, db, _TAKE)


def give_back(call: Call[Debit], db: Connection) -> None:
    """Cancel, which nobody calls."""


def main() -> None:
    """Serve until SIGTERM."""
    bank = Participant("bank", create_engine(sys.argv[1], pool_size=12))
    for definition in (bank.action(BATCHED, batch=True, batch_key="account")(hold), bank.action(ALONE)(hold)):
        definition.confirm(take)
        definition.cancel(give_back)
    bank.serve("127.0.0.1:0")


if __name__ == "__main__":
    main()
