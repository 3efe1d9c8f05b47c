"""Many seeds: in several processes, with progress, counts, and a file by which a long run is stopped and resumed."""

from __future__ import annotations

import gc
import json
import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from .seeded import Substitution
from .shrink import command, shrink
from .simulation import run_seed

CHUNK = 100
"""Seeds that a process runs at a time."""
PROGRESS_S = 10.0
COUNTED_SEEDS = 1_000
"""In so many seeds everything must happen at least once."""
FAILURES_MAX = 5
"""After so many a run ends."""

MUST_HAPPEN = (
    "branches enlisted and tried", "direct calls given up", "nested branches enlisted and tried",
    "nested calls refused", "nested calls given up", "calls nested in nested ones",
    "calls taken by a second instance", "crashes of one instance of two", "participants rolled",
    "stores restored", "transactions lost by a restore", "transactions set back by a restore",
    "initiators whose transaction is gone", "mixed by a restore", "effects of what a restore has lost",
    "resolved by hand: done before a restore",
    "connections refused", "streams broken", "calls sent alone", "log delivery.breaker_open",
    "log delivery.breaker_closed", "calls answered at once: held back by a breaker",
    "calls answered at once: nowhere to send it",
    "messages lost", "messages repeated", "messages slow", "messages very late", "messages cut off",
    "one-way partitions", "did it, then said error", "replies too late or twice", "calls timed out",
    "calls sent again", "COMMIT lost, not applied", "COMMIT lost, applied", "COMMIT lost, applied later",
    "COMMIT rolled back (40001)", "flush waited for a lock", "store errors", "store slow", "store outages",
    "jumps of the store's clock", "crashes of coordinators", "crashes of participants", "coordinators stopped gently",
    "pauses", "pauses longer than a lease", "participants on the wrong database", "participants gone for long",
    "ended beside a dead participant", "programs replaced", "upgrades finished", "claims", "take-overs",
    "stale saves refused", "claims put off", "late Trys with an effect", "fence rows purged",
    "late calls after a purge", "fence SUSPENDED at once", "initiators asked again", "initiators died",
    "keys refused to another request", "operator cancel", "operator retry", "operator resolve", "resolved by hand",
    "attention RETRYING", "attention VIOLATION", "CONFIRMED", "CANCELLED", "TRYING -> CONFIRMING",
    "TRYING -> CANCELLING", "TRYING -> CANCELLED", "CONFIRMING -> CONFIRMED", "CANCELLING -> CANCELLED",
    "effects of TRY", "effects of CONFIRM", "effects of CANCEL", "participants' databases: lost_after_commit",
    "participants' databases: late_commit", "participants' databases: conflict_at_commit",
)  # fmt: skip
"""Faults, states and encounters without which a run shows nothing."""


class Tally(NamedTuple):
    """What some seeds came to."""

    seeds: int
    steps: int
    counts: dict[str, int]
    failed: tuple[tuple[int, str], ...]
    """The seeds with violations, and the first of each."""


class Progress:
    """How far a run has come, kept in a file if there is one."""

    def __init__(self, path: Path | None, first: int, seeds: int) -> None:
        self._path = path
        self.first = self.next = first
        self.end = first + seeds
        self.steps = 0
        self.counts: Counter[str] = Counter()
        self.failed: list[tuple[int, str]] = []
        if path is not None and path.exists():
            self._read(json.loads(path.read_text()))

    def _read(self, stored: dict[str, object]) -> None:
        if stored["first"] != self.first:
            raise SystemExit(f"--state: {self._path} is of a run from seed {stored['first']}, not {self.first}")
        self.next, self.steps = int(str(stored["next"])), int(str(stored["steps"]))
        counts, failed = stored["counts"], stored["failed"]
        assert isinstance(counts, dict)
        assert isinstance(failed, list)
        self.counts.update(counts)
        self.failed = [(seed, text) for seed, text in failed]

    def add(self, tally: Tally) -> None:
        """Some more seeds have been run: the next ones in order."""
        self.next += tally.seeds
        self.steps += tally.steps
        self.counts.update(tally.counts)
        self.failed += tally.failed
        if self._path is not None:
            stored = {
                "first": self.first, "next": self.next, "steps": self.steps, "counts": dict(self.counts),
                "failed": self.failed,
            }  # fmt: skip
            new = self._path.with_name(self._path.name + ".new")
            new.write_text(json.dumps(stored))
            new.replace(self._path)

    def chunks(self) -> Iterator[range]:
        """What is left to run."""
        return (range(start, min(start + CHUNK, self.end)) for start in range(self.next, self.end, CHUNK))


def run_chunk(seeds: range, substitutions: tuple[Substitution, ...] = ()) -> Tally:
    """Run some seeds in this process."""
    steps = 0
    counts: Counter[str] = Counter()
    failed = []
    gc.freeze()  # what is there stays, and need not be looked at again after each run
    for seed in seeds:
        gc.disable()  # a run is short, and all of it goes at once
        try:
            result = run_seed(seed, substitutions=substitutions)
        except Exception as error:  # of the simulator's own: the other seeds are run all the same
            failed.append((seed, f"the run itself failed: {error!r}"))
            continue
        finally:
            gc.enable()
        gc.collect(1 if seed % 10 else 2)
        steps += result.steps
        counts.update(result.counts)
        if result.violations:
            failed.append((seed, str(result.violations[0])))
    gc.unfreeze()
    return Tally(len(seeds), steps, dict(counts), tuple(failed))


def run_many(progress: Progress, processes: int, tell: Callable[[str], None] = print) -> bool:
    """Run what is left of a run; whether all is well. Tells progress, failures, counts and, last, the sum."""
    began_s = told_s = time.monotonic()
    began = progress.next
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, _ignore_ctrl_c) as pool:
        for tally in pool.imap(run_chunk, progress.chunks()):
            progress.add(tally)
            for seed, text in tally.failed:
                tell(f"seed {seed}: {text}")
            if len(progress.failed) >= FAILURES_MAX:
                break
            if time.monotonic() - told_s >= PROGRESS_S:
                told_s = time.monotonic()
                rate = (progress.next - began) / (told_s - began_s)
                tell(f"{progress.next - progress.first} of {progress.end - progress.first} seeds, {rate:.0f} a second")
        pool.terminate()
    if progress.failed:
        seed = progress.failed[0][0]
        tell(f"shrinking seed {seed}")
        tell(f"replay it: {command(seed, shrink(seed))}")
    seeds = progress.next - progress.first
    missing = tell_counts(progress.counts, tell) if seeds >= COUNTED_SEEDS else []
    for name in missing:
        tell(f"never happened in {seeds} seeds: {name}")
    tell(f"simulate: {seeds} seeds, {progress.steps} steps, {len(progress.failed)} violations")
    return not progress.failed and not missing


def _ignore_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children


def tell_counts(counts: Counter[str], tell: Callable[[str], None]) -> list[str]:
    """Tell how often everything has happened; what never has and must."""
    for name in sorted({*counts, *MUST_HAPPEN}):
        tell(f"{counts[name]:>10}  {name}")
    return [name for name in MUST_HAPPEN if not counts[name]]
