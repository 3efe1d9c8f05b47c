"""Tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on standard output: plain and never cut off a terminal, fitted to the width on one."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=10_000)
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, show_edge=False)
    for name in head:
        table.add_column(name, overflow="fold", no_wrap=not console.is_terminal)
    for row in rows:
        table.add_row(*row)
    console.print(table)
