"""Figures and a chart of what ``coordinator_scenes`` has measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from . import chart
from .coordinator_scenes import CLIENTS, Found, Several, spread
from .report import Measure, judged

PER_TX = "µs/transaction"


class Pgbench(NamedTuple):
    """What the figures stand beside: transactions per second."""

    before: float
    after: float

    @property
    def higher(self) -> float:
        return max(self)


def figures(pgbench: Pgbench, found: Found) -> list[Measure]:
    """Those with a goal first, then what they come from."""
    return [
        *_goals(pgbench, found),
        *_goals_of_all_scenes(found),
        *_rates(pgbench, found),
        *_unary(found),
        *_alone(pgbench, found),
        *_sweep(found),
    ]


def _goals(pgbench: Pgbench, found: Found) -> Iterator[Measure]:
    stream, unary = found.stream, found.unary[CLIENTS]
    workers_cpu = found.workers.median("cpu_us") / stream.median("cpu_us")
    yield _ratio("stream_ratio", stream, pgbench.higher, "pgbench")
    yield _ratio("stream_ratio_2", found.workers, pgbench.higher, "pgbench")
    yield _ratio("unary_ratio", unary, pgbench.higher, "pgbench")
    yield _latency_ratio(found)
    yield judged("cpu_us_stream", stream.median("cpu_us"), PER_TX, stream.spread("cpu_us"))
    yield judged("cpu_us_unary", unary.median("cpu_us"), PER_TX, unary.spread("cpu_us"))
    yield judged("commits_per_tx", found.commits_per_tx, "commits")
    yield judged("wal_bytes_per_tx", stream.median("wal_per_tx"), "bytes", stream.spread("wal_per_tx"))
    yield judged("workers_cpu_ratio", workers_cpu, "one worker", found.workers.spread("cpu_us"))


def _latency_ratio(found: Found) -> Measure:
    """The middle one of the rounds' ratios."""
    ratios = [load.p50_ms / ms for load, ms in zip(found.unary[1].loads, found.alone.ms(), strict=True)]
    return judged("latency_ratio", median(ratios), "parts alone", spread(ratios))


def _goals_of_all_scenes(found: Found) -> Iterator[Measure]:
    if found.steady is not None:
        yield judged("p99_over_p50", found.steady.p99_ms / found.steady.p50_ms, "p50")
    if found.held is not None:
        yield judged("rss_mb_10k", found.held.rss_mb, "MB")
    if found.sqlite is not None:
        bare, sqlite = found.sqlite
        yield _ratio("sqlite_ratio", sqlite, bare.per_s, "bare SQLite")
    if found.idle is not None:
        yield judged("idle_cpu_pct", found.idle.cpu_pct, "% of a core")
        yield judged("idle_rss_mb", found.idle.rss_mb, "MB")


def _rates(pgbench: Pgbench, found: Found) -> Iterator[Measure]:
    """Transactions per second, and what else belongs to those loads."""
    yield _rate("stream_per_s", found.stream, pgbench.higher)
    yield _rate("stream_per_s_2", found.workers, pgbench.higher)
    for clients, load in found.unary.items():
        yield _rate(f"transactions_per_s_{clients}", load, pgbench.higher)
    yield _several("stream_p50_ms", found.stream, "p50_ms", "ms")
    yield _several("stream_p99_ms", found.stream, "p99_ms", "ms")
    yield _several("cpu_us_stream_2", found.workers, "cpu_us", PER_TX)
    if found.steady is not None:
        yield Measure("steady_per_s", found.steady.per_s, "1/s")
        yield Measure("steady_p50_ms", found.steady.p50_ms, "ms")
        yield Measure("steady_p99_ms", found.steady.p99_ms, "ms")
    if found.aged is not None:
        yield Measure("wal_bytes_per_tx_aged", found.aged.wal_per_tx, "bytes")
        yield Measure("stream_per_s_aged", found.aged.per_s, "1/s")
    if found.sqlite is not None:
        bare, sqlite = found.sqlite
        yield _rate("sqlite_per_s", sqlite, bare.per_s)
    if found.held is not None:
        yield Measure("rss_mb_none_in_flight", found.held.rss_before_mb, "MB")


def _unary(found: Found) -> Iterator[Measure]:
    for clients, load in found.unary.items():
        yield _several(f"p50_ms_{clients}", load, "p50_ms", "ms")
        yield _several(f"p99_ms_{clients}", load, "p99_ms", "ms")
        if clients != CLIENTS:
            yield _several(f"cpu_us_unary_{clients}", load, "cpu_us", PER_TX)
        yield judged(f"commits_per_tx_unary_{clients}", load.median("flushes_per_tx"), "commits")


def _alone(pgbench: Pgbench, found: Found) -> Iterator[Measure]:
    alone = found.alone
    yield Measure("pgbench_tps", pgbench.higher, "1/s")
    yield Measure("pgbench_tps.before", pgbench.before, "1/s")
    yield Measure("pgbench_tps.after", pgbench.after, "1/s")
    yield _middle("bare_echo_p50_ms", [echo.p50_ms for echo in alone.echoes], "ms")
    yield Measure(f"bare_echo_per_s_{CLIENTS}", alone.echo_64.per_s, "1/s")
    yield _middle("bare_commit_p50_ms", [commit.p50_ms for commit in alone.commits], "ms")
    yield _middle("bare_commit_per_s", [commit.per_s for commit in alone.commits], "1/s")
    if found.sqlite is not None:
        yield Measure("bare_sqlite_per_s", found.sqlite[0].per_s, "1/s")


def _sweep(found: Found) -> Iterator[Measure]:
    for kind, loads in found.sweep.items():
        for size, load in loads.items():
            yield Measure(f"sweep.{kind}.{size}.per_s", load.per_s, "1/s")
            yield Measure(f"sweep.{kind}.{size}.p50", load.p50_ms, "ms")
            yield Measure(f"sweep.{kind}.{size}.p99", load.p99_ms, "ms")


def _ratio(metric: str, found: Several, beside: float, unit: str) -> Measure:
    return judged(metric, found.median("per_s") / beside, unit, found.spread("per_s"))


def _rate(metric: str, found: Several, beside: float) -> Measure:
    per_s = found.median("per_s")
    return Measure(metric, per_s, "1/s", beside, per_s / beside, spread=found.spread("per_s"))


def _middle(metric: str, values: Sequence[float], unit: str) -> Measure:
    return Measure(metric, median(values), unit, spread=spread(values))


def _several(metric: str, found: Several, name: str, unit: str) -> Measure:
    return Measure(metric, found.median(name), unit, spread=found.spread(name))


def draw(folder: Path, pgbench: Pgbench, found: Found) -> Path:
    """Throughput against concurrency, and the latencies that go with it. The file."""

    def lines(name: str, suffix: str = "", *, dashed: bool = False) -> list[chart.Line]:
        return [
            chart.Line(kind + suffix, [(size, getattr(load, name)) for size, load in loads.items()], number, dashed)
            for number, (kind, loads) in enumerate(found.sweep.items())
        ]

    folder.mkdir(exist_ok=True)
    path = folder / "coordinator.svg"
    latencies = [*lines("p50_ms", " p50"), *lines("p99_ms", " p99", dashed=True)]
    panels = [
        chart.Panel("Throughput, transactions/s", lines("per_s"), ("pgbench -N -c16", pgbench.higher)),
        chart.Panel("Latency, ms", latencies, logarithmic=True),
    ]
    chart.write(path, "Two no-op branches, durable, answered when finished; everything on one machine", panels)
    return path
