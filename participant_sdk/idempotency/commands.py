"""`tricord idempotency`: the records in a service's database, for operators. See participant_sdk.commands."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any, Final

import click

from participant_sdk.idempotency.command_options import (
    as_json,
    database_options,
    filter_of,
    filter_options,
    found,
    key_options,
    one_key,
    opened,
    output_option,
    print_entry,
    state_text,
    table_options,
    tables_of,
)
from participant_sdk.idempotency.commands_changing import extend, purge, resolve, sweep
from participant_sdk.idempotency.telling import (
    Hash,
    Text,
    errors_as_exits,
    length_text,
    print_table,
    tell,
)

if TYPE_CHECKING:
    from participant_sdk.idempotency.inspection import Entry
    from participant_sdk.idempotency.record import Answer

_DIALECTS: Final = ("postgresql", "mariadb", "mysql", "sqlite")


@click.group()
def idempotency() -> None:
    """Look at idempotency records, and say what became of those that nobody knows of."""


idempotency.add_command(resolve)
idempotency.add_command(purge)
idempotency.add_command(extend)
idempotency.add_command(sweep)


@idempotency.command("list")
@database_options
@filter_options
@click.option("--operation", type=Text(), default="", metavar="NAME", help="Only this operation's.")
@click.option("--tenant", type=Text(), default=None, metavar="NAME", help="Only this tenant's.")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=50, show_default=True, metavar="N", help="At most so many."
)
@click.option("--page-token", type=Hash(), default=None, metavar="TOKEN", help="As the page before names it.")
@output_option("table", "json", "jsonl")
def list_records(
    database: str, namespace: str, table: str | None, schema: str | None, states: tuple[str, ...],
    older_than: int | None, lapsed: bool, operation: str, tenant: str | None, limit: int, page_token: bytes | None,
    output: str,
) -> None:  # fmt: skip
    """List records, in the order of their keys' hashes.

    All options must hold. Where few of very many records match, the whole table is read.

    \b
      tricord idempotency list --state UNKNOWN
      tricord idempotency list --lapsed --older-than 5m
    """
    from participant_sdk.idempotency.inspection import Inspection

    which = filter_of(states, operation, tenant, older_than, lapsed)
    with opened(database, table, schema) as (engine, tables):
        page = Inspection(engine, namespace=namespace, tables=tables).page(which, page_token or b"", limit)
    token = "" if page.end is None else page.end.hex()
    if output == "jsonl":
        for entry in page.entries:
            click.echo(json.dumps(as_json(entry)))
    else:
        facts = {"records": [as_json(entry) for entry in page.entries], "next_page_token": token}
        tell(output, facts, lambda: _print_list(page.entries))
    if token and output != "json":
        click.echo(f"more: --page-token {token}", err=True)


def _print_list(entries: Any) -> None:
    head = ("KEY HASH", "STATE", "AGE", "LEASE", "EXPIRES", "TENANT", "OPERATION", "KEY", "REASON")
    rows = [
        (
            entry.key_hash.hex(), state_text(entry), length_text(entry.age_ms), length_text(entry.lease_left_ms),
            length_text(entry.expires_left_ms), entry.tenant, entry.operation,
            f"{entry.key_hint}…" if entry.key_hint else "", entry.reason,
        )
        for entry in entries
    ]  # fmt: skip
    print_table(head, rows)


@idempotency.command()
@key_options
@database_options
@output_option("table", "json", "jsonl")
def show(
    key: str | None, key_hash: bytes | None, operation: str, tenant: str | None, database: str, namespace: str,
    table: str | None, schema: str | None, output: str,
) -> None:  # fmt: skip
    """Show one record.

    Keys are stored as hashes, of which tenant and operation are a part: name them with KEY, or name the hash.

    \b
      tricord idempotency show 8e03978e-40d5 --operation orders.create --tenant acme
      tricord idempotency show --hash HEX
    """
    from participant_sdk.idempotency.inspection import Inspection

    one_key(key, key_hash)
    with opened(database, table, schema) as (engine, tables):
        entry = found(Inspection(engine, namespace=namespace, tables=tables), key, key_hash, operation, tenant)
    tell(output, as_json(entry), lambda: print_entry(entry))


@idempotency.command()
@database_options
@filter_options
@click.option("--operation", type=Text(), default="", metavar="NAME", help="Only this operation's.")
@click.option("--tenant", type=Text(), default=None, metavar="NAME", help="Only this tenant's.")
def export(
    database: str, namespace: str, table: str | None, schema: str | None, states: tuple[str, ...],
    older_than: int | None, lapsed: bool, operation: str, tenant: str | None,
) -> None:  # fmt: skip
    """Print all records that match with their answers, a line of JSON for each.

    What is stored, as it is stored: headers as names and values, the body in base64. One record at a time, so there may
    be any number. What ends or goes meanwhile may be in it or not.

    \b
      tricord idempotency export --tenant acme > acme.jsonl
    """
    from participant_sdk.idempotency.inspection import Inspection

    which = filter_of(states, operation, tenant, older_than, lapsed)
    with opened(database, table, schema) as (engine, tables):
        inspection = Inspection(engine, namespace=namespace, tables=tables)
        after: bytes | None = b""
        while after is not None:
            page = inspection.page(which, after, 100)
            for entry in page.entries:
                answer = None if entry.codec is None else inspection.answer(entry.key_hash)
                click.echo(json.dumps(_with_answer(entry, answer)))
            after = page.end


def _with_answer(entry: Entry, answer: Answer | None) -> dict[str, Any]:
    """The same, with all of its answer."""
    facts = as_json(entry)
    if answer is not None:
        headers = [[part.decode("latin-1") for part in header] for header in answer.headers]
        facts["answer"] |= {"headers": headers, "body_base64": base64.b64encode(answer.body).decode()}
    return facts


@idempotency.command()
@database_options
@output_option("table", "json", "jsonl")
def stats(database: str, namespace: str, table: str | None, schema: str | None, output: str) -> None:
    """Count the records by state, and name the oldest that are not over.

    LAPSED are runs whose lease ended without an outcome; OLDEST is how long ago the first of them was made. Reads the
    whole table, of all namespaces.
    """
    from participant_sdk.idempotency.inspection import Inspection

    with opened(database, table, schema) as (engine, tables):
        statistics = Inspection(engine, namespace=namespace, tables=tables).statistics()
    named = {"oldest_processing": statistics.oldest_processing, "oldest_unknown": statistics.oldest_unknown}
    counts = [
        {"state": each.state.name, "records": each.records, "oldest_ms": each.oldest_ms, "expired": each.expired,
         "lapsed": each.lapsed}
        for each in statistics.counts
    ]  # fmt: skip
    facts = {"states": counts, **{name: entry and as_json(entry) for name, entry in named.items()}}

    def print_stats() -> None:
        rows = [
            (each.state.name, str(each.records), length_text(each.oldest_ms), str(each.expired or ""),
             str(each.lapsed or ""))
            for each in statistics.counts
        ]  # fmt: skip
        print_table(("STATE", "RECORDS", "OLDEST", "EXPIRED", "LAPSED"), rows)
        for name, entry in named.items():
            if entry is not None:
                click.echo(f"{name.replace('_', ' ')}: {entry.key_hash.hex()}")

    tell(output, facts, print_stats)


@idempotency.command()
@click.option("--dialect", type=click.Choice(_DIALECTS), required=True, help="The service's database.")
@table_options
def ddl(dialect: str, table: str | None, schema: str | None) -> None:
    """Print the statement that creates the table, for a migration of your own.

    The store creates it at start if it is missing, so this is for databases where programs may not create tables.
    """
    from sqlalchemy.engine import make_url

    with errors_as_exits():
        tables = tables_of(table, schema)
    for statement in tables.ddl(make_url(f"{dialect}://").get_dialect()()):
        click.echo(f"{statement};\n")
