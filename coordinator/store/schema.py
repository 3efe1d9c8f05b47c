"""The tables, as SQLAlchemy MetaData: the one source of the schema; creating and checking them.

Migrations are Alembic's; a test compares what they make with the MetaData here. ``migrate`` brings an older store up
to date while coordinators run on it (protocol G2): a revision only adds what older programs need not know, and the
store itself says which row format may be written and which program is too old for it.
"""

from __future__ import annotations

import secrets
import time
from typing import NamedTuple

import sqlalchemy as sa

from ..model import FORMAT
from .rows import Row, StoreError

REVISIONS = ("0001", "0002", "0003")
"""The schema's revisions that this program knows, oldest first. It runs on the last, and on later ones that let it."""
REVISION = REVISIONS[-1]
VERSION_TABLE = "tricord_schema_version"

APPLICATION_NAME = f"tricord/{FORMAT}"
"""What a program's sessions on PostgreSQL are named: by the format that it reads. Those of format 1: "tricord"."""

UNKNOWN_INCARNATION = "unknown"
"""Where the database does not tell its history: nothing can be concluded from it."""

metadata = sa.MetaData()

transactions = sa.Table(
    "tricord_transaction",
    metadata,
    # What never changes.
    sa.Column("xid", sa.LargeBinary, primary_key=True),
    sa.Column("created_ms", sa.BigInteger, nullable=False),
    sa.Column("key", sa.LargeBinary, nullable=True),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("participants", sa.Text, nullable=False),
    sa.Column("format", sa.SmallInteger, nullable=False),
    # What each save writes.
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("save_id", sa.BigInteger, nullable=False),
    sa.Column("state", sa.SmallInteger, nullable=False),
    sa.Column("attention", sa.SmallInteger, nullable=False),
    sa.Column("wake_ms", sa.BigInteger, nullable=True),
    sa.Column("updated_ms", sa.BigInteger, nullable=False),
    sa.Column("progress", sa.LargeBinary, nullable=False),
    # What claims write: how often this version was claimed, which a save puts an end to by being another one (A7).
    sa.Column("claims", sa.SmallInteger, nullable=False, server_default=sa.text("0")),
    sa.Column("claimed_version", sa.Integer, nullable=False, server_default=sa.text("0")),
    sa.UniqueConstraint("key", name="tricord_transaction_key"),
    # Only unfinished rows: finished ones may pile up without slowing the look for due work.
    sa.Index(
        "tricord_transaction_due",
        "wake_ms",
        postgresql_where=sa.text("wake_ms IS NOT NULL"),
        sqlite_where=sa.text("wake_ms IS NOT NULL"),
    ),
)
ROW = [transactions.c[name] for name in Row._fields]
"""The columns of a ``Row``, in its order."""
FILLFACTOR = sa.DDL("ALTER TABLE tricord_transaction SET (fillfactor = 50)")  # type: ignore[no-untyped-call]
"""Half-filled pages leave room for the decision's new row version beside the old one (a HOT update)."""
sa.event.listen(transactions, "after_create", FILLFACTOR.execute_if(dialect="postgresql"))

participants = sa.Table(
    "tricord_participant",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("address", sa.Text, nullable=False),
    sa.Column("actions", sa.JSON, nullable=False),
    sa.Column("withdrawn", sa.JSON, nullable=False),
    sa.Column("updated_ms", sa.BigInteger, nullable=False),
)

participant_addresses = sa.Table(
    "tricord_participant_address",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("address", sa.Text, primary_key=True),
    sa.Column("actions", sa.JSON, nullable=False),
    sa.Column("seen_ms", sa.BigInteger, nullable=False),
)

labels = sa.Table(
    "tricord_label",
    metadata,
    # Found by name and value, newest last; deleted with its transaction, by the index.
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, primary_key=True),
    sa.Column("xid", sa.LargeBinary, primary_key=True),
    sa.Index("tricord_label_xid", "xid"),
)

audit = sa.Table(
    "tricord_audit",
    metadata,
    # Rows are added, never changed. The id is a UUIDv7: they lie in the order of time.
    sa.Column("id", sa.LargeBinary, primary_key=True),
    sa.Column("time_ms", sa.BigInteger, nullable=False),
    sa.Column("action", sa.Text, nullable=False),
    sa.Column("xid", sa.LargeBinary, nullable=True),
    # Who: the name that was given, and where the call came from. Neither is proven.
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("peer", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    # JSON: what it was about, and what it has changed.
    sa.Column("before", sa.Text, nullable=False),
    sa.Column("after", sa.Text, nullable=False),
    sa.Index("tricord_audit_xid", "xid"),
)

store_info = sa.Table(
    "tricord_store",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("store_id", sa.Text, nullable=False),
    sa.Column("incarnation", sa.Text, nullable=False),
    # The highest row format that may be written, and the lowest that a program must read to run here.
    sa.Column("format", sa.SmallInteger, nullable=False, server_default=sa.text("1")),
    sa.Column("oldest_program", sa.SmallInteger, nullable=False, server_default=sa.text("1")),
)


class Stand(NamedTuple):
    """How far a store has been migrated."""

    revision: str
    """Empty: there are no tables yet."""
    format: int = 1
    oldest_program: int = 1


class StoreBehind(StoreError):
    """The store is older than the program."""


def ensure_schema(engine: sa.Engine) -> None:
    """Create the tables in an empty database; refuse a schema on which this program must not run.

    Raises StoreBehind, StoreError. Two coordinators may do it at once: the loser finds the winner's tables.
    """
    stand = read_stand(engine)
    if not stand.revision:
        stand = _upgrade(engine)
    if stand.revision in REVISIONS[:-1]:
        raise StoreBehind(
            f"the store has schema revision {stand.revision}, this program needs {REVISION}: run `tricord migrate` "
            "(coordinators of the older version go on working)"
        )
    _check_oldest(stand)


def migrate(engine: sa.Engine, *, finish: bool) -> Stand:
    """Bring the schema up to this program's revision, and with ``finish`` shut out older programs; returns the result.

    Without ``finish`` programs of the revision before go on working. Doing it again changes nothing. Raises StoreError
    if the store is newer than this program, or if it is to be finished while an older program uses it.
    """
    stand = read_stand(engine)
    if not stand.revision or stand.revision in REVISIONS[:-1]:
        stand = _upgrade(engine)
    _check_oldest(stand)
    if not finish or stand.format >= FORMAT:
        return stand
    _refuse_older_at_work(engine)
    _tell(engine, oldest_program=max(FORMAT, stand.oldest_program))  # from here on none of them starts any more
    try:
        _refuse_older_at_work(engine)
    except StoreError:
        _tell(engine, oldest_program=stand.oldest_program)
        raise
    _tell(engine, format=FORMAT)
    return read_stand(engine)


def _tell(engine: sa.Engine, **values: int) -> None:
    """Say in the store which formats and programs it is for."""
    with engine.begin() as connection:
        connection.execute(store_info.update().where(store_info.c.format < FORMAT).values(**values))


def _refuse_older_at_work(engine: sa.Engine) -> None:
    """Raises StoreError if an older program is connected; to a SQLite file none is, it is locked for one program."""
    if engine.dialect.name != "postgresql":
        return
    sessions = sa.text(
        "SELECT application_name, coalesce(host(client_addr), 'an address that is not told') AS host "
        "FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'tricord%'"
    )
    with engine.connect() as connection:
        hosts = {session.host for session in connection.execute(sessions) if _is_older(session.application_name)}
    if hosts:
        raise StoreError(
            f"coordinators of an older version still use the store, from {', '.join(sorted(hosts))}: "
            "stop them (or start this version in their place), then finish again"
        )


def _is_older(application_name: str) -> bool:
    name, _, number = application_name.partition("/")
    return name == "tricord" and (not number or (number.isdecimal() and int(number) < FORMAT))


def read_stand(engine: sa.Engine) -> Stand:
    """How far the store has been migrated."""
    inspector = sa.inspect(engine)
    if not inspector.has_table(VERSION_TABLE):
        return Stand("")
    with engine.connect() as connection:
        rows = connection.execute(sa.text(f"SELECT version_num FROM {VERSION_TABLE}"))  # a constant
        revision = ", ".join(str(row.version_num) for row in rows)
        if not revision.isdecimal() or int(revision) <= int(REVISIONS[0]):
            return Stand(revision)
        columns = sa.select(store_info.c.format, store_info.c.oldest_program)
        found = connection.execute(columns).one_or_none()
    return Stand(revision) if found is None else Stand(revision, found.format, found.oldest_program)


def _check_oldest(stand: Stand) -> None:
    later = stand.revision.isdecimal() and int(stand.revision) > int(REVISION)
    if (stand.revision == REVISION or later) and stand.oldest_program <= FORMAT:
        return
    raise StoreError(
        f"the store has schema revision {stand.revision} for programs from format {stand.oldest_program} on, this "
        f"program runs on {REVISION} and has format {FORMAT}: the store belongs to another version of Tricord; run "
        "that version or a newer one"
    )


def _upgrade(engine: sa.Engine) -> Stand:
    """Run the revisions that are missing. An empty store is finished at once: no older program knows of it."""
    for attempt in range(10):
        try:
            _upgrade_once(engine)
        except sa.exc.DBAPIError:  # another does the same, or old coordinators hold what must be changed
            if attempt == 9:
                raise
            time.sleep(0.1 * (attempt + 1))
        stand = read_stand(engine)
        if stand.revision and stand.revision not in REVISIONS[:-1]:
            return stand
    raise StoreError(f"the store's schema could not be brought to revision {REVISION}")


def _upgrade_once(engine: sa.Engine) -> None:
    # Only who migrates pays for importing Alembic.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "coordinator:store/migrations")
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":
            # The driver begins no local transaction before CREATE TABLE: a crash would leave half of the tables.
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        empty = not sa.inspect(connection).has_table(VERSION_TABLE)
        config.attributes["connection"] = connection
        command.upgrade(config, REVISION)
        if empty:
            made = {"store_id": secrets.token_hex(16), "incarnation": UNKNOWN_INCARNATION}
            connection.execute(store_info.insert().values(id=1, format=FORMAT, oldest_program=FORMAT, **made))
