"""One run beside another: ``python -m benchmarks.compare BASE [NEW]`` prints both figures and the change.

Each is a file of ``out/``, or a folder of them; NEW is ``out/`` if it is not named. What has become worse by more than
the noise is marked, and the exit code is 1. The noise of a figure is how far its own repetitions lay apart in either
run, and never taken for less than 10 % (30 % for a p99).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

from .goals import GOALS
from .report import OUT, Measure, load, show_wide

NOISE = 0.10
NOISE_OF_P99 = 0.30
"""Of a single run's slowest hundredth."""
RATIOS_OF_RATES = ("pgbench", "bare SQLite")
"""Units."""


class Change(NamedTuple):
    """One figure in both runs."""

    metric: str
    base: float
    new: float
    unit: str
    change: float
    """Share of the base."""
    noise: float
    verdict: str
    """``worse``, ``better`` or nothing."""


def compare(base: list[Measure], new: list[Measure]) -> list[Change]:
    """What both runs have measured, in the new one's order."""
    before = {measure.metric: measure for measure in base}
    return [_change(before[measure.metric], measure) for measure in new if measure.metric in before]


def _change(base: Measure, new: Measure) -> Change:
    change = (new.value - base.value) / abs(base.value) if base.value else 0.0 if new.value == 0 else 1.0
    least = NOISE_OF_P99 if "p99" in new.metric else NOISE
    noise = max(least, base.spread or 0.0, new.spread or 0.0)
    verdict = ""
    if abs(change) > noise:
        verdict = "better" if (change > 0) == _more_is_better(new) else "worse"
    return Change(new.metric, base.value, new.value, new.unit, change, noise, verdict)


def _more_is_better(measure: Measure) -> bool:
    if measure.metric in GOALS:
        return GOALS[measure.metric].more_is_better
    if measure.goal is not None:
        return ">" in measure.goal or "≥" in measure.goal
    return measure.unit.endswith("/s") or measure.unit in RATIOS_OF_RATES


def _files(path: Path) -> dict[str, Path]:
    return {found.name: found for found in sorted(path.glob("*.json"))} if path.is_dir() else {path.name: path}


def _pairs(base: Path, new: Path) -> list[tuple[Path, Path]]:
    """Files of one name; a file beside a folder is compared with that of its name, two files with each other."""
    if not base.is_dir() and not new.is_dir():
        return [(base, new)]
    bases, news = _files(base), _files(new)
    return [(bases[name], news[name]) for name in bases if name in news]


def main() -> int:
    """Compare and print. 0: nothing is worse; 1: something is; 2: there is nothing to compare."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("base", type=Path, help="a saved file, or a folder of them")
    parser.add_argument("new", type=Path, nargs="?", default=OUT, help="default: benchmarks/out")
    options = parser.parse_args()
    pairs = _pairs(options.base, options.new)
    if not pairs:
        parser.error(f"{options.base} and {options.new} have no file of one name")
    worse = 0
    for base, new in pairs:
        try:
            changes = compare(load(base), load(new))
        except (OSError, ValueError) as error:
            parser.error(str(error))
        shown = [
            (*found[:4], f"{found.change:+.1%}", f"{found.noise:.0%}", found.verdict.upper())
            for found in changes
            if "." not in found.metric or found.verdict
        ]
        heads = ("metric", "base", "new", "unit", "change", "noise", "")
        show_wide(f"{new.stem}: {base} beside {new}", heads, shown, left=("metric", "unit", ""))
        worse += sum(found.verdict == "worse" for found in changes)
    print(f"{worse} figure(s) worse by more than the noise")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
