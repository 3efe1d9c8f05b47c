"""The resolver (protocol D1): what was TRIED too long is settled as a stored record says, and never without one."""

import asyncio
import logging
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from coordinator.model import Resolution, State
from participant_sdk import upkeep_resolve
from participant_sdk.transaction import LookedUp
from participant_sdk.upkeep import ResolveReport, Upkeep
from participant_sdk.upkeep_hands import ThreadHands
from participant_sdk.upkeep_resolve import Scan, resolving
from participant_sdk.upkeep_steps import Job, Memory, StoreChanged
from tests.contract.participant.records import (
    CANCELLED,
    CANCELLING,
    COMMITTED,
    CONFIRMED,
    CONFIRMING,
    ROLLBACKED,
    TRIED,
    TRYING,
    Records,
    branch,
    change,
    copies,
    counts,
    old_xid,
    resolve,
)
from tests.contract.participant.world import CONFIRM, DONE, TRY, Debit, World, new_xid
from tests.coordinators import CALL_S, CoordinatorProcess, execute_request, states
from tests.postgres import free_port
from tests.servers import eventually
from tricord.v1 import coordinator_pb2 as pb

PATIENT: dict[str, Any] = {
    "call_timeout_ms": 60_000,
    "lease_ms": 120_000,
    "timeout_ms": 120_000,
    "backoff_cap_ms": 200,
}

several = pytest.mark.parametrize("flavour", ["sqlite-sync", "postgres-async", "mariadb-sync"], indirect=True)


async def test_a_stored_record_decides_and_nothing_else(
    world: World, records: Records, caplog: pytest.LogCaptureFixture
) -> None:
    confirmed = [await branch(world, TRIED, await records.put(old_xid(), state)) for state in (CONFIRMING, CONFIRMED)]
    cancelled = [await branch(world, TRIED, await records.put(old_xid(), state)) for state in (CANCELLING, CANCELLED)]
    two = await records.put(old_xid(), CONFIRMING, [Debit(), Debit()])
    await branch(world, TRIED, two)
    await copies(world, two, [two], branch_ids=[2])
    undecided = await branch(world, TRIED, await records.put(old_xid(), TRYING))
    unknown = await branch(world, TRIED, old_xid())
    settled = await branch(world, COMMITTED, await records.put(old_xid(), CANCELLING))
    with caplog.at_level(logging.INFO, "tricord.participant"):
        report = await resolve(world, records.endpoint)
    assert counts(report) == {"confirmed": 4, "cancelled": 2, "undecided": 1, "unknown": 1}
    assert [world.status(xid) for xid in confirmed] == [COMMITTED, COMMITTED]
    assert [world.status(xid) for xid in cancelled] == [ROLLBACKED, ROLLBACKED]
    assert [world.status(two, number) for number in (1, 2)] == [COMMITTED, COMMITTED]
    assert [world.status(xid) for xid in (undecided, unknown, settled)] == [TRIED, TRIED, COMMITTED]
    for xid, what in ((confirmed[0], "confirm"), (cancelled[0], "cancel")):
        first, then = world.effects(xid)
        assert (first, then.split()[0], "#1" in then) == ("try", what, True)  # with what Try returned
    assert [world.effects(xid) for xid in (undecided, unknown)] == [["try"], ["try"]]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith(f"participant bank: {unknown}: is TRIED here, but the coordinator has no record of it")
    assert f"participant bank: resolve: {report}" in caplog.messages
    caplog.clear()
    assert counts(await resolve(world, records.endpoint)) == {"undecided": 1, "unknown": 1}
    assert caplog.records == []
    assert (await world.call(CONFIRM, confirmed[0])).outcome == DONE  # the coordinator's own, later
    assert len(world.effects(confirmed[0])) == 2


@several
async def test_what_is_young_is_left_to_the_coordinator(world: World, records: Records) -> None:
    just_now = int(time.time() * 1000)
    young, late_try = [await records.put(xid, CONFIRMING) for xid in (new_xid(), old_xid(days=0.5))]
    for xid in (young, late_try):
        assert (await world.call(TRY, xid)).outcome == DONE
    lately = await branch(world, TRIED, await records.put(old_xid(), CONFIRMING, decided_ms=just_now))
    assert counts(await resolve(world, records.endpoint)) == {"left": 1}
    over = await branch(world, TRIED, await records.put(old_xid(), CANCELLED, decided_ms=just_now))
    assert counts(await resolve(world, records.endpoint)) == {"left": 1, "cancelled": 1}
    assert [world.status(xid) for xid in (young, late_try, lately, over)] == [TRIED, TRIED, TRIED, ROLLBACKED]
    assert counts(await resolve(world, records.endpoint, resolve_after=timedelta(0))) == {"confirmed": 3}


@several
async def test_an_external_try_that_may_still_run_is_left(world: World, records: Records) -> None:
    xid = await branch(world, TRIED, await records.put(old_xid(), CANCELLING))
    change(world, xid, "finished_at = NULL, intent = 'abc', lease_until_ms = 9999999999999")
    assert counts(await resolve(world, records.endpoint)) == {"left": 1}
    change(world, xid, "lease_until_ms = 1")
    assert counts(await resolve(world, records.endpoint)) == {"cancelled": 1}
    assert world.status(xid) == ROLLBACKED


@several
async def test_what_was_resolved_by_hand_is_written_down_and_nothing_run(world: World, records: Records) -> None:
    """As where a database that was given up for lost turns up again."""

    async def resolved(state: State, confirmed: bool) -> str:
        by_hand = Resolution(1, confirmed, "alice", "by hand", 1, opposite=False, lost=True)
        return await branch(world, TRIED, await records.put(old_xid(), state, resolved=(by_hand,)))

    xids = [await resolved(state, confirmed) for state in (CONFIRMED, CANCELLING) for confirmed in (True, False)]
    assert counts(await resolve(world, records.endpoint)) == {"confirmed": 2, "cancelled": 2}
    assert [world.status(xid) for xid in xids] == [COMMITTED, ROLLBACKED] * 2
    assert [world.effects(xid) for xid in xids] == [["try"]] * 4


@several
async def test_the_fence_has_the_last_word(world: World, records: Records, caplog: pytest.LogCaptureFixture) -> None:
    other_payload = await branch(world, TRIED, await records.put(old_xid(), CONFIRMING, [Debit(amount=99)]))
    half_done = await branch(world, TRIED, await records.put(old_xid(), CONFIRMING))
    change(world, half_done, "finished_at = NULL")
    not_one_of_its = await branch(world, TRIED, await records.put(old_xid(), CONFIRMING, participant="another"))
    unknown_action = await branch(world, TRIED, await records.put(old_xid(), CANCELLING, action="nothing"))
    xids = [other_payload, half_done, not_one_of_its, unknown_action]
    for _ in range(2):
        assert counts(await resolve(world, records.endpoint)) == {"failed": 4}
        assert [world.status(xid) for xid in xids] == [TRIED] * 4
        assert [world.effects(xid) for xid in xids] == [["try"]] * 4
    told = [text for text in caplog.messages if text.startswith("participant bank: ")]
    assert sorted(text.split(": ")[1] for text in told) == sorted(xids)
    (text,) = [text for text in told if other_payload in text]
    assert "Confirm of its branch 1 is owed by the coordinator's record, but ended as violation: violation: the" in text


@several
async def test_a_handler_that_fails_is_run_again_in_the_next_round(world: World, records: Records) -> None:
    debit = Debit(mode="confirm_raises")
    xid = new_xid()
    assert (await world.call(TRY, xid, "confirm_raises")).outcome == DONE
    await records.put(xid, CONFIRMING, [debit])
    for _ in range(2):
        assert counts(await resolve(world, records.endpoint, resolve_after=timedelta(0))) == {"failed": 1}
    assert (world.status(xid), world.effects(xid)) == (TRIED, ["try"])


@several
async def test_a_record_that_cannot_be_read_keeps_it_from_no_other(
    world: World, records: Records, caplog: pytest.LogCaptureFixture
) -> None:
    unread, read = sorted([await branch(world, TRIED, await records.put(old_xid(), CONFIRMING)) for _ in range(2)])
    with closing(sqlite3.connect(records.path, isolation_level=None)) as file:
        file.execute("UPDATE tricord_transaction SET body = x'00' WHERE xid = ?", (bytes.fromhex(unread),))
    assert counts(await resolve(world, records.endpoint)) == {"failed": 1, "confirmed": 1}
    assert [world.status(xid) for xid in (unread, read)] == [TRIED, COMMITTED]
    (told,) = [text for text in caplog.messages if text.startswith("participant bank: ")]
    assert told.startswith(f"participant bank: {unread}: is TRIED here, and the coordinator's record of it cannot be")


async def test_beside_the_coordinator_itself(world: World, records: Records) -> None:
    """And beside another instance of the resolver: Confirm runs once."""
    xids = [await branch(world, TRIED, await records.put(old_xid(), CONFIRMING)) for _ in range(5)]
    resolving_twice = asyncio.gather(*(resolve(world, records.endpoint) for _ in range(2)))
    replies = await asyncio.gather(*(world.call(CONFIRM, xid) for xid in xids))
    assert [reply.outcome for reply in replies] == [DONE] * 5
    assert [report.failed for report in await resolving_twice] == [0, 0]
    assert [len(world.effects(xid)) for xid in xids] == [2] * 5
    assert counts(await resolve(world, records.endpoint)) == {}


@several
async def test_another_store_ends_one_round(world: World, records: Records) -> None:
    await branch(world, TRIED, await records.put(old_xid(), CONFIRMING))
    assert counts(await resolve(world, records.endpoint)) == {"confirmed": 1}
    xid = await branch(world, TRIED, await records.put(old_xid(), CONFIRMING))
    with closing(sqlite3.connect(records.path, isolation_level=None)) as file:
        file.execute("UPDATE tricord_store SET store_id = 'another'")
    report = await resolve(world, records.endpoint)
    assert report.error.startswith("nothing is done in this round: the coordinator's store is 'another', and was")
    assert world.status(xid) == TRIED
    assert counts(await resolve(world, records.endpoint)) == {"confirmed": 1}


def test_another_incarnation_is_another_history() -> None:
    memory = Memory()
    for incarnation in (0, 7, 0, 7):  # 0: not known
        memory.check_store(LookedUp({}, "store", incarnation))
    with pytest.raises(StoreChanged, match=r"incarnation 8, and was 7"):
        memory.check_store(LookedUp({}, "store", 8))
    memory.check_store(LookedUp({}, "store", 8))


@several
async def test_only_a_few_findings_at_a_time_are_logged(
    world: World, records: Records, caplog: pytest.LogCaptureFixture
) -> None:
    first = await branch(world, TRIED, old_xid())
    await copies(world, first, [old_xid() for _ in range(24)])
    told = []
    for _ in range(3):
        caplog.clear()
        assert counts(await resolve(world, records.endpoint, batch=7)) == {"unknown": 25}
        told.append(len([text for text in caplog.messages if "no record" in text]))
        assert ("participant bank: 15 more findings of that kind" in caplog.messages) is (len(told) == 1)
    assert told == [10, 10, 5]


class Rounds:
    """Rounds that go on where the last has ended, as those in the background do."""

    def __init__(self, world: World, endpoint: str) -> None:
        fence, engine_fence = world.participant._fence, world.participant._engine_fence
        assert fence is not None
        job = Job(world.name, fence, Upkeep(), Memory())
        self.scan = Scan()
        self._job = job
        self._hands = ThreadHands(
            endpoint, engine_fence, fence.database, lambda call: engine_fence.execute(call, fence)  # type: ignore
        )  # fmt: skip

    async def run(self) -> dict[str, Any]:
        report = await asyncio.to_thread(self._hands.run, resolving(self._job, self.scan))
        assert isinstance(report, ResolveReport)
        return counts(report)

    def close(self) -> None:
        self._hands.close()


@pytest.mark.parametrize("flavour", ["sqlite-sync"], indirect=True)
async def test_rounds_look_at_what_is_new_and_at_what_waits(
    world: World, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a pass over everything, which is rare, finds what came late for its place."""
    monkeypatch.setattr(upkeep_resolve, "PAGE_ROWS", 2)
    rounds = Rounds(world, records.endpoint)
    try:
        waits = [await branch(world, TRIED, await records.put(old_xid(days), TRYING)) for days in (6, 5)]
        for days in range(4, 7):
            await branch(world, COMMITTED, old_xid(days))
        assert await rounds.run() == {"undecided": 2}
        assert rounds.scan.waiting == {(xid, 1) for xid in waits}
        young = await records.put(new_xid(), CONFIRMED)
        assert (await world.call(TRY, young)).outcome == DONE
        late = await branch(world, TRIED, await records.put(old_xid(5.5), CONFIRMED))
        assert await rounds.run() == {"undecided": 2}
        await decide(records, waits[0])
        rounds._job = replace(rounds._job, settings=Upkeep(resolve_after=timedelta(0)))
        assert await rounds.run() == {"undecided": 1, "confirmed": 2}
        assert [world.status(xid) for xid in (*waits, young, late)] == [COMMITTED, TRIED, COMMITTED, TRIED]
        assert rounds.scan.whole_at - time.monotonic() > 3_000
        rounds.scan.whole_at = 0.0
        assert await rounds.run() == {"undecided": 1, "confirmed": 1}
        assert world.status(late) == COMMITTED
    finally:
        rounds.close()


async def decide(records: Records, xid: str) -> None:
    """Confirm a transaction of the records, as a save does."""
    with closing(sqlite3.connect(records.path, isolation_level=None)) as file:
        set_state = "UPDATE tricord_transaction SET state = ? WHERE xid = ?"
        assert file.execute(set_state, (int(CONFIRMED), bytes.fromhex(xid))).rowcount == 1


@pytest.mark.parametrize("flavour", ["sqlite-sync"], indirect=True)
async def test_a_round_that_fails_forgets_nothing(world: World, records: Records) -> None:
    xid = await branch(world, TRIED, await records.put(old_xid(), TRYING))
    rounds = Rounds(world, records.endpoint)
    hands, nowhere = rounds._hands, Rounds(world, f"127.0.0.1:{free_port()}")
    try:
        assert await rounds.run() == {"undecided": 1}
        rounds._hands = nowhere._hands
        assert "UNAVAILABLE" in (await rounds.run())["error"]
        rounds._hands = hands
        with closing(sqlite3.connect(world.auditor.url.database or "", isolation_level=None)) as file:
            file.execute("ALTER TABLE tcc_fence_log RENAME TO away")
            assert (await rounds.run())["error"] == "OperationalError: no such table: tcc_fence_log"
            file.execute("ALTER TABLE away RENAME TO tcc_fence_log")
        await decide(records, xid)
        assert await rounds.run() == {"confirmed": 1}
    finally:
        hands.close()
        nowhere.close()


@pytest.mark.parametrize("flavour", ["sqlite-sync", "postgres-async"], indirect=True)
@pytest.mark.parametrize(
    ("mode", "decided", "resolved", "finished"),
    [("plain", "CONFIRMING", {"confirmed": 2}, "CONFIRMED"), ("refuse", "CANCELLING", {"cancelled": 1}, "CANCELLED")],
)
async def test_a_coordinator_that_cannot_reach_the_participant(
    world: World, mode: str, decided: str, resolved: dict[str, int], finished: str, tmp_path: Path
) -> None:
    """Between Try and the decision it is registered under an address where nobody answers."""
    gate = world.gate("slow")
    actions = {"debit": world.serving.fence_id}
    path = tmp_path / "tricord.db"
    with CoordinatorProcess(store=path, **PATIENT) as coordinator:
        coordinator.register("bank", world.serving.address, actions)
        service = coordinator.coordinator_service()
        payloads = [world.message(TRY, "", "plain").payload, world.message(TRY, "", mode, account="slow").payload]
        request = execute_request(
            *(pb.BranchRequest(participant="bank", action="debit", payload=payload) for payload in payloads),
            wait=pb.WAIT_DECIDED,
            timeout_ms=60_000,
        )
        executing = asyncio.ensure_future(asyncio.to_thread(service.Execute, request, timeout=CALL_S))
        await gate.wait_reached()
        first_is_tried = "SELECT 1 FROM tcc_fence_log WHERE branch_id = 1 AND finished_at IS NOT NULL"
        assert await asyncio.to_thread(eventually, lambda: bool(world.query(first_is_tried)))
        nowhere = f"127.0.0.1:{free_port()}"
        coordinator.register("bank", nowhere, actions)
        coordinator.withdraw("bank", world.serving.address)
        gate.opened.set()
        transaction = (await executing).transaction
        assert states(transaction)[0] == decided
        assert counts(await resolve(world, coordinator.endpoint, resolve_after=timedelta(0))) == resolved
        effects = world.effects(transaction.xid)
        coordinator.register("bank", world.serving.address, actions)
        coordinator.withdraw("bank", nowhere)
        while states(transaction)[0] != finished:
            found = await asyncio.to_thread(service.Get, pb.GetRequest(xid=transaction.xid), timeout=CALL_S)
            transaction = found.transaction
        assert world.effects(transaction.xid) == effects  # the coordinator's own calls found it done
