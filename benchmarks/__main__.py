"""``python -m benchmarks [--only NAME] [--small]``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from . import coordinator, fence, history, hot_row, idempotency, recovery
from .report import Measure, progress, show

BENCHMARKS: dict[str, Callable[[], list[Measure]]] = {
    "coordinator": coordinator.run,
    "fence": fence.run,
    "idempotency": idempotency.run,
    "hot_row": hot_row.run,
    "recovery": recovery.run,
    "history": history.run,
}
SMALL: dict[str, Callable[[], list[Measure]]] = {
    "coordinator": partial(coordinator.run, small=True),
    "idempotency": partial(idempotency.run, small=True),
    "recovery": partial(recovery.run, small=True),
    "history": partial(history.run, small=True),
}
"""Those whose full size takes minutes."""
JUDGED_IN_SMALL = ("coordinator", "idempotency")
"""Of the others, figures in small say only that they run."""


def main() -> None:
    """Run what was asked for. A missed goal is told in the table; only a benchmark that cannot be run is an error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", choices=sorted(BENCHMARKS), help="run this one alone")
    parser.add_argument("--small", action="store_true", help=f"in a minute or less: {', '.join(SMALL)}")
    options = parser.parse_args()
    for name, benchmark in BENCHMARKS.items():
        if options.only not in (None, name):
            continue
        progress(f"--- {name}")
        if not options.small or name not in SMALL:
            show(name, benchmark())
        elif name in JUDGED_IN_SMALL:
            show(f"{name}_small", SMALL[name]())
        else:
            show(f"{name}_small", [measure._replace(goal=None, met=None) for measure in SMALL[name]()])
    progress("done")


if __name__ == "__main__":
    main()
