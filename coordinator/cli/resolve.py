"""``tricord resolve``: what became of a branch by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .actions import make_sure, tell_transaction, transaction_output, yes_option
from .calls import call, endpoint_option
from .exits import CONFLICT, fail
from .forms import tell_one
from .params import Text, actor_option, login
from .query import as_json

if TYPE_CHECKING:
    from tricord.v1 import operator_pb2


@click.command()
@click.argument("xid", type=Text())
@click.argument("branch", type=click.IntRange(1, 64))
@click.option(
    "--as", "resolved_as", type=click.Choice(("confirmed", "cancelled"), case_sensitive=False), required=True,
    help="What became of it.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Record it whatever the participant's fence says, or does not say.")
@click.option("--lost", is_flag=True, help="Its database is gone for good: end the branch at once. Needs --yes.")
@click.option("--dry-run", is_flag=True, help="Only ask the fence, and say what would come of it.")
@click.option("--reason", type=Text(), required=True, metavar="TEXT", help="Why: stored with the transaction.")
@yes_option
@actor_option
@endpoint_option
@transaction_output
def resolve(
    xid: str, branch: int, resolved_as: str, force: bool, lost: bool, dry_run: bool, reason: str, yes: bool, actor: str,
    endpoint: str, output: str,
) -> None:  # fmt: skip
    """Record how a branch was ended by hand.

    Of a decided transaction, for a participant that cannot do it any more. Its fence is asked first: where it has the
    opposite, or cannot be asked, nothing is recorded, unless with --force. The branch's Confirm or Cancel is not called
    again; its participant is told to write the same down, and the branch rests when it has. Until then the opposite may
    be recorded. Against the decision it marks the transaction mixed, for ever.

    With --lost nobody is told any more, and the branch ends at once: for a participant whose database is gone for good.
    Refused while it answers, unless with --force.

    \b
      tricord resolve XID 2 --as confirmed --reason "paid by hand" --dry-run
      tricord resolve XID 2 --as confirmed --reason "paid by hand"

    Exit codes: 0 recorded, 1 not confirmed by you, 2 wrong usage, 3 no such transaction, 4 it is undecided, the branch
    has answered for good, or its fence contradicts or cannot be asked, 5 cannot be reached. With --dry-run the same,
    and nothing is changed.
    """
    from tricord.v1 import operator_pb2, types_pb2

    if lost and not yes and not dry_run:
        raise click.UsageError("--lost cannot be taken back: it goes with --yes")
    if not dry_run:
        make_sure(f"Record branch {branch} of transaction {xid} as {resolved_as} by hand?", yes)
    request = operator_pb2.ResolveRequest(
        xid=xid,
        branch_id=branch,
        resolved_state=types_pb2.BranchState.Value(f"BRANCH_STATE_{resolved_as.upper()}"),
        actor=actor or login(),
        reason=reason,
        force=force,
        lost=lost,
        dry_run=dry_run,
    )
    response: operator_pb2.ResolveResponse = call(endpoint, "Resolve", request)
    if dry_run:
        _tell_prospect(request, response, output)
        return
    tell_transaction(response.transaction, output)
    if force and response.fence:
        click.echo(f"forced; the fence: {response.fence}", err=True)


def _tell_prospect(request: operator_pb2.ResolveRequest, response: operator_pb2.ResolveResponse, output: str) -> None:
    from tricord.v1 import operator_pb2

    verdict = operator_pb2.FenceVerdict.Name(response.fence_verdict).removeprefix("FENCE_VERDICT_")
    facts = {
        "fence_verdict": verdict,
        "fence": response.fence,
        "refusal": response.refusal,
        "transaction": as_json(response.transaction),
    }

    def table() -> None:
        from .output import print_table

        tx = response.transaction
        rows = [
            ("fence", f"{verdict}: {response.fence}" if response.fence else "not asked"),
            ("would be", _would_be(request, response)),
            ("state", str(as_json(tx)["state"])),
            ("mixed", "True: for ever" if tx.mixed else "False"),
        ]
        print_table(("FIELD", "VALUE"), rows, wraps=("VALUE",))

    tell_one(output, facts, table)
    if response.refusal:
        fail(response.refusal, CONFLICT)


def _would_be(request: operator_pb2.ResolveRequest, response: operator_pb2.ResolveResponse) -> str:
    if response.refusal:
        return "refused"
    if not response.fence:
        return "recorded: it is already"
    if request.lost:
        return "recorded; the branch ends at once"
    return "recorded; its participant is told until it has written it down"
