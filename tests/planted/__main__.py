"""Plant the bugs of the catalogue, each alone, and tell who notices.

    python -m tests.planted [TEXT ...]      # those whose names contain one of the texts

Last comes the unchanged product, which must pass all the seeds and suites by which a bug was noticed. The last line is
the score; exit code 1 unless it is full and the unchanged product passes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from .bugs import Bug, Seeds, Suite
from .catalogue import CATALOGUE
from .catch import SEEDS_MAX, Caught, Failed, catch, failing_test, violation
from .tree import NoLongerApplies, planted

_SHOWN = 150


class Told(NamedTuple):
    """What came of one bug."""

    bug: Bug
    caught: Caught | None
    why_not: str


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="TEXT", help="only bugs whose names contain one of these")
    parser.add_argument("--seeds", type=int, default=SEEDS_MAX, help="look for each in so many seeds at the most")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 2), help="so many at a time")
    options = parser.parse_args()
    bugs = [bug for bug in CATALOGUE if not options.names or any(text in bug.name for text in options.names)]
    began_at = time.monotonic()
    with ThreadPoolExecutor(options.processes) as pool:
        told = list(_in_turn(pool, bugs, options.seeds))
        wrong = list(_unchanged(pool, told, options.processes))
    missed = [each for each in told if each.caught is None or not each.caught.by]
    for each in missed:
        print(f"NOT CAUGHT: {each.bug.name} ({each.bug.seen}) {each.why_not}")
    for text in wrong:
        print(f"THE UNCHANGED PRODUCT FAILS: {text}")
    print(f"planted: {time.monotonic() - began_at:.0f} s")
    print(f"planted: {len(told) - len(missed)}/{len(told)} caught", flush=True)
    return 1 if missed or wrong or not told else 0


def _in_turn(pool: ThreadPoolExecutor, bugs: Sequence[Bug], seeds: int) -> Iterator[Told]:
    """Every bug with what came of it, as it is known, and printed."""
    # What takes longest begins first.
    order = sorted(bugs, key=lambda bug: isinstance(bug.catcher, Seeds))
    running = {pool.submit(_try, bug, seeds): bug for bug in order}
    for future in as_completed(running):
        told = future.result()
        caught = told.caught
        if caught is not None and caught.by:
            after = f"after {caught.seeds} seeds" if caught.seeds else "by a suite"
            print(f"{told.bug.name}: {after}, {caught.seconds:.0f} s: {caught.by[:_SHOWN]}", flush=True)
        else:
            print(f"{told.bug.name}: NOT CAUGHT {told.why_not}", flush=True)
        yield told


def _try(bug: Bug, seeds: int) -> Told:
    try:
        caught = catch(bug, seeds)
    except (NoLongerApplies, Failed) as error:
        return Told(bug, None, f"{type(error).__name__}: {error}")
    return Told(bug, caught, "" if caught.by else f"in {caught.seeds} seeds, {caught.seconds:.0f} s")


def _unchanged(pool: ThreadPoolExecutor, told: Sequence[Told], processes: int) -> Iterator[str]:
    """What fails of the catchers where no bug is planted."""
    suites = {each.bug.catcher for each in told if isinstance(each.bug.catcher, Suite)}
    seeds: dict[str, int] = {}
    for each in told:
        if isinstance(each.bug.catcher, Seeds) and each.caught is not None:
            name = each.bug.catcher.simulator
            seeds[name] = max(seeds.get(name, 0), each.caught.seeds)
    with planted(()) as folder:
        running = {pool.submit(failing_test, suite, folder): " ".join(suite.files) for suite in suites}
        for name, end in seeds.items():
            for part in _parts(end, processes):
                look = pool.submit(_violation, Seeds(name, unexpected=True), part, folder)
                running[look] = f"{name} {part}"
        for future in as_completed(running):
            try:
                found = future.result()
            except Failed as error:
                found = str(error)
            if found:
                yield f"{running[future]}: {found}"
    text = ", ".join(f"{end} seeds of the {name}" for name, end in seeds.items())
    print(f"unchanged: {text or 'no seeds'}, {len(suites)} suites", flush=True)


def _violation(catcher: Seeds, seeds: range, folder: Path) -> str:
    what, _ = violation(catcher, seeds, folder)
    return what


def _parts(end: int, parts: int) -> list[range]:
    size = -(-end // parts)
    return [range(first, min(first + size, end)) for first in range(0, end, size)] if end else []


if __name__ == "__main__":
    sys.exit(main())
