"""What it costs that a request is safe to repeat, beside the bare one's local transaction: same driver, same engine.

A request is one INSERT of the business and about 300 bytes of answer. Clients are threads of one process; the variants
take turns, a second each, so that whatever else this machine does hits them alike. What was answered is counted
afterwards against what the database holds.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

from sqlalchemy import Engine, create_engine, event

from participant_sdk.idempotency.idempotency import Idempotency
from tests.postgres import PostgresServer

from . import fence_counts
from .idempotency_shop import ATOMIC, BARE, FRONT, LEASED, REPLAY, REPLAY_LEASED, VARIANTS, Shop, identical
from .report import Measure, progress, show_wide

CLIENTS: Final = 16
SLICE_SECONDS: Final = 1.0
ROUNDS: Final = 8
ROUNDS_SMALL: Final = 3
BLOCK: Final = 200
IDENTICAL: Final = 50
GOALS: Final = {ATOMIC: 0.6, LEASED: 0.45, REPLAY: 6.0}
_NAMES: Final = {
    ATOMIC: "atomic_ratio",
    LEASED: "leased_ratio",
    REPLAY: "replay_ratio",
    REPLAY_LEASED: "replay_leased_ratio",
    FRONT: "replay_front_ratio",
}


class Rate:
    """How often a variant was answered, in how much time."""

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0
        self.cpu_seconds = 0.0

    @property
    def per_second(self) -> float:
        """By all clients together."""
        return self.calls / self.seconds


def run(small: bool = False) -> list[Measure]:
    """Measure; the figures in the order in which they are shown."""
    progress(f"{os.cpu_count()} cores for everything; {CLIENTS} clients, threads of one process")
    with ExitStack() as stack:
        server = stack.enter_context(PostgresServer.from_environment())
        admin = stack.enter_context(fence_counts.administrator(server.dsn()))
        progress(f"PostgreSQL as read back from it: {fence_counts.settings_of_postgres(admin)}")
        dsn = server.create_database()
        stack.callback(server.drop_database, dsn)
        engine = create_engine(dsn.replace("postgresql:", "postgresql+psycopg:", 1), pool_size=CLIENTS, max_overflow=2)
        stack.callback(engine.dispose)
        connections: list[Any] = []
        event.listen(engine, "connect", lambda connection, record: connections.append(connection))
        shop = stack.enter_context(Shop(engine).opened())
        rates = _measured(shop, ROUNDS_SMALL if small else ROUNDS)
        still_open = [connection for connection in connections if not connection.closed]
        counted = _counted(shop, still_open, admin, urlsplit(dsn).path[1:])
        elsewhere = _elsewhere(shop, still_open)
        together = stack.enter_context(Idempotency(engine, waiters_per_key_max=IDENTICAL))
        ran, replayed, held = identical(shop, together, IDENTICAL)
        shop.verify()
        hot = _hot(engine)
    return [*_ratios(rates), *_absolute(rates), *_costs(counted), *elsewhere, *_together(ran, replayed, held), hot]


def _measured(shop: Shop, rounds: int) -> dict[str, Rate]:
    rates = {variant: Rate() for variant in VARIANTS}
    with _clients(shop) as everybody:
        for variant in VARIANTS:
            everybody(variant, SLICE_SECONDS)  # warm: connections, prepared statements, answers to be replayed
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}: {len(VARIANTS)} variants, {SLICE_SECONDS:.0f} s each")
            for variant in VARIANTS[number % len(VARIANTS) :] + VARIANTS[: number % len(VARIANTS)]:
                calls, seconds, cpu_seconds = everybody(variant, SLICE_SECONDS)
                rates[variant].calls += calls
                rates[variant].seconds += seconds
                rates[variant].cpu_seconds += cpu_seconds
    return rates


@contextmanager
def _clients(shop: Shop) -> Iterator[Callable[[str, float], tuple[int, float, float]]]:
    """All clients, for a slice of time: how many requests were answered, in how many seconds, with how much CPU."""
    begins, ends = threading.Barrier(CLIENTS + 1), threading.Barrier(CLIENTS + 1)
    task: list[Any] = [None, 0.0]
    calls = [0] * CLIENTS
    failures: list[BaseException] = []

    def work(client: int) -> None:
        while True:
            begins.wait()
            if task[0] is None:
                return
            calls[client] = 0
            try:
                while time.perf_counter() < task[1]:
                    shop.request(task[0], client)
                    calls[client] += 1
            except BaseException as error:
                failures.append(error)
            ends.wait()

    def everybody(variant: str, seconds: float) -> tuple[int, float, float]:
        cpu, start = time.process_time(), time.perf_counter()
        task[:] = [variant, start + seconds]
        begins.wait()
        ends.wait()
        if failures:
            raise failures[0]
        return sum(calls), time.perf_counter() - start, time.process_time() - cpu

    threads = [threading.Thread(target=work, args=(client,), daemon=True) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield everybody
    finally:
        task[0] = None
        begins.wait()
        for thread in threads:
            thread.join()


def _counted(shop: Shop, connections: list[Any], admin: Any, database: str) -> dict[str, dict[str, float]]:
    """Of one request of each variant, by one client."""
    progress(f"counted: {BLOCK} requests of each variant by one client")
    counted = {}
    for variant in VARIANTS:
        shop.request(variant, 0)
        before = fence_counts.counters(connections, admin, database), fence_counts.log_position(admin)
        for _ in range(BLOCK):
            shop.request(variant, 0)
        after = fence_counts.counters(connections, admin, database), fence_counts.log_position(admin)
        counted[variant] = {
            "commits": (after[0][0] - before[0][0]) / BLOCK,
            "flushes": (after[0][1] - before[0][1]) / BLOCK,
            "wal_bytes": (after[1][0] - before[1][0]) / BLOCK,
        } | fence_counts.on_the_wire(connections, partial(shop.request, variant, 0))._asdict()
    heads = ["", *counted[BARE]]
    show_wide("one request", heads, [[variant, *costs.values()] for variant, costs in counted.items()])
    return counted


def _elsewhere(shop: Shop, connections: list[Any]) -> list[Measure]:
    """A repeat of an atomic request in a process that has not seen the key: what was begun has to be rolled back."""
    trips = fence_counts.on_the_wire(connections, partial(shop.replayed_elsewhere, 0)).round_trips
    return [Measure("replay_elsewhere.round_trips", trips or 0, "round trips")]


def _hot(engine: Engine) -> Measure:
    """Completions change no index."""
    sql = "SELECT n_tup_hot_upd, n_tup_upd FROM pg_stat_user_tables WHERE relname = 'tricord_idempotency'"
    with engine.connect() as connection:
        hot, all_ = connection.exec_driver_sql(sql).one()
    return Measure(
        "hot_updates", hot / all_ if all_ else 0.0, "of all", None, None, "≥ 0.99", bool(all_ and hot >= 0.99 * all_)
    )


def _ratios(rates: dict[str, Rate]) -> list[Measure]:
    bare = rates[BARE].per_second
    measures = []
    for variant, metric in _NAMES.items():
        ratio, goal = rates[variant].per_second / bare, GOALS.get(variant)
        told, met = (None, None) if goal is None else (f"ratio ≥ {goal:g}", ratio >= goal)
        measures.append(Measure(metric, rates[variant].per_second, "requests/s", bare, ratio, told, met))
    return measures


def _absolute(rates: dict[str, Rate]) -> list[Measure]:
    measures = []
    for variant, rate in rates.items():
        measures.append(Measure(f"{variant}_us", 1e6 / rate.per_second, "µs a request"))
        measures.append(Measure(f"{variant}_client_cpu_us", 1e6 * rate.cpu_seconds / rate.calls, "µs a request"))
        measures.append(Measure(f"{variant}.calls", rate.calls, "requests"))
    return measures


def _costs(counted: dict[str, dict[str, float]]) -> list[Measure]:
    bare, atomic = counted[BARE], counted[ATOMIC]
    replay, leased = (counted[variant]["statements"] for variant in (REPLAY, REPLAY_LEASED))
    replays = counted[REPLAY]["round_trips"]
    extra = atomic["flushes"] - bare["flushes"]
    trips = atomic["round_trips"] - bare["round_trips"]
    measures = [
        Measure("atomic_extra_flushes", extra, "flushes", None, None, "0", round(extra, 1) <= 0),
        Measure("atomic_extra_round_trips", trips, "round trips", None, None, "0", trips <= 0),
        Measure("replay_round_trips", replays, "round trips", None, None, "1", replays <= 1),
        Measure("replay_leased_statements", leased, "statements", None, None, "1", leased <= 1),
        Measure("replay_statements", replay, "statements", None, None, "1", replay <= 1),
    ]
    for variant, costs in counted.items():
        measures.append(Measure(f"{variant}_wal_bytes", costs["wal_bytes"], "bytes"))
        measures += [Measure(f"{variant}.{name}", value, name.replace("_", " ")) for name, value in costs.items()]
    return measures


def _together(ran: int, replayed: int, held: int) -> list[Measure]:
    return [
        Measure("identical_runs", ran, f"of {IDENTICAL} at once", None, None, "1", ran == 1),
        Measure("identical_replays", replayed, f"of {IDENTICAL} at once", None, None, "49", replayed == IDENTICAL - 1),
        Measure("connections_held_by_waiters", held, "connections", None, None, "0", held == 0),
    ]
