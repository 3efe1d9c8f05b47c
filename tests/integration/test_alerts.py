"""The alert hook: what is sent, how often it is tried, and that the engine never waits for it."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest

from coordinator.alerts import Alerts, Patience
from coordinator.machine import begin
from coordinator.model import Attention, BranchSpec, Policy, Spec, Transaction
from examples.transfer.databases import eventually
from tests.coordinators import CALL_S, CoordinatorProcess, branch, execute_request, refused, states
from tests.postgres import free_port
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import participant_pb2, types_pb2

from .hook import Hook
from .participant_server import ParticipantServer, done

QUICK = Patience(timeout_s=20.0, attempts_max=3, base_s=0.01, cap_s=0.02)
ONCE = QUICK._replace(attempts_max=1)
SHORT: dict[str, Any] = {"backoff_base_ms": 20, "backoff_cap_ms": 100, "call_timeout_ms": 1_000, "lease_ms": 2_000}
Call = participant_pb2.Call
Reply = participant_pb2.Reply


def violates(*phases: "participant_pb2.Phase.ValueType", times: int = 1) -> Any:
    """Contradicts the protocol in answer to the first calls of these phases."""
    left = [times]

    def answer(call: Call) -> Reply:
        if call.phase in phases and left[0]:
            left[0] -= 1
            return Reply(outcome=participant_pb2.OUTCOME_VIOLATION, error="confirm without try")
        return done(call)

    return answer


def flagged(number: int = 1) -> Transaction:
    """A transaction that needs attention."""
    spec = Spec(number.to_bytes(16, "big"), b"", 0, 30_000, (BranchSpec("bank", "debit"), BranchSpec("stock", "take")))
    tx = begin(spec, 0, Policy())
    steps = (tx.steps[0], tx.steps[1]._replace(error="no such row", attempts=10))
    return tx._replace(steps=steps, attention=Attention.RETRYING)


@pytest.fixture
def bank() -> Iterator[ParticipantServer]:
    """A participant."""
    with ParticipantServer() as server:
        yield server


class TestSending:
    """One ``Alerts`` in this process."""

    async def test_a_document_tells_what_and_where(self) -> None:
        with Hook() as hook:
            alerts = Alerts(hook.url.replace("//", "//me:s3%20cret@") + "?to=a", "here:7800")
            alerts.start()
            alerts.tell(flagged(), 1)
            alerts.tell(flagged(2)._replace(attention=Attention.VIOLATION), None)
            await alerts.stop(CALL_S)
        first, second = hook.arrivals()
        assert datetime.fromisoformat(first.document.pop("time")).tzinfo is not None
        assert first.document == {
            "event": "transaction.attention", "coordinator": "here:7800", "xid": f"{1:032x}", "state": "TRYING",
            "why": "RETRYING", "branch": 2, "participant": "stock", "action": "take", "message": "no such row",
            "errors": ["branch 2: no such row"],
        }  # fmt: skip
        assert second.document["branch"] is second.document["participant"] is second.document["action"] is None
        assert "history has changed" in second.document["message"]
        assert first.path == "/hook?to=a"
        assert first.headers["content-type"] == "application/json"
        assert first.headers["authorization"] == "Basic bWU6czMgY3JldA=="
        assert (alerts.sent, alerts.dropped) == (2, 0)

    async def test_it_is_tried_again_until_it_is_taken(self) -> None:
        with Hook(lambda n: (500, 302, 200)[n - 1], location="http://127.0.0.1:9/") as hook:
            alerts = Alerts(hook.url, "here", QUICK)
            alerts.start()
            alerts.tell(flagged(), 1)
            await alerts.stop(CALL_S)
        assert [arrival.document["xid"] for arrival in hook.arrivals()] == [f"{1:032x}"] * 3
        assert (alerts.sent, alerts.dropped) == (1, 0)

    async def test_what_nobody_takes_is_dropped_and_the_next_one_sent(self) -> None:
        with Hook(lambda n: 404 if n <= 3 else 202) as hook:
            alerts = Alerts(hook.url, "here", QUICK)
            alerts.start()
            alerts.tell(flagged(1), 1)
            alerts.tell(flagged(2), 1)
            await alerts.stop(CALL_S)
        assert [int(arrival.document["xid"], 16) for arrival in hook.arrivals()] == [1, 1, 1, 2]
        assert (alerts.sent, alerts.dropped) == (1, 1)

    async def test_no_attempt_begins_when_its_time_is_over(self) -> None:
        with Hook(lambda n: 503) as hook:
            alerts = Alerts(hook.url, "here", QUICK._replace(give_up_s=-1.0))
            alerts.start()
            alerts.tell(flagged(), 1)
            await alerts.stop(CALL_S)
        assert len(hook.arrivals()) == 1
        assert alerts.dropped == 1

    async def test_nobody_there(self) -> None:
        alerts = Alerts(f"http://127.0.0.1:{free_port()}/", "here", QUICK)
        alerts.start()
        alerts.tell(flagged(), 1)
        await alerts.stop(CALL_S)
        assert (alerts.sent, alerts.dropped) == (0, 1)

    async def test_a_hook_that_hangs_runs_into_its_time_out(self) -> None:
        with Hook(lambda n: None if n == 1 else 200) as hook:
            alerts = Alerts(hook.url, "here", QUICK._replace(timeout_s=0.2))
            alerts.start()
            alerts.tell(flagged(), 1)
            await alerts.stop(CALL_S)
        assert len(hook.arrivals()) == 2
        assert (alerts.sent, alerts.dropped) == (1, 0)

    @pytest.mark.parametrize(("start", "sent"), [(b"HTTP/1.1 2", 0), (b"HTTP/1.1 204 No Content\r\nX: ", 1)])
    async def test_an_answer_that_trickles_has_no_more_time(self, start: bytes, sent: int) -> None:
        """Each byte comes well within the time-out, and the answer never ends; its status alone counts."""
        accepted: list[socket.socket] = []
        ended = threading.Event()

        def trickle() -> None:
            connection, _ = listening.accept()
            accepted.append(connection)
            with contextlib.suppress(OSError):
                connection.sendall(start)
                while not ended.wait(0.05):
                    connection.sendall(b"0")
            ended.set()

        with socket.create_server(("127.0.0.1", 0)) as listening:
            thread = threading.Thread(target=trickle)
            thread.start()
            alerts = Alerts(f"http://127.0.0.1:{listening.getsockname()[1]}/", "here", ONCE._replace(timeout_s=0.3))
            alerts.start()
            alerts.tell(flagged(), 1)
            await asyncio.to_thread(eventually, "it is over", lambda: alerts.sent + alerts.dropped == 1, CALL_S)
            await alerts.stop(CALL_S)
            assert (alerts.sent, alerts.dropped) == (sent, 1 - sent)
            ended.set()
            thread.join()
            accepted[0].close()

    async def test_too_many_are_dropped_and_a_stop_does_not_wait_for_the_rest(self) -> None:
        with Hook(lambda n: None) as hook:
            alerts = Alerts(hook.url, "here", Patience(waiting_max=2, timeout_s=CALL_S))
            alerts.start()
            alerts.tell(flagged(1), 1)
            hook.wait_for(1)  # this one is being sent, it waits no more
            for number in range(2, 6):
                alerts.tell(flagged(number), 1)
            assert alerts.dropped == 2
            await alerts.stop(0.1)
            assert (alerts.sent, alerts.dropped) == (0, 5)


class TestCoordinator:
    """A coordinator process with a hook."""

    def test_a_violation_is_told_once(self, tmp_path: Path, bank: ParticipantServer) -> None:
        bank.answer = violates(participant_pb2.PHASE_CONFIRM, times=3)
        with (
            Hook(lambda n: 500 if n == 1 else 204) as hook,
            CoordinatorProcess(store=tmp_path / "t.db", alert_url=hook.url, **SHORT) as coordinator,
        ):
            coordinator.register("bank", bank.address)
            tx = coordinator.coordinator_service().Execute(execute_request(branch()), timeout=CALL_S).transaction
            assert states(tx) == ["CONFIRMED", "CONFIRMED"]
            assert tx.attention == types_pb2.ATTENTION_VIOLATION
            first, second = hook.wait_for(2)
            assert first.document == second.document
            assert coordinator.stop() == 0
            (logged,) = coordinator.log("transaction.attention")
            told = first.document
            assert (told["xid"], told["why"]) == (logged["xid"], logged["why"]) == (tx.xid, "VIOLATION")
            assert (told["state"], told["branch"], told["participant"]) == ("CONFIRMING", 1, "bank")
            assert told["message"] == "confirm without try"
            assert told["coordinator"].endswith(f":{coordinator.endpoint.rpartition(':')[2]}")
            (stopped,) = coordinator.log("alerts.stopped")
            assert (stopped["sent"], stopped["dropped"]) == (1, 0)
            assert len(hook.arrivals()) == 2

    def test_many_failures_are_told_once(self, tmp_path: Path, bank: ParticipantServer) -> None:
        """On each failure after the second the transaction needs attention, and has it already."""

        def answer(call: Call) -> Reply:
            if call.phase == participant_pb2.PHASE_CONFIRM and call.attempt <= 8:
                return Reply(outcome=participant_pb2.OUTCOME_UNKNOWN, error="not now")
            return done(call)

        bank.answer = answer
        with (
            Hook() as hook,
            CoordinatorProcess(store=tmp_path / "t.db", alert_url=hook.url, attention_after=2, **SHORT) as coordinator,
        ):
            coordinator.register("bank", bank.address)
            tx = coordinator.coordinator_service().Execute(execute_request(branch()), timeout=CALL_S).transaction
            assert states(tx) == ["CONFIRMED", "CONFIRMED"]
            assert coordinator.stop() == 0
            (arrival,) = hook.arrivals()
            assert (arrival.document["why"], arrival.document["message"]) == ("RETRYING", "not now")

    def test_a_hook_that_hangs_holds_up_no_transaction_and_no_stop(
        self, tmp_path: Path, bank: ParticipantServer
    ) -> None:
        with (
            Hook(lambda n: None) as hook,
            CoordinatorProcess(store=tmp_path / "t.db", alert_url=hook.url, **SHORT) as coordinator,
        ):
            coordinator.register("bank", bank.address)
            stub = coordinator.coordinator_service()
            for _ in range(5):
                bank.answer = violates(participant_pb2.PHASE_CONFIRM)
                tx = stub.Execute(execute_request(branch()), timeout=CALL_S).transaction
                assert tx.attention == types_pb2.ATTENTION_VIOLATION
            hook.wait_for(1)
            assert coordinator.stop() == 0
            assert len(hook.arrivals()) == 1
            (dropped,) = coordinator.log("alert.dropped")
            assert (dropped["alerts"], dropped["dropped"]) == (5, 5)


@pytest.mark.database
class TestSeveralCoordinators:
    """On one PostgreSQL."""

    @pytest.mark.parametrize("order", ["confirm", "cancel"])
    def test_only_the_one_whose_save_it_was_tells(self, pg_database: str, bank: ParticipantServer, order: str) -> None:
        """The second one flags it; the first meets that row when it reads ("confirm") or when it saves ("cancel")."""
        bank.answer = violates(participant_pb2.PHASE_TRY)
        with Hook() as hook, ExitStack() as stack:
            first, second = [
                stack.enter_context(CoordinatorProcess(store=pg_database, alert_url=hook.url, **SHORT))
                for _ in range(2)
            ]
            first.register("bank", bank.address)
            stub, other = first.coordinator_service(), second.coordinator_service()
            begun = stub.Begin(pb.BeginRequest(), timeout=CALL_S).transaction
            request = pb.CoordinatorServiceTryRequest(xid=begun.xid, branch=branch(), branch_key="one")
            assert other.Try(request, timeout=CALL_S).cancel_reason
            hook.wait_for(1)
            if order == "cancel":
                stub.Cancel(pb.CoordinatorServiceCancelRequest(xid=begun.xid, reason="no"), timeout=CALL_S)
            else:
                confirm = pb.CoordinatorServiceConfirmRequest(xid=begun.xid)
                assert refused(stub.Confirm, confirm).reason == "NOT_TRYING"
            assert [first.stop(), second.stop()] == [0, 0]
            assert len(hook.arrivals()) == 1
            assert first.log("transaction.attention") == []
            assert len(second.log("transaction.attention")) == 1

    def test_another_history_is_told_of_each_open_transaction(self, pg_database: str, bank: ParticipantServer) -> None:
        bank.answer = lambda call: None
        with Hook() as hook:
            with CoordinatorProcess(store=pg_database, **SHORT) as coordinator:
                coordinator.register("bank", bank.address)
                request = execute_request(branch(), wait=pb.WAIT_ACCEPTED)
                stub = coordinator.coordinator_service()
                xids = {stub.Execute(request, timeout=CALL_S).transaction.xid for _ in range(3)}
                coordinator.kill()
            with psycopg.connect(pg_database, autocommit=True) as connection:
                connection.execute("UPDATE tricord_store SET incarnation = '1-00000001'")
            with CoordinatorProcess(store=pg_database, alert_url=hook.url, **SHORT) as coordinator:
                told = [arrival.document for arrival in hook.wait_for(3)]
                eventually("all are logged", lambda: len(coordinator.log("transaction.attention")) == 3)
            assert {document["xid"] for document in told} == xids
            assert all("history has changed" in document["message"] for document in told)
            assert all(document["why"] == "VIOLATION" for document in told)
            with CoordinatorProcess(store=pg_database, alert_url=hook.url, **SHORT) as coordinator:
                assert coordinator.log("store.history_changed") == []
            assert len(hook.arrivals()) == 3
