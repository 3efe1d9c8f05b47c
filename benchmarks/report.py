"""Progress, tables and files of the benchmarks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

OUT = Path(__file__).parent / "out"


class Measure(NamedTuple):
    """One figure. ``baseline`` is what it stands beside, ``ratio`` the figure divided by it."""

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
    table = Table(title=f"benchmark {name}", title_justify="left")
    for head in Measure._fields:
        table.add_column(head, justify="left" if head in ("metric", "unit", "goal") else "right", no_wrap=True)
    for measure in measures:
        table.add_row(*(_cell(value) for value in measure))
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(table)
    OUT.mkdir(exist_ok=True)
    path = OUT / f"{name}.json"
    path.write_text(json.dumps([measure._asdict() for measure in measures], indent=2) + "\n")
    progress(f"written to benchmarks/out/{path.name}")


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)
