"""Tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, wraps: Sequence[str] = ()) -> None:
    """A table on standard output: plain and never cut off a terminal; on one, the columns ``wraps`` fit the width.

    A column in ``wraps`` that is empty in every row is left out.
    """
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
