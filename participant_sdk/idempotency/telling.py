"""How the commands take and tell things: tables for people, JSON for programs, and exit codes as all of `tricord`'s."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import click

from participant_sdk.errors import printable

ERROR: Final = 1
USAGE: Final = 2
NOT_FOUND: Final = 3
CONFLICT: Final = 4
UNAVAILABLE: Final = 5

_AGE: Final = re.compile(r"([0-9]{1,9})([smhd])")
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_CELL_MAX: Final = 200


class Age(click.ParamType[int]):
    """A length of time such as 30s, 5m, 2h, 1d; in seconds."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Raises click's usage error for anything else."""
        match = _AGE.fullmatch(str(value))
        if match is None:
            self.fail(f"{value!r} is no age; write 30s, 5m, 2h or 1d", param, ctx)
        return int(match[1]) * _UNITS_S[match[2]]


class Hash(click.ParamType[bytes]):
    """A key's hash, in hexadecimal."""

    name = "hash"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        """Raises click's usage error for anything else."""
        if isinstance(value, bytes):
            return value
        if not re.fullmatch(r"[0-9a-fA-F]{64}", str(value)):
            self.fail("is not 64 hexadecimal digits", param, ctx)
        return bytes.fromhex(value)


class Text(click.ParamType[str]):
    """Text that can be stored: what the shell hands over need not be UTF-8."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Raises click's usage error for what is none."""
        text = str(value)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail("is not valid UTF-8", param, ctx)
        if "\0" in text:
            self.fail("holds a NUL", param, ctx)
        return text


def fail(message: str, code: int = ERROR) -> NoReturn:
    """Say what is wrong on standard error, and end with this exit code."""
    click.echo(f"tricord: {message}", err=True)
    sys.exit(code)


@contextmanager
def errors_as_exits() -> Iterator[None]:
    """End with the exit code of what went wrong, and its text on one line."""
    from participant_sdk.errors import ConfigurationError, InvalidRequest
    from participant_sdk.idempotency.errors import NotComparable, StoreUnavailable
    from participant_sdk.idempotency.inspecting import NoSuchRecord, RecordInUse

    codes: dict[type[Exception], int] = {
        ConfigurationError: USAGE,
        InvalidRequest: USAGE,
        NoSuchRecord: NOT_FOUND,
        RecordInUse: CONFLICT,
        StoreUnavailable: UNAVAILABLE,
        NotComparable: UNAVAILABLE,  # ask with the newer program
    }
    try:
        yield
    except tuple(codes) as error:
        fail(printable(str(error)), next(code for kind, code in codes.items() if isinstance(error, kind)))


def make_sure(question: str, yes: bool) -> None:
    """Ask at a terminal; elsewhere nobody could answer, so it must have been said before."""
    if yes:
        return
    if not sys.stdin.isatty():
        fail("this cannot be undone; say --yes, since there is no terminal to ask at", USAGE)
    click.confirm(question, abort=True, err=True)


def tell(output: str, facts: Mapping[str, Any], table: Callable[[], None]) -> None:
    """Print one thing: for programs as it is, or for people."""
    if output in ("json", "jsonl"):
        click.echo(json.dumps(facts, indent=2 if output == "json" else None))
    else:
        table()


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns side by side; those that are empty in all rows are left out. What is printed moves no cursor."""
    clean = [[printable(cell, _CELL_MAX) for cell in row] for row in rows]
    shown = [n for n in range(len(head)) if not rows or any(row[n] for row in clean)]
    widths = {n: max(len(line[n]) for line in [head, *clean]) for n in shown}
    for line in [head, *clean]:
        click.echo("  ".join(line[n].ljust(widths[n]) for n in shown).rstrip())


def length_text(milliseconds: int | None) -> str:
    """A length of time for people, in one or two units: 850ms, 12s, 5m10s, 3h2m, 9d4h; with a minus if it is over."""
    if milliseconds is None:
        return ""
    if milliseconds < 0:
        return f"-{length_text(-milliseconds)}"
    if milliseconds < 1_000:
        return f"{milliseconds}ms"
    whole = milliseconds // 1_000
    for (large, per_large), (small, per_small) in (
        (("d", 86_400), ("h", 3_600)),
        (("h", 3_600), ("m", 60)),
        (("m", 60), ("s", 1)),
    ):
        if whole >= per_large:
            rest = whole % per_large // per_small
            return f"{whole // per_large}{large}{rest}{small}" if rest else f"{whole // per_large}{large}"
    return f"{whole}s"
