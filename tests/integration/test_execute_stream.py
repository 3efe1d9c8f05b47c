"""``ExecuteStream`` by the published contract, on a real coordinator: answers, errors, bounds, and bad messages."""

import random
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.coordinators import CALL_S, CoordinatorProcess, branch, execute_request, refused, states
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import operator_pb2
from tricord.v1 import participant_pb2 as participant_pb

from .conversation import Conversation, details, ids
from .participant_server import Gate, ParticipantServer, done
from .scene import finished, unknown

CALLS_MAX = 8
"""Of one stream of the coordinator here: few, so that the bound is met."""
METHOD = "/tricord.v1.CoordinatorService/ExecuteStream"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stream") / "tricord.db"


@pytest.fixture(scope="module")
def coordinator(store: Path) -> Iterator[CoordinatorProcess]:
    """One on SQLite for all tests here."""
    with CoordinatorProcess(
        store=store, backoff_cap_ms=200, call_timeout_ms=9_000, stream_calls_max=CALLS_MAX
    ) as process:
        yield process
        assert not process.log("rpc.failed")
        assert "Traceback" not in process.text_log()


@pytest.fixture
def talk(coordinator: CoordinatorProcess, bank: ParticipantServer) -> Conversation:
    return Conversation(coordinator.coordinator_service())


def held(key: str = "") -> pb.ExecuteRequest:
    """A transaction that stands before the gate."""
    return execute_request(branch(data=b"held"), key=key)


def begun(coordinator: CoordinatorProcess) -> int:
    """How many transactions it has begun."""
    answer = coordinator.operator_service().GetStatistics(operator_pb2.GetStatisticsRequest(), timeout=CALL_S)
    return answer.coordinator.begun


def test_each_is_answered_as_it_finishes(bank: ParticipantServer, talk: Conversation) -> None:
    assert not talk.messages[0].results  # it only says that there is such a stream
    bank.answer = gate = Gate(participant_pb.PHASE_TRY, b"held")
    talk.send(held(), *[execute_request(branch(), branch(action="credit"), key=f"quick {n}") for n in range(3)])
    talk.send(execute_request(branch()), first=5)
    results = talk.results(4)
    assert sorted(results) == [2, 3, 4, 5]
    for result in results.values():
        assert set(states(result.response.transaction)) == {"CONFIRMED"}
    assert {n: results[n].response.transaction.idempotency_key for n in (2, 3, 4)} == {
        2: "quick 0", 3: "quick 1", 4: "quick 2",
    }  # fmt: skip
    gate.open.set()
    talk.end()
    (last,) = talk.rest()
    assert (last.call_id, states(last.response.transaction)) == (1, ["CONFIRMED", "CONFIRMED"])


def test_thousands(coordinator: CoordinatorProcess, bank: ParticipantServer, talk: Conversation) -> None:
    before = begun(coordinator)
    for first in range(0, 2_000, 100):
        talk.send(*[execute_request(branch()) for _ in range(100)], first=first)
    talk.end()
    messages = list(talk.stream)
    assert max(len(message.results) for message in messages) <= 256
    results = [result for message in messages for result in message.results]
    assert ids(results) == list(range(2_000))
    assert all(states(result.response.transaction) == ["CONFIRMED", "CONFIRMED"] for result in results)
    assert len({result.response.transaction.xid for result in results}) == 2_000
    assert begun(coordinator) == before + 2_000


def test_it_answers_and_fails_as_execute(
    coordinator: CoordinatorProcess, bank: ParticipantServer, talk: Conversation
) -> None:
    """A bad call fails alone, among good ones, with the very error of the unary call."""
    unary = coordinator.coordinator_service().Execute
    unary(execute_request(branch(), key="taken"), timeout=CALL_S)
    bad = [
        execute_request(),
        execute_request(*[branch()] * 65),
        execute_request(branch("nobody")),
        execute_request(branch(action="no such")),
        execute_request(branch("no good name")),
        execute_request(branch(data=b"other"), key="taken"),
        execute_request(branch(), key="k" * 256),
        execute_request(branch(), timeout_ms=0),
        execute_request(branch(), wait=9),  # type: ignore[arg-type]
        execute_request(branch(data=bytes(1024 * 1024 + 1))),
    ]
    good = execute_request(branch())
    for n, request in enumerate(bad):
        talk.send(good, request, good, first=10 * n)
        results = talk.results(3)
        for call_id in (10 * n, 10 * n + 2):
            assert states(results[call_id].response.transaction) == ["CONFIRMED", "CONFIRMED"]
        error = results[10 * n + 1].error
        expected = refused(unary, request)
        assert (error.code, error.message) == (expected.code.value[0], expected.message)
        assert details(error) == (expected.reason, expected.fields)
        assert expected.reason


def test_a_call_id_that_is_taken_fails_alone(bank: ParticipantServer, talk: Conversation) -> None:
    bank.answer = gate = Gate(participant_pb.PHASE_TRY, b"held")
    talk.send(held(), first=7)
    talk.send(execute_request(branch()), first=7)
    (result,) = talk.results(1).values()
    assert result.error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert details(result.error) == (
        "INVALID_REQUEST", {"call_id": "is 7, as that of another call that is not answered yet"},
    )  # fmt: skip
    gate.open.set()
    assert states(talk.results(1)[7].response.transaction) == ["CONFIRMED", "CONFIRMED"]
    talk.send(execute_request(branch()), first=7)  # it is free again
    assert states(talk.results(1)[7].response.transaction) == ["CONFIRMED", "CONFIRMED"]


@pytest.mark.parametrize("wait", [pb.WAIT_ACCEPTED, pb.WAIT_DECIDED])
def test_less_may_be_waited_for(bank: ParticipantServer, talk: Conversation, wait: "pb.Wait.ValueType") -> None:
    phase = participant_pb.PHASE_TRY if wait == pb.WAIT_ACCEPTED else participant_pb.PHASE_CONFIRM
    answer_now = threading.Event()
    bank.answer = lambda call: done(call) if call.phase != phase or answer_now.wait(CALL_S) else unknown()
    talk.send(execute_request(branch(), wait=wait))
    seen = states(talk.results(1)[1].response.transaction)
    assert seen == (["TRYING", "PENDING"] if wait == pb.WAIT_ACCEPTED else ["CONFIRMING", "TRIED"])
    answer_now.set()


def test_when_patience_is_over_the_state_of_the_moment_is_told(bank: ParticipantServer, talk: Conversation) -> None:
    bank.answer = gate = Gate(participant_pb.PHASE_TRY, b"held")
    talk.send(held("impatient"), patience_ms=300)
    tx = talk.results(1)[1].response.transaction
    assert states(tx) == ["TRYING", "PENDING"]
    talk.send(held("impatient"))
    gate.open.set()
    after = talk.results(1)[1].response.transaction
    assert (after.xid, states(after)) == (tx.xid, ["CONFIRMED", "CONFIRMED"])
    assert not bank.seen("CANCEL")


def test_patience_may_be_over_before_anything_is_stored(
    coordinator: CoordinatorProcess, bank: ParticipantServer, talk: Conversation, store: Path
) -> None:
    with sqlite3.connect(store) as other:
        other.execute("BEGIN IMMEDIATE")
        talk.send(execute_request(branch(), key="late"), patience_ms=300)
        error = talk.results(1)[1].error
        other.rollback()
    assert error.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    assert details(error)[0] == "DEADLINE_EXCEEDED"
    talk.send(execute_request(branch(), key="late"))
    assert states(talk.results(1)[1].response.transaction) == ["CONFIRMED", "CONFIRMED"]


def test_a_full_stream_is_not_read(
    coordinator: CoordinatorProcess, bank: ParticipantServer, talk: Conversation
) -> None:
    bank.answer = gate = Gate(participant_pb.PHASE_TRY, b"held")
    before = begun(coordinator)
    talk.send(*[held() for _ in range(3 * CALLS_MAX)])
    talk.send(execute_request(branch()), first=99)
    bank.wait_for(CALLS_MAX, "TRY")
    # Others have their turn, and what has not been read has not begun when theirs is over.
    for _ in range(3):
        coordinator.coordinator_service().Execute(execute_request(branch()), timeout=CALL_S)
    assert begun(coordinator) == before + CALLS_MAX + 3
    gate.open.set()
    assert sorted(talk.results(3 * CALLS_MAX + 1)) == [*range(1, 3 * CALLS_MAX + 1), 99]


def test_answers_that_nobody_reads_fill_a_stream_too(
    coordinator: CoordinatorProcess, bank: ParticipantServer, talk: Conversation
) -> None:
    """What the caller does not take off is not piled up here: gRPC's flow control holds it up, and no more begins."""
    data = bytes(256 * 1024)
    before = begun(coordinator)
    for first in range(0, 200, 4):
        talk.send(*[execute_request(branch(data=data)) for _ in range(4)], first=first)
    unary = coordinator.coordinator_service().Execute
    seen, at = -1, 0
    while seen != at:  # until what one more unary call takes changes nothing
        seen, at = at, begun(coordinator)
        for _ in range(20):
            unary(execute_request(branch()), timeout=CALL_S)
            before += 1
        at = begun(coordinator) - before
    assert at < 200
    talk.end()
    messages = list(talk.stream)
    assert ids(result for message in messages for result in message.results) == list(range(200))
    # Those that had gathered leave in messages that are cut by bytes.
    assert max(len(message.results) for message in messages) == 3
    assert max(message.ByteSize() for message in messages) <= 1024 * 1024


def test_a_caller_that_goes_away_cancels_nothing(
    coordinator: CoordinatorProcess, bank: ParticipantServer, talk: Conversation
) -> None:
    bank.answer = gate = Gate(participant_pb.PHASE_TRY, b"held")
    talk.send(*[held(f"gone {n}") for n in range(CALLS_MAX)])
    bank.wait_for(CALLS_MAX, "TRY")
    talk.stream.cancel()
    gate.open.set()
    for n in range(CALLS_MAX):
        tx = finished(coordinator.coordinator_service(), idempotency_key=f"gone {n}")
        assert states(tx) == ["CONFIRMED", "CONFIRMED"]
    assert not bank.seen("CANCEL")


def test_a_transaction_that_rests_is_answered_when_it_is_done(bank: ParticipantServer, talk: Conversation) -> None:
    """Nobody drives it between its attempts."""
    bank.answer = lambda call: done(call) if call.attempt > 3 else unknown()
    talk.send(*[execute_request(branch()) for _ in range(3)])
    for result in talk.results(3).values():
        assert states(result.response.transaction) == ["CONFIRMED", "CONFIRMED"]


class TestBadMessages:
    """What is no ExecuteStreamRequest."""

    @staticmethod
    def sent(coordinator: CoordinatorProcess, *messages: bytes) -> tuple[grpc.StatusCode, list[bytes]]:
        """Send these bytes on a stream; how it ended, and what was answered."""
        channel = coordinator.channel()
        stream = channel.stream_stream(METHOD, lambda data: data, lambda data: data)(iter(messages), timeout=CALL_S)
        answers = []
        try:
            answers = [answer for answer in stream if answer]
        except grpc.RpcError as error:
            return error.code(), answers
        return grpc.StatusCode.OK, answers

    def test_it_ends_the_stream(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        assert self.sent(coordinator, b"\xff\xff\xff") == (grpc.StatusCode.INVALID_ARGUMENT, [])
        good = pb.ExecuteStreamRequest(calls=[pb.ExecuteStreamCall(call_id=1, request=execute_request(branch()))])
        code, _ = self.sent(coordinator, good.SerializeToString(), b"\x0a\x7f")
        assert code is grpc.StatusCode.INVALID_ARGUMENT

    def test_empty_ones_are_harmless(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        nothing = pb.ExecuteStreamRequest().SerializeToString()
        assert self.sent(coordinator, nothing, nothing) == (grpc.StatusCode.OK, [])
        code, (answer,) = self.sent(
            coordinator, pb.ExecuteStreamRequest(calls=[pb.ExecuteStreamCall()]).SerializeToString()
        )
        (result,) = pb.ExecuteStreamResponse.FromString(answer).results
        assert (code, result.call_id, result.error.code) == (grpc.StatusCode.OK, 0, 3)

    @pytest.mark.parametrize("seed", range(20))
    def test_garbage(self, coordinator: CoordinatorProcess, bank: ParticipantServer, seed: int) -> None:
        """A good message with some bytes changed, cut or added: an answer or an error for each, and nothing else."""
        chance = random.Random(seed)
        request = execute_request(branch(data=b"x" * 50), branch(action="credit"), key=f"garbage {seed}", timeout_ms=5)
        call = pb.ExecuteStreamCall(call_id=5, request=request, patience_ms=9_000)
        data = bytearray(pb.ExecuteStreamRequest(calls=[call] * 2).SerializeToString())
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(data))
            match chance.randrange(3):
                case 0:
                    data[at] = chance.randrange(256)
                case 1:
                    del data[at : at + chance.randint(1, 20)]
                case 2:
                    data[at:at] = chance.randbytes(chance.randint(1, 20))
        code, _ = self.sent(coordinator, bytes(data))
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)
        assert self.sent(coordinator)[0] is grpc.StatusCode.OK
