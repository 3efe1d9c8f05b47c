"""A chart of two panels as SVG: lines over the number of transactions in flight.

Written by hand: two panels of lines take a hundred lines here, a plotting library would bring ten packages with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

WIDTH, HEIGHT = 980, 440
PANEL_W, PANEL_H, LEFT, TOP, GAP = 380, 290, 75, 60, 105
COLOURS = ("#1f6fb4", "#c2410c", "#15803d", "#7e22ce")
STEPS = (1, 2, 5, 10)
TICKS = 5
LEGEND_COLUMNS = 4


class Line(NamedTuple):
    """Points (in flight, value) under a name, in one of the ``COLOURS``. No value may be 0 on a logarithmic axis."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    dashed: bool = False


class Panel(NamedTuple):
    """Lines on axes of their own; ``level`` is a line straight across with its name, such as a baseline."""

    title: str
    lines: Sequence[Line]
    level: tuple[str, float] | None = None
    logarithmic: bool = False


class _Axis(NamedTuple):
    """Values to pixels."""

    lowest: float
    highest: float
    ticks: Sequence[float]
    start: float
    length: float
    logarithmic: bool

    def at(self, value: float) -> float:
        low, high, value = (math.log(v) if self.logarithmic else v for v in (self.lowest, self.highest, value))
        return self.start + (value - low) / ((high - low) or 1) * self.length


def write(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Draw the panels side by side."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 22, title, "middle", size=15),
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, LEFT + number * (PANEL_W + GAP), TOP + PANEL_H)
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _panel(panel: Panel, left: float, bottom: float) -> Iterator[str]:
    at = sorted({x for line in panel.lines for x, _ in line.points})
    values = [y for line in panel.lines for _, y in line.points] + ([panel.level[1]] if panel.level else [])
    x_axis = _Axis(at[0], at[-1], at, left, PANEL_W, True)
    ticks = _powers(min(values), max(values)) if panel.logarithmic else _even(max(values))
    y_axis = _Axis(ticks[0], ticks[-1], ticks, bottom, -PANEL_H, panel.logarithmic)
    yield _text(left + PANEL_W / 2, bottom - PANEL_H - 12, panel.title, "middle", size=13)
    for tick in y_axis.ticks:
        yield _stroke([(left, y_axis.at(tick)), (left + PANEL_W, y_axis.at(tick))], "#e2e8f0", 1)
        yield _text(left - 6, y_axis.at(tick) + 4, f"{tick:,g}", "end")
    for tick in x_axis.ticks:
        yield _text(x_axis.at(tick), bottom + 18, f"{tick:g}", "middle")
    yield _text(left + PANEL_W / 2, bottom + 38, "transactions in flight", "middle")
    if panel.level:
        name, value = panel.level
        yield _stroke([(left, y_axis.at(value)), (left + PANEL_W, y_axis.at(value))], "#334155", 1.5, dashed=True)
        yield _text(left + 4, y_axis.at(value) - 5, name, "start", "#334155")
    for number, line in enumerate(panel.lines):
        points = [(x_axis.at(x), y_axis.at(y)) for x, y in line.points]
        colour = COLOURS[line.colour]
        yield _stroke(points, colour, 2, dashed=line.dashed)
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)
        legend = left + number % LEGEND_COLUMNS * PANEL_W / LEGEND_COLUMNS
        yield _stroke([(legend, bottom + 56), (legend + 18, bottom + 56)], colour, 2, dashed=line.dashed)
        yield _text(legend + 23, bottom + 60, line.name, "start", colour)


def _even(highest: float) -> Sequence[float]:
    """Round numbers from 0 to at least the highest value."""
    rough = (highest or 1) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in STEPS if step * power >= rough * 0.999)
    return [number * step for number in range(math.ceil(highest / step * 0.999) + 1)]


def _powers(lowest: float, highest: float) -> Sequence[float]:
    """1, 2, 5, 10 and so on, around the values."""
    powers = range(math.floor(math.log10(lowest)), math.ceil(math.log10(highest)) + 1)
    ticks = [step * 10.0**power for power in powers for step in STEPS[:-1]]
    first = max(number for number, tick in enumerate(ticks) if tick <= lowest * 1.001)
    last = min(number for number, tick in enumerate(ticks) if tick >= highest * 0.999)
    return ticks[first : max(last, first + 1) + 1]


def _stroke(points: Sequence[tuple[float, float]], colour: str, width: float, *, dashed: bool = False) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#0f172a", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}" font-size="{size}">{escape(text)}</text>'
