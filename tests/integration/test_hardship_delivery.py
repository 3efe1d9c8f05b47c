"""Participants that answer too much, or not at all, or that have moved: nothing is held up, and nothing is held."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.delivery import Delivery
from coordinator.delivery_breaker import FAILURES_MAX, SILENT_MAX
from coordinator.delivery_link import Link
from coordinator.model import BranchSpec, Call, Outcome, Payload, Phase, Reply, Spec
from coordinator.participants import Participants
from coordinator.store.rows import ParticipantRow
from coordinator.store.store import Store, backend_for
from coordinator.wire import RESULT_BYTES_MAX
from tests.coordinators import CALL_S, CoordinatorProcess, branch, execute_request, states
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import participant_pb2, types_pb2

from .participant_server import Context, ParticipantServer, done

TRY, CONFIRM, CANCEL = participant_pb2.PHASE_TRY, participant_pb2.PHASE_CONFIRM, participant_pb2.PHASE_CANCEL
DONE = participant_pb2.OUTCOME_DONE


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    """A coordinator with quick retries, and calls that soon time out."""
    with CoordinatorProcess(
        store=tmp_path / "tricord.db", backoff_base_ms=20, backoff_cap_ms=100, call_timeout_ms=500, lease_ms=5_000,
        drain_ms=0,
    ) as process:  # fmt: skip
        yield process


@pytest.fixture
def bank(coordinator: CoordinatorProcess) -> Iterator[ParticipantServer]:
    """A participant that says yes to everything, registered."""
    with ParticipantServer() as participant:
        coordinator.register("bank", participant.address)
        yield participant


def result_of(size: int, content_type: str = "") -> participant_pb2.Reply:
    """Done, with so much of a result."""
    return participant_pb2.Reply(outcome=DONE, result=types_pb2.Payload(data=bytes(size), content_type=content_type))


BEYOND: dict[str, tuple[Callable[[], participant_pb2.Reply], str]] = {
    "result": (lambda: result_of(RESULT_BYTES_MAX + 1), "65537 bytes; the limit is 65536"),
    "large result": (lambda: result_of(3_000_000), "3000000 bytes; the limit is 65536"),
    "content type": (lambda: result_of(1, "x" * 256), "content_type is longer than 255"),
    "large content type": (lambda: result_of(1, "é" * 1_000_000), "content_type is longer than 255"),
    "fence": (lambda: participant_pb2.Reply(outcome=DONE, fence_id="f" * 65), "fence"),
    "refusal with a fence": (
        lambda: participant_pb2.Reply(outcome=participant_pb2.OUTCOME_REFUSED, fence_id="f" * 2_000_000),
        "fence",
    ),
}


class TestReplies:
    """What a participant sends has limits: beyond them it is a violation, and of a Try that is a refusal."""

    @pytest.mark.parametrize("name", BEYOND)
    def test_beyond_its_limit_in_try(self, coordinator: CoordinatorProcess, bank: ParticipantServer, name: str) -> None:
        make, said = BEYOND[name]
        bank.answer = lambda call: make() if call.phase == TRY and call.branch_id == 1 else done(call)
        service = coordinator.coordinator_service()
        request = execute_request(branch(), branch(action="credit"), key=name)
        tx = service.Execute(request, timeout=CALL_S).transaction
        assert states(tx) == ["CANCELLED"] * 3
        assert tx.attention == types_pb2.ATTENTION_VIOLATION
        assert said in tx.cancel_reason
        assert said in tx.branches[0].last_error
        assert [seen.call.attempt for seen in bank.seen("TRY")] == [1, 1]
        assert service.Get(pb.GetRequest(xid=tx.xid), timeout=CALL_S).transaction.xid == tx.xid
        assert tx.ByteSize() < 10_000

    @pytest.mark.parametrize("name", ["large result", "content type", "fence"])
    def test_beyond_its_limit_in_confirm(
        self, coordinator: CoordinatorProcess, bank: ParticipantServer, name: str
    ) -> None:
        """The decision stands; the branch is asked again, and a person is told."""
        make, said = BEYOND[name]
        bank.answer = lambda call: make() if call.phase == CONFIRM else done(call)
        service = coordinator.coordinator_service()
        running = service.Execute.future(execute_request(branch(), key=name), timeout=CALL_S)
        bank.wait_for(2, "CONFIRM")
        tx = service.Get(pb.GetRequest(idempotency_key=name), timeout=CALL_S).transaction
        assert (states(tx), tx.attention) == (["CONFIRMING", "TRIED"], types_pb2.ATTENTION_VIOLATION)
        assert said in tx.branches[0].last_error
        bank.answer = done
        assert states(running.result(CALL_S).transaction) == ["CONFIRMED", "CONFIRMED"]

    def test_just_within_its_limit(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        """The most that may be stored can also be read: 64 results, and payloads up to the request's limit."""
        bank.answer = lambda call: result_of(RESULT_BYTES_MAX, "x" * 255)
        service = coordinator.coordinator_service()
        request = execute_request(*[branch(data=bytes(125_000))] * 64)
        tx = service.Execute(request, timeout=CALL_S).transaction
        assert states(tx)[0] == "CONFIRMED"
        found = service.Get(pb.GetRequest(xid=tx.xid), timeout=CALL_S).transaction
        assert [len(b.result.data) for b in found.branches] == [RESULT_BYTES_MAX] * 64

    def test_long_texts_are_cut(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        refusal = types_pb2.Refusal(reason="r" * 1_000_000, message="€" * 600_000)
        refused = participant_pb2.Reply(outcome=participant_pb2.OUTCOME_REFUSED, refusal=refusal, error="e" * 100_000)
        bank.answer = lambda call: refused if call.phase == TRY else done(call)
        service = coordinator.coordinator_service()
        tx = service.Execute(execute_request(*[branch()] * 64), timeout=CALL_S).transaction
        assert states(tx)[0] == "CANCELLED"
        assert tx.branches[0].refusal.reason.startswith("rrr")
        assert tx.ByteSize() < 1_000_000


class TestMuteStreams:
    """A stream on which nothing comes back any more, though the connection seems to live."""

    def test_it_is_given_up_for_a_new_one(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        """A proxy between the two, or a participant's broken server, answers pings and no calls."""
        bank.answer = lambda call: None if bank.streams == 1 else done(call)
        service = coordinator.coordinator_service()
        request = execute_request(branch(), timeout_ms=50_000)
        calls = [service.Execute.future(request, timeout=CALL_S) for _ in range(SILENT_MAX + 8)]
        assert {states(call.result(CALL_S).transaction)[0] for call in calls} == {"CONFIRMED"}
        assert bank.streams == 2

    def test_it_is_given_up_by_one_transaction_alone(
        self, coordinator: CoordinatorProcess, bank: ParticipantServer
    ) -> None:
        """The calls in a row may be one call's repeats."""
        bank.answer = lambda call: None if bank.streams == 1 else done(call)
        request = execute_request(*[branch()] * 8, timeout_ms=50_000)
        tx = coordinator.coordinator_service().Execute(request, timeout=CALL_S).transaction
        assert states(tx)[0] == "CONFIRMED"
        assert bank.streams == 2
        assert 4 <= max(seen.call.attempt for seen in bank.seen("TRY")) <= 8

    def test_one_that_takes_nothing_any_more(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        """Not even what is to be written: the coordinator's own write hangs, and must not take its writer with it."""
        service = coordinator.coordinator_service()
        assert states(service.Execute(execute_request(branch()), timeout=CALL_S).transaction)[0] == "CONFIRMED"
        bank.may_read.clear()
        bank.answer = lambda call: None if bank.streams == 1 else done(call)
        request = execute_request(*[branch(data=bytes(900_000))] * 8, timeout_ms=50_000)
        calls = [service.Execute.future(request, timeout=CALL_S) for _ in range(5)]

        def give_up() -> None:
            while bank.streams == 1 and not over.wait(0.05):
                pass
            bank.may_read.set()

        over = threading.Event()
        watch = threading.Thread(target=give_up)
        watch.start()
        try:
            assert {states(call.result(CALL_S).transaction)[0] for call in calls} == {"CONFIRMED"}
        finally:
            over.set()
            watch.join()
        assert bank.streams == 2

    def test_a_stream_that_answers_some_is_kept(self, coordinator: CoordinatorProcess, bank: ParticipantServer) -> None:
        """Slow or lost calls beside others that are answered are those calls' own trouble."""
        bank.answer = lambda call: (
            None if call.branch_id != 1 and call.phase == TRY and call.attempt < 5 else done(call)
        )
        service = coordinator.coordinator_service()
        request = execute_request(*[branch()] * (SILENT_MAX // 2), timeout_ms=50_000)
        running = service.Execute.future(request, timeout=CALL_S)
        while not running.done():
            service.Execute(execute_request(branch()), timeout=CALL_S)
        assert states(running.result(CALL_S).transaction)[0] == "CONFIRMED"
        assert bank.streams == 1


class Turning(ParticipantServer):
    """Turns every stream away with the same code, at once."""

    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__()
        self._code = code

    def Exchange(self, request_iterator: Iterator[participant_pb2.ExchangeRequest], context: Context) -> Iterator[Any]:
        context.abort(self._code, "turned away by the test")


class TestRefusedStreams:
    """The first batch races the refusal: its write may fail, and gRPC reports that in place of the refusal's code.

    It happens to a few streams in a hundred; hence so many.
    """

    @pytest.mark.parametrize(
        ("code", "outcome"),
        [
            (grpc.StatusCode.UNIMPLEMENTED, Outcome.DONE),  # goes out alone, as a unary call
            (grpc.StatusCode.RESOURCE_EXHAUSTED, Outcome.UNKNOWN),
        ],
    )
    async def test_its_code_decides(self, code: grpc.StatusCode, outcome: Outcome) -> None:
        with Turning(code) as server:
            outcomes = set()
            for _ in range(300):
                link = Link(server.address)
                try:
                    replied: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
                    link.send("", LARGE, Call(0, Phase.TRY, 1, 30_000), replied.set_result)
                    outcomes.add((await replied).outcome)
                finally:
                    await link.close()
            assert outcomes == {outcome}


SPEC = Spec(bytes(16), b"", 0, 30_000, (BranchSpec("bank", "debit"), BranchSpec("shop", "debit")))


LARGE = SPEC._replace(branches=(BranchSpec("bank", "debit", Payload(bytes(70_000))),))


class Addresses:
    """A real ``Delivery`` on real participants, whose addresses a test changes."""

    def __init__(self, participants: Participants, delivery: Delivery) -> None:
        self.participants = participants
        self.delivery = delivery

    async def register(self, name: str, address: str) -> None:
        """A participant is there now."""
        await self.participants.register(ParticipantRow(name, address, {"debit": "fence-1"}), replace_fence=False)

    async def move(self, name: str, old: str, new: str) -> None:
        """A participant is no longer where it was."""
        await self.register(name, new)
        await self.participants.withdraw(name, old)

    def call(self, branch: int, timeout_ms: int = 30_000) -> asyncio.Future[Reply]:
        """Send a Try."""
        replied: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.delivery.send("00" * 16, SPEC, Call(branch, Phase.TRY, 1, timeout_ms), replied.set_result)
        return replied


@pytest.fixture
async def addresses(tmp_path: Path) -> AsyncIterator[Addresses]:
    """On a store of its own."""
    store = Store(backend_for(str(tmp_path / "tricord.db"), 10_000))
    await store.open()
    participants = Participants(store)
    delivery = Delivery(participants)
    try:
        await participants.refresh()
        yield Addresses(participants, delivery)
    finally:
        await delivery.close()
        await store.close()


async def is_closed(channel: grpc.aio.Channel) -> None:
    """Returns when it is closed."""
    async with asyncio.timeout(CALL_S):
        while True:
            try:
                state = channel.get_state()
            except grpc.aio.UsageError:
                return
            if state is grpc.ChannelConnectivity.SHUTDOWN:
                return
            await asyncio.sleep(0.01)


class TestAddresses:
    """An address that no participant has any more is let go."""

    async def test_once_its_calls_are_answered(self, addresses: Addresses) -> None:
        gate = threading.Event()

        def later(call: participant_pb2.Call) -> participant_pb2.Reply:
            assert gate.wait(CALL_S)
            return done(call)

        with ParticipantServer(later) as old, ParticipantServer() as new:
            await addresses.register("bank", old.address)
            late = addresses.call(0, timeout_ms=3_000)
            await asyncio.to_thread(old.wait_for, 1)
            channel = addresses.delivery._links[old.address]._channel
            await addresses.move("bank", old.address, new.address)
            assert (await addresses.call(0)).outcome is Outcome.DONE
            assert list(addresses.delivery._links) == [new.address]
            assert not late.done()
            gate.set()
            assert (await late).outcome is Outcome.DONE
            await is_closed(channel)
            assert not addresses.delivery._retired
            assert (await addresses.call(0)).outcome is Outcome.DONE

    async def test_one_that_is_still_in_use_stays(self, addresses: Addresses) -> None:
        with ParticipantServer() as old, ParticipantServer() as new:
            await addresses.register("bank", old.address)
            await addresses.register("shop", old.address)
            assert (await addresses.call(0)).outcome is Outcome.DONE
            await addresses.move("bank", old.address, new.address)
            assert (await addresses.call(0)).outcome is Outcome.DONE
            assert (await addresses.call(1)).outcome is Outcome.DONE
            assert {*addresses.delivery._links} == {old.address, new.address}
            assert (old.streams, new.streams) == (1, 1)

    async def test_at_a_stop_those_with_open_calls_are_closed_too(self, addresses: Addresses) -> None:
        """Their callers hear of it, and no connection is left behind."""
        with ParticipantServer(lambda call: None) as old, ParticipantServer() as new:
            await addresses.register("bank", old.address)
            open_ = addresses.call(0)
            await asyncio.to_thread(old.wait_for, 1)
            channel = addresses.delivery._links[old.address]._channel
            await addresses.move("bank", old.address, new.address)
            assert (await addresses.call(0)).outcome is Outcome.DONE
            await addresses.delivery.close()
            assert (await asyncio.wait_for(open_, CALL_S)).outcome is Outcome.UNKNOWN
            await is_closed(channel)

    async def test_it_may_come_back(self, addresses: Addresses) -> None:
        with ParticipantServer() as one, ParticipantServer() as two:
            await addresses.register("bank", two.address)
            for old, new in ((two, one), (one, two)) * 3:
                await addresses.move("bank", old.address, new.address)
                assert (await addresses.call(0)).outcome is Outcome.DONE
            assert len(addresses.delivery._links) == 1

    @pytest.mark.parametrize("failures", [1, FAILURES_MAX], ids=["breaker closed", "breaker open"])
    async def test_one_that_an_operator_trusts_is_tried_at_once(self, addresses: Addresses, failures: int) -> None:
        """Not gRPC's last attempt counts, which was before it came back."""
        with ParticipantServer() as server:
            await addresses.register("bank", server.address)
            server.stop()
            for _ in range(failures):
                assert (await addresses.call(0)).outcome is Outcome.UNKNOWN
            server.start()
            addresses.delivery.trust(["bank"])
            assert (await addresses.call(0)).outcome is Outcome.DONE
