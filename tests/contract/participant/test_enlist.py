"""A participant that is called directly: Enlist, Try, Report, against a coordinator that a test scripts.

B2, B3: whatever of it is lost, repeated or refused, there is one branch, one effect, and nothing counts as tried that
its participant has not reported.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection

from participant_sdk import Call, ConfigurationError, InvalidRequest, Participant, Refused, client_enlisting
from participant_sdk.call import IncomingCall, Outcome, Reply
from participant_sdk.context import Scope, arrived, bound
from participant_sdk.enlist_errors import BranchUnknown, NotEnlisted
from participant_sdk.fence import Phase
from participant_sdk.payload import Payload, encode
from participant_sdk.tried_memory import TriedMemory
from tests.contract.participant.world import (
    CONFIRM,
    DONE,
    TRY,
    Debit,
    Held,
    World,
    do_phase2,
    do_try,
    new_xid,
    sqlite_url,
)
from tricord.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
    types_pb2,
)

ON_SQLITE = pytest.mark.parametrize("flavour", ["sqlite-sync", "sqlite-async"])
WAIT_S = 20.0
PARENT = 7

Context = grpc.aio.ServicerContext[Any, Any]


class Ledger(coordinator_pb2_grpc.CoordinatorServiceServicer, registry_pb2_grpc.RegistryServiceServicer):
    """A coordinator of one transaction: its branches by key. `faults` says what goes wrong with its next calls.

    "lost": what was asked is done, the answer is not heard. "down": nothing is done. A reason: it is refused so.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.enlists: list[coordinator_pb2.EnlistRequest] = []
        self.reports: list[coordinator_pb2.ReportRequest] = []
        self.branches: dict[str, types_pb2.Branch] = {}
        self.state = types_pb2.TRANSACTION_STATE_TRYING
        self.reporting, self.may_report = asyncio.Event(), asyncio.Event()
        self.may_report.set()

    async def Enlist(self, request: coordinator_pb2.EnlistRequest, context: Context) -> coordinator_pb2.EnlistResponse:
        self.enlists.append(request)
        fault = await self.fault(context)
        branch = self.branches.get(request.branch_key)
        if branch is None:
            branch = self.branches[request.branch_key] = types_pb2.Branch(
                branch_id=len(self.branches) + 8, state=types_pb2.BRANCH_STATE_PENDING, enlisted=True
            )
        if fault == "lost":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the answer was lost")
        return coordinator_pb2.EnlistResponse(branch=branch)

    async def Report(self, request: coordinator_pb2.ReportRequest, context: Context) -> coordinator_pb2.ReportResponse:
        self.reports.append(request)
        self.reporting.set()
        await self.may_report.wait()
        fault = await self.fault(context)
        (branch,) = [each for each in self.branches.values() if each.branch_id == request.branch_id]
        if request.HasField("refusal"):
            branch.refusal.CopyFrom(request.refusal)
            branch.state = types_pb2.BRANCH_STATE_REFUSED
        else:
            branch.state = types_pb2.BRANCH_STATE_TRIED
            branch.tried_branch_ids[:] = request.tried.tried_branch_ids
            if request.tried.HasField("result"):
                branch.result.CopyFrom(request.tried.result)
        if fault == "lost":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the answer was lost")
        return coordinator_pb2.ReportResponse(state=self.state)

    async def RegisterParticipant(self, request: Any, context: Context) -> registry_pb2.RegisterParticipantResponse:
        return registry_pb2.RegisterParticipantResponse()

    async def WithdrawParticipant(self, request: Any, context: Context) -> registry_pb2.WithdrawParticipantResponse:
        return registry_pb2.WithdrawParticipantResponse()

    async def fault(self, context: Context) -> str:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "down":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        if fault and fault != "lost":
            detail = any_pb2.Any()
            detail.Pack(error_details_pb2.ErrorInfo(reason=fault, domain="tricord"))
            code = code_pb2.NOT_FOUND if fault == "TRANSACTION_NOT_FOUND" else code_pb2.FAILED_PRECONDITION
            status = status_pb2.Status(code=code, message="it is so", details=[detail])
            await context.abort_with_status(rpc_status.to_status(status))
        return fault


class Shop:
    """A participant that serves, and whose action the test enlists as a business call would."""

    def __init__(self, world: World, ledger: Ledger, **options: Any) -> None:
        self.world = world
        self.ledger = ledger
        self.xid = new_xid()
        self.reserve = (define_async if world.is_async else define)(world.participant, **options)

    async def enlist(self, payload: Debit, key: str | None = "k", **options: Any) -> tuple[Any, set[int]]:
        """What it returns, and what the caller would be told was tried."""
        with arrived(Scope(self.xid, PARENT, key, options.pop("expires_at", None))) as seen:
            return await self.enlist_here(payload, **options), seen

    async def enlist_here(self, payload: Debit, **options: Any) -> Any:
        if self.world.is_async:
            return await self.reserve.enlist(payload, **options)
        return await asyncio.to_thread(self.reserve.enlist, payload, **options)

    def effects(self) -> list[str]:
        return [what for (what,) in self.world.query("SELECT what FROM effects WHERE xid = :xid", xid=self.xid)]

    def fenced(self) -> list[tuple[int, int]]:
        query = "SELECT branch_id, status FROM tcc_fence_log WHERE xid = :xid"
        return [(branch_id, status) for branch_id, status in self.world.query(query, xid=self.xid)]


def define(bank: Participant, **options: Any) -> Any:
    @bank.action("reserve", **options)
    def reserve(call: Call[Debit], db: Connection) -> Held:
        return do_try(db, call)  # type: ignore[no-any-return]

    @reserve.confirm
    def confirm_reserve(call: Call[Debit], db: Connection) -> None:
        do_phase2(db, call, "confirm")

    @reserve.cancel
    def cancel_reserve(call: Call[Debit], db: Connection) -> None:
        do_phase2(db, call, "cancel")

    return reserve


def define_async(bank: Participant, **options: Any) -> Any:
    @bank.action("reserve", **options)
    async def reserve(call: Call[Debit], db: AsyncConnection) -> Held:
        held: Held = await db.run_sync(do_try, call)
        return held

    @reserve.confirm
    async def confirm_reserve(call: Call[Debit], db: AsyncConnection) -> None:
        await db.run_sync(do_phase2, call, "confirm")

    @reserve.cancel
    async def cancel_reserve(call: Call[Debit], db: AsyncConnection) -> None:
        await db.run_sync(do_phase2, call, "cancel")

    return reserve


@pytest.fixture
async def ledger() -> AsyncIterator[tuple[Ledger, str]]:
    """A scripted coordinator, and where it is."""
    ledger, server = Ledger(), grpc.aio.server()  # type: ignore[abstract]  # it is asked nothing else
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(ledger, server)
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(ledger, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield ledger, f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
async def shop(flavour: str, participant_url: str, ledger: tuple[Ledger, str]) -> AsyncIterator[Shop]:
    """A participant that is registered at it."""
    world = World(flavour, participant_url)
    try:
        shop = Shop(world, ledger[0])
        await world.start(coordinator=ledger[1], upkeep=None)
        yield shop
    finally:
        await world.close()


async def test_b3_it_is_enlisted_before_its_try_and_reported_after_its_commit(shop: Shop) -> None:
    held, seen = await shop.enlist(Debit())
    assert (held, seen) == (Held(f"{shop.xid}#8"), {8})
    (enlist,), (report,) = shop.ledger.enlists, shop.ledger.reports
    assert (enlist.xid, enlist.branch_key, enlist.parent_branch_id) == (shop.xid, "k.1", PARENT)
    assert (enlist.branch.participant, enlist.branch.action) == ("bank", "reserve")
    assert (report.xid, report.branch_id, report.fence_id) == (shop.xid, 8, shop.world.serving.fence_id)
    assert Payload(report.tried.result.data, report.tried.result.content_type) == encode(held)
    assert (shop.effects(), shop.fenced()) == (["try"], [(8, 1)])
    # The very same fence: a call of the coordinator's, with the payload that it was given, finds what was left there.
    payload = Payload(enlist.branch.payload.data, enlist.branch.payload.content_type)
    changes: dict[str, Any] = {"branch_id": 8, "action": "reserve", "payload": payload}
    assert (await shop.world.call(TRY, shop.xid, **changes)).outcome == DONE
    assert shop.effects() == ["try"]
    assert (await shop.world.call(CONFIRM, shop.xid, **changes)).outcome == DONE
    assert shop.effects() == ["try", f"confirm {held.hold}"]


async def test_a_refusal_is_raised_and_reported(shop: Shop) -> None:
    with pytest.raises(Refused, match="insufficient_funds"):
        await shop.enlist(Debit(mode="refuse"))
    (report,) = shop.ledger.reports
    assert (report.refusal.reason, report.HasField("tried")) == ("insufficient_funds", False)
    assert (shop.effects(), shop.fenced()) == ([], [(8, 3)])
    with pytest.raises(Refused, match="insufficient_funds"):  # the same business call again
        await shop.enlist(Debit(mode="refuse"))
    assert [enlist.branch_key for enlist in shop.ledger.enlists] == ["k.1", "k.1"]
    assert len(shop.ledger.reports) == 1


async def test_enlisted_branches_of_an_action_that_batches(
    flavour: str, participant_url: str, ledger: tuple[Ledger, str]
) -> None:
    """Each gets its own answer, whoever it ran together with."""
    world = World(flavour, participant_url)
    try:
        shop = Shop(world, ledger[0], batch=True, batch_key="account")
        await world.start(coordinator=ledger[1], upkeep=None)
        modes = ["plain", "plain", "refuse", "nothing", "raise", "plain", "refuse", "plain"]
        enlisting = [shop.enlist(Debit(mode=mode), str(n), timeout=WAIT_S) for n, mode in enumerate(modes)]
        answers = await asyncio.gather(*enlisting, return_exceptions=True)
        for mode, answer in zip(modes, answers, strict=True):
            match mode:
                case "refuse":
                    assert isinstance(answer, Refused)
                case "raise":
                    assert isinstance(answer, BranchUnknown)
                case _:
                    assert not isinstance(answer, BaseException)
                    held, seen = answer
                    assert held == (None if mode == "nothing" else Held(f"{shop.xid}#{min(seen)}"))
        assert shop.effects() == ["try"] * 5
        assert sorted(status for _, status in shop.fenced()) == [1] * 5 + [3] * 2
    finally:
        await world.close()


@ON_SQLITE
class TestLost:
    """What is lost on the way."""

    async def test_b2_a_lost_enlist_answer_makes_no_second_branch(self, shop: Shop) -> None:
        shop.ledger.faults = ["down", "lost", "lost"]
        _, seen = await shop.enlist(Debit())
        assert [enlist.branch_key for enlist in shop.ledger.enlists] == ["k.1"] * 4
        assert (seen, list(shop.ledger.branches), shop.effects()) == ({8}, ["k.1"], ["try"])

    async def test_b2_a_repeated_business_call_is_the_same_branch_and_answer(self, shop: Shop) -> None:
        first = await shop.enlist(Debit())
        assert await shop.enlist(Debit()) == first
        assert (len(shop.ledger.branches), shop.effects()) == (1, ["try"])
        other = await shop.enlist(Debit(), "another call")
        assert other[1] == {9}

    async def test_each_branch_within_a_call_has_its_own_key(self, shop: Shop) -> None:
        for _ in range(2):
            with arrived(Scope(shop.xid, PARENT, "k")) as seen:
                await shop.enlist_here(Debit())
                await shop.enlist_here(Debit("bob"))
            assert seen == {8, 9}
        assert shop.effects() == ["try", "try"]

    async def test_b2_a_repeat_after_the_report_was_not_made_is_answered_from_the_fence(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client_enlisting, "REPORT_SECONDS_MIN", 0.1)
        shop.ledger.faults = ["", *["down"] * 1000]
        with pytest.raises(BranchUnknown, match="did not take the report") as caught:
            await shop.enlist(Debit(), timeout=0.5)
        assert (caught.value.branch_id, caught.value.branch_key, caught.value.retryable) == (8, "k.1", True)
        assert shop.ledger.branches["k.1"].state == types_pb2.BRANCH_STATE_PENDING
        shop.ledger.faults = []
        assert await shop.enlist(Debit()) == (Held(f"{shop.xid}#8"), {8})
        assert shop.effects() == ["try"]

    async def test_a_lost_report_answer_is_asked_for_again(self, shop: Shop) -> None:
        shop.ledger.faults = ["", "lost", "down"]
        assert (await shop.enlist(Debit()))[1] == {8}
        assert [report.branch_id for report in shop.ledger.reports] == [8, 8, 8]

    async def test_while_it_is_not_answered_ok_nothing_is_run(self, shop: Shop) -> None:
        shop.ledger.faults = ["down"] * 1000
        began_at = time.monotonic()
        with pytest.raises(BranchUnknown, match="its Try was not run") as caught:
            await shop.enlist(Debit(), expires_at=began_at + 0.5)  # the time of the call that is served
        assert time.monotonic() - began_at < WAIT_S / 2
        assert caught.value.branch_id is None
        assert (shop.effects(), shop.fenced(), shop.ledger.reports) == ([], [], [])

    async def test_b3_a_try_of_unknown_outcome_is_not_reported(self, shop: Shop) -> None:
        with pytest.raises(BranchUnknown, match="bad luck"), arrived(Scope(shop.xid, PARENT, "k")) as seen:
            await shop.enlist_here(Debit(mode="raise"))
        assert (seen, shop.ledger.reports, shop.effects()) == (set(), [], [])

    async def test_b3_a_try_that_outlives_its_time_is_not_reported(self, shop: Shop) -> None:
        gate = shop.world.gate("slow")
        task = asyncio.ensure_future(shop.world.call(TRY, shop.xid, branch_id=8, mode="slow", account="slow"))
        await gate.wait_reached()
        with pytest.raises(BranchUnknown):  # queues behind the other call of its branch
            await shop.enlist(Debit(), timeout=0.3)
        assert shop.ledger.reports == []
        gate.opened.set()
        await task


@ON_SQLITE
class TestRefusedByTheCoordinator:
    """Its definite "no"."""

    @pytest.mark.parametrize(
        "reason",
        ["NOT_TRYING", "SEALED", "NOT_INTERACTIVE", "BRANCH_KEY_REUSED", "TOO_MANY_BRANCHES", "TRANSACTION_NOT_FOUND"],
    )
    async def test_nothing_is_run(self, shop: Shop, reason: str) -> None:
        shop.ledger.faults = [reason]
        with pytest.raises(NotEnlisted, match="it is so") as caught:
            await shop.enlist(Debit())
        assert (caught.value.reason, caught.value.ran, caught.value.retryable) == (reason, False, False)
        assert (shop.effects(), shop.fenced(), shop.ledger.reports) == ([], [], [])

    async def test_a_branch_that_was_cancelled_is_not_run(self, shop: Shop) -> None:
        shop.ledger.branches["k.1"] = types_pb2.Branch(branch_id=8, state=types_pb2.BRANCH_STATE_CANCELLED)
        with pytest.raises(NotEnlisted, match="was cancelled"):
            await shop.enlist(Debit())
        assert (shop.effects(), shop.fenced()) == ([], [])

    @pytest.mark.parametrize("answer", ["state", "NOT_TRYING"])
    async def test_it_is_told_when_the_transaction_was_cancelled_meanwhile(self, shop: Shop, answer: str) -> None:
        shop.ledger.state = types_pb2.TRANSACTION_STATE_CANCELLING
        shop.ledger.faults = ["", answer] if answer != "state" else []
        with pytest.raises(NotEnlisted) as caught, arrived(Scope(shop.xid, PARENT, "k")) as seen:
            await shop.enlist_here(Debit())
        assert (caught.value.reason, caught.value.ran, seen) == ("NOT_TRYING", True, set())

    async def test_a_repeat_is_told_too(self, shop: Shop) -> None:
        await shop.enlist(Debit())
        shop.ledger.state = types_pb2.TRANSACTION_STATE_CANCELLING
        with pytest.raises(NotEnlisted) as caught:
            await shop.enlist(Debit())
        assert (caught.value.reason, caught.value.ran, shop.effects()) == ("NOT_TRYING", True, ["try"])

    async def test_a_refusal_stays_one_when_it_cannot_be_reported(self, shop: Shop) -> None:
        shop.ledger.faults = ["", "NOT_TRYING"]
        with pytest.raises(Refused, match="insufficient_funds"):
            await shop.enlist(Debit(mode="refuse"))


@ON_SQLITE
class TestMisused:
    """What the program has to see to."""

    async def test_there_has_to_be_a_transaction(self, shop: Shop) -> None:
        with pytest.raises(NotEnlisted, match="no current xid") as caught:
            await shop.enlist_here(Debit())
        assert caught.value.reason == "NO_XID"

    async def test_the_callers_key_is_needed_or_one_of_its_own(self, shop: Shop) -> None:
        with pytest.raises(NotEnlisted, match="tricord-branch-key") as caught:
            await shop.enlist(Debit(), None)
        assert caught.value.reason == "NO_BRANCH_KEY"
        with bound(shop.xid):
            await shop.enlist_here(Debit(), branch_key="order-1/tea")
        (enlist,) = shop.ledger.enlists
        assert (enlist.branch_key, enlist.parent_branch_id) == ("order-1/tea", 0)

    @pytest.mark.parametrize("key", ["", "k" * 256, 7])
    async def test_a_key_that_cannot_be_one(self, shop: Shop, key: Any) -> None:
        with pytest.raises(InvalidRequest, match="1 to 255 characters"):
            await shop.enlist(Debit(), branch_key=key)

    async def test_a_payload_that_cannot_be_sent(self, shop: Shop) -> None:
        with pytest.raises(InvalidRequest, match="bank/reserve cannot be sent"):
            await shop.enlist(object())  # type: ignore[arg-type]

    async def test_after_its_end(self, shop: Shop) -> None:
        await shop.world.stop()
        with pytest.raises(ConfigurationError, match="closed"):
            await shop.enlist(Debit())

    async def test_without_a_coordinator(self, shop: Shop, tmp_path: Path) -> None:
        asynchronous = shop.world.is_async
        (tmp_path / "alone").mkdir()
        world = World(shop.world.flavour, sqlite_url(tmp_path / "alone", asynchronous=asynchronous))
        try:
            alone = Shop(world, shop.ledger)
            for start in (False, True):
                if start:
                    await world.start()
                with pytest.raises(ConfigurationError, match="coordinator='host:port'"):
                    await alone.enlist(Debit())
        finally:
            await world.close()


@ON_SQLITE
async def test_one_whose_try_has_run_still_reports_when_its_participant_stops(shop: Shop) -> None:
    shop.ledger.may_report.clear()
    enlisted = asyncio.create_task(shop.enlist(Debit()))
    await asyncio.wait_for(shop.ledger.reporting.wait(), WAIT_S)
    stopping = asyncio.create_task(shop.world.stop())
    while "stopping" not in (await shop.world.call(TRY, new_xid())).error:
        pass
    shop.ledger.may_report.set()
    assert (await enlisted)[1] == {8}
    assert await stopping


class TestTriedMemory:
    """What repeats are told, which the fence does not store."""

    def call(self, branch_id: int, phase: Phase = Phase.TRY) -> IncomingCall:
        return IncomingCall(phase, "a" * 32, branch_id, "bank", "debit", Payload(), 1, 0.0, b"")

    def test_a_repeat_is_told_what_the_run_saw(self) -> None:
        memory, ids = TriedMemory(), frozenset({3, 4})
        assert memory.completed(self.call(1), Reply(Outcome.DONE)).tried_branch_ids == frozenset()
        assert memory.completed(self.call(1), Reply(Outcome.DONE, tried_branch_ids=ids)).tried_branch_ids == ids
        assert memory.completed(self.call(1), Reply(Outcome.DONE)).tried_branch_ids == ids
        for call, reply in (
            (self.call(2), Reply(Outcome.DONE)),
            (self.call(1, Phase.CONFIRM), Reply(Outcome.DONE)),
            (self.call(1), Reply.unknown("x")),
        ):
            assert memory.completed(call, reply) == reply

    def test_it_forgets_the_oldest(self) -> None:
        memory, ids = TriedMemory(2), frozenset({9})
        for branch_id in (1, 2, 3):
            memory.completed(self.call(branch_id), Reply(Outcome.DONE, tried_branch_ids=ids))
        told = [memory.completed(self.call(branch_id), Reply(Outcome.DONE)).tried_branch_ids for branch_id in (1, 2, 3)]
        assert told == [frozenset(), ids, ids]
