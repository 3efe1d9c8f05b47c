"""Kill processes at every point of a transaction, singly and in pairs, in the simulator.

    python -m tests.points [--processes 2]
    python -m tests.points --scenario "2 commit" --kill "c1 after claim" --kill "p1 before commit TRY 1"

For each scenario (``scenarios``) a run in which nobody is killed tells which points there are (``points``). There is
one run for each of them, with the process killed that comes there; and one for each pair: that point, and each that is
passed after it, by whoever recovers, too. With two coordinators the killed one stays away, and there are no pairs.
Nothing else goes wrong, and all takes as long each time; what is drawn at random (back-off, pauses) is drawn from one
seed. The second form is one run, line by line.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from coordinator.model import State
from tests.simulator.seeded import Substitution

from .play import Played, play
from .points import KINDS, kind_of
from .scenarios import ALL, Scenario

PROGRESS_S = 5.0
FAILURES_MAX = 5
"""After so many everything ends."""
CHUNK = 10
"""Runs that a process makes at a time."""
Counts = Counter[tuple[Scenario, str, str]]
"""By scenario, kind of point and column."""
COLUMNS = ("points", "pairs from", "pairs to", "confirmed", "cancelled", "claimed", "violations")
"""What is counted for each scenario and kind of point.

points      of this kind, each with a run in which it is the only one
pairs from  runs in which somebody was killed there first
pairs to    runs in which somebody was killed there after another
confirmed, cancelled, claimed, violations  of the single runs, and of those of ``pairs from``
"""


class Run(NamedTuple):
    """A scenario, and where somebody is killed in it, one after another."""

    scenario: Scenario
    kills: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.scenario}, {' and '.join(self.kills) or 'nobody is killed'}"

    @property
    def command(self) -> str:
        """What shows it, line by line."""
        kills = "".join(f" --kill {shlex.quote(kill)}" for kill in self.kills)
        return f"python -m tests.points --scenario {shlex.quote(str(self.scenario))}{kills}"

    def made(self, substitutions: tuple[Substitution, ...] = ()) -> Made:
        """Make it; an error of the simulator's own is wrong as well."""
        try:
            seen = play(self.scenario, self.kills, substitutions=substitutions)
        except Exception as error:  # the other runs are made all the same
            return Made(self, Played((), None, False, [f"the run itself failed: {error!r}"], ()))
        return Made(self, seen if self.deeper else seen._replace(points=()))

    @property
    def deeper(self) -> bool:
        """Whether one more is killed in others."""
        return len(self.kills) < self.scenario.kills_max


class Made(NamedTuple):
    """A run, and what came of it."""

    run: Run
    seen: Played

    @property
    def following(self) -> list[Run]:
        """The same with one more killed, at each point that was passed after the last kill."""
        run = self.run
        return [run._replace(kills=(*run.kills, point)) for point in self.seen.points] if run.deeper else []


def count(counts: Counts, made: Made) -> None:
    """Add a run."""
    (scenario, kills), seen = made
    if not kills:
        return
    kind = kind_of(kills[0])
    for column, counted in (
        ("points", len(kills) == 1),
        ("pairs from", len(kills) == 2),
        ("confirmed", seen.end is State.CONFIRMED),
        ("cancelled", seen.end is State.CANCELLED),
        ("claimed", seen.claimed),
        ("violations", bool(seen.wrong)),
    ):
        counts[scenario, kind, column] += counted
    if len(kills) == 2:
        counts[scenario, kind_of(kills[1]), "pairs to"] += 1


def run_all(
    scenarios: Sequence[Scenario], processes: int, tell: Callable[[str], None] = print
) -> tuple[Counts, list[Made]]:
    """All points of these scenarios: what was counted, and the runs in which something is wrong. Tells progress.

    First those in which nobody is killed, then those with one kill, then the pairs; none after a round that failed.
    """
    counts: Counts = Counter()
    failed: list[Made] = []
    runs = [Run(scenario) for scenario in scenarios]
    begun_s = told_s = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(processes, _ignore_ctrl_c) as pool:
        while runs and not failed:
            following: list[Run] = []
            for done, made in enumerate(pool.imap(Run.made, runs, CHUNK), 1):
                count(counts, made)
                following += made.following
                if made.seen.wrong:
                    failed.append(made)
                if len(failed) >= FAILURES_MAX:
                    tell(f"points: {len(failed)} violations, the other runs are not made")
                    break
                if time.monotonic() - told_s >= PROGRESS_S:
                    told_s = time.monotonic()
                    tell(
                        f"points: {done} of {len(runs)} runs with {len(made.run.kills)} kills, {told_s - begun_s:.0f} s"
                    )
            runs = following
        pool.terminate()
    return counts, failed


def _ignore_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children


def total(counts: Counts, column: str) -> int:
    """The sum of a column."""
    return sum(number for (_, _, name), number in counts.items() if name == column)


def table(scenarios: Sequence[Scenario], counts: Counts) -> Iterator[str]:
    """A line for each scenario and kind of point; one for each scenario where the kinds add nothing."""
    yield f"{'scenario':<12}{'kind':<8}" + "".join(f"{column:>12}" for column in COLUMNS)
    for scenario in scenarios:
        for kinds in [(kind,) for kind in KINDS] if scenario.coordinators == 1 else [KINDS]:
            cells = "".join(f"{sum(counts[scenario, kind, column] for kind in kinds):>12}" for column in COLUMNS)
            yield f"{scenario!s:<12}{kinds[0] if len(kinds) == 1 else 'all':<8}{cells}"


def missing(scenarios: Sequence[Scenario], counts: Counts) -> Iterator[str]:
    """What must be there, and is not."""
    for scenario in scenarios:
        alone = scenario.coordinators == 1
        for kind in KINDS:
            must = [] if kind == "claim" else ["points", "pairs from"] if alone else ["points"]
            for column in [*must, "pairs to"] if alone else must:
                if not counts[scenario, kind, column]:
                    yield f"{scenario}, {kind}: no {column}"
        for column in (*(state.name.lower() for state in sorted(scenario.ends(killed=True))), "claimed"):
            if not sum(counts[scenario, kind, column] for kind in KINDS):
                yield f"{scenario}: none {column}"


def main() -> int:
    """Run it; 1 if anything did not hold, or was not there."""
    parser = argparse.ArgumentParser(prog="python -m tests.points", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="so many processes share the work")
    parser.add_argument("--scenario", type=_scenario, help='run this one alone, as "2 commit", and show it')
    parser.add_argument("--kill", action="append", default=[], metavar="POINT", help="in it: kill who comes there")
    options = parser.parse_args()
    if options.processes < 1:
        parser.error("--processes must be 1 or more")
    if options.scenario is not None:
        return show(options.scenario, options.kill)
    if options.kill:
        parser.error("--kill needs --scenario")
    counts, failed = run_all(ALL, options.processes)
    for line in table(ALL, counts):
        print(line)
    for run, seen in failed:
        print(f"points: VIOLATED: {run}: {seen.wrong[0]}\n  replay it: {run.command}")
    absent = [] if failed else list(missing(ALL, counts))
    for what in absent:
        print(f"points: MISSING: {what}")
    single, pairs = total(counts, "points"), total(counts, "pairs from")
    print(f"points: {single} single, {pairs} pairs, {len(failed)} violations", flush=True)
    return 1 if failed or absent else 0


def _scenario(text: str) -> Scenario:
    try:
        return Scenario.read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; there are: {', '.join(map(str, ALL))}") from error


def show(scenario: Scenario, kills: Sequence[str]) -> int:
    """One run, line by line; 1 if something is wrong in it."""
    seen = play(scenario, kills, tracing=True)
    for line in seen.lines:
        print(line)
    for why in seen.wrong:
        print(f"points: VIOLATED: {why}")
    print(f"points: {scenario} ended {seen.end.name if seen.end else 'not at all'}, {len(seen.wrong)} violations")
    return 1 if seen.wrong else 0
