"""``tricord list``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import click

from .calls import call, endpoint_option
from .exits import USAGE, fail
from .params import Age, Text
from .query import as_json

STATES = ("TRYING", "CONFIRMING", "CONFIRMED", "CANCELLING", "CANCELLED")
ORDERS = {"newest": "create_time desc", "oldest": "create_time asc"}


class Label(click.ParamType[str]):
    """A label's name and value, as a comparison of a filter."""

    name = "label"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Raises click's usage error for what is not NAME=VALUE."""
        from ..filters_tree import quoted

        name, equals, text = Text().convert(value, param, ctx).partition("=")
        if not equals or not re.fullmatch(r"[a-z][a-z0-9_.-]*", name):
            self.fail(f"{value!r} is no label; write NAME=VALUE, a name being a-z 0-9 _ . - after a letter", param, ctx)
        return f"labels.{name} = {quoted(text)}"


@click.command("list")
@endpoint_option
@click.option("--filter", "filter_", type=Text(), default="", metavar="FILTER", help="See below.")
@click.option(
    "--label", "labels", multiple=True, type=Label(), metavar="NAME=VALUE", help="With this label. Repeatable."
)
@click.option("--state", "states", multiple=True, type=click.Choice(STATES, case_sensitive=False), help="Repeatable.")
@click.option("--older-than", "older_than", type=Age(), metavar="AGE", help="Created at least so long ago: 30s, 5m.")
@click.option("--participant", type=Text(), default="", metavar="NAME", help="With a branch of this participant.")
@click.option("--order", type=click.Choice(list(ORDERS)), default="newest", show_default=True, help="Which come first.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Rows on a page.")
@click.option("--page-token", type=Text(), default="", metavar="TOKEN", help="As the page before names it.")
@click.option(
    "-o", "--output", type=click.Choice(["table", "wide", "json", "jsonl"]), default="table", show_default=True
)
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
    from ..filters_tree import quoted

    parts = list(labels)
    if states:
        parts.append(" OR ".join(f"state = {state.upper()}" for state in states))
    if older_than is not None:
        parts.append(f"age >= {older_than}")
    if participant:
        parts.append(f"participant = {quoted(participant)}")
    if filter_:
        _check(filter_)
        parts.append(f"({filter_})" if parts and filter_.strip() else filter_)
    whole = " AND ".join(part for part in parts if part.strip())
    _check(whole)
    pages = _Pages(endpoint, whole, ORDERS[order], limit, page_token)
    if output == "jsonl":
        for tx in pages:
            click.echo(json.dumps(tx))
    elif output == "json":
        rows = list(pages)
        click.echo(json.dumps({"transactions": rows, "next_page_token": pages.next_page_token}, indent=2))
        return
    else:
        _print(list(pages), wide=output == "wide")
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


def _check(text: str) -> None:
    """End with the text and a caret under what is wrong with it, if anything is."""
    from ..filters import FilterError, parse

    try:
        parse(text)
    except FilterError as error:
        from rich.cells import cell_len

        shown = "".join(character if character.isprintable() else " " for character in text)
        caret = " " * cell_len(shown[: error.column - 1]) + "^"
        fail(f"the filter is wrong at {error}\n  {shown}\n  {caret}", USAGE)


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
