"""The coordinator with two no-op participants, beside its parts measured alone in the same run.

Everything shares this machine: PostgreSQL, coordinator, two participants and the load generator, each a process of
its own. Answers given are held against the CONFIRMED rows that the store has at the end.
"""

from __future__ import annotations

from .coordinator_figures import Pgbench, draw, figures
from .coordinator_scenes import FULL, SMALL, measure_all
from .postgres import measured, pgbench_database, pgbench_tps
from .report import OUT, Measure, progress


def run(small: bool = False) -> list[Measure]:
    """Measure; the figures in the order in which they are shown. A small run leaves out what takes its time."""
    sizes = SMALL if small else FULL
    with measured() as (server, folder), pgbench_database(server) as bench_dsn:
        progress(f"pgbench -N, before, {sizes.pgbench_s} s")
        before_tps = pgbench_tps(server, bench_dsn, sizes.pgbench_s)
        found = measure_all(server, folder, sizes)
        progress(f"pgbench -N, after, {sizes.pgbench_s} s")
        after_tps = pgbench_tps(server, bench_dsn, sizes.pgbench_s)
    tps = Pgbench(before_tps, after_tps)
    if found.sweep:
        path = draw(OUT, tps, found)
        progress(f"drawn to benchmarks/out/{path.name}")
    return figures(tps, found)
