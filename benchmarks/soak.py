"""A million transactions through one coordinator: nothing may grow, nothing may be lost.

``python -m benchmarks.soak [--transactions N]`` (``make soak``, ``N=20000`` for a try). Pipelined, on PostgreSQL, with
two no-op participants. While it runs, the coordinator's memory is read. At the end the answers, what the coordinator
has counted and the rows of the database must be equal, nothing may be open or in flight, and the memory must not have
grown with the transactions.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import grpc

from .coordinator_scenes import IN_FLIGHT
from .postgres import measured
from .report import Measure, progress, show
from .scene import STREAM, Scene, on_postgres

TRANSACTIONS = 1_000_000
LOAD_S = 20.0
SAMPLE_S = 1.0
POLL_S, END_S = 0.1, 10.0
WARM_UP = 0.2
"""Of all transactions: caches and pools fill, and the allocator finds its size."""
GROWTH_MB_MAX = 16.0
"""After the warm-up, by the line that fits the samples best: what an allocator may gain. The least leak, an object of
16 bytes and the pointer to it for each of 800,000 transactions, is more."""
JUDGED_FROM = 200_000
"""Transactions: of fewer, the caches and pools that fill are most of the growth."""


class Sample(NamedTuple):
    """What was read at one moment."""

    finished: int
    rss_mb: float


def growth_mb(samples: Sequence[Sample]) -> float:
    """How much the memory has grown from the first to the last sample, by the line of least squares through all."""
    mean_x = sum(sample.finished for sample in samples) / len(samples)
    mean_y = sum(sample.rss_mb for sample in samples) / len(samples)
    square = sum((sample.finished - mean_x) ** 2 for sample in samples)
    if not square:
        return 0.0
    slope = sum((sample.finished - mean_x) * (sample.rss_mb - mean_y) for sample in samples) / square
    return slope * (samples[-1].finished - samples[0].finished)


class Watching:
    """Reads memory and progress beside the load, in a thread of its own."""

    def __init__(self, scene: Scene, transactions: int) -> None:
        self.samples: list[Sample] = []
        self._scene = scene
        self._transactions = transactions
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="soak-watch")

    def __enter__(self) -> Watching:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _watch(self) -> None:
        start_s, told_s = time.monotonic(), time.monotonic()
        while not self._ending.wait(SAMPLE_S):
            try:
                finished = self._scene.statistics().confirmed
            except grpc.RpcError:  # busy: the next one will do
                continue
            self.samples.append(Sample(finished, self._scene.coordinator.rss_mb()))
            now_s = time.monotonic()
            if finished and now_s - told_s >= 10 * SAMPLE_S:
                told_s = now_s
                left_s = (now_s - start_s) * (self._transactions - finished) / finished
                share = finished / self._transactions
                rss_mb = self.samples[-1].rss_mb
                progress(f"{finished:,} done ({share:.0%}), {rss_mb:.1f} MB, about {max(0, left_s):.0f} s left")


def run(transactions: int) -> list[Measure]:
    """Run it. Raises RuntimeError if the answers, the coordinator's counts and the rows are not equal at the end."""
    with measured() as (server, folder), on_postgres(server, folder) as scene:
        progress(f"{transactions:,} transactions, {IN_FLIGHT} in flight")
        done, start_s = 0, time.perf_counter()
        with Watching(scene, transactions) as watching:
            rate = 0.0
            while done < transactions:
                seconds = min(LOAD_S, (transactions - done) / rate if rate else min(LOAD_S, transactions / 10_000))
                load = scene.load(STREAM, IN_FLIGHT, max(0.5, seconds))
                done, rate = done + load.answers, load.per_s
        took_s = time.perf_counter() - start_s
        live = _left_in_flight(scene)
        scene.stop()  # holds answers, counts and rows against each other
    warm = [sample for sample in watching.samples if sample.finished >= WARM_UP * transactions]
    return [
        Measure("soak_transactions", float(done), "transactions"),
        Measure("soak_per_s", done / took_s, "1/s"),
        Measure("soak_live_at_end", float(live), "transactions", goal="0", met=live == 0),
        *_memory(warm, judged=transactions >= JUDGED_FROM),
    ]


def _left_in_flight(scene: Scene) -> int:
    """What the coordinator still has in memory, when its last saves have had their time."""
    gives_up_s = time.monotonic() + END_S
    while (live := scene.statistics().live) and time.monotonic() < gives_up_s:
        time.sleep(POLL_S)
    return live


def _memory(samples: Sequence[Sample], *, judged: bool) -> list[Measure]:
    if len(samples) < 2:
        return []
    grown = growth_mb(samples)
    goal, met = (f"<= {GROWTH_MB_MAX:g}", grown <= GROWTH_MB_MAX) if judged else (None, None)
    return [
        Measure("soak_rss_growth_mb", grown, "MB", goal=goal, met=met),
        Measure("soak_rss_mb_first", samples[0].rss_mb, "MB"),
        Measure("soak_rss_mb_last", samples[-1].rss_mb, "MB"),
        Measure("soak_rss_mb_highest", max(sample.rss_mb for sample in samples), "MB"),
    ]


def main() -> int:
    """0 if nothing has grown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--transactions", type=int, default=TRANSACTIONS)
    options = parser.parse_args()
    if options.transactions < 1:
        parser.error("--transactions must be at least 1")
    measures = run(options.transactions)
    show("soak", measures)
    return 1 if any(measure.met is False for measure in measures) else 0


if __name__ == "__main__":
    sys.exit(main())
