"""``tricord audit``: what operators did."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from .calls import call, endpoint_option, time_text
from .forms import output_option, tell_rows
from .params import Age, Text, age_ms

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration

    from tricord.v1 import operator_pb2


@click.command()
@click.argument("xid", type=Text(), required=False, default="")
@click.option("--newer-than", "newer_than", type=Age(), metavar="AGE", help="Written down no longer ago: 30s, 5m.")
@click.option("--older-than", "older_than", type=Age(), metavar="AGE", help="Written down at least so long ago.")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=50, show_default=True, metavar="N", help="Records on a page."
)
@click.option("--page-token", type=Text(), default="", metavar="TOKEN", help="As the page before names it.")
@endpoint_option
@output_option("table", "json", "jsonl")
def audit(
    xid: str,
    newer_than: str | None,
    older_than: str | None,
    limit: int,
    page_token: str,
    endpoint: str,
    output: str,
) -> None:
    """Show what operators did, newest first.

    With XID only what was done to that transaction. Each action has two records: what was asked for, and what came of
    it.

    \b
      tricord audit --newer-than 12h
      tricord audit XID -o json
    """
    from tricord.v1 import operator_pb2

    request = operator_pb2.ListAuditRequest(xid=xid, page_size=limit, page_token=page_token)
    _set_age(request.newer_than, newer_than)
    _set_age(request.older_than, older_than)
    response = call(endpoint, "ListAudit", request)
    records = map(_record_as_json, response.records)
    tell_rows(output, "records", records, _print, lambda: {"next_page_token": response.next_page_token})
    if response.next_page_token and output != "json":
        click.echo(f"more: --page-token {response.next_page_token}", err=True)


def _print(records: list[dict[str, Any]]) -> None:
    from .output import print_table

    print_table(
        ("TIME", "ACTION", "OUTCOME", "ACTOR", "XID", "REASON", "BEFORE", "AFTER"),
        [
            (
                r["time"], r["action"], r["outcome"], r["actor"], r["xid"], r["reason"],
                _state_text(r["before"]), _end_text(r["after"]),
            )
            for r in records
        ],
        wraps=("REASON",),
    )  # fmt: skip


def _record_as_json(record: operator_pb2.AuditRecord) -> dict[str, Any]:
    """A record for machines; what was stored as JSON is JSON again."""
    from tricord.v1 import operator_pb2

    return {
        "id": record.id,
        "time": time_text(record, "time"),
        "action": record.action,
        "outcome": operator_pb2.AuditOutcome.Name(record.outcome).removeprefix("AUDIT_OUTCOME_"),
        "asked_id": record.asked_id,
        "xid": record.xid,
        "actor": record.actor,
        "peer": record.peer,
        "reason": record.reason,
        "before": json.loads(record.before or "{}"),
        "after": json.loads(record.after or "{}"),
    }


def _state_text(what: dict[str, Any]) -> str:
    return str(what.get("state", what.get("error", "")))


def _end_text(after: dict[str, Any]) -> str:
    """What came of it, and in what way it was asked for."""
    return " ".join([_state_text(after), *(how for how in ("forced", "lost") if after.get(how))])


def _set_age(field: Duration, age: str | None) -> None:
    if age is not None:
        field.FromMilliseconds(age_ms(age))
