"""Kinds of arguments that several commands have."""

from __future__ import annotations

import getpass
import re
from typing import Any

import click

from .exits import USAGE, fail

_AGE = re.compile(r"([0-9]{1,9})([smhd])")
_UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class Age(click.ParamType[str]):
    """A length of time such as 30s, 5m, 2h, 1d."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Raises click's usage error for anything else."""
        if not _AGE.fullmatch(str(value)):
            self.fail(f"{value!r} is no age; write 30s, 5m, 2h or 1d", param, ctx)
        return str(value)


def age_ms(age: str) -> int:
    """How many milliseconds an ``Age`` is."""
    match = _AGE.fullmatch(age)
    if match is None:
        raise ValueError(f"{age!r} is no age")
    return int(match[1]) * _UNITS_MS[match[2]]


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


actor_option = click.option(
    "--actor", type=Text(), default="", metavar="NAME", help="Who asks, for the audit.  [default: the login name]"
)


def login() -> str:
    """Who runs the command, by the operating system; ends it if that does not know."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        fail("who are you? there is no login name here; say --actor NAME", USAGE)
