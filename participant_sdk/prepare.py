"""What is done once at the start: the tables, the fence's id, and the proof that the engine has transactions.

The promise "effect once" stands on one local transaction holding the fence row and the business rows. An engine in
AUTOCOMMIT mode, or a table that cannot roll back, breaks it silently, so the proof is run and not assumed: a row is
inserted, a savepoint released, all of it rolled back, and a second connection must not see the row.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Engine, Table, delete, func, inspect, literal, select, true
from sqlalchemy import exc as sqlalchemy_errors
from sqlalchemy.schema import CreateTable

from participant_sdk.call import IncomingCall, fingerprint
from participant_sdk.databases import Database, database_of
from participant_sdk.databases.database import RELEASE, SAVEPOINT
from participant_sdk.errors import ConfigurationError, describe
from participant_sdk.fence import Phase
from participant_sdk.fence_tables import FenceTables
from participant_sdk.payload import Payload
from participant_sdk.steps import Ask, CallFailed, Rollback, Send, Step

R = TypeVar("R")

CREATE_RUNS_MAX: Final = 5
CREATE_SECONDS_MAX: Final = 10.0
PROBE_BRANCH_ID: Final = 0
"""No branch has it: they are numbered from 1."""


def check_engine(engine: Engine, tables: FenceTables, connections_needed: int) -> Database:
    """The kind of database behind `engine`; raises ConfigurationError if the fence cannot live there."""
    database = database_of(engine.dialect, tables)
    check_transactions(engine, "the fence")
    capacity = pool_capacity(engine)
    if capacity is not None and capacity < connections_needed:
        raise ConfigurationError(
            f"the engine's pool gives at most {capacity} connections, but {connections_needed} calls may run at a "
            "time: raise pool_size or max_overflow, or lower try_workers or phase2_workers"
        )
    return database


def check_transactions(engine: Engine, what: str) -> None:
    """Raises ConfigurationError, on behalf of `what`, if the engine's settings say that it has no transactions."""
    if is_autocommit(engine):
        raise ConfigurationError(
            f"the engine is in AUTOCOMMIT mode: the rows of {what} and the business rows must commit together; create "
            "the engine without isolation_level='AUTOCOMMIT'"
        )
    if engine.dialect.name == "sqlite" and _in_memory(engine):
        raise ConfigurationError(f"an in-memory SQLite database cannot hold {what}: name a file")


def is_autocommit(bind: Engine | Connection) -> bool:
    """Whether each statement commits by itself there."""
    default = getattr(bind.dialect, "_on_connect_isolation_level", None)
    return bool(bind.get_execution_options().get("isolation_level", default) == "AUTOCOMMIT")


def check_apart(first: Connection, second: Connection) -> None:
    """Raises ConfigurationError if the pool lends one connection twice: one call would commit another's half."""
    if first.connection.driver_connection is second.connection.driver_connection:
        raise ConfigurationError(_NOT_APART.format(type(first.engine.pool).__name__))


_NOT_APART: Final = (
    "the engine's pool ({}) lends one connection to several at a time, or to one only: each call needs a connection of "
    "its own; use QueuePool (the default) or NullPool"
)


def pool_capacity(engine: Engine) -> int | None:
    """How many connections the engine's pool gives at a time; None if it does not say or has no limit."""
    size, overflow = getattr(engine.pool, "size", None), getattr(engine.pool, "_max_overflow", None)
    if not callable(size) or not isinstance(overflow, int) or overflow < 0:
        return None
    pool_size = int(size())
    return pool_size + overflow if pool_size > 0 else None


def _in_memory(engine: Engine) -> bool:
    name = engine.url.database or ""
    return ":memory:" in name or not name or engine.url.query.get("mode") == "memory"


def make_tables(connection: Connection, tables: FenceTables) -> str:
    """Create what is missing of the tables and read the fence's id. Many instances may start at the same time."""

    def make() -> str:
        create_missing(connection, tables.schema, tables.log, tables.info)
        check_key(connection, tables.log, {"xid", "branch_id"}, "two calls of a branch would not meet")
        return _fence_id(connection, tables)

    return made_together(connection, make)


def made_together(connection: Connection, make: Callable[[], R]) -> R:
    """Do what other instances may be doing now, too, and commit."""
    for run in range(1, CREATE_RUNS_MAX + 1):
        try:
            made = make()
            connection.commit()
            return made
        except (sqlalchemy_errors.DBAPIError, sqlalchemy_errors.NoSuchTableError):
            connection.rollback()
            if run == CREATE_RUNS_MAX:
                raise
            time.sleep(0.05 * run)  # another instance is creating them
    raise AssertionError("unreachable")


def create_missing(connection: Connection, schema: str | None, *tables: Table) -> None:
    """Create those that are not there."""
    existing = set(inspect(connection).get_table_names(schema))
    for table in tables:
        if table.name not in existing:
            connection.execute(CreateTable(table, if_not_exists=True))
    connection.commit()  # another instance may have made them: from REPEATABLE READ on, a new snapshot shows them
    for table in tables:
        connection.execute(select(table).where(~true()))  # every column is there


def check_key(connection: Connection, table: Table, columns: set[str], why: str) -> None:
    """Raises ConfigurationError if that is not the table's primary key."""
    key = inspect(connection).get_pk_constraint(table.name, table.schema)["constrained_columns"]
    if set(key) != columns:
        names = ", ".join(column.name for column in table.primary_key)
        raise ConfigurationError(f"table {table.name} has not the primary key ({names}): {why}")


def _fence_id(connection: Connection, tables: FenceTables) -> str:
    read = select(func.max(tables.info.c.fence_id))
    found = connection.execute(read).scalar()
    if found is None:
        try:
            connection.execute(tables.info.insert(), {"singleton": 1, "fence_id": secrets.token_hex(16)})
            connection.commit()
        except sqlalchemy_errors.IntegrityError:  # another instance was faster
            connection.rollback()
        found = connection.execute(read).scalar_one()
    return str(found)


def probe(database: Database, xid: str) -> Generator[Step, Any, None]:
    """The start of a call, as far as a savepoint's release. The caller rolls it back."""
    payload = Payload()
    call = IncomingCall(
        phase=Phase.TRY,
        xid=xid,
        branch_id=PROBE_BRANCH_ID,
        participant="probe",
        action="probe",
        payload=payload,
        attempt=1,
        expires_at=time.monotonic() + CREATE_SECONDS_MAX,
        fingerprint=fingerprint("probe", payload),
    )
    yield from database.meet(call)
    yield Send(SAVEPOINT)
    yield Ask(_as_a_handler_would)
    yield Send(RELEASE)
    yield from database.restore()


def _as_a_handler_would(connection: Connection) -> None:
    """Through SQLAlchemy, so that whatever listens to its statements does what it does."""
    connection.execute(select(literal(1))).all()


def undo(connection: Connection) -> None:
    """Roll back what the probe has done."""
    Rollback().perform(connection)


def check_rolled_back(connection: Connection, tables: FenceTables, xid: str, failure: Exception | None) -> None:
    """Raises ConfigurationError if a second connection sees what the first has rolled back.

    `failure` is what went wrong in the probe: then nothing is proved either, but a row that is there says more.
    """
    key = (tables.log.c.xid == xid) & (tables.log.c.branch_id == PROBE_BRANCH_ID)
    if connection.execute(select(tables.log.c.status).where(key)).first() is not None:
        connection.execute(delete(tables.log).where(key))
        connection.commit()
        raise ConfigurationError(
            "the engine has no transactions: a fence row that was rolled back is still there. It may be in AUTOCOMMIT "
            "mode, an event listener of it may commit, or its table may not support transactions"
        )
    if failure is not None:
        raise failure


@contextmanager
def errors_told(engine: Engine, what: str = "the fence") -> Iterator[None]:
    """Turns what the database says into a ConfigurationError that says it on one line."""
    try:
        yield
    except AssertionError as error:  # AssertionPool's way to say that it lends one connection only
        raise ConfigurationError(_NOT_APART.format("AssertionPool")) from error
    except (sqlalchemy_errors.SQLAlchemyError, engine.dialect.loaded_dbapi.Error, CallFailed) as error:
        cause = error.orig if isinstance(error, sqlalchemy_errors.DBAPIError) and error.orig else error
        raise ConfigurationError(f"{what} cannot be set up in the database: {describe(cause)}") from error
