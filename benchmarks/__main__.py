"""``python -m benchmarks [--only NAME]``."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from . import coordinator, fence
from .report import Measure, show

BENCHMARKS: dict[str, Callable[[], list[Measure]]] = {"coordinator": coordinator.run, "fence": fence.run}


def main() -> None:
    """Run what was asked for. A missed goal is told in the table; only a benchmark that cannot be run is an error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=sorted(BENCHMARKS), help="run this one alone")
    only = parser.parse_args().only
    for name, benchmark in BENCHMARKS.items():
        if only in (None, name):
            show(name, benchmark())


if __name__ == "__main__":
    main()
