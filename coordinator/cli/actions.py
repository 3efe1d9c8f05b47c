"""``tricord retry``, ``cancel``, ``resolve`` and ``audit``: what operators do, and what was done."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from .calls import call, endpoint_option, time_text
from .exits import CONFLICT, USAGE, fail
from .params import Age, Text, actor_option, age_ms, login
from .query import as_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.duration_pb2 import Duration

    from tricord.v1 import operator_pb2, types_pb2

_output = click.option(
    "-o", "--output", type=click.Choice(["table", "json", "jsonl"]), default="table", show_default=True
)
_reason = click.option("--reason", type=Text(), default="", metavar="TEXT", help="Why, for the audit.")


@click.command()
@click.argument("xid", type=Text(), required=False, default="")
@click.option("--participant", type=Text(), default="", metavar="NAME", help="All transactions that wait for this one.")
@click.option(
    "--state", "states", multiple=True, type=click.Choice(("TRYING", "CONFIRMING", "CANCELLING"), case_sensitive=False),
    help="With --participant: only these. Repeatable.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="With --participant: only count them.")
@_reason
@actor_option
@endpoint_option
@_output
def retry(
    xid: str,
    participant: str,
    states: tuple[str, ...],
    dry_run: bool,
    reason: str,
    actor: str,
    endpoint: str,
    output: str,
) -> None:
    """Retry now what waits for its next attempt: one transaction, or all that wait for a participant.

    Calls that are out are left alone. Exit codes: 0 done, 2 wrong usage, 3 no such transaction, 4 it is finished, or
    some of many could not be retried, 5 cannot be reached.
    """
    if bool(xid) == bool(participant):
        raise click.UsageError("name either XID or --participant")
    if xid and (dry_run or states):
        raise click.UsageError("--dry-run and --state go with --participant")
    from tricord.v1 import operator_pb2

    actor = actor or login()
    if xid:
        request = operator_pb2.RetryRequest(xid=xid, actor=actor, reason=reason)
        _tell_transaction(call(endpoint, "Retry", request).transaction, output)
        return
    count, failed = 0, list[str]()
    for page in _retried(endpoint, participant, states, dry_run, actor, reason):
        count += page.count
        failed += page.failed_xids
    facts = {"participant": participant, "dry_run": dry_run, "count": count, "failed_xids": failed}
    if output == "table":
        click.echo(f"{count} {'would be retried' if dry_run else 'retried'}")
    else:
        click.echo(json.dumps(facts, indent=2 if output == "json" else None))
    if failed:
        fail(f"{len(failed)} could not be retried, among them {failed[0]}; see `tricord audit {failed[0]}`", CONFLICT)


@click.command()
@click.argument("xid", type=Text())
@click.option("--reason", type=Text(), required=True, metavar="TEXT", help="Why: stored with the transaction.")
@click.option("--yes", is_flag=True, help="Do not ask; needed where there is no terminal to ask at.")
@actor_option
@endpoint_option
@_output
def cancel(xid: str, reason: str, yes: bool, actor: str, endpoint: str, output: str) -> None:
    """Cancel a transaction that is still TRYING.

    Exit codes: 0 it is decided to be cancelled, 1 not confirmed by you, 2 wrong usage, 3 no such transaction, 4 it was
    decided before, 5 cannot be reached.
    """
    from tricord.v1 import operator_pb2

    _make_sure(f"Cancel transaction {xid}?", yes)
    request = operator_pb2.OperatorServiceCancelRequest(xid=xid, actor=actor or login(), reason=reason)
    _tell_transaction(call(endpoint, "Cancel", request).transaction, output)


@click.command()
@click.argument("xid", type=Text())
@click.argument("branch", type=click.IntRange(1, 64))
@click.option(
    "--as", "resolved_as", type=click.Choice(("confirmed", "cancelled"), case_sensitive=False), required=True,
    help="What became of it.",
)  # fmt: skip
@click.option("--reason", type=Text(), required=True, metavar="TEXT", help="Why: stored with the transaction.")
@click.option("--yes", is_flag=True, help="Do not ask; needed where there is no terminal to ask at.")
@actor_option
@endpoint_option
@_output
def resolve(
    xid: str, branch: int, resolved_as: str, reason: str, yes: bool, actor: str, endpoint: str, output: str
) -> None:
    """Record that a branch of a decided transaction was confirmed or cancelled by hand.

    For a participant that cannot do it any more. Its Confirm or Cancel is not called again; it is told to write the
    same down, and the branch rests when it has. Until then the opposite may be recorded. Against the decision it marks
    the transaction mixed, for ever.

    Exit codes: 0 recorded, 1 not confirmed by you, 2 wrong usage, 3 no such transaction, 4 it is undecided, or the
    branch has answered for good, 5 cannot be reached.
    """
    from tricord.v1 import operator_pb2, types_pb2

    _make_sure(f"Record branch {branch} of transaction {xid} as {resolved_as} by hand?", yes)
    request = operator_pb2.ResolveRequest(
        xid=xid,
        branch_id=branch,
        resolved_state=types_pb2.BranchState.Value(f"BRANCH_STATE_{resolved_as.upper()}"),
        actor=actor or login(),
        reason=reason,
    )
    _tell_transaction(call(endpoint, "Resolve", request).transaction, output)


@click.command()
@click.argument("xid", type=Text(), required=False, default="")
@click.option("--newer-than", "newer_than", type=Age(), metavar="AGE", help="Written down no longer ago: 30s, 5m.")
@click.option("--older-than", "older_than", type=Age(), metavar="AGE", help="Written down at least so long ago.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Records on a page.")
@click.option("--page-token", type=Text(), default="", metavar="TOKEN", help="As the page before names it.")
@endpoint_option
@_output
def audit(
    xid: str,
    newer_than: str | None,
    older_than: str | None,
    limit: int,
    page_token: str,
    endpoint: str,
    output: str,
) -> None:
    """Show what operators did, newest first: of one transaction, or of all.

    Each action has two records: what was asked for, and what came of it.
    """
    from tricord.v1 import operator_pb2

    request = operator_pb2.ListAuditRequest(xid=xid, page_size=limit, page_token=page_token)
    _set_age(request.newer_than, newer_than)
    _set_age(request.older_than, older_than)
    response = call(endpoint, "ListAudit", request)
    records = [_record_as_json(record) for record in response.records]
    if output == "json":
        click.echo(json.dumps({"records": records, "next_page_token": response.next_page_token}, indent=2))
        return
    if output == "jsonl":
        for record in records:
            click.echo(json.dumps(record))
    else:
        from .output import print_table

        print_table(
            ("TIME", "ACTION", "OUTCOME", "ACTOR", "XID", "REASON", "BEFORE", "AFTER"),
            [
                (
                    r["time"], r["action"], r["outcome"], r["actor"], r["xid"], r["reason"],
                    _state_text(r["before"]), _state_text(r["after"]),
                )
                for r in records
            ],
            wraps=("REASON",),
        )  # fmt: skip
    if response.next_page_token:
        click.echo(f"more: --page-token {response.next_page_token}", err=True)


def _retried(
    endpoint: str, participant: str, states: tuple[str, ...], dry_run: bool, actor: str, reason: str
) -> Iterator[operator_pb2.RetryManyResponse]:
    """Page after page, until there are no more."""
    from tricord.v1 import operator_pb2, types_pb2

    request = operator_pb2.RetryManyRequest(
        participant=participant,
        states=[types_pb2.TransactionState.Value(f"TRANSACTION_STATE_{state.upper()}") for state in states],
        dry_run=dry_run,
        actor=actor,
        reason=reason,
    )
    while True:
        page: operator_pb2.RetryManyResponse = call(endpoint, "RetryMany", request)
        yield page
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


def _make_sure(question: str, yes: bool) -> None:
    """Ask at a terminal; elsewhere nobody could answer, so it must have been said before."""
    if yes:
        return
    if not sys.stdin.isatty():
        fail("this cannot be undone; say --yes, since there is no terminal to ask at", USAGE)
    click.confirm(question, abort=True, err=True)


def _tell_transaction(tx: types_pb2.Transaction, output: str) -> None:
    if output == "table":
        from .output import print_table

        facts = as_json(tx)
        names = ("xid", "state", "mixed", "attention", "cancel_reason")
        print_table(("FIELD", "VALUE"), [(n, str(facts[n])) for n in names if facts[n]], wraps=("VALUE",))
    else:
        click.echo(json.dumps(as_json(tx), indent=2 if output == "json" else None))


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


def _set_age(field: Duration, age: str | None) -> None:
    if age is not None:
        field.FromMilliseconds(age_ms(age))
