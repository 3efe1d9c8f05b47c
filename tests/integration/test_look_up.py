"""Looking transactions up at real coordinators, by the contract and through the SDK, on grpc and on grpc.aio."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from participant_sdk.coordinator_lookup import AsyncCoordinatorLookup, CoordinatorLookup, LookedUp
from participant_sdk.errors import ConfigurationError, OutcomeUnknown
from participant_sdk.transaction import Transaction, TransactionState
from tests.coordinators import CALL_S, CoordinatorProcess, branch, execute_request
from tests.postgres import free_port
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import participant_pb2

from .participant_server import ParticipantServer, done, refuse

ABSENT = "f" * 32
CONFIRMED, CANCELLED, TRYING = TransactionState.CONFIRMED, TransactionState.CANCELLED, TransactionState.TRYING


class Lookup:
    """Either flavour of the SDK's, called from asyncio."""

    def __init__(self, kind: str, endpoint: str) -> None:
        self._sync = CoordinatorLookup(endpoint) if kind == "sync" else None
        self._async = AsyncCoordinatorLookup(endpoint) if kind == "async" else None

    async def look_up(self, *xids: str) -> LookedUp:
        if self._sync is not None:
            return await asyncio.to_thread(self._sync.look_up, xids, CALL_S)
        assert self._async is not None
        return await self._async.look_up(xids, CALL_S)

    async def fetch(self, xid: str) -> Transaction | None:
        if self._sync is not None:
            return await asyncio.to_thread(self._sync.fetch, xid, CALL_S)
        assert self._async is not None
        return await self._async.fetch(xid, CALL_S)

    async def close(self) -> None:
        if self._sync is not None:
            self._sync.close()
        if self._async is not None:
            await self._async.close()


class Stage:
    """A coordinator, and a participant that says what a payload asks of it."""

    def __init__(self, store: str) -> None:
        self.answering = threading.Event()
        self.bank = ParticipantServer(self._answer)
        self.coordinator = CoordinatorProcess(store=store, backoff_cap_ms=100)
        self._xids: dict[str, str] = {}

    def _answer(self, call: participant_pb2.Call) -> participant_pb2.Reply | None:
        if call.payload.data == b"hang" and not self.answering.is_set():
            return None
        return refuse(call) if call.payload.data == b"no" else done(call)

    def run(self, what: str) -> str:
        """A transaction of one branch; its xid."""
        service = self.coordinator.coordinator_service()
        wait_s = 1.0 if what == "hang" else CALL_S  # it is told the state of that moment
        return service.Execute(execute_request(branch(data=what.encode())), timeout=wait_s).transaction.xid

    def __enter__(self) -> "Stage":
        self.bank.start()
        self.coordinator.start()
        self.coordinator.register("bank", self.bank.address)
        return self

    def __exit__(self, *_: object) -> None:
        self.answering.set()
        self.coordinator.stop()
        self.bank.stop()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One for all tests here that disturb nobody."""
    with Stage(str(tmp_path_factory.mktemp("look_up") / "tricord.db")) as stage:
        yield stage


@pytest.fixture(params=["sync", "async"])
async def lookup(request: pytest.FixtureRequest, stage: Stage) -> AsyncIterator[Lookup]:
    """At that coordinator."""
    lookup = Lookup(request.param, stage.coordinator.endpoint)
    yield lookup
    await lookup.close()


async def until_finished(lookup: Lookup, *xids: str) -> LookedUp:
    """The answer, once all are finished: an Execute may be answered before its last save, which a look-up needs."""
    while True:
        found = await lookup.look_up(*xids)
        if all(state.finished for state in found.states.values()):
            return found


async def test_states_and_absence(stage: Stage, lookup: Lookup) -> None:
    yes, no, open_ = stage.run("yes"), stage.run("no"), stage.run("hang")
    await until_finished(lookup, yes, no)
    found = await lookup.look_up(no, ABSENT, open_, yes)
    assert found.states == {yes: CONFIRMED, no: CANCELLED, open_: TRYING}
    (ready,) = stage.coordinator.log("coordinator.ready")
    assert (found.store_id, found.incarnation) == (ready["store_id"], 0)
    assert (await lookup.look_up(ABSENT)).states == {}


async def test_a_thousand(stage: Stage, lookup: Lookup) -> None:
    yes = stage.run("yes")
    found = await until_finished(lookup, *[f"{n:032x}" for n in range(999)], yes)
    assert found.states == {yes: CONFIRMED}


async def test_one_whole(stage: Stage, lookup: Lookup) -> None:
    xid = stage.run("no")
    found = await lookup.fetch(xid)
    assert found is not None
    assert (found.xid, found.branches[0].participant) == (xid, "bank")
    assert found.refusal is not None
    assert await lookup.fetch(ABSENT) is None


def test_however_an_xid_is_written_it_is_answered_in_one_form(stage: Stage) -> None:
    xid = stage.run("yes")
    service = stage.coordinator.coordinator_service()
    written = [xid.upper(), f"{xid[:8]}-{xid[8:12]}-{xid[12:16]}-{xid[16:20]}-{xid[20:]}", xid, xid]
    answer = service.LookUp(pb.LookUpRequest(xids=written), timeout=CALL_S)
    assert [each.xid for each in answer.transactions] == [xid]


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_while_nobody_answers(kind: str, tmp_path: Path) -> None:
    """Neither "absent" nor any state: not known."""
    coordinator = CoordinatorProcess(store=tmp_path / "tricord.db", listen=f"127.0.0.1:{free_port()}")
    lookup = Lookup(kind, coordinator.endpoint)
    try:
        for question in (lookup.look_up(ABSENT), lookup.fetch(ABSENT)):
            with pytest.raises(OutcomeUnknown, match="cannot be asked: UNAVAILABLE") as caught:
                await question
            assert caught.value.retryable
        coordinator.start()
        while True:  # until gRPC connects again
            try:
                answered = await lookup.look_up(ABSENT)
            except OutcomeUnknown:
                continue
            break
        assert answered.states == {}
        coordinator.kill()
        with pytest.raises(OutcomeUnknown):
            await lookup.look_up(ABSENT)
    finally:
        await lookup.close()
        coordinator.kill()
    with pytest.raises(ConfigurationError, match="closed"):
        await lookup.look_up(ABSENT)


async def test_after_a_crash_of_the_coordinator(tmp_path: Path) -> None:
    """What is told is what is stored: before, after, and of what recovery has brought to its end."""
    with Stage(str(tmp_path / "tricord.db")) as stage:
        lookup = Lookup("async", stage.coordinator.endpoint)
        yes, open_ = stage.run("yes"), stage.run("hang")
        before = await until_finished(lookup, yes)
        assert (await lookup.look_up(open_)).states == {open_: TRYING}
        await lookup.close()
        stage.coordinator.kill()
        stage.answering.set()
        stage.coordinator.start()
        lookup = Lookup("async", stage.coordinator.endpoint)
        after = await until_finished(lookup, yes, open_)
        assert after.states == {yes: CONFIRMED, open_: CONFIRMED}
        assert (after.store_id, after.incarnation) == (before.store_id, before.incarnation)
        await lookup.close()


async def test_another_store_knows_nothing_and_says_which_it_is(stage: Stage, tmp_path: Path) -> None:
    """The wrong cluster: its silence about a transaction must not be taken for an answer (D1)."""
    xid = stage.run("yes")
    with CoordinatorProcess(store=tmp_path / "other.db") as other:
        mine, theirs = Lookup("async", stage.coordinator.endpoint), Lookup("async", other.endpoint)
        found, nothing = await mine.look_up(xid), await theirs.look_up(xid)
        assert (list(found.states), list(nothing.states)) == ([xid], [])
        assert found.store_id != nothing.store_id
        await asyncio.gather(mine.close(), theirs.close())


@pytest.mark.database
class TestPostgres:
    """Any coordinator on one database will do."""

    async def test_one_coordinator_tells_what_another_drives(self, pg_database: str) -> None:
        settings: dict[str, Any] = {"store": pg_database, "backoff_cap_ms": 100}
        with Stage(pg_database) as stage, CoordinatorProcess(**settings) as other:
            mine, theirs = Lookup("sync", stage.coordinator.endpoint), Lookup("async", other.endpoint)
            open_, yes = stage.run("hang"), stage.run("yes")
            assert (await theirs.look_up(open_)).states == {open_: TRYING}
            found = await until_finished(theirs, yes)
            assert found.incarnation > 0
            assert found == await mine.look_up(yes)
            stage.answering.set()
            assert (await until_finished(theirs, open_)).states == {open_: CONFIRMED}
            await asyncio.gather(mine.close(), theirs.close())
