"""``python -m tests.simulator``: one seed with its trace, or many seeds."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from .drawing import plan_of
from .plan import without
from .runner import Progress, run_many
from .shrink import command, shrink
from .simulation import run_seed


def main() -> int:
    """Returns the exit status: 1 if an invariant was broken, or something that must happen never did."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=None, metavar="N", help="run this seed alone; else the first of many"
    )
    parser.add_argument("--seeds", type=int, default=None, metavar="N", help="run so many seeds")
    parser.add_argument("--drop", default="", metavar="PARTS", help="leave these parts of the seed's plan out")
    parser.add_argument("--trace", action="store_true", help="print all that happens")
    parser.add_argument("--plan", action="store_true", help="print what the seed has planned, and stop")
    parser.add_argument(
        "--state", type=Path, default=None, metavar="FILE", help="keep progress here, and resume from it"
    )
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 2), metavar="N")
    arguments = parser.parse_args()
    if arguments.seeds is not None:
        progress = Progress(arguments.state, arguments.seed or 0, arguments.seeds)
        try:
            return 0 if run_many(progress, arguments.processes, lambda text: print(text, flush=True)) else 1
        except KeyboardInterrupt:
            kept = "; the same command goes on from there" if arguments.state is not None else ""
            print(f"stopped after {progress.next - progress.first} seeds{kept}")
            return 130
    return _one(arguments.seed or 0, tuple(filter(None, arguments.drop.split(","))), arguments)


def _one(seed: int, dropped: tuple[str, ...], arguments: argparse.Namespace) -> int:
    plan = without(plan_of(seed), dropped)
    if arguments.plan:
        _print_plan(plan)
        return 0
    result = run_seed(seed, dropped, tracing=arguments.trace)
    for line in result.lines:
        print(line)
    for violation in result.violations:
        print(violation)
    print(f"trace {result.hash}")
    if result.violations and not dropped:
        print(f"replay it smaller: {command(seed, shrink(seed))}")
    print(f"simulate: 1 seeds, {result.steps} steps, {len(result.violations)} violations")
    return 1 if result.violations else 0


def _print_plan(plan: object) -> None:
    for name, value in plan._asdict().items():  # type: ignore[attr-defined]
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            for each in value:
                print(f"{name}: {each}")
        else:
            print(f"{name}: {value}")


if __name__ == "__main__":
    sys.exit(main())
