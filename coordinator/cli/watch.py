"""``tricord watch``: what becomes of a transaction, line by line; or of all, again and again."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from .calls import connected, end_for, endpoint_option
from .exits import INTERRUPTED
from .forms import output_option
from .live import EVERY_S, watch_all
from .params import Text
from .query import as_json

if TYPE_CHECKING:
    import grpc

    from tricord.v1 import types_pb2

STREAM_S = 10.0
"""How long one stream lasts: on a new one a coordinator answers at once, so one that hangs is noticed."""
PATIENCE_S = 30.0
"""For so long a coordinator that has answered before may be away."""
RETRY_S = 0.5


@click.command()
@click.argument("xid", type=Text(), default="")
@endpoint_option
@output_option("text", "jsonl")
@click.option(
    "--every", type=click.FloatRange(0.1, 3600), metavar="SECONDS", help="Without XID: how often.  [default: 2]"
)
@click.option("--count", type=click.IntRange(1), metavar="N", help="Without XID: end after so many times.")
def watch(xid: str, endpoint: str, output: str, every: float | None, count: int | None) -> None:
    """Watch a transaction, or all that is open.

    With XID: a line whenever it changes, until it is finished.

    Without XID: figures as of `tricord stats`, and the open transactions that a person should look at, drawn again
    every 2 seconds. Where standard output is no terminal that is one line of JSON each time.

    Ctrl-C ends it, with exit code 130.
    """
    if xid and (every is not None or count is not None):
        raise click.UsageError("--every and --count are for a watch without XID")
    try:
        if xid:
            _watch_one(xid, endpoint, as_lines_of_json=output == "jsonl")
        else:
            as_text = output == "text" and sys.stdout.isatty()
            watch_all(endpoint, every or EVERY_S, count, as_text=as_text)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


# --- one transaction --------------------------------------------------------------------------------------


def _watch_one(xid: str, endpoint: str, *, as_lines_of_json: bool) -> None:
    with connected(endpoint) as channel:
        for message in _changes(channel, endpoint, xid):
            tx = as_json(message)
            click.echo(json.dumps(tx) if as_lines_of_json else _line(tx))


def _changes(channel: grpc.Channel, endpoint: str, xid: str) -> Iterator[types_pb2.Transaction]:
    """The transaction whenever it has changed; ends the command if it cannot be watched (any more)."""
    import grpc

    from tricord.v1 import coordinator_pb2, coordinator_pb2_grpc, types_pb2

    finished = (types_pb2.TRANSACTION_STATE_CONFIRMED, types_pb2.TRANSACTION_STATE_CANCELLED)
    stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
    version = 0
    heard_s: float | None = None
    while True:
        heard_on_this = False
        try:
            for response in stub.Watch(coordinator_pb2.WatchRequest(xid=xid), timeout=STREAM_S):
                heard_s, heard_on_this = time.monotonic(), True
                if response.transaction.version > version:
                    version = response.transaction.version
                    yield response.transaction
                if response.transaction.state in finished:
                    return
            code, details = grpc.StatusCode.UNAVAILABLE, "the stream has ended"
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
        if heard_on_this and code is grpc.StatusCode.DEADLINE_EXCEEDED:
            continue  # its time is over
        away = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
        if not away or heard_s is None or time.monotonic() > heard_s + PATIENCE_S:
            end_for(endpoint, code, details)
        time.sleep(RETRY_S)


def _line(tx: dict[str, Any]) -> str:
    attention = "" if tx["attention"] == "NONE" else f" attention={tx['attention']}"
    reason = f" ({tx['cancel_reason']})" if tx["cancel_reason"] else ""
    branches = ", ".join(map(_branch_text, tx["branches"]))
    return f"{tx['update_time']} {tx['state']}{reason}{attention}  {branches}".rstrip()


def _branch_text(branch: dict[str, Any]) -> str:
    text = f"{branch['branch_id']} {branch['participant']}.{branch['action']} {branch['state']}"
    if branch["attempts"]:
        text += f" after {branch['attempts']} attempts"
    return text + (f" [{branch['last_error']}]" if branch["attempts"] and branch["last_error"] else "")
