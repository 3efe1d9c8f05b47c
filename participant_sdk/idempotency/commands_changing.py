"""`tricord idempotency`: the commands that change something."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from participant_sdk.idempotency.command_fronts import fronts_of, fronts_options
from participant_sdk.idempotency.command_options import (
    actor_option,
    as_json,
    database_options,
    filter_of,
    filter_options,
    found,
    key_options,
    login,
    one_key,
    opened,
    output_option,
    print_entry,
    reason_option,
    state_text,
    yes_option,
)
from participant_sdk.idempotency.record import State
from participant_sdk.idempotency.telling import UNAVAILABLE, Age, Text, fail, length_text, make_sure, print_table, tell

if TYPE_CHECKING:
    from participant_sdk.idempotency.inspection import Entry
    from participant_sdk.idempotency.record import Answer

_RESOLVED: Final = ("succeeded", "failed_final", "failed_retryable", "tombstone")
_BODY_BYTES_MAX: Final = 16 * 1024 * 1024


@click.command()
@key_options
@click.option(
    "--as", "state", type=click.Choice(_RESOLVED, case_sensitive=False), required=True,
    help="What became of it; failed_retryable: nothing, so that it may run again.",
)  # fmt: skip
@reason_option
@click.option("--status", type=click.IntRange(100, 599), default=None, metavar="N", help="The answer's HTTP status.")
@click.option("--header", "headers", type=Text(), multiple=True, metavar="'NAME: VALUE'", help="One of its headers.")
@click.option("--body", type=Text(), default=None, metavar="TEXT", help="Its body.")
@click.option(
    "--body-file", default=None, metavar="PATH", help="Its body, out of a file.",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)  # fmt: skip
@click.option("--ttl", type=Age(), default="1d", show_default=True, metavar="AGE", help="When it expires, from now.")
@click.option("--force", is_flag=True, help="Also a run whose lease ended without an outcome.")
@click.option(
    "--live", is_flag=True,
    help="Also a run that goes on. Its local transaction rolls back; what it does elsewhere does not.",
)  # fmt: skip
@actor_option
@yes_option
@database_options
@output_option("table", "json", "jsonl")
def resolve(
    key: str | None, key_hash: bytes | None, operation: str, tenant: str | None, state: str, reason: str,
    status: int | None, headers: tuple[str, ...], body: str | None, body_file: Path | None, ttl: int, force: bool,
    live: bool, actor: str, yes: bool, database: str, namespace: str, table: str | None, schema: str | None,
    output: str,
) -> None:  # fmt: skip
    """Say what became of a record that is UNKNOWN.

    succeeded and failed_final need the answer that repeats are to get (--status, --header, --body); tombstone: it was
    done, and repeats are told so without an answer; failed_retryable: it was not done, and a repeat runs it. The answer
    is one of HTTP: what came in by gRPC, or is a function, can be a tombstone here, or be resolved by a program.

    \b
      tricord idempotency resolve --hash HEX --as succeeded --status 201 --body '{"order": 42}' --reason "paid, see #7"
      tricord idempotency resolve --hash HEX --as failed_retryable --reason "the bank has no such payment"

    Exit codes: 0 done, 1 not confirmed by you, 2 wrong usage, 3 no such record, 4 it is in another state, live, or has
    changed meanwhile, 5 the database cannot be reached.
    """
    from participant_sdk.idempotency.inspection import Inspection

    one_key(key, key_hash)
    outcome = State[state.upper()]
    answer = _answer_of(outcome, status, headers, body, body_file)
    with opened(database, table, schema) as (engine, tables):
        inspection = Inspection(engine, namespace=namespace, tables=tables)
        entry = found(inspection, key, key_hash, operation, tenant)
        make_sure(f"Record {_told(entry)} as {outcome.name}?", yes)
        why = f"{actor or login()}: {reason}" if reason.strip() else reason
        entry = inspection.resolve(
            entry.key_hash, outcome, reason=why, answer=answer, ttl_s=ttl, force=force, live=live
        )
    tell(output, as_json(entry), lambda: print_entry(entry))


def _answer_of(
    state: State, status: int | None, headers: tuple[str, ...], body: str | None, body_file: Path | None
) -> Answer | None:
    from participant_sdk.idempotency.record import Answer, Codec

    given = status is not None or headers or body is not None or body_file is not None
    if state not in (State.SUCCEEDED, State.FAILED_FINAL):
        if given:
            raise click.UsageError(
                f"--as {state.name.lower()} stores no answer: leave out --status, --header and --body"
            )
        return None
    if status is None:
        raise click.UsageError(
            f"--as {state.name.lower()} needs the answer for repeats: say --status, or --as tombstone"
        )
    if body is not None and body_file is not None:
        raise click.UsageError("say --body or --body-file")
    content = (body or "").encode() if body_file is None else body_file.read_bytes()
    if len(content) > _BODY_BYTES_MAX:
        raise click.UsageError(f"the body has {len(content)} bytes; at most {_BODY_BYTES_MAX} are stored")
    return Answer(Codec.HTTP, status, tuple(map(_header_of, headers)), content)


def _header_of(header: str) -> tuple[bytes, bytes]:
    name, colon, value = header.partition(":")
    if not colon or not name.strip().isascii() or not name.strip() or not header.isprintable() or not value.isascii():
        raise click.UsageError(f"--header {header!r} is not 'NAME: VALUE' in printable ASCII")
    return name.strip().lower().encode(), value.strip().encode()


@click.command()
@key_options
@filter_options
@click.option("--force", is_flag=True, help="Also what is UNKNOWN or lapsed: a repeat would then run. Never live runs.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@yes_option
@fronts_options
@database_options
@output_option("table", "json", "jsonl")
def purge(
    key: str | None, key_hash: bytes | None, operation: str, tenant: str | None, states: tuple[str, ...],
    older_than: int | None, lapsed: bool, force: bool, dry_run: bool, yes: bool, redis: str | None,
    redis_prefix: str | None, database: str, namespace: str, table: str | None, schema: str | None, output: str,
) -> None:  # fmt: skip
    """Delete records: one, or all that match.

    Without KEY and --hash, all that match --tenant, --operation, --state, --older-than and --lapsed. A request whose
    record is gone runs again when it is repeated. Where the services have a front in Redis, name it with --redis, or it
    goes on replaying for a while; what a process holds in its own memory it holds for some minutes more.

    \b
      tricord idempotency purge --hash HEX
      tricord idempotency purge --tenant acme --redis redis://cache/0 --dry-run
    """
    from participant_sdk.idempotency.inspection import Filter, Inspection

    which = filter_of(states, operation, tenant, older_than, lapsed)
    one = key is not None or key_hash is not None
    if one and (key is not None) == (key_hash is not None):
        raise click.UsageError("name the record by KEY (with --operation and --tenant), or by --hash")
    if one and (states or older_than is not None or lapsed):
        raise click.UsageError("--state, --older-than and --lapsed go without KEY and --hash")
    if not one and which == Filter():
        raise click.UsageError("name a record, or say which: --tenant, --operation, --state, --older-than, --lapsed")
    with fronts_of(redis, redis_prefix) as fronts, opened(database, table, schema) as (engine, tables):
        inspection = Inspection(engine, namespace=namespace, tables=tables, fronts=fronts)
        if one:
            entry = found(inspection, key, key_hash, operation, tenant)
            if not dry_run:
                make_sure(f"Delete {_told(entry)}?", yes)
            inspection.purge(entry.key_hash, force=force, dry_run=dry_run)
            count = 1
        else:
            if not dry_run:
                make_sure("Delete all records that match, of all namespaces? (--dry-run counts them)", yes)
            count = inspection.purge_many(which, force=force, dry_run=dry_run)
    text = f"{count} {'would be ' if dry_run else ''}deleted"
    tell(output, {"count": count, "dry_run": dry_run}, lambda: click.echo(text))


@click.command()
@key_options
@click.option("--ttl", type=Age(), required=True, metavar="AGE", help="It expires not before so long from now.")
@database_options
@output_option("table", "json", "jsonl")
def extend(
    key: str | None, key_hash: bytes | None, operation: str, tenant: str | None, ttl: int, database: str,
    namespace: str, table: str | None, schema: str | None, output: str,
) -> None:  # fmt: skip
    """Let a record expire later.

    \b
      tricord idempotency extend --hash HEX --ttl 7d
    """
    from participant_sdk.idempotency.inspection import Inspection

    one_key(key, key_hash)
    with opened(database, table, schema) as (engine, tables):
        inspection = Inspection(engine, namespace=namespace, tables=tables)
        entry = inspection.extend(found(inspection, key, key_hash, operation, tenant).key_hash, ttl)
    tell(output, as_json(entry), lambda: print_entry(entry))


@click.command()
@click.option(
    "--rows-per-s", type=click.IntRange(1, 10_000_000), default=5_000, show_default=True, metavar="N",
    help="Records to look at in a second, at most.",
)  # fmt: skip
@database_options
@output_option("table", "json", "jsonl")
def sweep(rows_per_s: int, database: str, namespace: str, table: str | None, schema: str | None, output: str) -> None:
    """Delete the records that have expired, of all namespaces.

    As the services do in the background, unless that is switched off. What is PROCESSING or UNKNOWN stays.
    """
    from participant_sdk.idempotency.sweepers import Sweeper
    from participant_sdk.idempotency.sweeping import Sweep

    with opened(database, table, schema) as (engine, tables):
        report = Sweeper(engine, tables, Sweep(rows_per_s=rows_per_s)).sweep(rests=True)
    names = ("looked_at", "deleted", "left_busy", "processing", "lapsed", "oldest_processing_ms", "unknown")
    facts = {name: getattr(report, name) for name in (*names, "oldest_unknown_ms", "error")}
    tell(output, facts, lambda: print_table(("FIELD", "VALUE"), [(n, str(facts[n])) for n in facts if facts[n] != ""]))
    if report.error:
        fail(f"it ended early: {report.error}", UNAVAILABLE)


def _told(entry: Entry) -> str:
    about = f"{entry.operation} of {entry.tenant}" if entry.tenant else entry.operation
    return f"{about}, {state_text(entry)}, made {length_text(entry.age_ms)} ago"
