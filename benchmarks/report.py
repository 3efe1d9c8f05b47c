"""Progress, tables and files of the benchmarks.

``python -m benchmarks.report [FILE …]`` prints what is in ``out/`` once more; with ``--markdown`` as tables for a page,
with ``--page docs/performance.md`` into that page.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from .goals import GOALS

OUT = Path(__file__).parent / "out"
HEADS = ("metric", "value", "unit", "baseline", "ratio", "goal", "met")
MARKS = ("<!-- figures -->", "<!-- /figures -->")
_STARTED_S = time.monotonic()


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
    spread: float | None = None
    """Of what was measured several times: how far highest and lowest lie apart, as a share of the value."""


def judged(metric: str, value: float, unit: str, spread: float | None = None) -> Measure:
    """A figure beside its goal in ``goals``."""
    goal = GOALS[metric]
    return Measure(metric, value, unit, goal=str(goal), met=goal.met_by(value), spread=spread)


def progress(text: str) -> None:
    """One line on standard error, with the time since the start."""
    minutes, seconds = divmod(int(time.monotonic() - _STARTED_S), 60)
    print(f"bench {minutes:2d}:{seconds:02d}  {text}", file=sys.stderr, flush=True)


def show(name: str, measures: list[Measure]) -> None:
    """Print the table and write ``out/NAME.json``."""
    _print(name, measures)
    OUT.mkdir(exist_ok=True)
    save(OUT / f"{name}.json", measures)
    progress(f"written to benchmarks/out/{name}.json")


def save(path: Path, measures: list[Measure]) -> None:
    """Write figures to a file that ``load`` reads."""
    path.write_text(json.dumps([measure._asdict() for measure in measures], indent=2) + "\n")


def load(path: Path) -> list[Measure]:
    """What ``save`` has written. Raises OSError, or ValueError if it is something else."""
    try:
        return [Measure(**entry) for entry in json.loads(path.read_text())]
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} holds no figures of a benchmark: {error}") from error


def _print(name: str, measures: list[Measure]) -> None:
    printed = [measure[: len(HEADS)] for measure in measures if "." not in measure.metric]
    show_wide(f"benchmark {name}", HEADS, printed, left=("metric", "unit", "goal"))


def show_wide(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]], left: Sequence[str] = ("",)) -> None:
    """Print a table. The columns named in ``left`` are text, the others figures."""
    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head, justify="left" if head in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell(value) for value in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    console.print(table)


def markdown(measures: Sequence[Measure]) -> str:
    """A table for a page; what has a goal stands first."""
    lines = [f"| {' | '.join(HEADS)} |", "|---|---:|---|---:|---:|---|---|"]
    printed = [measure for measure in measures if "." not in measure.metric]
    for measure in sorted(printed, key=lambda measure: measure.goal is None):
        cells = [f"`{measure.metric}`", *(cell(value) for value in measure[1 : len(HEADS)])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(value: object) -> str:
    """A value as tables show it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return str(value)


def put_into(page: Path, text: str) -> None:
    """Put text between the page's marks. Raises ValueError if it has none."""
    before, start, rest = page.read_text().partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not start or not end:
        raise ValueError(f"{page} has no marks {MARKS[0]} and {MARKS[1]}")
    page.write_text(f"{before}{start}\n{text.strip()}\n{end}{after}")


def main() -> None:
    """Print files again."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="default: all in benchmarks/out")
    parser.add_argument("--markdown", action="store_true", help="as Markdown")
    parser.add_argument("--page", type=Path, help="put the Markdown between the marks of this page instead")
    options = parser.parse_args()
    files = options.files or sorted(OUT.glob("*.json"))
    if not files:
        parser.error(f"there is nothing in {OUT} yet: run `make bench`")
    try:
        runs = {path.stem: load(path) for path in files}
        pages = "\n\n".join(f"### {name}\n\n{markdown(measures)}" for name, measures in runs.items())
        if options.page:
            put_into(options.page, pages)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if options.markdown:
        print(pages)
    elif not options.page:
        for name, measures in runs.items():
            _print(name, measures)


if __name__ == "__main__":
    main()
