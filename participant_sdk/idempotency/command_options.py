"""What the commands have in common: which database, which records, and what is told of one."""

from __future__ import annotations

import getpass
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from participant_sdk.idempotency.record import State
from participant_sdk.idempotency.telling import USAGE, Age, Hash, Text, errors_as_exits, fail, length_text, print_table

if TYPE_CHECKING:
    from sqlalchemy import URL, Engine

    from participant_sdk.idempotency.inspection import Entry, Filter, Inspection
    from participant_sdk.idempotency.tables import IdempotencyTables

_Command = TypeVar("_Command", bound=Callable[..., Any])

CONNECT_S: Final = 10
_DRIVERS: Final = {
    "postgresql": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mysql+asyncmy": "mysql+pymysql",
    "mariadb": "mariadb+pymysql",
    "mariadb+asyncmy": "mariadb+pymysql",
    "sqlite+aiosqlite": "sqlite",
}
"""A command has no event loop, and is glad of the address that the service has."""
_TIMEOUTS: Final = {"psycopg": {"connect_timeout": CONNECT_S}, "pymysql": {"connect_timeout": CONNECT_S}}


def database_options(command: _Command) -> _Command:
    """Which table of which database."""
    options = (
        click.option(
            "--database", required=True, envvar="TRICORD_IDEMPOTENCY_DATABASE", show_envvar=True, metavar="URL",
            help="SQLAlchemy's address of the database, such as postgresql://shop@db/shop.",
        ),
        click.option(
            "--namespace", default="default", show_default=True, type=Text(), envvar="TRICORD_IDEMPOTENCY_NAMESPACE",
            metavar="NAME", help="Of the service that the keys are of.",
        ),
        table_options,
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def table_options(command: _Command) -> _Command:
    """Which table."""
    schema = click.option("--schema", default=None, metavar="NAME", help="The schema that holds it.")
    table = click.option("--table", default=None, metavar="NAME", help="The table, if it has another name.")
    return table(schema(command))


def key_options(command: _Command) -> _Command:
    """One record."""
    options = (
        click.argument("key", type=Text(), required=False),
        click.option("--hash", "key_hash", type=Hash(), default=None, metavar="HEX", help="In place of KEY: its hash."),
        click.option("--operation", type=Text(), default="", metavar="NAME", help="The key's operation."),
        click.option("--tenant", type=Text(), default=None, metavar="NAME", help="Whose key it is."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def filter_options(command: _Command) -> _Command:
    """Many records."""
    options = (
        click.option(
            "--state", "states", multiple=True, help="Only these. Repeatable.",
            type=click.Choice([state.name for state in State], case_sensitive=False),
        ),
        click.option("--older-than", type=Age(), default=None, metavar="AGE", help="Made so long ago: 30s, 5m, 2h."),
        click.option("--lapsed", is_flag=True, help="Only runs of which the lease ended without an outcome."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def output_option(*forms: str) -> Callable[[_Command], _Command]:
    """Add `-o`; the first form is the default."""
    return click.option(
        "-o", "--output", type=click.Choice(forms), default=forms[0], show_default=True,
        help="How to print it; json and jsonl are for programs.",
    )  # fmt: skip


yes_option = click.option("--yes", is_flag=True, help="Do not ask; needed where there is no terminal to ask at.")
reason_option = click.option(
    "--reason", type=Text(), required=True, metavar="TEXT", help="Why: stored with the record."
)
actor_option = click.option(
    "--actor", type=Text(), default="", metavar="NAME", help="Who says so.  [default: the login name]"
)


def login() -> str:
    """Who runs the command, by the operating system; ends it if that does not know."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        fail("who are you? there is no login name here; say --actor NAME", USAGE)


def tables_of(table: str | None, schema: str | None) -> IdempotencyTables:
    """The table that the options name. Raises ConfigurationError."""
    from participant_sdk.idempotency.tables import RECORDS_NAME, IdempotencyTables

    return IdempotencyTables(table or RECORDS_NAME, schema)


@contextmanager
def opened(database: str, table: str | None, schema: str | None) -> Iterator[tuple[Engine, IdempotencyTables]]:
    """The engine, and the table, which is there. What goes wrong ends the command with its exit code."""
    from sqlalchemy import create_engine, inspect
    from sqlalchemy.exc import SQLAlchemyError

    from participant_sdk.handling import told
    from participant_sdk.idempotency.errors import StoreUnavailable
    from participant_sdk.idempotency.stores import store_of

    with errors_as_exits():
        url = _url_of(database)
        tables = tables_of(table, schema)
        try:
            engine = create_engine(url, connect_args=_TIMEOUTS.get(url.get_driver_name(), {}))
        except (SQLAlchemyError, ImportError) as error:
            fail(f"--database: {error}", USAGE)
        store_of(engine.dialect, tables)
        try:
            try:
                there = inspect(engine).has_table(tables.records.name, schema)
            except (SQLAlchemyError, OSError) as error:
                raise StoreUnavailable(f"the database cannot be reached: {told(error)}") from error
            if not there:
                fail(f"there is no table {tables.records.fullname} in the database: see --table and --schema", USAGE)
            yield engine, tables
        finally:
            engine.dispose()


def _url_of(database: str) -> URL:
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(database)
        url = url.set(drivername=_DRIVERS.get(url.drivername, url.drivername))
        url.get_dialect()
    except (ArgumentError, ValueError):  # its text may hold the password
        fail(
            "--database is no address of SQLAlchemy's, such as postgresql://shop@db/shop or sqlite:////data/shop.db",
            USAGE,
        )
    except Exception as error:
        fail(f"--database: {error}", USAGE)
    if url.get_backend_name() == "sqlite" and not Path(url.database or "").is_file():
        fail(f"--database: there is no file {url.database}", USAGE)
    return url


def one_key(key: str | None, key_hash: bytes | None) -> None:
    """Raises click's usage error unless one record is named, once."""
    if (key is None) == (key_hash is None):
        raise click.UsageError("name the record by KEY (with --operation and --tenant), or by --hash")


def found(inspection: Inspection, key: str | None, key_hash: bytes | None, operation: str, tenant: str | None) -> Entry:
    """The record that the options name. Raises NoSuchRecord."""
    if key_hash is not None:
        return inspection.show(key_hash)
    return inspection.find(key or "", operation, tenant or "")


def filter_of(
    states: tuple[str, ...], operation: str, tenant: str | None, older_than: int | None, lapsed: bool
) -> Filter:
    """What the options say."""
    from participant_sdk.idempotency.inspection import Filter

    return Filter(
        states=tuple(State[state.upper()] for state in states),
        operation=operation or None,
        tenant=tenant,
        older_than_ms=None if older_than is None else older_than * 1_000,
        lapsed=lapsed,
    )


def as_json(entry: Entry) -> dict[str, Any]:
    """A record for programs; lengths of time in ms."""
    return {
        "key_hash": entry.key_hash.hex(),
        "key_hint": entry.key_hint,
        "tenant": entry.tenant,
        "operation": entry.operation,
        "state": entry.state.name,
        "lapsed": entry.lapsed,
        "expired": entry.expired,
        "fence": entry.fence,
        "attempt": entry.attempt,
        "owner": entry.owner,
        "age_ms": entry.age_ms,
        "lease_left_ms": entry.lease_left_ms,
        "completed_ago_ms": entry.completed_ago_ms,
        "expires_left_ms": entry.expires_left_ms,
        "recovery_point": entry.recovery_point,
        "answer": None
        if entry.codec is None
        else {"codec": entry.codec.name, "status": entry.status, "body_bytes": entry.body_bytes},
        "reason": entry.reason,
    }


def print_entry(entry: Entry) -> None:
    """A record for people."""
    answer = "" if entry.codec is None else f"{entry.codec.name} {entry.status}, {entry.body_bytes} bytes"
    rows = [
        ("key_hash", entry.key_hash.hex()),
        ("key", f"{entry.key_hint}…" if entry.key_hint else ""),
        ("tenant", entry.tenant),
        ("operation", entry.operation),
        ("state", state_text(entry)),
        ("attempt", str(entry.attempt)),
        ("fence", str(entry.fence)),
        ("owner", entry.owner),
        ("made", f"{length_text(entry.age_ms)} ago"),
        ("lease", length_text(entry.lease_left_ms)),
        ("ended", "" if entry.completed_ago_ms is None else f"{length_text(entry.completed_ago_ms)} ago"),
        ("expires", length_text(entry.expires_left_ms)),
        ("recovery_point", entry.recovery_point or ""),
        ("answer", answer),
        ("reason", entry.reason),
    ]
    print_table(("FIELD", "VALUE"), [row for row in rows if row[1]])


def state_text(entry: Entry) -> str:
    """The state, and what of it is past."""
    return entry.state.name + " (lapsed)" * entry.lapsed + " (expired)" * entry.expired
