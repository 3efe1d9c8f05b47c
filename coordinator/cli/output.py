"""Tables, and lengths of time, for people."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

_DAY_HOUR = (("d", 86_400), ("h", 3_600))
_HOUR_MINUTE = (("h", 3_600), ("m", 60))
_MINUTE_SECOND = (("m", 60), ("s", 1))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, wraps: Sequence[str] = ()) -> None:
    """A table on standard output: plain and never cut off a terminal; on one, the columns ``wraps`` fit the width.

    A column in ``wraps`` that is empty in every row is left out.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=10_000)
    shown = [n for n, name in enumerate(head) if name not in wraps or not rows or any(row[n] for row in rows)]
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, show_edge=False)
    for n in shown:
        wrap = head[n] in wraps and console.is_terminal
        table.add_column(head[n], overflow="fold", no_wrap=not wrap, min_width=16 if wrap else None)
    for row in rows:
        table.add_row(*(row[n] for n in shown))
    console.print(table)


def age_text(when: str) -> str:
    """How long ago a time of ``time_text`` was, by this machine's clock; empty if there is none."""
    if not when:
        return ""
    return length_text((datetime.now(UTC) - datetime.fromisoformat(when)).total_seconds())


def length_text(seconds: float) -> str:
    """A length of time for people, in one or two units: 850ms, 12s, 5m10s, 3h2m, 9d4h."""
    if seconds < 1:
        return f"{max(0, int(seconds * 1000))}ms"
    whole = int(seconds)
    for (large, per_large), (small, per_small) in (_DAY_HOUR, _HOUR_MINUTE, _MINUTE_SECOND):
        if whole >= per_large:
            rest = whole % per_large // per_small
            return f"{whole // per_large}{large}{rest}{small}" if rest else f"{whole // per_large}{large}"
    return f"{whole}s"


def count_text(count: int, *, more: bool) -> str:
    """A number; with a plus if it was counted up to a limit only."""
    return f"{count}+" if more else str(count)
