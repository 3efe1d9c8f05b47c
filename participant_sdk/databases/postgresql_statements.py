"""Prepared statements by which scripts are made up, and how what they are given is written."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import psycopg
from sqlalchemy import Connection

from participant_sdk.databases.database import RELEASE, ROLLBACK_TO, SAVEPOINT, Script
from participant_sdk.databases.postgresql_script import BEGIN, PREPARED_AS, READY, NotPrepared, PgScript, Prepared
from participant_sdk.steps import Look, Rollback

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult

_PREPARED: Final = "SELECT name FROM pg_prepared_statements WHERE name LIKE 'tricord%'"

ONE_ROW: Final = "WITH hit AS ({update} RETURNING 1) SELECT 1 / count(*) FROM hit"


_TYPES: Final = {
    "boolean": 16,
    "bytea": 17,
    "bigint": 20,
    "smallint": 21,
    "integer": 23,
    "text": 25,
    "varchar": 1043,
    "bytea[]": 1001,
    "varchar[]": 1015,
    "bigint[]": 1016,
}
"""By PostgreSQL's own numbers, which never change."""


def _name(key: str, text: bytes) -> bytes:
    """After its text: two owners, or two versions, on one connection do not take each other's."""
    return f"tricord_{key}_{zlib.crc32(text):08x}".encode()


_BETWEEN: Final = {
    text: _name("short", text)
    for text in (
        *(begin.removesuffix(";").encode() for begin in BEGIN.values()),
        *(short.encode() for short in ("SET CONSTRAINTS ALL IMMEDIATE", SAVEPOINT, RELEASE, ROLLBACK_TO, "COMMIT")),
    )
}
"""What stands between the others in nearly every script, and what it is prepared as."""


class Statements:
    """What is prepared on a connection: by key, the SQL and the types of its parameters."""

    def __init__(self, sql: Mapping[str, str], types: Mapping[str, str]) -> None:
        self._prepared = {
            key: (_name(key, text.encode()), text.encode(), [_TYPES[name] for name in types[key].split(", ")])
            for key, text in sql.items()
        }

    def with_(self, key: str, arguments: Sequence[str | None]) -> Prepared:
        """A statement with its arguments."""
        return Prepared(*self._prepared[key], arguments)

    def prepare(self, owner: tuple[str, str]) -> Script[None]:
        """Prepare all of them; the connection is then ready for scripts `of` the owner."""
        if (yield Look(_prepares)):
            (found,) = yield PgScript(_PREPARED)
            there = {found.get_value(row, 0) for row in range(found.ntuples)}
            lead: list[str | Prepared] = []
            for name, sql, types in [*self._prepared.values(), *((name, sql, ()) for sql, name in _BETWEEN.items())]:
                if name in there:  # it may be older than the table
                    lead.append(f"DEALLOCATE {name.decode()}")
                lead.append(Prepared(name, sql, types, None))
            yield PgScript("", lead=lead)
            yield Look(lambda connection: connection.info.setdefault(PREPARED_AS, _BETWEEN))
        yield Look(lambda connection: connection.info.setdefault(READY, set()).add(owner))


def begun(script: PgScript, make_ready: Callable[[], Script[None]]) -> Script[Sequence[PGresult]]:
    """The results of a script `of` an owner, made ready for it if need be."""
    results: Sequence[PGresult] | None
    try:
        results = yield script
    except NotPrepared:  # since the driver, or the user, has deallocated all that there was
        yield PgScript("", begin="BEGIN;")  # else the driver, which holds no names for true after a rollback, does none
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


def as_argument(value: bytes | str | int | None) -> str | None:
    """What a statement is given."""
    if value is None:
        return None
    if isinstance(value, bytes):
        return bytes_as_argument(value)
    return text_as_argument(value) if isinstance(value, str) else f"{value:d}"


def bytes_as_argument(value: bytes) -> str:
    """Bytes, whatever the server's settings."""
    return f"\\x{value.hex()}"


def text_as_argument(value: str) -> str:
    """Any text that PostgreSQL can hold; raises ValueError for other text, which libpq would cut off."""
    if "\0" in value:
        raise ValueError("PostgreSQL holds no text with a NUL character in it")
    return value


def _prepares(connection: Connection) -> bool:
    raw = cast("psycopg.Connection[Any]", connection.connection.driver_connection)
    return raw.prepare_threshold is not None
