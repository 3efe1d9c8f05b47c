"""The view of ``tricord watch`` without XID: figures, and the open transactions that a person should look at."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from .calls import ask, connected, end_for
from .output import age_text, print_table
from .query import as_json
from .stats import figures_json, print_figures

if TYPE_CHECKING:
    import grpc

EVERY_S = 2.0
ROWS_MAX = 1_000
"""Open transactions with attention that are shown at the most, the newest ones."""
_BELOW_ROWS = 22
"""Lines of a terminal that the figures take."""
_NEEDS_A_PERSON = "attention != NONE AND (state = TRYING OR state = CONFIRMING OR state = CANCELLING)"


def watch_all(endpoint: str, every_s: float, count: int | None, *, as_text: bool) -> None:
    """Show it every so many seconds, ``count`` times or for ever.

    Ends the command if the coordinator does not answer at first; later that is shown, and it is asked again.
    """
    import grpc

    answered = False
    left = count
    with connected(endpoint) as channel:
        while True:
            try:
                view = _view(channel)
                answered = True
            except grpc.RpcError as error:
                if not answered:
                    end_for(endpoint, error.code(), error.details())
                view = {"error": f"the coordinator at {endpoint} did not answer: {error.details()}"}
            view = {"time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"), **view}
            if as_text:
                _draw(view, endpoint)
            else:
                click.echo(json.dumps(view))
            if left is not None:
                left -= 1
                if not left:
                    return
            time.sleep(every_s)


def _view(channel: grpc.Channel) -> dict[str, Any]:
    """Raises grpc.RpcError."""
    from tricord.v1 import operator_pb2

    view = figures_json(ask(channel, "GetStatistics", operator_pb2.GetStatisticsRequest()))
    found: list[dict[str, Any]] = []
    if view["open"] is not None and any(any(of["attention"].values()) for of in view["open"]["states"].values()):
        response = ask(channel, "List", operator_pb2.ListRequest(filter=_NEEDS_A_PERSON, page_size=ROWS_MAX))
        found = [as_json(tx) for tx in response.transactions]
    return {**view, "attention": found}


def _draw(view: dict[str, Any], endpoint: str) -> None:
    click.clear()
    click.echo(f"{endpoint}  {view['time']}  (Ctrl-C ends)\n")
    if "error" in view:
        click.echo(view["error"])
        return
    print_figures(view)
    found = view["attention"]
    if not found:
        return
    import shutil

    room = max(3, shutil.get_terminal_size().lines - _BELOW_ROWS)
    click.echo()
    rows = [(tx["xid"], tx["state"], tx["attention"], age_text(tx["create_time"]), _errors(tx)) for tx in found[:room]]
    print_table(("XID", "STATE", "ATTENTION", "AGE", "LAST ERROR"), rows, wraps=("LAST ERROR",))
    if len(found) > room:
        click.echo(f"and {len(found) - room} more")


def _errors(tx: dict[str, Any]) -> str:
    """Of the branches, one each; short, for a row must stay a row."""
    told = [f"{b['participant']}.{b['action']}: {b['last_error']}" for b in tx["branches"] if b["last_error"]]
    text = "; ".join(told)
    return text if len(text) <= 100 else text[:99] + "…"
