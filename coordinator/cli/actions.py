"""``tricord retry`` and ``cancel``: one transaction, or many."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from .calls import call, endpoint_option
from .exits import CONFLICT, USAGE, fail
from .filtering import filter_option, label_option, older_than_option, whole_filter
from .forms import output_option, tell_one
from .params import Text, actor_option, login
from .query import as_json

if TYPE_CHECKING:
    from tricord.v1 import operator_pb2, types_pb2

yes_option = click.option("--yes", is_flag=True, help="Do not ask; needed where there is no terminal to ask at.")
transaction_output = output_option("table", "json", "jsonl")


@click.command()
@click.argument("xid", type=Text(), required=False, default="")
@click.option("--participant", type=Text(), default="", metavar="NAME", help="All transactions that wait for this one.")
@filter_option
@label_option
@older_than_option
@click.option(
    "--state", "states", multiple=True, type=click.Choice(("TRYING", "CONFIRMING", "CANCELLING"), case_sensitive=False),
    help="Of many, only these. Repeatable.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Only count them.")
@click.option("--reason", type=Text(), default="", metavar="TEXT", help="Why, for the audit.")
@actor_option
@endpoint_option
@transaction_output
def retry(
    xid: str, participant: str, filter_: str, labels: tuple[str, ...], older_than: str | None,
    states: tuple[str, ...], dry_run: bool, reason: str, actor: str, endpoint: str, output: str,
) -> None:  # fmt: skip
    """Retry now what waits for its next attempt: one, or many.

    With XID one transaction, else all that wait for a participant, or that match. Calls that are out are left alone.

    \b
      tricord retry XID
      tricord retry --participant bank --dry-run
      tricord retry --label order=42 --reason "the bank is back"

    Exit codes: 0 done, 2 wrong usage, 3 no such transaction, 4 it is finished, or
    some of many could not be retried, 5 cannot be reached.
    """
    many = bool(participant or filter_ or labels or older_than)
    if bool(xid) == many:
        raise click.UsageError("name either XID or --participant, --filter, --label or --older-than")
    if xid and (dry_run or states):
        raise click.UsageError("--dry-run and --state go with --participant, --filter, --label or --older-than")
    from tricord.v1 import operator_pb2, types_pb2

    actor = actor or login()
    if xid:
        request = operator_pb2.RetryRequest(xid=xid, actor=actor, reason=reason)
        tell_transaction(call(endpoint, "Retry", request).transaction, output)
        return
    whole = whole_filter(filter_, labels, older_than=older_than)
    _act_on_many(
        endpoint,
        "RetryMany",
        operator_pb2.RetryManyRequest(
            participant=participant,
            filter=whole,
            states=[types_pb2.TransactionState.Value(f"TRANSACTION_STATE_{state.upper()}") for state in states],
            dry_run=dry_run,
            actor=actor,
            reason=reason,
        ),
        {"participant": participant, "filter": whole},
        "retried",
        output,
    )


@click.command()
@click.argument("xid", type=Text(), required=False, default="")
@filter_option
@label_option
@older_than_option
@click.option("--participant", type=Text(), default="", metavar="NAME", help="With a branch of this participant.")
@click.option("--dry-run", is_flag=True, help="Of many: only count them.")
@click.option(
    "--reason",
    type=Text(),
    default=None,
    metavar="TEXT",
    help="Why: stored with the transaction. Needed, but for --dry-run.",
)
@yes_option
@actor_option
@endpoint_option
@transaction_output
def cancel(
    xid: str, filter_: str, labels: tuple[str, ...], older_than: str | None, participant: str, dry_run: bool,
    reason: str | None, yes: bool, actor: str, endpoint: str, output: str,
) -> None:  # fmt: skip
    """Cancel what is still TRYING: one transaction, or many.

    With XID that one, else all that match; of these, those that are decided are left alone.

    \b
      tricord cancel XID --reason "the customer has left"
      tricord cancel --label customer=eve --dry-run
      tricord cancel --filter 'age > 5m' --reason "a wrong release" --yes

    Exit codes: 0 it is decided to be cancelled, 1 not confirmed by you, 2 wrong usage, 3 no such transaction, 4 it was
    decided before, or some of many could not be cancelled, 5 cannot be reached.
    """
    if bool(xid) == bool(filter_ or labels or older_than or participant):
        raise click.UsageError("name either XID or --filter, --label, --older-than or --participant")
    if xid and dry_run:
        raise click.UsageError("--dry-run goes with --filter, --label, --older-than or --participant")
    if reason is None:
        if not dry_run:
            raise click.MissingParameter(param_hint="'--reason'", param_type="option")
        reason = ""
    from tricord.v1 import operator_pb2

    if xid:
        make_sure(f"Cancel transaction {xid}?", yes)
        request = operator_pb2.OperatorServiceCancelRequest(xid=xid, actor=actor or login(), reason=reason)
        tell_transaction(call(endpoint, "Cancel", request).transaction, output)
        return
    whole = whole_filter(filter_, labels, older_than=older_than, participant=participant)
    if not dry_run:
        make_sure(f"Cancel every transaction that is TRYING, of: {whole}? (--dry-run counts them)", yes)
    many = operator_pb2.CancelManyRequest(filter=whole, dry_run=dry_run, actor=actor or login(), reason=reason)
    _act_on_many(endpoint, "CancelMany", many, {"filter": whole}, "cancelled", output)


def _act_on_many(
    endpoint: str,
    method: str,
    request: operator_pb2.RetryManyRequest | operator_pb2.CancelManyRequest,
    about: dict[str, Any],
    done: str,
    output: str,
) -> None:
    """Page after page, until there are no more."""
    count, left_alone, failed = 0, 0, list[str]()
    while True:
        page = call(endpoint, method, request)
        count += page.count
        failed += page.failed_xids
        left_alone += page.left_alone if method == "CancelMany" else 0
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    facts = {**about, "dry_run": request.dry_run, "count": count, "failed_xids": failed}
    text = f"{count} {f'would be {done}' if request.dry_run else done}"
    if method == "CancelMany":
        facts["left_alone"] = left_alone
        text += f", {left_alone} left alone: decided before"
    tell_one(output, facts, lambda: click.echo(text))
    if failed:
        fail(f"{len(failed)} could not be {done}, among them {failed[0]}; see `tricord audit {failed[0]}`", CONFLICT)


def make_sure(question: str, yes: bool) -> None:
    """Ask at a terminal; elsewhere nobody could answer, so it must have been said before."""
    if yes:
        return
    if not sys.stdin.isatty():
        fail("this cannot be undone; say --yes, since there is no terminal to ask at", USAGE)
    click.confirm(question, abort=True, err=True)


def tell_transaction(tx: types_pb2.Transaction, output: str) -> None:
    """What has become of the transaction."""
    facts = as_json(tx)

    def table() -> None:
        from .output import print_table

        names = ("xid", "state", "mixed", "attention", "cancel_reason")
        print_table(("FIELD", "VALUE"), [(n, str(facts[n])) for n in names if facts[n]], wraps=("VALUE",))

    tell_one(output, facts, table)
