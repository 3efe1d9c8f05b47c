"""``tricord list`` and ``tricord show``."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar

import click

from .exits import CONFLICT, ERROR, NOT_FOUND, UNAVAILABLE, USAGE, fail

if TYPE_CHECKING:
    from tricord.v1 import types_pb2

STATES = ("TRYING", "CONFIRMING", "CONFIRMED", "CANCELLING", "CANCELLED")
ENDPOINT_DEFAULT = "127.0.0.1:7800"
CALL_TIMEOUT_S = 10.0

_endpoint = click.option(
    "--endpoint", envvar="TRICORD_ENDPOINT", default=ENDPOINT_DEFAULT, show_default=True, metavar="HOST:PORT",
    help="The coordinator's address (or TRICORD_ENDPOINT).",
)  # fmt: skip
_output = click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)


class Age(click.ParamType[int]):
    """A length of time such as 30s, 5m, 2h, 1d; milliseconds."""

    name = "age"
    _UNITS: ClassVar = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Raises click's usage error for anything else."""
        match = re.fullmatch(r"(\d{1,9})([smhd])", str(value))
        if match is None:
            self.fail(f"{value!r} is no age; write 30s, 5m, 2h or 1d", param, ctx)
        return int(match[1]) * self._UNITS[match[2]]


class Text(click.ParamType[str]):
    """Text that can be sent: what the shell hands over need not be UTF-8."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Raises click's usage error for bytes that are no text."""
        text = str(value)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail("is not valid UTF-8", param, ctx)
        return text


@click.command("list")
@_endpoint
@click.option("--state", "states", multiple=True, type=click.Choice(STATES, case_sensitive=False), help="Repeatable.")
@click.option("--older-than", "older_than_ms", type=Age(), metavar="AGE", help="Created at least so long ago: 30s, 5m.")
@click.option("--participant", type=Text(), default="", metavar="NAME", help="With a branch of this participant.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Rows on a page.")
@click.option("--page-token", type=Text(), default="", metavar="TOKEN", help="As the page before names it.")
@_output
def list_transactions(
    endpoint: str,
    states: tuple[str, ...],
    older_than_ms: int | None,
    participant: str,
    limit: int,
    page_token: str,
    output: str,
) -> None:
    """List transactions, newest first."""
    from google.protobuf.duration_pb2 import Duration

    from tricord.v1 import operator_pb2, types_pb2

    request = operator_pb2.ListRequest(
        page_size=limit,
        page_token=page_token,
        states=[types_pb2.TransactionState.Value(f"TRANSACTION_STATE_{state.upper()}") for state in states],
        participant=participant,
    )
    if older_than_ms is not None:
        age = Duration()
        age.FromMilliseconds(older_than_ms)
        request.older_than.CopyFrom(age)
    response = _call(endpoint, "List", request)
    if output == "json":
        rows = [as_json(tx) for tx in response.transactions]
        click.echo(json.dumps({"transactions": rows, "next_page_token": response.next_page_token}, indent=2))
        return
    from .output import print_table

    print_table(
        ("XID", "STATE", "CREATED", "ATTENTION", "BRANCHES"),
        [
            (tx["xid"], tx["state"], tx["create_time"], _attention_text(tx), _branches_text(tx))
            for tx in map(as_json, response.transactions)
        ],
        wraps=("ATTENTION", "BRANCHES"),
    )
    if response.next_page_token:
        click.echo(f"more: --page-token {response.next_page_token}", err=True)


@click.command()
@click.argument("xid", type=Text())
@_endpoint
@_output
def show(xid: str, endpoint: str, output: str) -> None:
    """Show one transaction: its branches, attempts, last errors and times.

    TIMEOUT_MS is the transaction's own: from its creation to its deadline. CALL MS is that of one call of a branch, by
    the settings of the coordinator that is asked; a call that got lost is repeated after it.
    """
    from tricord.v1 import operator_pb2

    response = _call(endpoint, "Get", operator_pb2.OperatorServiceGetRequest(xid=xid))
    metadata = dict(sorted(response.transaction.metadata.items()))  # which a list does not have
    tx = {**as_json(response.transaction), "metadata": metadata}
    if output == "json":
        click.echo(json.dumps(tx, indent=2))
        return
    from .output import print_table

    names = ("xid", "state", "attention", "idempotency_key", "create_time", "update_time", "decide_time")
    facts = [(name, str(tx[name])) for name in (*names, "deadline_time", "timeout_ms", "cancel_reason")]
    facts += [("metadata", f"{key}={value}") for key, value in metadata.items()]
    print_table(("FIELD", "VALUE"), [fact for fact in facts if fact[1]], wraps=("VALUE",))
    click.echo()
    print_table(
        ("BRANCH", "PARTICIPANT", "ACTION", "STATE", "CALL MS", "ATTEMPTS", "NEXT ATTEMPT", "REFUSED", "LAST ERROR"),
        [
            (
                str(b["branch_id"]), b["participant"], b["action"], b["state"], str(b["call_timeout_ms"] or ""),
                str(b["attempts"]), b["next_attempt_time"], _refusal_text(b), b["last_error"],
            )
            for b in tx["branches"]
        ],
        wraps=("NEXT ATTEMPT", "REFUSED", "LAST ERROR"),
    )  # fmt: skip


def as_json(tx: types_pb2.Transaction) -> dict[str, Any]:
    """A transaction for machines: states without their wire prefix, times as ISO 8601 in UTC, no payload bytes."""
    from tricord.v1 import types_pb2

    return {
        "xid": tx.xid,
        "state": types_pb2.TransactionState.Name(tx.state).removeprefix("TRANSACTION_STATE_"),
        "attention": types_pb2.Attention.Name(tx.attention).removeprefix("ATTENTION_"),
        "idempotency_key": tx.idempotency_key,
        "create_time": _time(tx, "create_time"),
        "update_time": _time(tx, "update_time"),
        "decide_time": _time(tx, "decide_time"),
        "deadline_time": _time(tx, "deadline_time"),
        "timeout_ms": tx.timeout.ToMilliseconds(),
        "cancel_reason": tx.cancel_reason,
        "version": tx.version,
        "branches": [
            {
                "branch_id": branch.branch_id,
                "participant": branch.participant,
                "action": branch.action,
                "state": types_pb2.BranchState.Name(branch.state).removeprefix("BRANCH_STATE_"),
                "payload_bytes": len(branch.payload.data),
                "call_timeout_ms": branch.call_timeout.ToMilliseconds() if branch.HasField("call_timeout") else None,
                "attempts": branch.attempts,
                "next_attempt_time": _time(branch, "next_attempt_time"),
                "last_error": branch.last_error,
                "refusal": {"reason": branch.refusal.reason, "message": branch.refusal.message}
                if branch.HasField("refusal")
                else None,
            }
            for branch in tx.branches
        ],
    }


def _time(message: Any, field: str) -> str:
    if not message.HasField(field):
        return ""
    when: datetime = getattr(message, field).ToDatetime()
    return when.isoformat(timespec="milliseconds") + "Z"


def _attention_text(tx: dict[str, Any]) -> str:
    return "" if tx["attention"] == "NONE" else str(tx["attention"])


def _branches_text(tx: dict[str, Any]) -> str:
    return ", ".join(f"{b['participant']}.{b['action']}" for b in tx["branches"])


def _refusal_text(branch: dict[str, Any]) -> str:
    refusal = branch["refusal"]
    return "" if refusal is None else ": ".join(part for part in refusal.values() if part)


def _call(endpoint: str, method: str, request: Any) -> Any:
    """Call the operator service; end with a message and an exit code if it fails."""
    import grpc

    from tricord.v1 import operator_pb2_grpc

    with grpc.insecure_channel(endpoint, options=[("grpc.max_receive_message_length", -1)]) as channel:
        try:
            return getattr(operator_pb2_grpc.OperatorServiceStub(channel), method)(request, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        hint = "is it running? name its address with --endpoint or TRICORD_ENDPOINT"
        fail(f"the coordinator at {endpoint} did not answer: {details}; {hint}", UNAVAILABLE)
    exits = {
        grpc.StatusCode.INVALID_ARGUMENT: USAGE,
        grpc.StatusCode.NOT_FOUND: NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION: CONFLICT,
    }
    fail(str(details), exits.get(code, ERROR))
