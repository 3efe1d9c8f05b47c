"""The tables, as SQLAlchemy MetaData: the one source of the schema; creating and checking them.

Migrations are Alembic's; a test compares what they make with the MetaData here.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence

import sqlalchemy as sa

from .rows import StoreError

REVISION = "0001"
"""The schema revision that this program runs on."""
VERSION_TABLE = "tricord_schema_version"

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
    sa.UniqueConstraint("key", name="tricord_transaction_key"),
    # Only unfinished rows: finished ones may pile up without slowing the look for due work.
    sa.Index(
        "tricord_transaction_due",
        "wake_ms",
        postgresql_where=sa.text("wake_ms IS NOT NULL"),
        sqlite_where=sa.text("wake_ms IS NOT NULL"),
    ),
)
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

store_info = sa.Table(
    "tricord_store",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("store_id", sa.Text, nullable=False),
    sa.Column("incarnation", sa.Text, nullable=False),
)


def ensure_schema(engine: sa.Engine) -> None:
    """Create the tables in an empty database; refuse a schema that this program does not know.

    Raises StoreError. Two coordinators may do it at once: the loser finds the winner's tables.
    """
    for attempt in range(10):
        revisions = _revisions(engine)
        if revisions == [REVISION]:
            return
        if revisions:
            raise StoreError(
                f"the store has schema revision {', '.join(revisions)}, this program runs on {REVISION}: "
                "it was made by another version of Tricord; run that version or a newer one"
            )
        try:
            _upgrade(engine)
        except sa.exc.DBAPIError:
            if attempt == 9:
                raise
            time.sleep(0.1 * (attempt + 1))


def store_identity(engine: sa.Engine, incarnation: str) -> tuple[str, bool]:
    """The store's id, made at the first start, and whether the database's history has changed since the last start.

    After such a change (a restored backup, a failover) decisions may be lost of which calls have left, so every
    unfinished transaction gets ``attention`` (protocol A9).
    """
    found = sa.select(store_info.c.store_id, store_info.c.incarnation)
    with engine.connect() as connection:
        row = connection.execute(found).one_or_none()
    if row is None:
        with (
            contextlib.suppress(sa.exc.IntegrityError),
            engine.begin() as connection,
        ):  # another was first: its id counts
            made = store_info.insert().values(id=1, store_id=secrets.token_hex(16), incarnation=incarnation)
            connection.execute(made)
    with engine.begin() as connection:
        row = connection.execute(found).one()
        if incarnation in (row.incarnation, UNKNOWN_INCARNATION):
            return str(row.store_id), False
        connection.execute(store_info.update().values(incarnation=incarnation))
        if row.incarnation == UNKNOWN_INCARNATION:
            return str(row.store_id), False
        connection.execute(
            transactions.update()
            .where(transactions.c.wake_ms.is_not(None))
            .values(attention=2, version=transactions.c.version + 1, save_id=secrets.randbits(62))
        )
        return str(row.store_id), True


def _revisions(engine: sa.Engine) -> Sequence[str]:
    if not sa.inspect(engine).has_table(VERSION_TABLE):
        return []
    with engine.connect() as connection:
        rows = connection.execute(sa.text(f"SELECT version_num FROM {VERSION_TABLE}"))  # a constant
        return [str(row.version_num) for row in rows]


def _upgrade(engine: sa.Engine) -> None:
    # Only an empty store pays for importing Alembic.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "coordinator:store/migrations")
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":
            # The driver begins no local transaction before CREATE TABLE: a crash would leave half of the tables.
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        config.attributes["connection"] = connection
        command.upgrade(config, REVISION)
