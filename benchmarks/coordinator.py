"""The coordinator on PostgreSQL with two no-op participants, beside ``pgbench -N`` on the same server.

Everything shares this machine: PostgreSQL, coordinator, two participants and the load generator, each a process of
its own. Answers given are counted against the CONFIRMED rows that the database then holds.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import psycopg

from coordinator.model import State
from tests.postgres import PostgresServer

from .postgres import measured, pgbench_database, pgbench_tps
from .processes import Process, start_coordinator, stopped_line
from .report import Measure, progress

CLIENTS = (1, 64)
LOAD_S = 10.0
WARM_UP_S = 2.0
IDLE_S = 10.0


class Load(NamedTuple):
    """What one load saw, and what it cost."""

    answers: int
    seconds: float
    p50_ms: float
    p99_ms: float
    cpu_s: float
    flushes: int
    begun: int
    commits: int
    """By the server's own count: the journal's, and what the look for due work and the checks of the end add."""


def run() -> list[Measure]:
    """Measure; the figures in the order in which they are shown."""
    with measured() as (server, folder), pgbench_database(server) as bench_dsn:
        progress("pgbench -N, before")
        tps = [pgbench_tps(server, bench_dsn)]
        loads = {clients: _load(server, folder, clients) for clients in CLIENTS}
        idle_cpu_pct, idle_rss_mb = _idle(server, folder)
        progress("pgbench -N, after")
        tps.append(pgbench_tps(server, bench_dsn))
    return _measures(max(tps), loads, idle_cpu_pct, idle_rss_mb)


def _measures(tps: float, loads: dict[int, Load], idle_cpu_pct: float, idle_rss_mb: float) -> list[Measure]:
    measures = [Measure("pgbench_tps", tps, "1/s")]
    for clients, load in loads.items():
        rate = load.answers / load.seconds
        ratio_name = "unary_ratio" if clients == max(loads) else f"unary_ratio_{clients}"
        per_tx = load.flushes / load.begun
        cpu_us = load.cpu_s / load.answers * 1e6
        # At one client: the begin and the decision; the last save rides on the next one's begin.
        goal, met = ("2.00", round(per_tx, 2) == 2.0) if clients == 1 else ("< 1.0", per_tx < 1.0)
        measures += [
            Measure(f"transactions_per_s_{clients}", rate, "1/s", tps, rate / tps),
            Measure(ratio_name, rate / tps, "pgbench", None, None),
            Measure(f"p50_ms_{clients}", load.p50_ms, "ms"),
            Measure(f"p99_ms_{clients}", load.p99_ms, "ms"),
            Measure(f"cpu_us_unary_{clients}", cpu_us, "µs/transaction"),
            Measure(f"commits_per_tx_unary_{clients}", per_tx, "commits", load.commits / load.begun, None, goal, met),
        ]
    measures.append(Measure("idle_cpu_pct", idle_cpu_pct, "% of a core", None, None, "< 1", idle_cpu_pct < 1))
    measures.append(Measure("idle_rss_mb", idle_rss_mb, "MB", None, None, "< 120", idle_rss_mb < 120))
    return measures


def _load(server: PostgresServer, folder: Path, clients: int) -> Load:
    """One load on a fresh coordinator with a fresh database."""
    with ExitStack() as stack:
        dsn = server.create_database()
        stack.callback(server.drop_database, dsn)
        coordinator, address = start_coordinator(stack, folder, dsn)
        for name in ("noop-1", "noop-2"):
            stack.enter_context(Process("benchmarks.noop_participant", [name, address], folder / f"{name}.log"))
        progress(f"unary Execute, {clients} client(s): {WARM_UP_S:.0f} s to warm up, {LOAD_S:.0f} s measured")
        _generate(folder, address, clients, WARM_UP_S)
        before_s = coordinator.cpu_s()
        seen = _generate(folder, address, clients, LOAD_S)
        cpu_s = coordinator.cpu_s() - before_s
        commits = _commits(dsn)
        coordinator.close()
        stopped = stopped_line(coordinator.log)
        _check_confirmed(dsn, stopped["begun"])
    return Load(
        int(seen["answers"]), seen["seconds"], seen["p50_ms"], seen["p99_ms"], cpu_s,
        stopped["flushes"], stopped["begun"], commits,
    )  # fmt: skip


def _generate(folder: Path, address: str, clients: int, seconds: float) -> dict[str, float]:
    with Process("benchmarks.load", [address, str(clients), str(seconds)], folder / "load.log") as load:
        seen: dict[str, float] = json.loads(load.read_all())
    return seen


def _idle(server: PostgresServer, folder: Path) -> tuple[float, float]:
    """CPU in per cent of a core, and resident MB, of a coordinator that has nothing to do."""
    with ExitStack() as stack:
        dsn = server.create_database()
        stack.callback(server.drop_database, dsn)
        start_coordinator(stack, folder, dsn)[0].close()  # makes the schema: an idle coordinator is a restarted one
        coordinator, _ = start_coordinator(stack, folder, dsn)
        progress(f"an idle coordinator, {IDLE_S:.0f} s")
        time.sleep(1)  # the start itself is not idle
        before_s, before = coordinator.cpu_s(), time.perf_counter()
        time.sleep(IDLE_S)
        share = (coordinator.cpu_s() - before_s) / (time.perf_counter() - before)
        return share * 100, coordinator.rss_mb()


def _check_confirmed(dsn: str, begun: int) -> None:
    """Every transaction that was begun was answered CONFIRMED; so many rows must say so, and no others be there."""
    with psycopg.connect(dsn) as connection:
        rows = connection.execute("SELECT state, count(*) FROM tricord_transaction GROUP BY state").fetchall()
    if dict(rows) != {State.CONFIRMED: begun}:
        raise RuntimeError(f"{begun} transactions were answered CONFIRMED, the database holds (state, rows): {rows}")


def _commits(dsn: str) -> int:
    time.sleep(1.5)  # the server's counters are up to a second behind
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(
            "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
        ).fetchone()
    assert row is not None
    return int(row[0])
