"""Options that say which transactions are meant, and the filter that they are together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import click

from .exits import USAGE, fail
from .params import Age, Text


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


filter_option = click.option(
    "--filter",
    "filter_",
    type=Text(),
    default="",
    metavar="FILTER",
    help="Only those that match; `tricord list --help` has examples.",
)
label_option = click.option(
    "--label", "labels", multiple=True, type=Label(), metavar="NAME=VALUE", help="With this label. Repeatable."
)
older_than_option = click.option(
    "--older-than", "older_than", type=Age(), metavar="AGE", help="Created at least so long ago: 30s, 5m."
)


def whole_filter(
    filter_: str,
    labels: Iterable[str] = (),
    states: Iterable[str] = (),
    older_than: str | None = None,
    participant: str = "",
) -> str:
    """All that must hold, as one filter; empty if nothing was said. Ends the command if it cannot be read."""
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
    return whole


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
