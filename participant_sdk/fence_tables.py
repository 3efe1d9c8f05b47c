"""The fence's two tables, as SQLAlchemy metadata for migrations and for creating them at start.

`tcc_fence_log` holds one row per branch that was ever called here; it is written in the same local transaction as
the business rows, which is the whole point of it. `tcc_fence_info` holds the database's own id, made together with
the tables, so that an answer out of another database is recognised.

Put `metadata` into your own migrations (`target_metadata = [Base.metadata, participant_sdk.metadata]` in Alembic),
print the statements with `tricord fence ddl`, or let the SDK create the tables at start. Other names, or a schema,
are a `FenceTables` of your own, given to the participant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    Dialect,
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

LOG_NAME: Final = "tcc_fence_log"
INFO_NAME: Final = "tcc_fence_info"
NAME_LENGTH_MAX: Final = 50
"""PostgreSQL's limit of 63, less what SQLAlchemy appends for the names of constraints."""

metadata: Final = MetaData()


def _name(length: int) -> TypeEngine[str]:
    """Names and ids are ASCII: on MySQL's servers a key of them is then small, and compared byte by byte."""
    return String(length).with_variant(
        mysql.VARCHAR(length, charset="ascii", collation="ascii_bin"), "mysql", "mariadb"
    )


def _time() -> TypeEngine[Any]:
    return DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")


@dataclass(frozen=True)
class FenceTables:
    """The tables of one fence. `schema` None: wherever the connection looks first.

    Raises ConfigurationError for a name that no table can have, or that `metadata` has already.
    """

    log_name: str = LOG_NAME
    info_name: str = INFO_NAME
    schema: str | None = None
    metadata: MetaData = field(default_factory=MetaData, compare=False)

    def __post_init__(self) -> None:
        for setting, name in (("log_name", self.log_name), ("info_name", self.info_name)):
            if not name or len(name) > NAME_LENGTH_MAX or "\0" in name:
                raise ConfigurationError(f"{setting} {name!r} is not 1 to {NAME_LENGTH_MAX} characters")
            if (name if self.schema is None else f"{self.schema}.{name}") in self.metadata.tables:
                raise ConfigurationError(f"{setting} {name!r} is a table of that metadata already")
        if self.log_name == self.info_name:
            raise ConfigurationError(f"log_name and info_name are both {self.log_name!r}")
        _define_log(self)
        _define_info(self)

    @property
    def log(self) -> Table:
        """One row per branch."""
        return self.metadata.tables[self._key(self.log_name)]

    @property
    def info(self) -> Table:
        """One row, with the fence's id."""
        return self.metadata.tables[self._key(self.info_name)]

    def _key(self, name: str) -> str:
        return name if self.schema is None else f"{self.schema}.{name}"

    def ddl(self, dialect: Dialect) -> list[str]:
        """The statements that create the tables, for a migration written by hand."""
        statements = (str(CreateTable(table).compile(dialect=dialect)) for table in (self.log, self.info))
        return ["\n".join(line.rstrip().expandtabs(4) for line in text.strip().splitlines()) for text in statements]


def _define_log(tables: FenceTables) -> None:
    Table(
        tables.log_name,
        tables.metadata,
        Column("xid", _name(32), primary_key=True),
        Column("branch_id", BigInteger, primary_key=True, autoincrement=False),
        Column("participant", _name(64), nullable=False),
        Column("action", _name(64), nullable=False),
        Column("status", SmallInteger, nullable=False),
        Column("fingerprint_algorithm", SmallInteger),
        Column("fingerprint", LargeBinary(32).with_variant(mysql.VARBINARY(32), "mysql", "mariadb")),
        Column("result", LargeBinary().with_variant(mysql.MEDIUMBLOB(), "mysql", "mariadb")),
        Column("result_content_type", Text),
        Column("refusal_reason", Text),
        Column("refusal_message", Text),
        Column("created_at", _time(), nullable=False),
        Column("modified_at", _time(), nullable=False),
        # Set by the last statement of the call that gave the row its status.
        Column("finished_at", _time()),
        # Of an external Try that runs: which run it is, and until when (ms since 1970, the database's clock).
        Column("intent", _name(32)),
        Column("lease_until_ms", BigInteger),
        schema=tables.schema,
        # Room on the page for the row's second version: finishing a call then touches no index.
        postgresql_with={"fillfactor": "50"},
        mysql_engine="InnoDB",
        mysql_charset="utf8mb4",
        mariadb_engine="InnoDB",
        mariadb_charset="utf8mb4",
    )


def _define_info(tables: FenceTables) -> None:
    Table(
        tables.info_name,
        tables.metadata,
        Column("singleton", SmallInteger, primary_key=True, autoincrement=False),
        Column("fence_id", _name(32), nullable=False),
        schema=tables.schema,
        mysql_engine="InnoDB",
        mariadb_engine="InnoDB",
    )


DEFAULT: Final = FenceTables(metadata=metadata)
