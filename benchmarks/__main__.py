"""``python -m benchmarks [--only NAME] [--small]``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from . import coordinator, fence, history, recovery
from .report import Measure, show

BENCHMARKS: dict[str, Callable[[], list[Measure]]] = {
    "coordinator": coordinator.run,
    "fence": fence.run,
    "recovery": recovery.run,
    "history": history.run,
}
SMALL: dict[str, Callable[[], list[Measure]]] = {
    "recovery": partial(recovery.run, small=True),
    "history": partial(history.run, small=True),
}
"""Those whose full size takes minutes; in small, their figures say only that they run."""


def main() -> None:
    """Run what was asked for. A missed goal is told in the table; only a benchmark that cannot be run is an error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=sorted(BENCHMARKS), help="run this one alone")
    parser.add_argument("--small", action="store_true", help="recovery and history in a size that only proves they run")
    options = parser.parse_args()
    for name, benchmark in BENCHMARKS.items():
        if options.only not in (None, name):
            continue
        if options.small and name in SMALL:
            show(f"{name}_small", [measure._replace(goal=None, met=None) for measure in SMALL[name]()])
        else:
            show(name, benchmark())


if __name__ == "__main__":
    main()
