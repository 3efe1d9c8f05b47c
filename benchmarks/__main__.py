"""``python -m benchmarks [--only NAME]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from . import coordinator
from .report import Measure, show

BENCHMARKS: dict[str, Callable[[], list[Measure]]] = {"coordinator": coordinator.run}


def main() -> int:
    """Run what was asked for; 1 if a goal was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=sorted(BENCHMARKS), help="run this one alone")
    only = parser.parse_args().only
    missed = False
    for name, benchmark in BENCHMARKS.items():
        if only in (None, name):
            measures = benchmark()
            show(name, measures)
            missed |= any(measure.met is False for measure in measures)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
