"""A bank that takes part in transfers: a participant with two actions.

    python -m examples.transfer.bank --name bank-a --listen 127.0.0.1:7801 --coordinator 127.0.0.1:7800 \\
        --database sqlite:///bank-a.db --accounts alice=10000,carol=5000

A transfer is one transaction with two branches: ``debit`` at one bank, ``credit`` at another. Neither moves money in
its Try. Try only *reserves*, so that Confirm cannot fail and Cancel can always give back:

    debit    Try moves the amount from ``balance`` to ``held``; Confirm takes it out of ``held``, Cancel moves it back;
             a row of ``hold`` says for which branch it is held, so that ``tricord doctor`` can compare
    credit   Try notes the amount as ``incoming``; Confirm moves it into ``balance``, Cancel strikes it out

Handlers use the connection that they are given and do not commit: what they do becomes durable together with the SDK's
record that they did it. That is why they need no code against calls that come twice, late or in the wrong order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Connection,
    Engine,
    MetaData,
    String,
    Table,
    create_engine,
    delete,
    event,
    func,
    select,
    update,
)
from sqlalchemy.exc import SQLAlchemyError

from participant_sdk import Call, ConfigurationError, Hold, Participant, Refused

AMOUNT_MAX = 10**15
"""Whatever could fail later is refused in Try: a column would overflow."""

metadata = MetaData()

accounts = Table(
    "account",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("balance", BigInteger, nullable=False),
    Column("held", BigInteger, nullable=False, server_default="0"),
    Column("incoming", BigInteger, nullable=False, server_default="0"),
    CheckConstraint("balance >= 0 AND held >= 0 AND incoming >= 0", name="account_not_negative"),
)

holds = Table(
    "hold",
    metadata,
    Column("xid", String(32), primary_key=True),
    Column("branch_id", BigInteger, primary_key=True, autoincrement=False),
    Column("amount", BigInteger, nullable=False),
)


@dataclass(frozen=True)
class Debit:
    """Take an amount (in cents) out of an account."""

    account: str
    amount: int


@dataclass(frozen=True)
class Credit:
    """Put an amount (in cents) into an account."""

    account: str
    amount: int


def add_actions(bank: Participant) -> None:
    """What this bank can do for a transaction."""
    _add_debit(bank)
    _add_credit(bank)


def _add_debit(bank: Participant) -> None:
    @bank.action("debit")
    def debit(call: Call[Debit], db: Connection) -> None:
        name, amount = call.payload.account, call.payload.amount
        _check_amount(amount)
        # One statement checks and reserves, so two transfers cannot both spend the last coin.
        taken = db.execute(
            update(accounts)
            .where(accounts.c.name == name, accounts.c.balance >= amount)
            .values(balance=accounts.c.balance - amount, held=accounts.c.held + amount)
        )
        if taken.rowcount != 1:
            _check_exists(db, name)
            raise Refused("insufficient_funds", f"{name} has less than {amount}")
        db.execute(holds.insert(), {"xid": call.xid, "branch_id": call.branch_id, "amount": amount})

    @debit.confirm
    def confirm_debit(call: Call[Debit], db: Connection) -> None:
        _change(db, call.payload.account, held=-call.payload.amount)
        _release(db, call)

    @debit.cancel
    def cancel_debit(call: Call[Debit], db: Connection) -> None:
        _change(db, call.payload.account, held=-call.payload.amount, balance=call.payload.amount)
        _release(db, call)

    @bank.holds("debit")
    def held_now(db: Connection) -> Iterator[Hold]:
        for row in db.execute(select(holds), execution_options={"yield_per": 500}):
            yield Hold(row.xid, row.branch_id, row.amount, "cents")


def _add_credit(bank: Participant) -> None:
    @bank.action("credit")
    def credit(call: Call[Credit], db: Connection) -> None:
        _check_amount(call.payload.amount)
        _check_exists(db, call.payload.account)
        _change(db, call.payload.account, incoming=call.payload.amount)

    @credit.confirm
    def confirm_credit(call: Call[Credit], db: Connection) -> None:
        _change(db, call.payload.account, incoming=-call.payload.amount, balance=call.payload.amount)

    @credit.cancel
    def cancel_credit(call: Call[Credit], db: Connection) -> None:
        _change(db, call.payload.account, incoming=-call.payload.amount)


def _check_amount(amount: int) -> None:
    if not 0 < amount <= AMOUNT_MAX:
        raise Refused("invalid_amount", f"an amount must be from 1 to {AMOUNT_MAX}, not {amount}")


def _check_exists(db: Connection, name: str) -> None:
    if db.execute(select(accounts.c.name).where(accounts.c.name == name)).first() is None:
        raise Refused("unknown_account", f"there is no account {name}")


def _change(db: Connection, name: str, **amounts: int) -> None:
    """Add amounts to columns of one account."""
    columns = {column: accounts.c[column] + amount for column, amount in amounts.items()}
    changed = db.execute(update(accounts).where(accounts.c.name == name).values(columns)).rowcount
    if changed != 1:  # then nothing of this call is committed; it is repeated, and a person is called
        raise RuntimeError(f"account {name} is gone")


def _release(db: Connection, call: Call[Debit]) -> None:
    """The hold is over."""
    mine = (holds.c.xid == call.xid, holds.c.branch_id == call.branch_id)
    if db.execute(delete(holds).where(*mine)).rowcount != 1:
        raise RuntimeError("the hold is gone")


def open_database(url: str) -> Engine:
    """The bank's database: sqlite:///file or postgresql+psycopg://…"""
    engine = create_engine(url, pool_pre_ping=True)
    if engine.dialect.name == "sqlite":

        @event.listens_for(engine, "connect")
        def use_wal(connection: Any, record: Any) -> None:
            connection.execute("PRAGMA journal_mode = WAL")  # readers and the writer do not wait for each other

    return engine


def open_accounts(engine: Engine, opening: Mapping[str, int]) -> None:
    """Create the tables, and the opening accounts if there are none yet."""
    with engine.begin() as db:
        metadata.create_all(db)
        if opening and db.execute(select(func.count()).select_from(accounts)).scalar_one() == 0:
            db.execute(accounts.insert(), [{"name": name, "balance": cents} for name, cents in opening.items()])


def read_accounts(text: str) -> dict[str, int]:
    """``alice=10000,bob=500`` (cents) as a mapping."""
    opening = {}
    for part in filter(None, text.split(",")):
        name, equals, cents = part.partition("=")
        if not name or not equals or not cents.isascii() or not cents.isdigit():
            raise argparse.ArgumentTypeError(f"{part!r} is not of the form name=cents")
        opening[name] = int(cents)
    return opening


def main(
    arguments: Sequence[str] | None = None, participant: Callable[[str, Engine], Participant] = Participant
) -> None:
    """Run a bank until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="bank", description="A bank that takes part in transfers.")
    parser.add_argument("--name", required=True, help="the participant's name, such as bank-a")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT")
    parser.add_argument("--database", required=True, metavar="URL", help="sqlite:///file or postgresql+psycopg://…")
    parser.add_argument("--coordinator", required=True, metavar="HOST:PORT")
    parser.add_argument("--advertise", metavar="HOST:PORT", help="where the coordinator reaches this bank")
    parser.add_argument(
        "--accounts", type=read_accounts, default={}, metavar="NAME=CENTS,…", help="opened if there are no accounts yet"
    )
    options = parser.parse_args(arguments)
    try:
        engine = open_database(options.database)
        try:
            open_accounts(engine, options.accounts)
            bank = participant(options.name, engine)
            add_actions(bank)
            bank.serve(options.listen, coordinator=options.coordinator, advertise=options.advertise)
        finally:
            engine.dispose()
    except (ConfigurationError, SQLAlchemyError, ImportError) as error:  # ImportError: the database's driver
        sys.exit(f"bank {options.name}: {error}")


if __name__ == "__main__":
    main()
