"""``tricord serve --workers N``: coordinator processes on one address, under a parent that watches over them."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc
import psycopg
import pytest

from coordinator.listening import HeldPort
from examples.transfer.databases import eventually
from tests.coordinators import CALL_S, CoordinatorProcess, branch, execute_request, registration, states
from tests.postgres import PostgresServer
from tricord.v1 import registry_pb2_grpc, types_pb2

from .participant_server import ParticipantServer, done
from .scene import QUICK, Call, Reply, counted, unknown

pytestmark = pytest.mark.database

CHANNELS = 16
"""Connections go to one worker or the other by chance: that all go to one is as good as impossible."""


class Workers(CoordinatorProcess):
    """Two workers and their parent."""

    def pid(self, worker: int) -> int:
        """Of the process that was started last under that number."""
        return int([entry["pid"] for entry in self.log("worker.started") if entry["worker"] == worker][-1])

    def signal(self, number: signal.Signals) -> None:
        """To the parent."""
        assert self._process is not None
        self._process.send_signal(number)

    def ended(self) -> int:
        """The parent's exit code, when it has ended by itself."""
        assert self._process is not None
        self._process.wait(CALL_S)
        return self.stop()

    def ready(self, worker: int) -> int:
        """How often that one has begun to serve."""
        return sum(entry.get("worker") == worker for entry in self.log("coordinator.ready"))

    def stopped(self) -> dict[int, dict[str, Any]]:
        """What each has counted, by its number, once they have stopped; 0: all together."""
        return {entry.get("worker", 0): entry for entry in self.log("coordinator.stopped")}

    def executes(self, name: str = "bank") -> list[types_pb2.Transaction]:
        """A transaction over each of many connections."""
        request = execute_request(branch(name))
        stubs = [self.coordinator_service() for _ in range(CHANNELS)]
        return [stub.Execute(request, timeout=CALL_S).transaction for stub in stubs]


@pytest.fixture
def bank() -> Iterator[ParticipantServer]:
    with ParticipantServer() as server:
        yield server


@pytest.fixture
def workers(pg_database: str, bank: ParticipantServer) -> Iterator[Workers]:
    with Workers(store=pg_database, workers=2, **QUICK) as process:
        process.register("bank", bank.address)
        yield process


def confirmed(transactions: list[types_pb2.Transaction]) -> bool:
    return all(states(tx)[0] == "CONFIRMED" for tx in transactions)


def free(listen: str) -> bool:
    """Whether nobody has that address."""
    try:
        HeldPort(listen).close()
    except OSError:
        return False
    return True


def test_both_serve_and_each_knows_whom_the_other_has_registered(workers: Workers) -> None:
    assert confirmed(workers.executes())
    with ParticipantServer() as later:  # their lists are fresh, and do not have it
        workers.register("later", later.address)
        assert confirmed(workers.executes("later"))
    assert workers.stop() == 0, workers.text_log()
    stopped = workers.stopped()
    assert sorted(stopped) == [0, 1, 2]
    assert stopped[1]["begun"] + stopped[2]["begun"] == stopped[0]["begun"] == 2 * CHANNELS
    assert min(stopped[1]["begun"], stopped[2]["begun"]) > 0
    assert stopped[0]["flushes"] == stopped[1]["flushes"] + stopped[2]["flushes"]
    assert (stopped[0]["workers"], stopped[0]["restarts"]) == (2, 0)
    assert "Traceback" not in workers.text_log()


def test_what_one_leaves_behind_is_ended_and_it_is_started_again(workers: Workers, bank: ParticipantServer) -> None:
    """SIGKILL to one under load: those who asked it ask again, by their keys."""
    go_on = threading.Event()

    def after_the_kill(call: Call) -> Reply:
        go_on.wait(CALL_S)
        return done(call)

    def execute(number: int) -> types_pb2.Transaction:
        while True:
            try:
                request = execute_request(branch(), key=f"key-{number}", timeout_ms=60_000)
                return workers.coordinator_service().Execute(request, timeout=CALL_S).transaction
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise

    bank.answer = after_the_kill
    with ThreadPoolExecutor(CHANNELS) as pool:
        running = [pool.submit(execute, number) for number in range(CHANNELS)]
        bank.wait_for(CHANNELS, "TRY")
        os.kill(workers.pid(1), signal.SIGKILL)
        go_on.set()
        assert confirmed([one.result() for one in running])
    eventually("it serves again", lambda: workers.ready(1) == 2, CALL_S)
    (ended,) = workers.log("worker.ended")
    assert (ended["worker"], ended["why"]) == (1, "killed by SIGKILL")
    assert confirmed(workers.executes())
    assert workers.stop() == 0
    assert workers.stopped()[0]["restarts"] == 1
    assert workers.stopped()[1]["begun"] > 0  # the new one has its share


def test_no_transaction_is_driven_by_two(pg_database: str, bank: ParticipantServer) -> None:
    """Retries come by the claims of both; each attempt is made once. No lease and no call's time runs out here."""
    patient = {**QUICK, "call_timeout_ms": 20_000, "lease_ms": 60_000}
    with Workers(store=pg_database, workers=2, **patient) as workers:
        workers.register("bank", bank.address)
        drive_with_retries(workers, bank)


def drive_with_retries(workers: Workers, bank: ParticipantServer) -> None:
    bank.answer = lambda call: unknown() if call.attempt < 4 else done(call)
    request = execute_request(branch(), branch(), timeout_ms=120_000)
    with ThreadPoolExecutor(CHANNELS) as pool:
        stubs = [workers.coordinator_service() for _ in range(CHANNELS)]
        assert confirmed([tx.transaction for tx in pool.map(lambda s: s.Execute(request, timeout=CALL_S), stubs * 4)])
    assert workers.stop() == 0
    assert min(workers.stopped()[worker]["recovered"] for worker in (1, 2)) > 0
    calls = counted(bank)
    assert {attempt for _, _, _, attempt in calls} == {1, 2, 3, 4}
    assert set(calls.values()) == {1}


def test_nothing_serves_when_the_parent_is_gone(workers: Workers) -> None:
    assert confirmed(workers.executes())
    workers.kill()  # returns when nobody writes to its log any more
    eventually("nobody listens", lambda: free(workers.listen), CALL_S)
    assert workers.text_log().count("the process that has started this worker is gone") == 2


def test_one_that_is_told_to_stop_drains_and_is_started_again(workers: Workers) -> None:
    os.kill(workers.pid(2), signal.SIGTERM)
    eventually("it serves again", lambda: workers.ready(2) == 2, CALL_S)
    assert workers.log("worker.ended")[0]["why"] == "exit code 0"
    assert confirmed(workers.executes())
    assert workers.stop() == 0


def test_what_runs_is_ended_before_they_stop(workers: Workers, bank: ParticipantServer) -> None:
    go_on = threading.Event()

    def slowly(call: Call) -> Reply:
        go_on.wait(CALL_S)
        return done(call)

    bank.answer = slowly
    call = workers.coordinator_service().Execute.future(execute_request(branch()), timeout=CALL_S)
    bank.wait_for(1)
    workers.signal(signal.SIGTERM)
    eventually("they drain", lambda: len(workers.log("coordinator.draining")) == 2, CALL_S)
    go_on.set()
    assert confirmed([call.result().transaction])
    assert workers.ended() == 0, workers.text_log()
    assert free(workers.listen)


def test_a_second_signal_ends_them_at_once(workers: Workers, bank: ParticipantServer) -> None:
    bank.answer = lambda call: None
    call = workers.coordinator_service().Execute.future(execute_request(branch()), timeout=CALL_S)
    bank.wait_for(1)
    workers.signal(signal.SIGINT)
    eventually("they drain", lambda: len(workers.log("coordinator.draining")) == 2, CALL_S)
    workers.signal(signal.SIGINT)
    assert workers.ended() == 1
    with pytest.raises(grpc.RpcError):
        call.result()
    assert "not all workers have stopped in order: killed by SIGKILL" in workers.text_log()
    assert free(workers.listen)


def test_one_that_cannot_start_again_ends_all(workers: Workers, pg_database: str) -> None:
    with psycopg.connect(pg_database) as connection:
        connection.execute("UPDATE tricord_store SET oldest_program = 99")
    os.kill(workers.pid(2), signal.SIGKILL)
    assert workers.ended() == 1
    assert "worker 2 ended 5 times in a row as soon as it had started, the last time: the store" in workers.text_log()
    assert len(workers.log("worker.ended")) in (4, 5)  # the first was at once too, or not; the last is the error's
    assert sorted(workers.stopped()) == [0, 1]


def test_one_that_finds_no_store_is_started_until_it_does(own_server: PostgresServer, bank: ParticipantServer) -> None:
    """The others wait for the store too, and must not be ended for it."""
    with own_server.lent_database() as dsn, Workers(store=dsn, workers=2, **QUICK) as workers:
        workers.register("bank", bank.address)
        own_server.kill()
        os.kill(workers.pid(1), signal.SIGKILL)
        eventually("it has tried often", lambda: len(workers.log("worker.ended")) > 5, CALL_S)
        own_server.start()
        eventually("it serves again", lambda: workers.ready(1) == 2, CALL_S)
        assert confirmed(workers.executes())
        assert workers.stop() == 0, workers.text_log()


class TestPort:
    """An address belongs to one parent, or to one coordinator."""

    def refuses(self, process: CoordinatorProcess) -> None:
        with pytest.raises(AssertionError, match=r"listen: cannot listen on .*: the port is in use"):
            process.start()

    def test_it_is_not_shared_with_other_coordinators(self, pg_database: str) -> None:
        with Workers(store=pg_database, workers=2) as workers:
            self.refuses(Workers(store=pg_database, workers=2, listen=workers.listen))
            self.refuses(CoordinatorProcess(store=pg_database, listen=workers.listen))
            assert workers.stop() == 0

    def test_it_is_not_taken_from_a_coordinator(self, pg_database: str) -> None:
        with CoordinatorProcess(store=pg_database) as one:
            self.refuses(Workers(store=pg_database, workers=2, listen=one.listen))

    def test_a_free_one_is_the_same_for_all(self, pg_database: str, bank: ParticipantServer) -> None:
        with ExitStack() as stack:
            workers = stack.enter_context(Workers(store=pg_database, workers=2, listen="localhost:0"))
            eventually("all have told", lambda: len(workers.log("coordinator.ready")) == 3, CALL_S)
            (listen,) = {entry["listen"] for entry in workers.log("coordinator.ready")}
            channel = stack.enter_context(grpc.insecure_channel(listen))
            registry = registry_pb2_grpc.RegistryServiceStub(channel)
            registry.RegisterParticipant(registration("bank", bank.address), timeout=CALL_S)
