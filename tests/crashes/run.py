"""Kill a coordinator at every point of a transaction, one after another; what it leaves must be brought to its end.

    python -m tests.crashes [--small] [--stages 3]

For each scenario (``scenario``) two undisturbed runs tell which points there are; then there is one run for each point:
coordinator A dies there by SIGKILL, coordinator B on the same PostgreSQL takes over, and the tables of everybody are
judged (``judge``). A point that the scenario should have and has not, or that never comes, is a failure.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from examples.transfer.processes import ProcessFailed
from tests.crashes.judge import called, took_over, violations
from tests.crashes.scenario import OUTCOMES, Scenario
from tests.crashes.stage import Seen, Stage
from tests.postgres import PostgresServer, PostgresUnavailable

ALL = [
    *(Scenario(branches, outcome) for outcome in ("commit", "refuse", "silent") for branches in (1, 2, 3)),
    *(Scenario(2, outcome) for outcome in OUTCOMES if outcome not in ("commit", "refuse", "silent")),
]
SMALL = [Scenario(2, outcome) for outcome in ("commit", "refuse", "silent")]
ATTEMPTS = 3
"""A slow machine makes other points: time-outs, progress that is saved by itself."""
DRY_RUNS = 2
TELL_S = 10.0


class Verdict(NamedTuple):
    """A run and what was wrong in it."""

    seen: Seen
    wrong: Sequence[str]


def judged(stage: Stage, scenario: Scenario, point: str = "", broken: str = "") -> Verdict:
    """One run, repeated if its point has not come. Raises ProcessFailed, TimeoutError."""
    for _ in range(ATTEMPTS):
        seen = stage.run(scenario, point, broken)
        if seen.came:
            break
    return Verdict(seen, violations(seen))


class Stages:
    """Stages that share the work, each in a thread."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._free: SimpleQueue[Stage] = SimpleQueue()
        for stage in stages:
            self._free.put(stage)
        self._size = len(stages)

    def run(self, what: Sequence[tuple[Scenario, str]], name: str) -> list[Verdict]:
        """Have all runs made, each on whatever stage is free; in their order; none after one that never ends.

        Raises as ``judged``.
        """
        begun_s = time.monotonic()
        told_s = begun_s

        def on_stage(scenario: Scenario, point: str) -> Verdict:
            stage = self._free.get()
            try:
                return judged(stage, scenario, point)
            finally:
                self._free.put(stage)

        verdicts = []
        with ThreadPoolExecutor(self._size) as pool:
            futures = [pool.submit(on_stage, *each) for each in what]
            try:
                for future in futures:
                    verdicts.append(future.result())
                    if not verdicts[-1].seen.finished:
                        pool.shutdown(cancel_futures=True)
                        break
                    if time.monotonic() - told_s > TELL_S:
                        told_s = time.monotonic()
                        wrong = sum(bool(verdict.wrong) for verdict in verdicts)
                        print(
                            f"crashes: {name}: {len(verdicts)} of {len(what)}, {wrong} of them wrong, "
                            f"{told_s - begun_s:.0f} s",
                            flush=True,
                        )
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return verdicts


def table(verdicts: Sequence[Verdict]) -> str:
    """All runs, a line each."""
    rows = [("scenario", "A dies", "stored then", "brought to its end by", "end", "calls", "")]
    for seen, wrong in verdicts:
        at_death = "nothing" if seen.at_death is None else seen.at_death.name
        end = ", ".join(stored.state.name for stored in seen.stored)
        point = seen.point or "never"
        rows.append((str(seen.scenario), point, at_death, took_over(seen), end, called(seen), "VIOLATED" * bool(wrong)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def play(scenarios: Sequence[Scenario], folder: Path, stages: int) -> list[Verdict]:
    """All points of all scenarios. Raises ProcessFailed, TimeoutError, PostgresUnavailable."""
    with ExitStack() as stack:
        server = stack.enter_context(PostgresServer.from_environment())
        made = []
        for number in range(1, stages + 1):
            (folder / str(number)).mkdir()
            made.append(stack.enter_context(Stage(folder / str(number), server)))
        shared = Stages(made)
        undisturbed = shared.run(
            [(scenario, "") for scenario in scenarios for _ in range(DRY_RUNS)], "undisturbed runs"
        )
        if any(verdict.wrong for verdict in undisturbed):
            return undisturbed
        points = []
        for n, scenario in enumerate(scenarios):
            first, *others = (verdict.seen.reached for verdict in undisturbed[n * DRY_RUNS : (n + 1) * DRY_RUNS])
            points += [(scenario, point) for point in first if all(point in other for other in others)]
        print(f"crashes: {len(points)} points of {len(scenarios)} scenarios", flush=True)
        return [*undisturbed[::DRY_RUNS], *shared.run(points, "points")]


def main() -> int:
    """Run it; 1 if anything did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.crashes", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--small", action="store_true", help="two branches, three outcomes")
    parser.add_argument("--stages", type=int, default=3, help="so many runs at the same time")
    options = parser.parse_args()
    if options.stages < 1:
        parser.error("--stages must be 1 or more")
    folder = Path(tempfile.mkdtemp(prefix="tricord-crashes-"))
    try:
        verdicts = play(SMALL if options.small else ALL, folder, options.stages)
    except (ProcessFailed, TimeoutError, PostgresUnavailable) as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        print(f"crashes: it did not come to its end: {error}\n{notes}\ncrashes: logs are kept in {folder}", flush=True)
        return 1
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    print(table(verdicts))
    wrong = [(seen, why) for seen, whys in verdicts for why in whys]
    if not all(verdict.seen.finished for verdict in verdicts):
        print("crashes: one transaction never ends; the runs after it were not made")
    for seen, why in wrong:
        print(f"crashes: VIOLATED: {seen.scenario}, {seen.point or 'nobody dies'}: {why}")
    points = sum(bool(verdict.seen.point) for verdict in verdicts)
    if wrong:
        print(f"crashes: logs are kept in {folder}")
    else:
        shutil.rmtree(folder)
    print(f"crashes: {points} points, {len(wrong)} violations", flush=True)
    return 1 if wrong or not points else 0
