"""The table of idempotency records, as SQLAlchemy metadata for migrations and for creating it at start.

Put `metadata` into your own migrations (`target_metadata = [Base.metadata, participant_sdk.idempotency.metadata]` in
Alembic), or let the store create the table at start. Another name, or a schema, is an `IdempotencyTables` of your own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.schema import CreateTable
from sqlalchemy.types import TypeEngine

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.record import KEY_HASH_BYTES

RECORDS_NAME: Final = "tricord_idempotency"
NAME_LENGTH_MAX: Final = 50
"""PostgreSQL's limit of 63, less what SQLAlchemy appends for the names of constraints."""

metadata: Final = MetaData()


def _bytes(length: int) -> TypeEngine[bytes]:
    return LargeBinary(length).with_variant(mysql.VARBINARY(length), "mysql", "mariadb")


def _blob() -> TypeEngine[bytes]:
    return LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")


def _text(length: int) -> TypeEngine[Any]:
    return String(length).with_variant(
        mysql.VARCHAR(length, charset="utf8mb4", collation="utf8mb4_bin"), "mysql", "mariadb"
    )


@dataclass(frozen=True)
class IdempotencyTables:
    """The table of one store. `schema` None: wherever the connection looks first.

    Raises ConfigurationError for a name that no table can have, or that `metadata` has already.
    """

    records_name: str = RECORDS_NAME
    schema: str | None = None
    metadata: MetaData = field(default_factory=MetaData, compare=False)

    def __post_init__(self) -> None:
        name = self.records_name
        if not name or len(name) > NAME_LENGTH_MAX or "\0" in name:
            raise ConfigurationError(f"records_name {name!r} is not 1 to {NAME_LENGTH_MAX} characters")
        if self._key in self.metadata.tables:
            raise ConfigurationError(f"records_name {name!r} is a table of that metadata already")
        _define_records(self)

    @property
    def records(self) -> Table:
        """One row per key."""
        return self.metadata.tables[self._key]

    @property
    def _key(self) -> str:
        return self.records_name if self.schema is None else f"{self.schema}.{self.records_name}"

    def ddl(self, dialect: Dialect) -> list[str]:
        """The statements that create the table, for a migration written by hand."""
        text = str(CreateTable(self.records).compile(dialect=dialect))
        return ["\n".join(line.rstrip().expandtabs(4) for line in text.strip().splitlines())]


def _define_records(tables: IdempotencyTables) -> None:
    Table(
        tables.records_name,
        tables.metadata,
        # What never changes stands first; times are ms since 1970 of the database's clock.
        Column("key_hash", _bytes(KEY_HASH_BYTES), primary_key=True),
        Column("tenant", _text(200), nullable=False),
        Column("operation", _text(200), nullable=False),
        Column("key_hint", _text(16), nullable=False),
        Column("created_ms", BigInteger, nullable=False),
        Column("fingerprint_version", SmallInteger, nullable=False),
        Column("fingerprint", _bytes(32), nullable=False),
        Column("state", SmallInteger, nullable=False),
        Column("fence", BigInteger, nullable=False),
        Column("attempt", Integer, nullable=False),
        Column("waiters", Boolean, nullable=False),
        Column("lease_until_ms", BigInteger),
        Column("completed_ms", BigInteger),
        Column("expires_ms", BigInteger),
        Column("owner", _text(100)),
        Column("recovery_point", _text(100)),
        Column("phase_data", _blob()),
        Column("reason", Text),
        Column("codec", SmallInteger),
        Column("status", Integer),
        Column("headers", _blob()),
        Column("body", _blob()),
        schema=tables.schema,
        # Room on the page for the row's next version: no index holds what a completion changes, so it touches none.
        postgresql_with={"fillfactor": "70"},
        mysql_engine="InnoDB",
        mysql_charset="utf8mb4",
        mariadb_engine="InnoDB",
        mariadb_charset="utf8mb4",
    )


DEFAULT: Final = IdempotencyTables(metadata=metadata)
