"""SIGTERM when nothing goes well: the process still ends in time, in order, and without a traceback.

Whoever starts coordinators (systemd, a container's host) kills what does not end, and a store that is away is just
when they are restarted.
"""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.coordinators import CALL_S, CoordinatorProcess, branch, environment, execute_request, states
from tests.postgres import PostgresServer
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import coordinator_pb2_grpc, operator_pb2, operator_pb2_grpc

from .participant_server import ParticipantServer, done

DRAIN_MS = 500
END_S = DRAIN_MS / 1000 + 15.0
"""Some ten seconds are promised; the rest is for a busy machine. What hangs is ended after ``STOP_S``, and fails."""


@contextlib.contextmanager
def frozen(server: PostgresServer) -> Iterator[None]:
    """All its processes are stopped: connections stay, and nothing answers."""
    assert server._process is not None
    root = server._process.pid
    os.kill(root, signal.SIGSTOP)  # first, so that the list of its children is complete
    children = Path(f"/proc/{root}/task/{root}/children").read_text().split()
    pids = [root, *map(int, children)]
    try:
        for pid in pids[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in reversed(pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def killed(server: PostgresServer) -> Iterator[None]:
    """As by a power cut."""
    server.kill()
    try:
        yield
    finally:
        server.start()


class Waiting:
    """Callers of one coordinator whose calls have arrived and are not answered."""

    def __init__(self, coordinator: CoordinatorProcess) -> None:
        self._channel = coordinator.channel()
        self._service = coordinator_pb2_grpc.CoordinatorServiceStub(self._channel)
        self._operator = operator_pb2_grpc.OperatorServiceStub(self._channel)
        self.calls: list[grpc.Future] = []  # type: ignore[type-arg]

    def execute(self, *branches: pb.BranchRequest) -> None:
        """Start a transaction."""
        self.calls.append(self._service.Execute.future(execute_request(*branches), timeout=CALL_S))

    def reads(self, count: int) -> None:
        """Ask for what only the store knows, more often than there are threads and connections for it."""
        for n in range(count):
            self.calls.append(self._service.Get.future(pb.GetRequest(xid=f"{n:032x}"), timeout=CALL_S))
            self.calls.append(self._operator.List.future(operator_pb2.ListRequest(), timeout=CALL_S))

    def arrived(self) -> None:
        """Returns when all have arrived: a later call on the same connection is answered."""
        health_pb2_grpc.HealthStub(self._channel).Check(  # type: ignore[attr-defined]
            health_pb2.HealthCheckRequest(), timeout=CALL_S
        )


def ends_in_order(coordinator: CoordinatorProcess) -> None:
    """SIGTERM, and what must come of it."""
    began_s = time.monotonic()
    code = coordinator.stop()
    took_s = time.monotonic() - began_s
    assert code == 0, coordinator.text_log()
    assert took_s < END_S
    assert "Traceback" not in coordinator.text_log()
    assert not [line for line in coordinator.text_log().splitlines() if not line.startswith("{")]
    assert coordinator.log("coordinator.stopped")


@pytest.mark.database
@pytest.mark.parametrize("trouble", [contextlib.nullcontext, frozen, killed], ids=["none", "frozen", "killed"])
def test_sigterm_ends_it_whatever_postgresql_does(
    own_server: PostgresServer, trouble: "type[contextlib.AbstractContextManager[None]]"
) -> None:
    """With transactions open, one participant dead and one mute, and callers that wait."""
    dsn = own_server.create_database()
    mute = ParticipantServer(lambda call: None)
    with mute, CoordinatorProcess(store=dsn, drain_ms=DRAIN_MS, lease_ms=10_000) as coordinator:
        coordinator.register("dead", "127.0.0.1:9")
        coordinator.register("mute", mute.address)
        waiting = Waiting(coordinator)
        waiting.execute(branch("dead"), branch("mute"))
        mute.wait_for(1)
        with trouble(own_server):  # type: ignore[call-arg]
            waiting.execute(branch("dead"))
            waiting.execute(branch("mute"))
            waiting.reads(10)
            waiting.arrived()
            ends_in_order(coordinator)


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    """Whoever presses Ctrl-C again does not want to wait for the drain. What is open is as after a crash."""
    mute = ParticipantServer(lambda call: None)
    with mute, CoordinatorProcess(store=tmp_path / "tricord.db", drain_ms=600_000) as coordinator:
        coordinator.register("mute", mute.address)
        waiting = Waiting(coordinator)
        waiting.execute(branch("mute"))
        mute.wait_for(1)
        coordinator.interrupt()
        while not coordinator.log("coordinator.draining"):
            time.sleep(0.01)
        coordinator.interrupt()
        assert coordinator.stop() in (-signal.SIGINT, -signal.SIGTERM)
        assert "Traceback" not in coordinator.text_log()


@pytest.mark.database
def test_sigterm_once_the_loss_has_been_noticed(own_server: PostgresServer) -> None:
    """The flush is between two attempts then, rather than in one."""
    dsn = own_server.create_database()
    with CoordinatorProcess(store=dsn, drain_ms=DRAIN_MS) as coordinator:
        coordinator.register("dead", "127.0.0.1:9")
        with killed(own_server):
            waiting = Waiting(coordinator)
            waiting.execute(branch("dead"))
            while len(coordinator.log("store.flush_lost")) < 3 or not coordinator.log("engine.claim_failed"):
                time.sleep(0.01)
            ends_in_order(coordinator)


def test_sigterm_while_somebody_holds_the_file(tmp_path: Path) -> None:
    """A backup tool or a shell may hold SQLite's write lock for as long as it likes."""
    path = tmp_path / "tricord.db"
    with CoordinatorProcess(store=path, drain_ms=DRAIN_MS) as coordinator:
        coordinator.register("dead", "127.0.0.1:9")
        waiting = Waiting(coordinator)
        waiting.execute(branch("dead"))
        with closing(sqlite3.connect(path, isolation_level=None)) as holder:
            holder.execute("BEGIN IMMEDIATE")
            waiting.execute(branch("dead"))
            waiting.arrived()
            ends_in_order(coordinator)


@pytest.mark.database
def test_what_a_hurried_stop_left_is_taken_up(own_server: PostgresServer) -> None:
    """What was stored is driven by the next one; nothing has to be asked again."""
    dsn = own_server.create_database()
    with (
        ParticipantServer(lambda call: None) as bank,
        CoordinatorProcess(store=dsn, drain_ms=DRAIN_MS, call_timeout_ms=500, lease_ms=1_000) as coordinator,
    ):
        coordinator.register("bank", bank.address)
        waiting = Waiting(coordinator)
        waiting.execute(branch())
        xid = bank.wait_for(1)[0].call.xid
        with frozen(own_server):
            ends_in_order(coordinator)
        bank.answer = done
        coordinator.start()
        service = coordinator.coordinator_service()
        deadline_s = time.monotonic() + CALL_S
        while states(service.Get(pb.GetRequest(xid=xid), timeout=CALL_S).transaction)[0] != "CONFIRMED":
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


_DIES_AT = """
import os, signal, sys
from pathlib import Path
import sqlalchemy as sa
from coordinator.store.schema import ensure_schema
from coordinator.store.sqlite import SqliteBackend

backend = SqliteBackend(Path(sys.argv[1]))
backend.prepare()
engine = backend.engine()

@sa.event.listens_for(engine, "before_cursor_execute")
def die(connection, cursor, statement, *rest):
    if sys.argv[2] in statement:
        os.kill(os.getpid(), signal.SIGKILL)

ensure_schema(engine)
"""


@pytest.mark.parametrize(
    "statement",
    ["CREATE TABLE tricord_participant", "CREATE TABLE tricord_store", "INTO tricord_schema_version"],
)
def test_a_kill_in_the_middle_of_the_first_start(tmp_path: Path, statement: str) -> None:
    """The tables are all there or none of them is; SQLite itself would keep each that was made."""
    path = tmp_path / "tricord.db"
    killed_run = subprocess.run(
        [sys.executable, "-c", _DIES_AT, str(path), statement], env=environment(), timeout=60, check=False
    )
    assert killed_run.returncode == -signal.SIGKILL
    with ParticipantServer() as bank, CoordinatorProcess(store=path) as coordinator:
        coordinator.register("bank", bank.address)
        tx = coordinator.coordinator_service().Execute(execute_request(branch()), timeout=CALL_S).transaction
        assert states(tx) == ["CONFIRMED", "CONFIRMED"]
