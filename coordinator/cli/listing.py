"""``tricord list``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import click

from .calls import call, endpoint_option
from .filtering import filter_option, label_option, older_than_option, whole_filter
from .forms import output_option, tell_rows
from .params import Text
from .query import as_json

STATES = ("TRYING", "CONFIRMING", "CONFIRMED", "CANCELLING", "CANCELLED")
ORDERS = {"newest": "create_time desc", "oldest": "create_time asc"}


@click.command("list")
@endpoint_option
@filter_option
@label_option
@click.option("--state", "states", multiple=True, type=click.Choice(STATES, case_sensitive=False), help="Repeatable.")
@older_than_option
@click.option("--participant", type=Text(), default="", metavar="NAME", help="With a branch of this participant.")
@click.option("--order", type=click.Choice(list(ORDERS)), default="newest", show_default=True, help="Which come first.")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=50, show_default=True, metavar="N", help="Rows on a page."
)
@click.option("--page-token", type=Text(), default="", metavar="TOKEN", help="As the page before names it.")
@output_option("table", "wide", "json", "jsonl")
def list_transactions(
    endpoint: str,
    filter_: str,
    labels: tuple[str, ...],
    states: tuple[str, ...],
    older_than: str | None,
    participant: str,
    order: str,
    limit: int,
    page_token: str,
    output: str,
) -> None:
    """List transactions, newest first.

    All options must hold. A FILTER compares state, attention, participant, action, labels.NAME, age and create_time,
    with AND, OR, NOT and parentheses; OR binds more tightly than AND:

    \b
      state = TRYING AND age > 5m
      labels.order = "42" AND NOT state = CONFIRMED
      attention != NONE AND participant = bank OR participant = shop
      action = bank.debit AND create_time < "2026-01-01T00:00:00Z"
    """
    whole = whole_filter(filter_, labels, states, older_than, participant)
    pages = _Pages(endpoint, whole, ORDERS[order], limit, page_token)
    tell_rows(output, "transactions", pages, partial(_print, wide=output == "wide"), pages.rest)
    if output == "json":
        return
    if pages.next_page_token:
        click.echo(f"more: --page-token {pages.next_page_token}", err=True)


class _Pages:
    """Up to ``limit`` transactions: one page, or several where the coordinator's hold fewer than are left."""

    def __init__(self, endpoint: str, filter_: str, order_by: str, limit: int, page_token: str) -> None:
        self._endpoint = endpoint
        self._filter = filter_
        self._order_by = order_by
        self._limit = limit
        self.next_page_token = page_token
        """Where the next ones begin; empty if there are none."""

    def rest(self) -> dict[str, str]:
        """What is told besides the transactions."""
        return {"next_page_token": self.next_page_token}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        from tricord.v1 import operator_pb2

        left = self._limit
        while True:
            request = operator_pb2.ListRequest(
                page_size=left, page_token=self.next_page_token, filter=self._filter, order_by=self._order_by
            )
            response = call(self._endpoint, "List", request)
            self.next_page_token = response.next_page_token
            left -= len(response.transactions)
            yield from map(as_json, response.transactions)
            if not left or not self.next_page_token:
                return


def _print(transactions: list[dict[str, Any]], *, wide: bool) -> None:
    from .output import print_table

    head = ["XID", "STATE", "CREATED", "ATTENTION", "BRANCHES"]
    more = ["LABELS", "UPDATED", "KEY", "CANCELLED BECAUSE"] if wide else []
    rows = []
    for tx in transactions:
        attention = " ".join(["MIXED"] * tx["mixed"] + [tx["attention"]] * (tx["attention"] != "NONE"))
        branches = ", ".join(f"{branch['participant']}.{branch['action']}" for branch in tx["branches"])
        row = [tx["xid"], tx["state"], tx["create_time"], attention, branches]
        if wide:
            labels = ", ".join(f"{name}={value}" for name, value in tx["labels"].items())
            row += [labels, tx["update_time"], tx["idempotency_key"], tx["cancel_reason"]]
        rows.append(row)
    print_table(head + more, rows, wraps=("ATTENTION", "BRANCHES", *more))
