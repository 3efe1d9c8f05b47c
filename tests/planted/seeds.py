"""Runs inside a copy: a simulator's seeds up to the first violation, told as the last line, in JSON.

python -m tests.planted.seeds town|branch FIRST END [--unexpected]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
from pathlib import Path

import coordinator
import participant_sdk
from tests.simulator.branch_scene import MARGIN_MS, BranchScene
from tests.simulator.branch_watch import Broken
from tests.simulator.sdk_clock import simulated_sdk
from tests.simulator.simulation import run_seed

UNEXPECTED = 13
"""The invariant that nothing happens which the programs did not expect."""


def of_town(seed: int, *, unexpected: bool) -> str | None:
    """What is found wrong in a run of the whole town."""
    violations = run_seed(seed).violations
    if not violations or (violations[0].number == UNEXPECTED and not unexpected):
        return None
    return str(violations[0])


def of_branch(seed: int) -> str | None:
    """What is found wrong at one participant."""
    try:
        with simulated_sdk(random.Random(seed), clock_margin_ms=MARGIN_MS):
            BranchScene(seed).play()
    except Broken as broken:
        return f"rule of the fence: {broken}"
    return None


def main() -> int:
    """Print ``{"seed": N, "what": TEXT}`` or ``{}``."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted.seeds")
    parser.add_argument("simulator", choices=("town", "branch"))
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int)
    parser.add_argument("--unexpected", action="store_true")
    options = parser.parse_args()
    for package in (coordinator, participant_sdk):
        if not Path(str(package.__file__)).is_relative_to(Path.cwd()):
            raise SystemExit(f"{package.__file__} is not of the copy in {Path.cwd()}")
    found: dict[str, object] = {}
    for seed in range(options.first, options.end):
        gc.disable()  # as the simulator's own runner does
        try:
            what = of_branch(seed) if options.simulator == "branch" else of_town(seed, unexpected=options.unexpected)
        finally:
            gc.enable()
        gc.collect(1 if seed % 10 else 2)
        if what is not None:
            found = {"seed": seed, "what": what}
            break
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
