"""What the fence costs beside the bare local transaction: same driver, same engine, the same UPDATE by key.

One process calls one thing at a time, and the variants take turns call by call, so that whatever else this machine
does hits them alike. Everything is checked afterwards against what the database holds.
"""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.ext.asyncio import create_async_engine

from tests.mariadb import MariaDbServer, connect, pymysql_url
from tests.postgres import PostgresServer
from tests.servers import ServerUnavailable

from . import fence_counts
from .fence_bank import BARE, FIRST, NAIVE, REPLAYS, TRY, TRY_JSON, VARIANTS, AsyncBank, Bank, Job, one_round, verify
from .fence_counts import Durable, Statements, Written
from .report import Measure, progress, show_wide

SECONDS: Final = {"postgresql": 16.0, "postgresql_asyncio": 10.0, "mariadb": 8.0, "sqlite": 6.0}
WARM_UP_ROUNDS: Final = 40
LATENCY_GOAL, CPU_GOAL = 1.35, 1.5


class Cost(NamedTuple):
    """Of one call. The CPU is this process's, the mean over all calls."""

    p50_us: float
    p99_us: float
    cpu_us: float
    calls: int


class Samples:
    """What was measured of each variant, in ns."""

    def __init__(self) -> None:
        self._wall: dict[str, list[int]] = {variant: [] for variant in VARIANTS}
        self._cpu: dict[str, list[int]] = {variant: [] for variant in VARIANTS}

    @contextmanager
    def collecting(self) -> Iterator[Samples]:
        """Without the collector's walks over what was there before."""
        gc.collect()
        gc.freeze()
        try:
            yield self
        finally:
            gc.unfreeze()

    @contextmanager
    def timing(self, variant: str) -> Iterator[None]:
        """One call."""
        cpu, wall = time.process_time_ns(), time.perf_counter_ns()
        yield
        wall, cpu = time.perf_counter_ns() - wall, time.process_time_ns() - cpu
        self._wall[variant].append(wall)
        self._cpu[variant].append(cpu)

    def costs(self) -> dict[str, Cost]:
        """What they come to."""
        costs = {}
        for variant, wall in self._wall.items():
            ordered = sorted(wall)
            p50, p99 = (ordered[int(len(ordered) * share)] / 1000 for share in (0.50, 0.99))
            costs[variant] = Cost(p50, p99, fmean(self._cpu[variant]) / 1000, len(wall))
        return costs


class Postgres(NamedTuple):
    """What was measured and counted on PostgreSQL."""

    costs: dict[str, Cost]
    asyncio_costs: dict[str, Cost]
    statements: dict[str, Statements]
    durable: dict[str, Durable]
    replays: Written


def run() -> list[Measure]:
    """Measure; the figures in the order in which they are shown."""
    progress(f"{os.cpu_count()} cores for everything; one call at a time, the variants in turns")
    postgres = _postgres()
    _show("postgresql", postgres.costs, postgres.statements, postgres.durable)
    _show("postgresql_asyncio", postgres.asyncio_costs, {}, {})
    measures = _headline(postgres)
    details = _details("postgresql", postgres.costs, postgres.statements)
    details += _details("postgresql_asyncio", postgres.asyncio_costs, {})
    others = {"postgresql_asyncio": postgres.asyncio_costs}
    for name, other in (("mariadb", _mariadb), ("sqlite", _sqlite)):
        try:
            others[name], statements = other()
        except ServerUnavailable as unavailable:
            progress(f"{name} is left out: {unavailable}")
            continue
        _show(name, others[name], statements, {})
        details += _details(name, others[name], statements)
    for name, costs in others.items():
        bare, fenced = costs[BARE], costs[TRY]
        measures.append(_ratio(f"fence_latency_ratio_{name}", fenced.p50_us, bare.p50_us, None))
        measures.append(_ratio(f"fence_cpu_ratio_{name}", fenced.cpu_us, bare.cpu_us, None))
    return measures + details


def _postgres() -> Postgres:
    with ExitStack() as stack:
        server = stack.enter_context(PostgresServer.from_environment())
        admin = stack.enter_context(fence_counts.administrator(server.dsn()))
        progress(f"PostgreSQL as read back from it: {fence_counts.settings_of_postgres(admin)}")
        dsn = server.create_database()
        stack.callback(server.drop_database, dsn)
        engine = stack.enter_context(_disposed(create_engine(_psycopg_url(dsn))))
        bank = Bank(engine)
        costs = _measure("postgresql", bank)
        _say_prepared(engine)
        statements = fence_counts.statements_of(bank, fence_counts.on_postgres)
        durable = fence_counts.durable_of(bank, admin, urlsplit(dsn).path[1:])
        replays = fence_counts.written_by_replays(bank, admin)
        verify(engine, bank.done)
        dsn = server.create_database()
        stack.callback(server.drop_database, dsn)
        asyncio_costs = asyncio.run(_measure_async(dsn))
    return Postgres(costs, asyncio_costs, statements, durable, replays)


def _mariadb() -> tuple[dict[str, Cost], dict[str, Statements]]:
    with ExitStack() as stack:
        named = os.environ.get(MariaDbServer.dsn_variable) or None
        server = stack.enter_context(MariaDbServer(durable=True, external_dsn=named))
        with closing(connect(server.dsn())) as connection:
            settings = fence_counts.settings_of_mariadb(connection)
        progress(f"MariaDB as read back from it: {settings}; PyMySQL prepares nothing")
        dsn = server.create_database()
        stack.callback(server.drop_database, dsn)
        engine = stack.enter_context(_disposed(create_engine(pymysql_url(dsn))))
        bank = Bank(engine)
        costs = _measure("mariadb", bank)
        statements = fence_counts.statements_of(bank, fence_counts.on_mariadb)
        verify(engine, bank.done)
    return costs, statements


def _sqlite() -> tuple[dict[str, Cost], dict[str, Statements]]:
    with tempfile.TemporaryDirectory(prefix="tricord-bench-") as folder:
        engine = create_engine(f"sqlite:///{Path(folder) / 'bank.db'}")

        @event.listens_for(engine, "connect")
        def use_wal(connection: object, record: object) -> None:
            connection.execute("PRAGMA journal_mode = WAL")  # type: ignore[attr-defined]

        with _disposed(engine):
            bank = Bank(engine)
            with engine.connect() as connection:
                settings = {
                    name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
                    for name in ("journal_mode", "synchronous")
                }
            progress(f"SQLite as read back from it: {settings}")
            costs = _measure("sqlite", bank)
            statements = fence_counts.statements_of(bank, fence_counts.on_sqlite)
            verify(engine, bank.done)
    return costs, statements


@contextmanager
def _disposed(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    finally:
        engine.dispose()


def _measure(name: str, bank: Bank) -> dict[str, Cost]:
    progress(f"{name}: {SECONDS[name]:.0f} s measured")
    for job in _warm_up():
        bank.run(job)
    with Samples().collecting() as samples:
        for job in _for_seconds(SECONDS[name]):
            with samples.timing(job.variant):
                bank.run(job)
    return samples.costs()


async def _measure_async(dsn: str) -> dict[str, Cost]:
    name = "postgresql_asyncio"
    progress(f"{name}: {SECONDS[name]:.0f} s measured, on asyncio's own event loop")
    engine = create_async_engine(_psycopg_url(dsn))
    try:
        bank = AsyncBank(engine)
        await bank.prepare()
        for job in _warm_up():
            await bank.run(job)
        with Samples().collecting() as samples:
            for job in _for_seconds(SECONDS[name]):
                with samples.timing(job.variant):
                    await bank.run(job)
    finally:
        await engine.dispose()
    with _disposed(create_engine(_psycopg_url(dsn))) as synchronous:
        verify(synchronous, bank.done)
    return samples.costs()


def _warm_up() -> Iterator[Job]:
    for _ in range(WARM_UP_ROUNDS):
        yield from one_round()


def _for_seconds(seconds: float) -> Iterator[Job]:
    """Whole rounds."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        yield from one_round()


_PREPARED: Final = text(
    "SELECT name, generic_plans, custom_plans FROM pg_prepared_statements WHERE statement LIKE 'UPDATE account%'"
)


def _say_prepared(engine: Engine) -> None:
    with engine.connect() as connection:
        found = connection.execute(_PREPARED).first()
        connection.commit()  # psycopg deallocates all that is prepared when it rolls back
    if found is None:
        progress("the bare UPDATE is NOT prepared at the end: something deallocates what psycopg prepares")
    else:
        told = f"the bare UPDATE is prepared by psycopg, by itself, at its sixth use on a connection: {found[0]}"
        progress(f"{told}, run {found[1]} times by the generic plan, {found[2]} times by another")


def _psycopg_url(dsn: str) -> str:
    return dsn.replace("postgresql:", "postgresql+psycopg:", 1)


def _headline(found: Postgres) -> list[Measure]:
    costs, bare, fenced = found.costs, found.costs[BARE], found.costs[TRY]
    replay = max(found.statements[variant].on_tables or 0 for variant in REPLAYS)
    naive = costs[NAIVE]
    measures = [
        _ratio("fence_latency_ratio", fenced.p50_us, bare.p50_us, LATENCY_GOAL),
        _ratio("fence_cpu_ratio", fenced.cpu_us, bare.cpu_us, CPU_GOAL),
        _ratio("fence_with_json_latency_ratio", costs[TRY_JSON].p50_us, bare.p50_us, None),
        _ratio("fence_with_json_cpu_ratio", costs[TRY_JSON].cpu_us, bare.cpu_us, None),
        _ratio("naive_latency_ratio", naive.p50_us, bare.p50_us, None),
        _ratio("naive_cpu_ratio", naive.cpu_us, bare.cpu_us, None),
        _count("replay_statements", replay, "statements on tables", 1),
        _count("replay_wal_bytes", found.replays.wal_bytes, "bytes", 0),
        _count("replay_xids", found.replays.xids, "transaction ids", 0),
    ]
    if found.durable:
        most = max(found.durable[variant].commits for variant in FIRST)
        extra = max(found.durable[variant].flushes for variant in FIRST) - found.durable[BARE].flushes
        measures.append(_count("commits_per_phase", most, "commits, at most", 1))
        measures.append(_count("extra_flushes_per_phase", extra, "flushes, at most", 0))
    return measures


def _ratio(metric: str, value: float, bare: float, goal: float | None) -> Measure:
    ratio = value / bare
    if goal is None:
        return Measure(metric, value, "µs", bare, ratio)
    return Measure(metric, value, "µs", bare, ratio, f"ratio ≤ {goal}", ratio <= goal)


def _count(metric: str, value: float, unit: str, goal: int) -> Measure:
    return Measure(metric, value, unit, None, None, str(goal), round(value, 2) <= goal)


def _details(name: str, costs: dict[str, Cost], statements: dict[str, Statements]) -> list[Measure]:
    """For the file; a table of its own has shown them."""
    measures = []
    bare = costs[BARE]
    for variant, cost in costs.items():
        metric = f"{name}.{variant}"
        measures += [
            Measure(f"{metric}.p50", cost.p50_us, "µs", bare.p50_us, cost.p50_us / bare.p50_us),
            Measure(f"{metric}.p99", cost.p99_us, "µs", bare.p99_us, cost.p99_us / bare.p99_us),
            Measure(f"{metric}.cpu", cost.cpu_us, "µs", bare.cpu_us, cost.cpu_us / bare.cpu_us),
            Measure(f"{metric}.calls", cost.calls, "calls"),
        ]
        for counted, value in (statements[variant]._asdict() if variant in statements else {}).items():
            if value is not None:
                measures.append(Measure(f"{metric}.{counted}", value, counted.replace("_", " ")))
    return measures


def _show(name: str, costs: dict[str, Cost], statements: dict[str, Statements], durable: dict[str, Durable]) -> None:
    heads = ["", "p50 µs", "p99 µs", "CPU µs", "p50 ÷ bare", "CPU ÷ bare", "calls"]
    heads += [head.replace("_", " ") for head in (*Statements._fields, *Durable._fields)]
    bare = costs[BARE]
    rows = []
    for variant, cost in costs.items():
        ratios = cost.p50_us / bare.p50_us, cost.cpu_us / bare.cpu_us
        counted = statements.get(variant, [None] * len(Statements._fields))
        commits = durable.get(variant, [None] * len(Durable._fields))
        rows.append([variant, cost.p50_us, cost.p99_us, cost.cpu_us, *ratios, cost.calls, *counted, *commits])
    show_wide(f"{name}: one call", heads, rows)
