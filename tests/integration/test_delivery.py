"""How calls reach participants, seen from the participant's side: batches, deadlines, broken streams, fences."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.coordinators import CALL_S, CoordinatorProcess, branch, execute_request, states
from tests.postgres import free_port
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import participant_pb2, types_pb2

from .participant_server import ParticipantServer, done

TRY, CONFIRM = participant_pb2.PHASE_TRY, participant_pb2.PHASE_CONFIRM
MIB = 1024 * 1024


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    """A coordinator with quick retries and a call time-out that no test reaches by chance."""
    with CoordinatorProcess(
        store=tmp_path / "tricord.db", backoff_base_ms=20, backoff_cap_ms=200, call_timeout_ms=20_000, lease_ms=30_000,
        drain_ms=0,
    ) as process:  # fmt: skip
        yield process


@pytest.fixture
def bank(coordinator: CoordinatorProcess) -> Iterator[ParticipantServer]:
    """A participant that says yes to everything, registered."""
    with ParticipantServer() as participant:
        coordinator.register("bank", participant.address)
        yield participant


def execute(coordinator: CoordinatorProcess, request: pb.ExecuteRequest) -> types_pb2.Transaction:
    """Run to the end."""
    return coordinator.coordinator_service().Execute(request, timeout=CALL_S).transaction


class TestBatches:
    """Calls to one participant travel together (E1)."""

    def test_one_transactions_branches_share_a_batch(
        self, coordinator: CoordinatorProcess, bank: ParticipantServer
    ) -> None:
        assert states(execute(coordinator, execute_request(*[branch()] * 64)))[0] == "CONFIRMED"
        assert [len(batch) for batch in bank.batches()] == [64, 64]
        assert bank.streams == 1

    def test_what_gathers_while_a_batch_is_written_leaves_together(
        self, coordinator: CoordinatorProcess, bank: ParticipantServer
    ) -> None:
        """While the stream takes nothing in, what is to be sent waits: it must leave by the hundred, not one by one."""
        service = coordinator.coordinator_service()
        bank.may_read.clear()
        blocks = [branch(data=bytes(900_000)) for _ in range(8)]
        calls = [service.Execute.future(execute_request(*blocks, key=f"block {n}"), timeout=CALL_S) for n in range(5)]
        while not all(_known(service, f"block {n}") for n in range(5)):
            pass
        for n in range(200):
            calls.append(service.Execute.future(execute_request(branch(), key=f"small {n}"), timeout=CALL_S))
        while not all(_known(service, f"small {n}") for n in range(200)):
            pass
        bank.may_read.set()
        assert {states(call.result(CALL_S).transaction)[0] for call in calls} == {"CONFIRMED"}
        batches = bank.batches()
        assert sum(len(batch) for batch in batches) == 2 * (200 + 40)
        small = [
            n for batch in batches if (n := sum(s.phase == "TRY" and len(s.call.payload.data) < 900 for s in batch))
        ]
        assert sum(small) == 200
        assert max(small) >= 64
        assert len(small) < 20
        assert all(seen.batch for seen in bank.seen())

    def test_call_ids_are_unique_on_a_stream(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        execute(coordinator, execute_request(*[branch()] * 64))
        assert len({seen.call.call_id for seen in bank.seen()}) == 128

    def test_a_batch_is_cut_by_bytes(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        """Five legal calls are more than a participant's gRPC takes in one message (4 MiB by default)."""
        tx = execute(coordinator, execute_request(*[branch(data=bytes(MIB))] * 5))
        assert states(tx)[0] == "CONFIRMED"
        assert [len(batch) for batch in bank.batches()] == [1] * 10
        assert bank.streams == 1

    def test_smaller_ones_share_a_mebibyte(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        execute(coordinator, execute_request(*[branch(data=bytes(300_000))] * 7))
        for batch in bank.batches():
            assert sum(len(seen.call.payload.data) for seen in batch) <= MIB
        assert len(bank.batches()) == 6

    def test_phase_2_overtakes_what_waits_for_its_try(
        self, coordinator: CoordinatorProcess, bank: ParticipantServer
    ) -> None:
        """E2: the stream is held up by Trys; a Confirm must not stand behind them."""
        release = threading.Event()

        def answer(call: participant_pb2.Call) -> participant_pb2.Reply:
            if call.phase == TRY and call.payload.data == b"first":
                assert release.wait(CALL_S)
            return done(call)

        bank.answer = answer
        service = coordinator.coordinator_service()
        request = execute_request(branch(data=b"first"), key="first", wait=pb.WAIT_DECIDED)
        first = service.Execute.future(request, timeout=CALL_S)
        bank.wait_for(1)
        bank.may_read.clear()
        # gRPC itself takes in some of these before it stops writing; the others wait in the coordinator's queue.
        slow = []
        for n in range(5):
            request = execute_request(*[branch(data=bytes(900_000))] * 8, key=f"slow {n}")
            slow.append(service.Execute.future(request, timeout=CALL_S))
        while not all(_known(service, f"slow {n}") for n in range(5)):
            pass
        release.set()
        assert states(first.result(CALL_S).transaction)[0] == "CONFIRMING"
        bank.may_read.set()
        assert [states(call.result(CALL_S).transaction)[0] for call in slow] == ["CONFIRMED"] * 5
        order = [(seen.phase, len(seen.call.payload.data)) for seen in bank.seen()]
        confirm = order.index(("CONFIRM", 5))
        assert order[confirm:].count(("TRY", 900_000)) >= 5


def _known(service: object, key: str) -> bool:
    import grpc

    try:
        service.Get(pb.GetRequest(idempotency_key=key), timeout=CALL_S)  # type: ignore[attr-defined]
    except grpc.RpcError:
        return False
    return True


class TestUnary:
    """Participants without Exchange."""

    def test_it_falls_back(self, coordinator: CoordinatorProcess) -> None:
        with ParticipantServer(exchange=False) as server:
            coordinator.register("bank", server.address)
            for _ in range(2):
                tx = execute(coordinator, execute_request(branch(), branch(action="credit")))
                assert states(tx) == ["CONFIRMED", "CONFIRMED", "CONFIRMED"]
                assert [b.attempts for b in tx.branches] == [0, 0]
            assert len(server.seen()) == 8
            assert server.streams == 0


class TestBrokenStreams:
    """A broken stream makes its calls UNKNOWN, and only those; they then come alone (E1)."""

    def test_calls_aboard_come_again_alone(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        bank.answer = lambda call: None if call.attempt == 1 and call.phase == TRY else done(call)
        with ParticipantServer() as other:
            coordinator.register("shop", other.address)
            call = coordinator.coordinator_service().Execute.future(
                execute_request(branch(), branch(), branch("shop")), timeout=CALL_S
            )
            bank.wait_for(2)
            bank.break_streams()
            tx = call.result(CALL_S).transaction
            assert states(tx) == ["CONFIRMED"] * 4
            tries = bank.seen("TRY")
            assert [(seen.call.attempt, bool(seen.batch)) for seen in tries] == [(1, True)] * 2 + [(2, False)] * 2
            assert [seen.call.attempt for seen in other.seen()] == [1, 1]
            assert "stream broke" in tx.branches[0].last_error
            # Others go by stream again.
            assert all(seen.batch for seen in bank.seen("CONFIRM"))

    def test_queued_calls_and_other_transactions_go_on(
        self, coordinator: CoordinatorProcess, bank: ParticipantServer
    ) -> None:
        bank.answer = lambda call: (
            None if (call.payload.data, call.phase, call.attempt) == (b"held", TRY, 1) else done(call)
        )
        service = coordinator.coordinator_service()
        held = service.Execute.future(execute_request(branch(data=b"held")), timeout=CALL_S)
        bank.wait_for(1)
        for _ in range(3):
            bank.break_streams()
            assert states(execute(coordinator, execute_request(branch())))[0] == "CONFIRMED"
        assert states(held.result(CALL_S).transaction)[0] == "CONFIRMED"

    def test_a_participant_that_comes_back_is_found_within_the_cap(
        self, coordinator: CoordinatorProcess, bank: ParticipantServer
    ) -> None:
        bank.answer = lambda call: done(call) if call.phase == TRY else None
        service = coordinator.coordinator_service()
        call = service.Execute.future(execute_request(branch(), key="outage"), timeout=CALL_S)
        bank.wait_for(1, "CONFIRM")
        bank.stop()
        attempts = 0
        while attempts < 12:  # long enough for every back-off to have grown to its cap
            attempts = (
                service.Get(pb.GetRequest(idempotency_key="outage"), timeout=CALL_S).transaction.branches[0].attempts
            )
        bank.answer = done
        bank.start()
        assert states(call.result(10).transaction) == ["CONFIRMED", "CONFIRMED"]
        assert not bank.seen("CANCEL")

    def test_a_participant_that_moves_is_followed(
        self, coordinator: CoordinatorProcess, bank: ParticipantServer
    ) -> None:
        bank.answer = lambda call: done(call) if call.phase == TRY else None
        call = coordinator.coordinator_service().Execute.future(execute_request(branch()), timeout=CALL_S)
        bank.wait_for(1, "CONFIRM")
        bank.stop()
        with ParticipantServer(port=free_port()) as moved:
            coordinator.register("bank", moved.address)
            assert states(call.result(CALL_S).transaction) == ["CONFIRMED", "CONFIRMED"]
            assert [seen.phase for seen in moved.seen()] == ["CONFIRM"]


class TestReplies:
    """What counts as an answer (E4, C3)."""

    def test_a_call_that_is_never_answered_ends_by_itself(self, tmp_path: Path) -> None:
        """Case 19: its own deadline ends it, and others on the same stream go on meanwhile."""
        with (
            CoordinatorProcess(store=tmp_path / "tricord.db", call_timeout_ms=400, lease_ms=2_000) as coordinator,
            ParticipantServer() as server,
        ):
            coordinator.register("bank", server.address)
            server.answer = lambda call: None if call.payload.data == b"held" and call.attempt == 1 else done(call)
            service = coordinator.coordinator_service()
            held = service.Execute.future(execute_request(branch(data=b"held")), timeout=CALL_S)
            server.wait_for(1)
            assert states(execute(coordinator, execute_request(branch())))[0] == "CONFIRMED"
            tx = held.result(CALL_S).transaction
            assert states(tx) == ["CONFIRMED", "CONFIRMED"]
            assert "no answer" in tx.branches[0].last_error
            assert "400 ms" in tx.branches[0].last_error
            held_calls = [seen for seen in server.seen() if seen.call.payload.data == b"held"]
            assert [(seen.phase, seen.call.attempt) for seen in held_calls][:2] == [("TRY", 1), ("TRY", 2)]
            assert held_calls[0].call.timeout.ToMilliseconds() == 400
            assert server.streams == 1

    def test_an_answer_to_no_call_is_ignored(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        def stray(call: participant_pb2.Call) -> participant_pb2.Reply:
            if call.phase == TRY and call.attempt == 1:
                return participant_pb2.Reply(call_id=call.call_id + 1_000_000, outcome=participant_pb2.OUTCOME_REFUSED)
            return done(call)

        bank.answer = stray
        call = coordinator.coordinator_service().Execute.future(execute_request(branch()), timeout=CALL_S)
        bank.wait_for(1)
        bank.break_streams()  # else it would wait for its deadline
        assert states(call.result(CALL_S).transaction) == ["CONFIRMED", "CONFIRMED"]

    @pytest.mark.parametrize("phase", [TRY, CONFIRM])
    def test_no_outcome_is_unknown(
        self, coordinator: CoordinatorProcess, bank: ParticipantServer, phase: "participant_pb2.Phase.ValueType"
    ) -> None:
        """Zero, and numbers of a later version: neither done nor refused, so it is asked again."""

        def vague(call: participant_pb2.Call) -> participant_pb2.Reply:
            if call.phase == phase and call.attempt < 3:
                return participant_pb2.Reply(outcome=0 if call.attempt == 1 else 9)  # type: ignore[arg-type]
            return done(call)

        bank.answer = vague
        tx = execute(coordinator, execute_request(branch()))
        assert states(tx) == ["CONFIRMED", "CONFIRMED"]
        name = participant_pb2.Phase.Name(phase).removeprefix("PHASE_")
        assert [seen.call.attempt for seen in bank.seen(name)] == [1, 2, 3]

    @pytest.mark.parametrize("fence_id", ["fence-2", "-"])
    def test_phase_2_answered_by_another_database_is_never_done(
        self, coordinator: CoordinatorProcess, bank: ParticipantServer, fence_id: str
    ) -> None:
        def answer(call: participant_pb2.Call) -> participant_pb2.Reply:
            reply = done(call)
            if call.phase == CONFIRM:
                reply.fence_id = fence_id
            return reply

        bank.answer = answer
        service = coordinator.coordinator_service()
        call = service.Execute.future(execute_request(branch(), key="wrong fence"), timeout=CALL_S)
        bank.wait_for(3, "CONFIRM")
        tx = service.Get(pb.GetRequest(idempotency_key="wrong fence"), timeout=CALL_S).transaction
        assert states(tx) == ["CONFIRMING", "TRIED"]
        assert tx.attention == types_pb2.ATTENTION_VIOLATION
        assert fence_id in tx.branches[0].last_error
        assert "fence-1" in tx.branches[0].last_error
        bank.answer = done
        tx = call.result(CALL_S).transaction
        assert states(tx) == ["CONFIRMED", "CONFIRMED"]
        assert tx.attention == types_pb2.ATTENTION_VIOLATION  # stays on record

    def test_try_answered_by_another_database_is_refused(
        self, coordinator: CoordinatorProcess, bank: ParticipantServer
    ) -> None:
        bank.fence_id = "fence-2"
        call = coordinator.coordinator_service().Execute.future(
            execute_request(branch(), wait=pb.WAIT_DECIDED), timeout=CALL_S
        )
        tx = call.result(CALL_S).transaction
        assert states(tx)[0] == "CANCELLING"
        assert tx.attention == types_pb2.ATTENTION_VIOLATION
        assert "fence-2" in tx.cancel_reason

    @pytest.mark.parametrize("phase", [TRY, CONFIRM])
    def test_an_answer_without_a_fence_is_never_done(
        self, coordinator: CoordinatorProcess, bank: ParticipantServer, phase: "participant_pb2.Phase.ValueType"
    ) -> None:
        """C3: every reply carries the fence database's id; who gives none may be anybody."""
        bank.fence_id = ""

        def answer(call: participant_pb2.Call) -> participant_pb2.Reply:
            return participant_pb2.Reply(
                outcome=participant_pb2.OUTCOME_DONE, fence_id="" if call.phase == phase else "fence-1"
            )

        bank.answer = answer
        service = coordinator.coordinator_service()
        tx = service.Execute(execute_request(branch(), timeout_ms=500), timeout=1.5).transaction
        assert states(tx)[0] in ("CANCELLING", "CONFIRMING", "CANCELLED")
        assert tx.attention == types_pb2.ATTENTION_VIOLATION

    def test_a_reply_of_no_limits_does_no_harm(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        """What participants send is stored and shown: it has limits, and a transaction can always be read."""
        result = types_pb2.Payload(data=bytes(3 * MIB))
        bank.answer = lambda call: participant_pb2.Reply(outcome=participant_pb2.OUTCOME_DONE, result=result)
        service = coordinator.coordinator_service()
        request = execute_request(*[branch()] * 8, key="large results", timeout_ms=1_000, wait=pb.WAIT_DECIDED)
        tx = service.Execute(request, timeout=CALL_S).transaction
        assert states(tx)[0] != "TRYING"
