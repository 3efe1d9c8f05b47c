"""What a coordinator does when it finds the work of one that has crashed.

recovery   20,000 decided transactions, two no-op branches each, whose calls were lost with their coordinator; a third
           of them at each of three participants
one dead   the same while one of the participants is gone: how fast the others' transactions are finished
deadlines  2,000 undecided transactions whose deadlines come while 10,000 others wait and clients make load
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from coordinator.model import State
from tests.postgres import PostgresServer

from . import rows
from .postgres import measured, pgbench_database, pgbench_tps
from .processes import stopped_line
from .recovery_deadlines import Late, Waiting, deadlines
from .recovery_scene import DEAD, LIVE, Scene
from .report import Measure, progress


class Sizes(NamedTuple):
    """How much is measured."""

    open: int = 20_000
    rounds: int = 3
    """Of which the median counts: each takes only some seconds."""
    waiting: Waiting = Waiting()
    pgbench_s: int = 10


SMALL = Sizes(1_000, 1, Waiting(others=500, due=100, due_s=4.0, clients=4, initiators=8), 2)
END_S = 300.0
POLL_S = 0.1
CLAIM_POLL_S = 0.01


class Third(Enum):
    """How it goes with the third participant."""

    ALIVE = "all participants are alive"
    DEAD = "one of three participants is dead"
    DEAD_BESIDE_LIVE = "one of three participants is dead, and its transactions have a branch at another one"


class Recovered(NamedTuple):
    """What became of the open transactions whose participants are alive."""

    per_s: float
    cpu_us: float
    """The coordinator's, for each of them."""


def run(small: bool = False) -> list[Measure]:
    """Measure; the figures in the order in which they are shown."""
    sizes = SMALL if small else Sizes()
    with measured() as (server, folder), pgbench_database(server) as bench_dsn:
        progress("pgbench -N, before")
        tps = [pgbench_tps(server, bench_dsn, sizes.pgbench_s)]
        found: dict[Third, list[Recovered]] = {kind: [] for kind in Third}
        for _ in range(sizes.rounds):
            for kind in Third:
                found[kind].append(_recover(server, folder, sizes.open, kind))
        runs = {kind: sorted(several)[len(several) // 2] for kind, several in found.items()}
        late = deadlines(server, folder, sizes.waiting)
        progress("pgbench -N, after")
        tps.append(pgbench_tps(server, bench_dsn, sizes.pgbench_s))
    return _measures(max(tps), runs, late)


def _measures(tps: float, runs: Mapping[Third, Recovered], late: Late) -> list[Measure]:
    healthy, one_dead, beside = runs[Third.ALIVE], runs[Third.DEAD], runs[Third.DEAD_BESIDE_LIVE]
    ratio, dead_ratio = healthy.per_s / tps, one_dead.per_s / healthy.per_s
    p99_ms, answered_ms = _p99(late.stored), _p99(late.answered)
    return [
        Measure("pgbench_tps", tps, "1/s"),
        Measure("recovered_ratio", healthy.per_s, "transactions/s", tps, ratio, ">= 0.7", ratio >= 0.7),
        Measure("cpu_us_recovered", healthy.cpu_us, "µs/transaction"),
        Measure(
            "one_dead_ratio", one_dead.per_s, "transactions/s", healthy.per_s, dead_ratio,
            ">= 0.85", dead_ratio >= 0.85,
        ),
        Measure(
            "one_dead_beside_ratio", beside.per_s, "transactions/s", healthy.per_s, beside.per_s / healthy.per_s
        ),
        Measure("deadline_late_ms_p99", p99_ms, "ms", None, None, "<= 1,000", p99_ms <= 1_000),
        Measure("deadline_answer_late_ms_p99", answered_ms, "ms", None, None, "<= 1,000", answered_ms <= 1_000),
        Measure("deadline_load", late.load_per_s, "transactions/s"),
        Measure("deadlines.late_ms_p50", late.stored[len(late.stored) // 2], "ms"),
        Measure("deadlines.late_ms_max", late.stored[-1], "ms"),
    ]  # fmt: skip


def _p99(ordered: Sequence[float]) -> float:
    return ordered[int(len(ordered) * 0.99)]


def _recover(server: PostgresServer, folder: Path, count: int, third: Third) -> Recovered:
    """Let a coordinator finish what it finds; those of a dead participant cannot be finished."""
    participants = (*LIVE, DEAD)
    dead = 0 if third is Third.ALIVE else count // len(participants)
    with ExitStack() as stack:
        scene = Scene(server, folder, stack, [DEAD] if dead else [])
        progress(f"recovery of {count} open transactions; {third.value}")
        now_ms = int(time.time() * 1000)

        def names(number: int) -> Sequence[str]:
            name = participants[number % len(participants)]
            return (LIVE[0] if name == DEAD and third is Third.DEAD_BESIDE_LIVE else name, name)

        rows.store(scene.dsn, (rows.confirming(rows.made(n, now_ms, names(n)), now_ms) for n in range(count)))
        with FirstClaim(scene.dsn, now_ms) as first:
            coordinator, _ = scene.start(stack)
            before, cpu_s = rows.counts(scene.dsn).get(State.CONFIRMED, 0), coordinator.cpu_s()
            ended_s = _until_finished(scene.dsn, but=DEAD if dead else "")
            cpu_s = coordinator.cpu_s() - cpu_s
        coordinator.close()
        _check(scene.dsn, count - dead, dead, stopped_line(coordinator.log))
    return Recovered((count - dead) / (ended_s - first.at_s), cpu_s / max(1, count - dead - before) * 1e6)


class FirstClaim(AbstractContextManager["FirstClaim"]):
    """When a coordinator took the first rows, which it may do before it says that it is ready.

    A claim moves ``wake_ms`` to its own time and a lease.
    """

    def __init__(self, dsn: str, stored_ms: int) -> None:
        self.at_s = 0.0
        self._dsn = dsn
        self._stored_ms = stored_ms
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="first-claim")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()

    def _watch(self) -> None:
        with rows.reading(self._dsn) as connection:
            while not self._ending.wait(CLAIM_POLL_S):
                found = connection.execute("SELECT max(wake_ms) FROM tricord_transaction").fetchone()
                if found is not None and (found[0] or 0) > self._stored_ms:
                    self.at_s = (found[0] - rows.POLICY.lease_ms) / 1000
                    return


def _until_finished(dsn: str, but: str) -> float:
    """When no transaction is open any more, but those of one participant."""
    query = "SELECT EXISTS (SELECT FROM tricord_transaction WHERE wake_ms IS NOT NULL AND participants NOT LIKE %s)"
    gives_up_s = time.time() + END_S
    with rows.reading(dsn) as connection:
        while connection.execute(query, (f"%,{but or 'nobody'},%",)).fetchone() != (False,):
            if time.time() > gives_up_s:
                raise RuntimeError(f"not recovered within {END_S:.0f} s: {rows.counts(dsn)}")
            time.sleep(POLL_S)
    return time.time()


def _check(dsn: str, count: int, dead: int, stopped: dict[str, int]) -> None:
    """What the coordinator has counted must be what the database holds."""
    stored = rows.counts(dsn)
    if stored != {State.CONFIRMED: count, **({State.CONFIRMING: dead} if dead else {})}:
        raise RuntimeError(f"{count} had to be confirmed and {dead} to stay open, the database holds {stored}")
    if stopped["confirmed"] != count or stopped["recovered"] < count:
        raise RuntimeError(f"the database holds {count} CONFIRMED, the coordinator has counted {stopped}")
