"""The forms that a command's answer takes: a table for people, JSON for programs. ``-o`` names one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])


def output_option(*forms: str) -> Callable[[_Command], _Command]:
    """Add ``-o``; the first form is the default."""
    return click.option(
        "-o", "--output", type=click.Choice(forms), default=forms[0], show_default=True,
        help="How to print it; json and jsonl are for programs.",
    )  # fmt: skip


def tell_rows(
    output: str,
    name: str,
    rows: Iterable[dict[str, Any]],
    table: Callable[[list[dict[str, Any]]], None],
    rest: Callable[[], Mapping[str, Any]] = dict,
) -> None:
    """Print rows: as they come with jsonl, all together by their name in one object with json, else as a table.

    ``rest`` is what the object has besides; it is asked when the rows have come to their end.
    """
    if output == "jsonl":
        for row in rows:
            click.echo(json.dumps(row))
    elif output == "json":
        click.echo(json.dumps({name: list(rows), **rest()}, indent=2))
    else:
        table(list(rows))


def tell_one(output: str, facts: Mapping[str, Any], table: Callable[[], None]) -> None:
    """Print one thing."""
    if output in ("json", "jsonl"):
        click.echo(json.dumps(facts, indent=2 if output == "json" else None))
    else:
        table()
