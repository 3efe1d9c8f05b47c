"""What is measured of the coordinator, scene by scene; ``coordinator`` makes figures of it."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

from tests.postgres import PostgresServer

from . import aged, baselines
from .processes import Process
from .report import progress
from .scene import EIGHT_STREAMS, HOLDING, KEYED, STEADY, STREAM, UNARY, Load, Scene, on_postgres, on_sqlite

CLIENTS = 64
IN_FLIGHT = 512
HELD = 10_000
OLD_ROWS = 1_000_000
POLL_S = 0.1
END_S = 120.0
HOLDING_FLAGS = ("--timeout-ms", "300000", "--call-timeout-ms", "120000", "--lease-ms", "130000")
"""Nothing is repeated or given up while it is held."""
INSTANCES = 3
"""Of each participant: a coordinator has at most 4,096 calls out to one address."""


class Sizes(NamedTuple):
    """How much is measured. Times are seconds."""

    pgbench_s: int = 10
    bare_s: float = 2.0
    warm_up_s: float = 2.0
    unary_s: float = 6.0
    stream_s: float = 6.0
    rounds: int = 3
    sweep_s: float = 3.0
    sweep: tuple[int, ...] = (1, 4, 16, 64, 256, 1024)
    sweep_unary_max: int = 256
    steady_s: float = 10.0
    idle_s: float = 10.0
    all_scenes: bool = True


FULL = Sizes()
SMALL = Sizes(
    pgbench_s=4, bare_s=1.0, warm_up_s=1.0, unary_s=3.0, stream_s=4.0, rounds=1, all_scenes=False
)  # fmt: skip


def spread(values: Sequence[float]) -> float | None:
    """How far highest and lowest lie apart, as a share of the middle one; None of one alone."""
    return (max(values) - min(values)) / median(values) if len(values) > 1 else None


class Several(NamedTuple):
    """The same load several times."""

    loads: Sequence[Load]

    def median(self, name: str) -> float:
        """The middle one of a figure of ``Load``."""
        return float(median(getattr(load, name) for load in self.loads))

    def spread(self, name: str) -> float | None:
        """Likewise how far they lie apart."""
        return spread([getattr(load, name) for load in self.loads])


class Idle(NamedTuple):
    """A coordinator that has nothing to do."""

    cpu_pct: float
    rss_mb: float


class Alone(NamedTuple):
    """The parts of a unary transaction, measured alone before each load of one client, and echoes of 64 clients."""

    echoes: Sequence[baselines.Bare]
    commits: Sequence[baselines.Bare]
    echo_64: baselines.Bare

    def ms(self) -> Sequence[float]:
        """What a transaction of one client waits for: begin and decision are flushed; the call itself, Try and Confirm
        are round trips."""
        return [2 * commit.p50_ms + 3 * echo.p50_ms for echo, commit in zip(self.echoes, self.commits, strict=True)]


class Held(NamedTuple):
    """A coordinator with ``HELD`` transactions in flight."""

    in_flight: int
    rss_mb: float
    rss_before_mb: float


Sweep = Mapping[str, Mapping[int, Load]]
"""By kind of load, then by how many are in flight."""


class Found(NamedTuple):
    """All that was measured; None is what a small run leaves out."""

    unary: dict[int, Several]
    alone: Alone
    stream: Several
    commits_per_tx: float
    """Of that stream, by PostgreSQL's own count."""
    workers: Several
    sweep: Sweep = MappingProxyType({})
    steady: Load | None = None
    sqlite: tuple[baselines.Bare, Several] | None = None
    held: Held | None = None
    aged: Load | None = None
    idle: Idle | None = None


def measure_all(server: PostgresServer, folder: Path, sizes: Sizes) -> Found:
    """One scene after another."""
    unary, alone = _unary(server, folder, sizes)
    stream, commits = _stream(server, folder, sizes, workers=1)
    workers, _ = _stream(server, folder, sizes, workers=2)
    if not sizes.all_scenes:
        return Found(unary, alone, stream, commits, workers)
    with on_postgres(server, folder) as scene:
        sweep = _sweep(scene, sizes)
        half = max(stream.median("per_s"), *(load.per_s for load in sweep["stream"].values())) / 2
        progress(f"ExecuteStream at {half:.0f} transactions/s, half the peak, {sizes.steady_s:g} s")
        steady = scene.load(STEADY, half, sizes.steady_s)
        scene.stop()
    return Found(
        unary, alone, stream, commits, workers, sweep, steady,
        _on_sqlite(folder, sizes), _held(server, folder), _aged(server, folder, sizes), _idle(server, folder, sizes),
    )  # fmt: skip


def _unary(server: PostgresServer, folder: Path, sizes: Sizes) -> tuple[dict[int, Several], Alone]:
    """One client in turn with its parts alone, so that what the machine does meanwhile meets both; then many."""
    with ExitStack() as stack:
        parts = baselines.Parts(stack, server, folder)
        scene = stack.enter_context(on_postgres(server, folder))
        progress(
            f"unary Execute, 1 client: {sizes.rounds} x {sizes.unary_s:g} s, each after bare echoes and bare commits"
        )
        scene.load(UNARY, 1, sizes.warm_up_s)
        echoes, commits, one = [], [], []
        for _ in range(sizes.rounds):
            echoes.append(parts.echo(1, sizes.bare_s))
            commits.append(parts.commit(sizes.bare_s))
            one.append(scene.load(UNARY, 1, sizes.unary_s))
        progress(
            f"{CLIENTS} clients: bare echoes {sizes.bare_s:g} s, unary Execute {sizes.rounds} x {sizes.unary_s:g} s"
        )
        alone = Alone(echoes, commits, parts.echo(CLIENTS, sizes.bare_s))
        many = scene.loads(UNARY, CLIENTS, sizes.unary_s, sizes.rounds, sizes.warm_up_s)
        scene.stop()
    return {1: Several(one), CLIENTS: Several(many)}, alone


def _stream(server: PostgresServer, folder: Path, sizes: Sizes, workers: int) -> tuple[Several, float]:
    flags, generator = (("--workers", str(workers)), EIGHT_STREAMS) if workers > 1 else ((), STREAM)
    with on_postgres(server, folder, flags) as scene:
        progress(f"ExecuteStream, {IN_FLIGHT} in flight, {workers} worker(s): {sizes.rounds} x {sizes.stream_s:g} s")
        loads = scene.loads(generator, IN_FLIGHT, sizes.stream_s, sizes.rounds, sizes.warm_up_s)
        return Several(loads), scene.stop()


def _sweep(scene: Scene, sizes: Sizes) -> Sweep:
    """Throughput and latency against concurrency, for the chart."""
    progress(f"for the chart: ExecuteStream with {', '.join(map(str, sizes.sweep))} in flight, and unary alike")
    return {
        "stream": {n: scene.load(STREAM, n, sizes.sweep_s) for n in sizes.sweep},
        "unary": {n: scene.load(UNARY, n, sizes.sweep_s) for n in sizes.sweep if n <= sizes.sweep_unary_max},
    }


def _on_sqlite(folder: Path, sizes: Sizes) -> tuple[baselines.Bare, Several]:
    bare = baselines.sqlite(folder, sizes.bare_s)
    with on_sqlite(folder) as scene:
        progress(f"ExecuteStream on SQLite, {IN_FLIGHT} in flight: {sizes.rounds} x {sizes.stream_s:g} s")
        loads = scene.loads(STREAM, IN_FLIGHT, sizes.stream_s, sizes.rounds, sizes.warm_up_s)
        scene.stop()
    return bare, Several(loads)


def _held(server: PostgresServer, folder: Path) -> Held:
    """Memory while so many are in flight: their participants answer nothing before the memory is read."""
    with on_postgres(server, folder, HOLDING_FLAGS, [HOLDING] * INSTANCES) as scene:
        progress(f"memory with {HELD} transactions in flight")
        before_mb = scene.coordinator.rss_mb()
        with scene.generating(EIGHT_STREAMS, HELD, 0) as load:
            in_flight = _until_begun(scene, load, HELD)
            time.sleep(1)  # until what was sent has come as far as it will
            found = Held(in_flight, scene.coordinator.rss_mb(), before_mb)
            for participant in scene.participants:
                participant.signal(signal.SIGUSR1)
            scene.read(load)
        scene.stop()
    return found


def _until_begun(scene: Scene, load: Process, count: int) -> int:
    gives_up_s = time.monotonic() + END_S
    while (live := scene.statistics().live) < count:
        if load.ended() or time.monotonic() > gives_up_s:
            raise RuntimeError(f"{count} were to be in flight, {live} are; the load: {load.log.read_text()[-2000:]}")
        time.sleep(POLL_S)
    return int(live)


def _aged(server: PostgresServer, folder: Path, sizes: Sizes) -> Load:
    """The write-ahead log in a database that holds many finished transactions, with random keys of users."""
    with on_postgres(server, folder) as scene:
        progress(f"{OLD_ROWS} old rows with random keys are stored")
        aged.store(scene.store, OLD_ROWS)
        progress(f"ExecuteStream with random keys, {IN_FLIGHT} in flight, beside them: {sizes.stream_s:g} s")
        scene.load(KEYED, IN_FLIGHT, sizes.warm_up_s)
        load = scene.load(KEYED, IN_FLIGHT, sizes.stream_s)
        scene.stop(stored_before=OLD_ROWS)
    return load


def _idle(server: PostgresServer, folder: Path, sizes: Sizes) -> Idle:
    with on_postgres(server, folder) as scene:
        scene.restart()  # an idle coordinator is one that found its schema there
        progress(f"an idle coordinator, {sizes.idle_s:g} s")
        time.sleep(1)  # the start itself is not idle
        before_s, before = scene.coordinator.cpu_s(), time.perf_counter()
        time.sleep(sizes.idle_s)
        share = (scene.coordinator.cpu_s() - before_s) / (time.perf_counter() - before)
        return Idle(share * 100, scene.coordinator.rss_mb())
