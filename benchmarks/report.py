"""Progress, tables and files of the benchmarks."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

OUT = Path(__file__).parent / "out"


class Measure(NamedTuple):
    """One figure. ``baseline`` is what it stands beside, ``ratio`` the figure divided by it.

    A metric with a dot in its name is a detail, which is written to the file and not printed.
    """

    metric: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None
    goal: str | None = None
    met: bool | None = None


def progress(text: str) -> None:
    """One line on standard error."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def show(name: str, measures: list[Measure]) -> None:
    """Print the table and write ``out/NAME.json``."""
    printed = [measure for measure in measures if "." not in measure.metric]
    show_wide(f"benchmark {name}", Measure._fields, printed, left=("metric", "unit", "goal"))
    OUT.mkdir(exist_ok=True)
    path = OUT / f"{name}.json"
    path.write_text(json.dumps([measure._asdict() for measure in measures], indent=2) + "\n")
    progress(f"written to benchmarks/out/{path.name}")


def show_wide(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]], left: Sequence[str] = ("",)) -> None:
    """Print a table. The columns named in ``left`` are text, the others figures."""
    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head, justify="left" if head in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    console.print(table)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)
