"""Prepared statements by which scripts are made up, and how what they are given is written as SQL."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import psycopg
from sqlalchemy import Connection

from participant_sdk.databases.database import Script
from participant_sdk.databases.postgresql_script import READY, NotPrepared, PgScript, Prepared
from participant_sdk.steps import Look, Rollback

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult

_PREPARED: Final = "SELECT name FROM pg_prepared_statements WHERE name LIKE 'tricord%'"

ONE_ROW: Final = "WITH hit AS ({update} RETURNING 1) SELECT 1 / count(*) FROM hit"


class Statements:
    """What is prepared on a connection: by key, the SQL and the types of its parameters."""

    def __init__(self, sql: Mapping[str, str], types: Mapping[str, str]) -> None:
        self._sql = sql
        self._types = types
        # Named after their text: two owners, or two versions, on one connection do not take each other's.
        self._names = {key: f"tricord_{key}_{zlib.crc32(text.encode()):08x}" for key, text in sql.items()}

    def with_(self, key: str, arguments: Sequence[str]) -> Prepared:
        """A statement with its arguments."""
        return Prepared(self._names[key], self._sql[key], arguments)

    def prepare(self, owner: tuple[str, str]) -> Script[None]:
        """Prepare all of them; the connection is then ready for scripts `of` the owner."""
        if (yield Look(_prepares)):
            (found,) = yield PgScript(_PREPARED)
            there = {(found.get_value(row, 0) or b"").decode() for row in range(found.ntuples)}
            script = ""
            for key, sql in self._sql.items():
                name = self._names[key]
                if name in there:  # it may be older than the table
                    script += f"DEALLOCATE {name};"
                script += f"PREPARE {name}({self._types[key]}) AS {sql};"
            yield PgScript(script)
        yield Look(lambda connection: connection.info.setdefault(READY, set()).add(owner))


def begun(script: PgScript, make_ready: Callable[[], Script[None]]) -> Script[Sequence[PGresult]]:
    """The results of a script `of` an owner, made ready for it if need be."""
    results: Sequence[PGresult] | None
    try:
        results = yield script
    except NotPrepared:  # since the driver, or the user, has deallocated all that there was
        yield Rollback()
        results = None
    if results is None:
        yield from make_ready()
        results = yield script
    if results is None:
        raise AssertionError("it was made ready")
    return results


def as_it_is(name: str) -> str:
    """A table's name without what SQLAlchemy has done to it for a driver that looks for parameters in the text."""
    return name.replace("%%", "%")


def as_sql(value: bytes | str | int | None) -> str:
    """What a statement is given."""
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return bytes_as_sql(value)
    return text_as_sql(value) if isinstance(value, str) else f"{value:d}"


def bytes_as_sql(value: bytes) -> str:
    """A literal, which costs the server less than a call of decode()."""
    return f"E'\\\\x{value.hex()}'"


_PLAIN: Final = re.compile(r"[A-Za-z0-9 ._/;=+-]*")
"""Means itself between quotes, whatever the server's settings."""


def text_as_sql(value: str) -> str:
    """Any text, whatever the server's settings."""
    return f"'{value}'" if _PLAIN.fullmatch(value) else f"convert_from({bytes_as_sql(value.encode())}, 'UTF8')"


def _prepares(connection: Connection) -> bool:
    raw = cast("psycopg.Connection[Any]", connection.connection.driver_connection)
    return raw.prepare_threshold is not None
