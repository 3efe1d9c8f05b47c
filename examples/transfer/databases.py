"""The databases of a coordinator and two banks: where they are, and what they say.

Nothing here asks a process. Whether a transfer came out right is read from the tables, as somebody would who trusts
none of the programs.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Engine, NullPool, String, cast, create_engine, make_url, select, text
from sqlalchemy.exc import SQLAlchemyError

from coordinator.model import Attention, State
from coordinator.store.schema import transactions
from participant_sdk.fence import Status
from participant_sdk.fence_tables import DEFAULT

from .bank import accounts

BANKS = ("bank-a", "bank-b")


class Account(NamedTuple):
    """One account, in cents."""

    balance: int
    held: int = 0
    incoming: int = 0


class Stored(NamedTuple):
    """One transaction in the coordinator's database."""

    xid: str
    state: State
    created_ms: int
    key: str
    attention: Attention
    participants: Sequence[str]
    """Those that have a branch."""


class FenceRow(NamedTuple):
    """One branch in a participant's database."""

    xid: str
    branch_id: int
    status: Status
    refused: bool
    """Its Try was refused."""
    created_ms: int
    modified_ms: int


class Databases:
    """One database for the coordinator and one for each bank, all on one kind of server."""

    def __init__(self, store: str, banks: dict[str, str]) -> None:
        self.store = store
        """The coordinator's, in its own spelling."""
        self.banks = banks
        """SQLAlchemy's addresses by bank."""
        self._coordinator = create_engine(
            store.replace("postgresql://", "postgresql+psycopg://", 1), poolclass=NullPool
        )
        self._engines = {bank: create_engine(url, poolclass=NullPool) for bank, url in banks.items()}

    def accounts(self) -> dict[str, Account]:
        """All accounts of all banks, as ``alice@bank-a``."""
        found = {}
        for bank, engine in self._engines.items():
            with engine.connect() as connection:
                for row in connection.execute(select(accounts).order_by(accounts.c.name)):
                    found[f"{row.name}@{bank}"] = Account(row.balance, row.held, row.incoming)
        return found

    def fence_rows(self, bank: str) -> list[FenceRow]:
        """A bank's fence rows."""
        t = DEFAULT.log.c
        times = cast(t.created_at, String), cast(t.modified_at, String)  # each kind of database has its own spelling
        query = select(t.xid, t.branch_id, t.status, t.refusal_reason, *times)
        with self._engines[bank].connect() as connection:
            return [
                FenceRow(xid, branch_id, Status(status), reason is not None, _ms(created), _ms(modified))
                for xid, branch_id, status, reason, created, modified in connection.execute(query)
            ]

    def fence_status(self, bank: str, xid: str) -> Status | None:
        """The status of a transaction's branch at a bank; None if there is no row."""
        return next((row.status for row in self.fence_rows(bank) if row.xid == xid), None)

    def fence_counts(self) -> dict[str, Counter[str]]:
        """How many fence rows each bank has, by status."""
        return {bank: Counter(row.status.name for row in self.fence_rows(bank)) for bank in self._engines}

    def transactions(self, *, unfinished: bool = False) -> list[Stored]:
        """The transactions in the coordinator's database: all, or those that still owe somebody something."""
        t = transactions.c
        query = select(t.xid, t.state, t.created_ms, t.key, t.attention, t.participants).order_by(t.xid)
        if unfinished:
            query = query.where(t.state.not_in([state for state in State if state.finished]))
        with self._coordinator.connect() as connection:
            return [
                Stored(
                    xid.hex(),
                    State(state),
                    created_ms,
                    _key_text(key),
                    Attention(attention),
                    names.strip(",").split(","),
                )
                for xid, state, created_ms, key, attention, names in connection.execute(query)
            ]

    def state(self, xid: str) -> State | None:
        """The stored state of one transaction; None if there is none."""
        return next((stored.state for stored in self.transactions() if stored.xid == xid), None)


def eventually(what: str, holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Return as soon as something holds; other processes' tables give no sign when they change.

    Raises TimeoutError.
    """
    deadline_s = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not so after {seconds:.0f} s: {what}")
        time.sleep(0.02)


def sqlite_databases(folder: Path) -> Databases:
    """Files in a folder."""
    return Databases(
        f"sqlite:///{folder / 'coordinator.db'}", {bank: f"sqlite:///{folder / bank}.db" for bank in BANKS}
    )


@contextmanager
def postgres_databases(server: str) -> Iterator[Databases]:
    """Fresh databases on the server that an address names, dropped at the end."""
    url = make_url(server).set(drivername="postgresql+psycopg")
    run = uuid.uuid4().hex[:8]
    names = {owner: f"tricord_demo_{run}_{owner.replace('-', '_')}" for owner in ("coordinator", *BANKS)}
    # A server has a database of this name unless somebody dropped it; an address may name another.
    admin = create_engine(
        url if url.database else url.set(database="postgres"), isolation_level="AUTOCOMMIT", poolclass=NullPool
    )
    created = []
    try:
        for name in names.values():
            _execute(admin, f'CREATE DATABASE "{name}"')
            created.append(name)
        urls = {owner: url.set(database=name).render_as_string(hide_password=False) for owner, name in names.items()}
        store = urls.pop("coordinator").replace("postgresql+psycopg://", "postgresql://", 1)
        yield Databases(store, urls)
    finally:
        for name in created:
            try:
                _execute(admin, f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
            except SQLAlchemyError as error:  # the others are to be dropped all the same
                print(f"database {name} could not be dropped: {error}", file=sys.stderr)
        admin.dispose()


def _ms(when: str) -> int:
    """A time in the database's words, in ms since 1970; UTC where they name no zone."""
    time = datetime.fromisoformat(when)
    return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1_000)


def _key_text(key: bytes | None) -> str:
    """The idempotency key, which stands behind its namespace; empty if there is none."""
    return (key or b"").rpartition(b"\0")[2].decode()


def _execute(engine: Engine, statement: str) -> None:
    with engine.connect() as connection:
        connection.execute(text(statement))
