"""A coordinator on a fresh store with two no-op participants, the loads on it, and what they cost.

When it stops, the answers that its loads were given are held against the CONFIRMED rows that the store then has.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import psycopg

from coordinator.model import State
from tests.postgres import PostgresServer
from tricord.v1 import operator_pb2, operator_pb2_grpc

from .postgres import commits, figure
from .processes import Process, start_coordinator, stopped_line

UNARY, STREAM, STEADY = ("benchmarks.load",), ("benchmarks.stream_load",), ("benchmarks.steady_load",)
"""The load generators: so many unary clients, so many in flight on a stream, so many a second on a stream."""
EIGHT_STREAMS, KEYED = (*STREAM, "--streams", "8"), (*STREAM, "--keys")
"""On so many streams, each on a connection of its own; with a random idempotency key for each transaction."""
Generator = Sequence[str]
"""The module of a load generator, and its flags."""
NOOP, HOLDING = "benchmarks.noop_participant", "benchmarks.holding_participant"
NAMES = ("noop-1", "noop-2")
STATISTICS_S = 10.0
POLL_S, END_S = 0.05, 30.0
_OPEN = "SELECT 1, 1 FROM tricord_transaction WHERE wake_ms IS NOT NULL LIMIT 1"
_STATES = "SELECT state, count(*) FROM tricord_transaction GROUP BY state"


class Load(NamedTuple):
    """What one load saw, and what it cost."""

    answers: int
    seconds: float
    p50_ms: float
    p99_ms: float
    cpu_s: float
    """Of the coordinator, with all its workers."""
    flushes: int
    """Of one worker."""
    wal_bytes: int
    """0 on SQLite."""

    @property
    def per_s(self) -> float:
        return self.answers / self.seconds

    @property
    def cpu_us(self) -> float:
        """Per transaction."""
        return self.cpu_s / self.answers * 1e6

    @property
    def flushes_per_tx(self) -> float:
        return self.flushes / self.answers

    @property
    def wal_per_tx(self) -> float:
        return self.wal_bytes / self.answers


class Scene:
    """What runs. Use it through ``on_postgres`` and ``on_sqlite``."""

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        store: str,
        flags: Sequence[str] = (),
        participants: Sequence[str] = (NOOP,),
    ) -> None:
        self.store = store
        self._stack = stack
        self._folder = folder
        self._flags = flags
        self._on_postgres = store.startswith("postgresql:")
        self.coordinator, self.address = start_coordinator(stack, folder, store, flags)
        self.participants = [
            stack.enter_context(Process(module, [name, self.address], folder / f"{name}.{number}.log"))
            for name in NAMES
            for number, module in enumerate(participants)
        ]
        self._answers = 0
        self._commits_before = self._commits()

    def load(self, generator: Generator, size: float, seconds: float) -> Load:
        """Run a load to its end."""
        wal, cpu_s, flushes = self._wal_position(), self.coordinator.cpu_s(), self.statistics().flushes
        with self.generating(generator, size, seconds) as process:
            seen = self.read(process)
        cpu_s = self.coordinator.cpu_s() - cpu_s
        flushes = self.statistics().flushes - flushes
        wal = self._wal_position() - wal
        return Load(int(seen["answers"]), seen["seconds"], seen["p50_ms"], seen["p99_ms"], cpu_s, flushes, wal)

    def loads(self, generator: Generator, size: float, seconds: float, rounds: int, warm_up_s: float) -> list[Load]:
        """The same load several times, after one that warms up."""
        self.load(generator, size, warm_up_s)
        return [self.load(generator, size, seconds) for _ in range(rounds)]

    def generating(self, generator: Generator, size: float, seconds: float) -> Process:
        """The process of a load; whoever reads what it has seen hands it to ``counted``."""
        module, *flags = generator
        return Process(module, [self.address, str(size), str(seconds), *flags], self._folder / "load.log")

    def read(self, process: Process) -> Mapping[str, float]:
        """Wait for a load's end and count its answers, which are held against the store when the scene stops."""
        seen: dict[str, float] = json.loads(process.read_all())
        self._answers += int(seen["answers"])
        return seen

    def statistics(self) -> operator_pb2.CoordinatorStatistics:
        """What the coordinator tells of itself; of several workers, one does."""
        with grpc.insecure_channel(self.address) as channel:
            stub = operator_pb2_grpc.OperatorServiceStub(channel)
            return stub.GetStatistics(operator_pb2.GetStatisticsRequest(), timeout=STATISTICS_S).coordinator

    def stop(self, stored_before: int = 0) -> float:
        """Stop the coordinator; the commits per transaction, by PostgreSQL's own count from the first load to the end.

        They are the journal's, and what the look for due work and the participants' heartbeats add; 0 on SQLite.
        Raises RuntimeError if the store does not hold what was answered, and nothing else but what was there before.
        """
        self._until_stored()
        self.coordinator.close()
        committed = self._commits() - self._commits_before  # whole only when the coordinator's sessions have ended
        begun, stored = stopped_line(self.coordinator.log)["begun"], dict(self._rows(_STATES))
        if stored != {State.CONFIRMED: self._answers + stored_before} or begun != self._answers:
            raise RuntimeError(
                f"{self._answers} transactions were answered CONFIRMED, the coordinator has begun {begun}, "
                f"the store holds (state: rows) {stored}, of which {stored_before} were there before"
            )
        return committed / self._answers

    def restart(self) -> None:
        """Stop the coordinator and start one on the same store, without its participants."""
        for process in (self.coordinator, *self.participants):
            process.close()
        self.participants = []
        self.coordinator, self.address = start_coordinator(self._stack, self._folder, self.store, self._flags)

    def _until_stored(self) -> None:
        """An answer does not wait for the last save, which follows within moments."""
        gives_up_s = time.monotonic() + END_S
        while self._rows(_OPEN) and time.monotonic() < gives_up_s:
            time.sleep(POLL_S)

    def _rows(self, query: str) -> list[tuple[int, int]]:
        if not self._on_postgres:
            with closing(sqlite3.connect(self.store)) as file:
                return file.execute(query).fetchall()
        with psycopg.connect(self.store) as connection:
            return connection.execute(query.encode()).fetchall()

    def _wal_position(self) -> int:
        """0 on SQLite."""
        return figure(self.store, "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')") if self._on_postgres else 0

    def _commits(self) -> int:
        """0 on SQLite."""
        return commits(self.store) if self._on_postgres else 0


@contextmanager
def on_postgres(
    server: PostgresServer, folder: Path, flags: Sequence[str] = (), participants: Sequence[str] = (NOOP,)
) -> Iterator[Scene]:
    """A scene on a database of its own, which is dropped at the end.

    ``participants`` names the module of each instance that either participant has.
    """
    with ExitStack() as stack:
        dsn = server.create_database()
        stack.callback(server.drop_database, dsn)
        yield Scene(stack, folder, dsn, flags, participants)


@contextmanager
def on_sqlite(folder: Path) -> Iterator[Scene]:
    """A scene on a file of its own."""
    with ExitStack() as stack:
        yield Scene(stack, folder, str(folder / f"coordinator-{time.monotonic_ns()}.db"))
