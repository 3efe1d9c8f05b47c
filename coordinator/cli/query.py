"""``tricord show``, and what all questions to a coordinator share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .calls import call, endpoint_option, time_text
from .forms import output_option, tell_one
from .params import Text

if TYPE_CHECKING:
    from tricord.v1 import types_pb2


@click.command()
@click.argument("xid", type=Text())
@endpoint_option
@output_option("table", "json", "jsonl")
def show(xid: str, endpoint: str, output: str) -> None:
    """Show one transaction: branches, errors, history, timeline.

    TIMEOUT_MS is the transaction's own: from its creation to its deadline. CALL MS is that of one call of a branch, by
    the settings of the coordinator that is asked; a call that got lost is repeated after it.
    """
    from tricord.v1 import operator_pb2

    from .history import history_json

    response = call(endpoint, "Get", operator_pb2.OperatorServiceGetRequest(xid=xid))
    metadata = dict(sorted(response.transaction.metadata.items()))  # which a list does not have
    history = history_json(response)
    tx = {**as_json(response.transaction), "metadata": metadata, "history": history}
    if response.history_incomplete:
        click.echo("tricord: the store did not answer: what operators did is missing from the history", err=True)
    tell_one(output, tx, lambda: _print(tx))


def _print(tx: dict[str, Any]) -> None:
    from .output import print_table
    from .timeline import terminal_width, timeline

    names = ("xid", "state", "mixed", "attention", "idempotency_key", "create_time", "update_time", "decide_time")
    facts = [(name, str(tx[name] or "")) for name in (*names, "deadline_time", "timeout_ms", "cancel_reason")]
    facts += [("label", f"{name}={value}") for name, value in tx["labels"].items()]
    facts += [("metadata", f"{key}={value}") for key, value in tx["metadata"].items()]
    print_table(("FIELD", "VALUE"), [fact for fact in facts if fact[1]], wraps=("VALUE",))
    click.echo()
    print_table(
        (
            "BRANCH", "PARTICIPANT", "ACTION", "STATE", "CALL MS", "ATTEMPTS", "NEXT ATTEMPT", "REFUSED", "RESOLVED",
            "LAST ERROR",
        ),
        [
            (
                str(b["branch_id"]), b["participant"], b["action"], b["state"], str(b["call_timeout_ms"] or ""),
                str(b["attempts"]), b["next_attempt_time"], _refusal_text(b), _resolution_text(b),
                b["last_error"],
            )
            for b in tx["branches"]
        ],
        wraps=("NEXT ATTEMPT", "REFUSED", "RESOLVED", "LAST ERROR"),
    )  # fmt: skip
    click.echo()
    events = [(event["time"], event["event"], event["actor"], event["detail"]) for event in tx["history"]]
    print_table(("TIME", "EVENT", "ACTOR", "DETAIL"), events, wraps=("ACTOR", "DETAIL"))
    click.echo()
    for line in timeline(tx, terminal_width()):
        click.echo(line)


def as_json(tx: types_pb2.Transaction) -> dict[str, Any]:
    """A transaction for machines: states without their wire prefix, times as ISO 8601 in UTC, no payload bytes."""
    from tricord.v1 import types_pb2

    return {
        "xid": tx.xid,
        "state": types_pb2.TransactionState.Name(tx.state).removeprefix("TRANSACTION_STATE_"),
        "mixed": tx.mixed,
        "attention": types_pb2.Attention.Name(tx.attention).removeprefix("ATTENTION_"),
        "idempotency_key": tx.idempotency_key,
        "create_time": time_text(tx, "create_time"),
        "update_time": time_text(tx, "update_time"),
        "decide_time": time_text(tx, "decide_time"),
        "deadline_time": time_text(tx, "deadline_time"),
        "timeout_ms": tx.timeout.ToMilliseconds(),
        "cancel_reason": tx.cancel_reason,
        "version": tx.version,
        "labels": dict(sorted(tx.labels.items())),
        "branches": [
            {
                "branch_id": branch.branch_id,
                "participant": branch.participant,
                "action": branch.action,
                "state": types_pb2.BranchState.Name(branch.state).removeprefix("BRANCH_STATE_"),
                "payload_bytes": len(branch.payload.data),
                "call_timeout_ms": branch.call_timeout.ToMilliseconds() if branch.HasField("call_timeout") else None,
                "attempts": branch.attempts,
                "next_attempt_time": time_text(branch, "next_attempt_time"),
                "last_error": branch.last_error,
                "refusal": {"reason": branch.refusal.reason, "message": branch.refusal.message}
                if branch.HasField("refusal")
                else None,
                "resolution": {
                    "as": types_pb2.BranchState.Name(branch.resolution.resolved_state).removeprefix("BRANCH_STATE_"),
                    "actor": branch.resolution.actor,
                    "reason": branch.resolution.reason,
                    "time": time_text(branch.resolution, "time"),
                    "lost": branch.resolution.lost,
                }
                if branch.HasField("resolution")
                else None,
            }
            for branch in tx.branches
        ],
    }


def _refusal_text(branch: dict[str, Any]) -> str:
    refusal = branch["refusal"]
    return "" if refusal is None else ": ".join(part for part in refusal.values() if part)


def _resolution_text(branch: dict[str, Any]) -> str:
    resolution = branch["resolution"]
    if resolution is None:
        return ""
    lost = ", its database being lost" if resolution["lost"] else ""
    return "{as} by {actor} at {time}{lost}: {reason}".format(**{**resolution, "lost": lost})
