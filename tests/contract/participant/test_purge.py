"""Purging the fence (protocol C7): what goes, what stays, and what happens to messages that come after it."""

import asyncio
import logging
import sqlite3
import threading
import time
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import text

from participant_sdk import upkeep_purge
from participant_sdk.call import IncomingCall, Outcome, Reply, fingerprint
from participant_sdk.errors import ConfigurationError
from participant_sdk.fence import Phase, Status
from participant_sdk.fence_tables import FenceTables
from participant_sdk.local_transaction import steps_of
from participant_sdk.payload import encode
from participant_sdk.steps import Commit, Send, Step, run
from participant_sdk.upkeep_sql import DELETES_MAX, UpkeepSql
from tests.contract.participant.records import (
    CANCELLED,
    CANCELLING,
    COMMITTED,
    CONFIRMED,
    CONFIRMING,
    ROLLBACKED,
    SUSPENDED,
    TRIED,
    TRYING,
    Records,
    branch,
    change,
    copies,
    counts,
    old_xid,
    purge,
    stored,
    xid_ms,
    xid_of,
)
from tests.contract.participant.world import (
    CANCEL,
    CONFIRM,
    DONE,
    REFUSED,
    TRY,
    VIOLATION,
    WAIT_SECONDS,
    Debit,
    World,
    new_xid,
)
from tests.postgres import free_port
from tests.servers import eventually

several = pytest.mark.parametrize("flavour", ["sqlite-async", "postgres-sync", "mariadb-sync"], indirect=True)
locking = pytest.mark.parametrize(
    "flavour",
    ["postgres-sync", "postgres-sync-repeatable_read", "mariadb-sync", "mariadb-sync-read_committed"],
    indirect=True,
)
sync_only = pytest.mark.parametrize("flavour", ["sqlite-sync", "postgres-sync", "mariadb-sync"], indirect=True)


async def test_what_is_over_goes_and_everything_else_stays(
    world: World, records: Records, caplog: pytest.LogCaptureFixture
) -> None:
    over = [
        await branch(world, COMMITTED, await records.put(old_xid(), CONFIRMED)),
        await branch(world, ROLLBACKED, await records.put(old_xid(), CANCELLED)),
        await branch(world, ROLLBACKED, await records.put(old_xid(), CANCELLED), mode="refuse"),
        await branch(world, SUSPENDED, await records.put(old_xid(), CANCELLED)),
    ]
    await copies(world, over[0], over[:1], branch_ids=(2, 3))
    kept = [
        await branch(world, COMMITTED, await records.put(old_xid(), CONFIRMING)),
        await branch(world, ROLLBACKED, await records.put(old_xid(), CANCELLING)),
        await branch(world, TRIED, await records.put(old_xid(), TRYING)),
        await branch(world, COMMITTED, unknown := old_xid()),
        await branch(world, TRIED, await records.put(tried := old_xid(), CONFIRMED)),
        await branch(world, ROLLBACKED, await records.put(contrary := old_xid(), CONFIRMED)),
        await branch(world, COMMITTED, await records.put(half_done := old_xid(), CONFIRMED)),
        await branch(world, COMMITTED, await records.put(old_xid(days=6), CONFIRMED)),
        await branch(world, COMMITTED, await records.put(other := old_xid(), CONFIRMED)),
    ]
    change(world, half_done, "finished_at = NULL")
    change(world, other, "participant = 'other'")
    with caplog.at_level(logging.INFO, "tricord.participant"):
        report = await purge(world, records.endpoint)
    told = {
        "purged": 6,
        "kept_unfinished": 3,
        "kept_unknown": 1,
        "kept_tried": 1,
        "kept_half_done": 1,
        "kept_contrary": 1,
    }
    assert counts(report) == told
    assert stored(world) == {(xid, 1) for xid in kept}
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sorted(text.split(": ")[1].split()[0] for text in warnings) == sorted([unknown, tried, half_done, contrary])
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.INFO] == [
        f"participant bank: purge: {report}"
    ]
    caplog.clear()
    assert counts(await purge(world, records.endpoint)) == {name: n for name, n in told.items() if name != "purged"}
    assert caplog.records == []  # what a person has been told once


@several
async def test_as_old_as_the_retention_is_young(world: World, records: Records) -> None:
    """What may go is older than what Try takes, by the margin: whatever is gone is refused."""
    now_ms = xid_ms(new_xid())
    retention_ms = world.participant._retention_ms
    margin_ms = upkeep_purge.CLOCK_MARGIN_MS
    for age_ms, goes in (
        (retention_ms, False),
        (retention_ms + margin_ms - 20_000, False),
        (retention_ms + margin_ms + 1, True),
    ):
        xid = await branch(world, SUSPENDED, await records.put(xid_of(now_ms - age_ms), CANCELLED))
        assert counts(await purge(world, records.endpoint)) == ({"purged": 1} if goes else {})
        assert ((xid, 1) in stored(world)) is not goes
        if goes:
            assert (await world.call(TRY, xid)).refusal.reason == "too_old"


async def test_messages_that_come_after_the_purge(world: World, records: Records) -> None:
    """Whatever it is, no handler runs; and what Cancel leaves behind goes with the next purge."""
    xid = await branch(world, ROLLBACKED, await records.put(old_xid(), CANCELLED))
    effects = world.effects(xid)
    assert counts(await purge(world, records.endpoint)) == {"purged": 1}
    late_try = await world.call(TRY, xid)
    assert (late_try.outcome, late_try.refusal.reason) == (REFUSED, "too_old")
    assert (await world.call(CONFIRM, xid)).outcome == VIOLATION
    assert world.status(xid) is None
    assert (await world.call(CANCEL, xid)).outcome == DONE
    assert (await world.call(TRY, xid)).refusal.reason == "suspended"
    assert world.status(xid) == SUSPENDED
    assert counts(await purge(world, records.endpoint)) == {"purged": 1}
    assert world.status(xid) is None
    assert world.effects(xid) == effects


def watched(steps: Any, before: Any) -> Any:
    """The same steps; `before` is called with each one before it is carried out."""
    try:
        step: Step = next(steps)
        while True:
            before(step)
            try:
                answer = yield step
            except Exception as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as stop:
        return stop.value


class Held:
    """Steps in a thread of their own, which stop before the one that `at` finds until `go`."""

    def __init__(self, world: World, steps: Any, at: Any) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self._at = at
        self._task = asyncio.ensure_future(asyncio.to_thread(self._run, world, watched(steps, self._before)))

    def _run(self, world: World, steps: Any) -> Any:
        with world.engine.connect() as connection:
            return run(steps, connection)

    def _before(self, step: Step) -> None:
        if self._at(step) and not self.reached.is_set():
            self.reached.set()
            assert self.opened.wait(WAIT_SECONDS)

    async def wait_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, WAIT_SECONDS)

    async def go(self) -> Any:
        self.opened.set()
        return await self._task


def delete_of(world: World) -> UpkeepSql:
    fence = world.participant._fence
    assert fence is not None
    return UpkeepSql(fence.database, world.name)


def is_commit(step: Step) -> bool:
    return isinstance(step, Commit)


def waits_for_a_lock(world: World) -> bool:
    if world.is_postgres:
        return bool(world.query("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"))
    (waits,) = world.query("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'")
    return int(waits[1]) > 0


@locking
async def test_a_try_that_waits_for_the_purge_of_its_row(world: World, records: Records) -> None:
    """Protocol C7: where the row was that says "cancelled", Try finds none; its age is looked at after that."""
    xid = await branch(world, SUSPENDED, await records.put(old_xid(), CANCELLED))
    held = Held(world, delete_of(world).delete([(xid, 1)]), is_commit)
    await held.wait_reached()
    late_try = asyncio.ensure_future(world.call(TRY, xid))
    assert await asyncio.to_thread(eventually, lambda: waits_for_a_lock(world))
    assert await held.go() == (1, 1)
    reply = await late_try
    assert (reply.outcome, reply.refusal.reason) == (REFUSED, "too_old")
    assert world.effects(xid) == []
    assert world.status(xid) is None


@sync_only
async def test_a_try_that_was_young_when_it_set_out(
    flavour: str, participant_url: str, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins within the retention and inserts beyond it; between the two, the row that bars it is purged."""
    monkeypatch.setattr(upkeep_purge, "CLOCK_MARGIN_MS", 0)
    world = World(flavour, participant_url)
    world.participant._retention_ms = 1_000
    try:
        await world.start()
        fence = world.participant._fence
        assert fence is not None
        xid = await records.put(new_xid(), CANCELLED)
        assert (await world.call(CANCEL, xid)).outcome == DONE
        payload = encode(Debit())
        expires_at = time.monotonic() + WAIT_SECONDS
        call = IncomingCall(
            Phase.TRY, xid, 1, "bank", "debit", payload, 1, expires_at, fingerprint("debit", payload)
        )  # fmt: skip
        held = Held(world, steps_of(call, fence), _writes)
        await held.wait_reached()
        while not (await purge(world, records.endpoint)).purged:  # until its time has come
            assert world.status(xid) == SUSPENDED
        reply: Reply = await held.go()
        assert (reply.outcome, reply.refusal and reply.refusal.reason) == (Outcome.REFUSED, "too_old")
        assert world.effects(xid) == []
    finally:
        await world.close()


def _writes(step: Step) -> bool:
    return "INSERT" in repr(step) or "BEGIN IMMEDIATE" in repr(step)


@locking
async def test_inserts_go_on_while_a_batch_is_under_way(world: World, records: Records) -> None:
    """Before, between, beside and behind the rows that go."""
    first = await branch(world, SUSPENDED, old_xid(31))
    xids = [old_xid(days) for days in range(12, 31)]
    await copies(world, first, xids)
    keys = sorted((xid, 1) for xid in (first, *xids))
    held = Held(world, delete_of(world).delete(keys), is_commit)
    await held.wait_reached()
    for xid in (new_xid(), old_xid(0.5), old_xid(11), old_xid(15), old_xid(40)):
        assert (await world.call(CANCEL, xid)).outcome == DONE
    for xid in (new_xid(), old_xid(0.5)):
        assert (await world.call(TRY, xid)).outcome == DONE
    assert await held.go() == (len(keys), len(keys))


@sync_only
async def test_a_row_that_is_gone_ends_the_batch(world: World) -> None:
    """On InnoDB its gap is locked then, which may be that at the end, where new rows come."""
    there = await branch(world, SUSPENDED, old_xid())
    gone, open_ = old_xid(), await branch(world, TRIED, old_xid())
    deleting = delete_of(world)

    def delete(*xids: str) -> Any:
        with world.engine.connect() as connection:
            return run(deleting.delete([(xid, 1) for xid in xids]), connection)

    assert delete(gone, there) == (0, 1)
    assert delete(open_, there) == (0, 1)
    assert delete(there, gone, open_) == (1, 2)
    assert stored(world) == {(open_, 1)}


async def test_two_at_once(world: World, records: Records) -> None:
    """Two instances of a participant: each row goes once, and neither minds the other."""
    first = await branch(world, COMMITTED, await records.put(old_xid(), CONFIRMED))
    xids = [await records.put(old_xid(), CONFIRMED) for _ in range(100)]
    await copies(world, first, xids, branch_ids=(1, 2))
    other = World(world.flavour, world.url)
    try:
        reports = await asyncio.gather(*(purge(each, records.endpoint, batch=60) for each in (world, other)))
    finally:
        await other.close()
    assert [report.error for report in reports] == ["", ""]
    left = len(stored(world))
    assert sum(report.purged for report in reports) + left == 201
    assert left <= sum(report.kept_busy for report in reports)
    assert (await purge(world, records.endpoint)).purged == left
    assert stored(world) == set()


@several
async def test_tables_of_another_name_in_the_same_database(world: World, records: Records) -> None:
    xid = await branch(world, COMMITTED, await records.put(old_xid(), CONFIRMED))
    tables = FenceTables(log_name="second_log", info_name="second_info")
    other = World(world.flavour, world.url, tables=tables)
    try:
        assert counts(await purge(other, records.endpoint)) == {}
        with world.auditor.begin() as db:
            db.execute(text("INSERT INTO second_log SELECT * FROM tcc_fence_log"))
        assert counts(await purge(other, records.endpoint)) == {"purged": 1}
        assert world.query("SELECT count(*) FROM second_log") == [(0,)]
    finally:
        await other.close()
    assert world.status(xid) == COMMITTED


@several
@pytest.mark.parametrize("batch", [1, 7, 1_000])
async def test_it_goes_past_what_stays(world: World, records: Records, batch: int) -> None:
    """Page by page, also where whole pages stay, and where a transaction has more branches than a page has rows."""
    xids = [old_xid(days) for days in range(10, 40)]
    gone, stay = [xid for n, xid in enumerate(xids) if n // 10 != 1], xids[10:20]
    for xid in gone:
        await records.put(xid, CONFIRMED)
    first = await branch(world, COMMITTED, await records.put(old_xid(41), CONFIRMED))
    await copies(world, first, xids, branch_ids=(1, 2, 3))
    await copies(world, first, gone[:1], branch_ids=range(4, 13))
    report = await purge(world, records.endpoint, batch=batch)
    assert counts(report) == {"purged": 1 + 60 + 9, "kept_unknown": 30}
    assert stored(world) == {(xid, number) for xid in stay for number in (1, 2, 3)}


@several
async def test_more_than_one_local_transaction_deletes(world: World, records: Records) -> None:
    xid = await records.put(old_xid(), CONFIRMED)
    await branch(world, COMMITTED, xid)
    await copies(world, xid, [xid], branch_ids=range(2, 2 * DELETES_MAX + 2))
    assert counts(await purge(world, records.endpoint, batch=10)) == {"purged": 2 * DELETES_MAX + 1}
    assert stored(world) == set()


@locking
async def test_a_row_that_is_locked_waits_for_the_next_purge(world: World, records: Records) -> None:
    xids = [await branch(world, COMMITTED, await records.put(old_xid(), CONFIRMED)) for _ in range(2)]
    held = Held(world, delete_of(world).delete([(max(xids), 1)]), is_commit)
    await held.wait_reached()
    assert counts(await purge(world, records.endpoint)) == {"kept_busy": 2}
    assert await held.go() == (1, 1)
    assert counts(await purge(world, records.endpoint)) == {"purged": 1}


@pytest.mark.parametrize("flavour", ["postgres-sync"], indirect=True)
async def test_pages_are_read_by_the_key(world: World) -> None:
    """Nobody has counted the table yet: left to itself, the server reads all that follows, for each page again."""
    first = await branch(world, COMMITTED, old_xid(31))
    await copies(world, first, [old_xid(days / 10) for days in range(300)], branch_ids=range(1, 11))
    plans: list[str] = []
    with world.engine.connect() as connection:

        def explain(step: Step) -> None:
            if isinstance(step, Send) and "FROM tcc_fence_log" in step.sql:
                cursor = connection.connection.cursor()
                cursor.execute(f"EXPLAIN {step.sql}", step.parameters)
                plans.extend(line for (line,) in cursor.fetchall())

        page = run(watched(delete_of(world).page("", old_xid(0), 100), explain), connection)
        run(watched(delete_of(world).again([(first, 1)], Status.COMMITTED), explain), connection)
    assert (len(page.rows), page.end is None) == (101, False)
    nodes = [line.replace("->", "").split("(")[0].strip() for line in plans if "(cost=" in line]
    assert {node for node in nodes if "Index" not in node} == {"Limit"}
    assert len([node for node in nodes if "Index" in node]) == 3


@several
async def test_no_answer_no_purge(world: World) -> None:
    xid = await branch(world, COMMITTED, old_xid())
    report = await purge(world, f"127.0.0.1:{free_port()}")
    assert report.error.startswith("the coordinator cannot be asked: UNAVAILABLE")
    assert (report.purged, stored(world)) == (0, {(xid, 1)})


@several
async def test_another_store_ends_one_round(world: World, records: Records, caplog: pytest.LogCaptureFixture) -> None:
    xid = await branch(world, COMMITTED, await records.put(old_xid(), CONFIRMED))
    assert counts(await purge(world, records.endpoint)) == {"purged": 1}
    await branch(world, COMMITTED, xid)
    with closing(sqlite3.connect(records.path, isolation_level=None)) as file:
        file.execute("UPDATE tricord_store SET store_id = 'another'")
    report = await purge(world, records.endpoint)
    assert report.error.startswith("nothing is done in this round: the coordinator's store is 'another', and was")
    assert stored(world) == {(xid, 1)}
    assert f"participant bank: purge ended early: {report.error}" in caplog.messages
    assert counts(await purge(world, records.endpoint)) == {"purged": 1}


@several
async def test_the_wrong_flavour_and_the_wrong_address(world: World, records: Records) -> None:
    with pytest.raises(ConfigurationError, match="has an"):  # noqa: PT012
        if world.is_async:
            world.participant.purge(records.endpoint)
        else:
            await world.participant.purge_async(records.endpoint)
    with pytest.raises(ConfigurationError, match="not an address"):
        await purge(world, "nowhere")
