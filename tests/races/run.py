"""Random interleavings of calls for one branch, on every database, under every isolation level.

    python -m tests.races.run --database all --rounds 10000 --seed N

A round that fails prints its trace and the command that plays it again. The last line is the sum; exit code 1 if a
violation was found, or if a combination of calls and faults has not come up although there were rounds enough.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tests.contract.participant.world import postgres_url
from tests.mariadb import MariaDbServer, pymysql_url
from tests.postgres import DURABLE, PostgresServer
from tests.races.bank import LEVELS
from tests.races.job import ASYNCIO, EXTERNAL, PROCESSES, ROUNDS_PER_CELL, THREADS, Job, Tally, failure, perform, replay
from tests.races.stories import cells, external_story, random_story, story_of
from tests.servers import LocalServer

JOBS_MAX: Final = 100
ASYNCIO_PART: Final = 20
PROCESSES_PART: Final = 400
"""One such round on top, for so many with threads."""
FAST: Final = {**DURABLE, "fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
"""Processes are lost here, and connections; the server's machine is not."""


class Databases:
    """Empty databases of every kind, as many as are wanted. Leaving the `with` block removes them all."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._stack = ExitStack()
        self._servers: dict[str, LocalServer] = {}
        self._folder = Path()
        self._count = 0

    def __enter__(self) -> Databases:
        self._folder = Path(tempfile.mkdtemp(prefix="tricord-races-"))
        self._stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
        try:
            if "postgres" in self._names:
                own = not os.environ.get(PostgresServer.dsn_variable)
                server: LocalServer = PostgresServer(FAST) if own else PostgresServer.from_environment()
                self._servers["postgres"] = self._stack.enter_context(server)
            if "mariadb" in self._names:
                self._servers["mariadb"] = self._stack.enter_context(MariaDbServer.from_environment())
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def fresh(self, database: str) -> str:
        """SQLAlchemy's address of one more."""
        self._count += 1
        if database == "sqlite":
            return f"sqlite:///{self._folder / f'bank{self._count}.db'}"
        dsn = self._servers[database].create_database()
        self._stack.callback(self._servers[database].drop_database, dsn)
        return postgres_url(dsn) if database == "postgres" else pymysql_url(dsn)


def main() -> int:
    """Run it; 1 if anything did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.races.run", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--database", choices=("all", *LEVELS), default="all")
    parser.add_argument("--rounds", type=int, default=10_000, help="per database, over all of its isolation levels")
    parser.add_argument("--seed", type=int, default=None, help="repeat a run's choices")
    parser.add_argument("--workers", type=int, default=2 * (os.cpu_count() or 1), help="processes at a time")
    parser.add_argument("--verbose", action="store_true", help="print how often each combination came up")
    parser.add_argument("--replay", default="", help="play one round again, as the trace says")
    options = parser.parse_args()
    if options.rounds < 1 or options.workers < 1:
        parser.error("--rounds and --workers must be 1 or more")
    if options.replay:
        return play_again(options.replay)
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    names = tuple(LEVELS) if options.database == "all" else (options.database,)
    print(f"races: {options.rounds} rounds per database, {options.workers} at a time, seed {seed}", flush=True)
    began_at = time.monotonic()
    with Databases(names) as databases:
        jobs = [job for name in names for job in jobs_of(name, databases, options.rounds, seed, options.workers)]
        done = list(performed(jobs, options.workers))
    bad = [report(name, [pair for pair in done if pair[0].database == name], options.verbose) for name in names]
    rounds, violations = sum(tally.rounds for _, tally in done), sum(tally.violations for _, tally in done)
    print(f"races: {time.monotonic() - began_at:.0f} s, seed {seed}")
    print(f"races: {rounds} interleavings, {violations} violations", flush=True)
    return 1 if violations or any(bad) else 0


def jobs_of(name: str, databases: Databases, rounds: int, seed: int, workers: int) -> Iterator[Job]:
    """The rounds on one kind of database, for so many processes."""
    levels = LEVELS[name]
    parts = max(1, min(round(workers / len(levels)), rounds // 100, JOBS_MAX // len(levels)))
    places = [(level, part) for level in levels for part in range(parts)]
    for number, (level, part) in enumerate(places):
        share = rounds // len(places) + (number < rounds % len(places))
        if share:
            own_seed = seed * JOBS_MAX + number
            yield Job(
                name, level, databases.fresh(name), share, own_seed, part, parts, deck_seed=seed, progress=True
            )  # fmt: skip
    for kind, count in ((ASYNCIO, rounds // ASYNCIO_PART), (PROCESSES, rounds // PROCESSES_PART)):
        if count:
            yield Job(name, levels[seed % len(levels)], databases.fresh(name), count, seed, kind=kind)


def performed(jobs: Sequence[Job], workers: int) -> Iterator[tuple[Job, Tally]]:
    """Each job with what came of it, as they end."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(jobs)), context) as pool:
        waiting = {pool.submit(perform, job): job for job in jobs}
        for future in as_completed(waiting):
            job, tally = waiting[future], future.result()
            for text in tally.failures:
                print(text, flush=True)
            print(
                f"races: {job.name}: {tally.rounds} rounds of {tally.calls} calls in {tally.seconds:.1f} s, "
                f"{tally.violations} violations",
                flush=True,
            )
            yield job, tally


def report(name: str, done: Sequence[tuple[Job, Tally]], verbose: bool) -> bool:
    """Print what was counted on one database; whether a combination is missing."""
    missing = False
    for level, kind in sorted({(job.level, job.kind) for job, _ in done}, key=lambda pair: (pair[1] != THREADS, pair)):
        tally = Tally()
        for job, each in done:
            if (job.level, job.kind) == (level, kind):
                tally.add(each)
        never = [cell for cell, count in tally.cells.items() if not count]
        enough = bool(tally.cells) and tally.rounds >= ROUNDS_PER_CELL * len(tally.cells)
        missing = missing or (enough and bool(never))
        print(
            f"races: {name} {level}, {kind}: {tally.rounds} rounds, {tally.calls} calls, {tally.violations} violations"
            + (f"; {len(tally.cells) - len(never)} of {len(tally.cells)} combinations came up" if tally.cells else "")
        )
        for cell in never[:20] if enough else ():
            print(f"  NEVER CAME UP: {cell}")
        if verbose:
            _print_counts("met", tally.meetings)
        _print_counts("struck", tally.struck)
        _print_counts("answered", tally.answers)
        _print_counts("run again because of", tally.lost_races)
        if verbose:
            for cell, count in sorted(tally.cells.items(), key=lambda item: str(item[0])):
                print(f"  {count} times {cell}")
    return missing


def _print_counts(what: str, counts: Counter[str]) -> None:
    print(f"  {what}: " + ", ".join(f"{key} {count}" for key, count in sorted(counts.items())))


def play_again(token: str) -> int:
    """Replay one round and print its trace; 1 if it went wrong again."""
    kind, database, level, number, seed, choices = token.split(":")
    if number.isdigit():
        story = story_of(list(cells(database))[int(number)], int(seed))
    else:
        story = (external_story if kind == EXTERNAL else random_story)(database, int(seed))
    with Databases((database,)) as databases:
        forced = [int(each) for each in choices.split(".") if each]
        played = replay(kind, database, level, databases.fresh(database), story, forced)
    print(failure(kind, database, level, played))
    print(f"races: {'violated again' if played.wrong else 'nothing wrong this time'}")
    return 1 if played.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
