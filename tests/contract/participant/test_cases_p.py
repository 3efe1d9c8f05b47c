"""What hurt users of other systems, on the participant's side: each test is named by the case's number.

A case whose kind has more to it has its own file; here it is, shortly, as it was met.
"""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event, text

from participant_sdk import Call, Participant
from participant_sdk.context import current_xid
from tests.contract.participant.test_external_process import running
from tests.contract.participant.till import Provider, Till, fail, write
from tests.contract.participant.world import (
    CANCEL,
    CONFIRM,
    DONE,
    REFUSED,
    TRY,
    UNKNOWN,
    VIOLATION,
    Debit,
    Held,
    World,
    do_phase2,
    do_try,
    new_xid,
    opened,
    sqlite_url,
)

TRIED, COMMITTED, ROLLBACKED, SUSPENDED = 1, 2, 3, 4

pytestmark = pytest.mark.parametrize("flavour", ["postgres-sync", "mariadb-async", "sqlite-sync"], indirect=True)


@pytest.fixture
async def world(flavour: str, participant_url: str) -> AsyncIterator[Till]:
    async with opened(Till(flavour, participant_url, Provider())) as world:
        yield world


@pytest.fixture
async def other(flavour: str, participant_url: str, world: Till) -> AsyncIterator[Till]:
    """A second instance on the same database."""
    async with opened(Till(flavour, participant_url, world.provider)) as other:
        yield other


@dataclass(frozen=True)
class DebitIn:
    """The payload after a deploy: what was stored before has not got all of it."""

    account: str
    amount: int
    mode: str
    currency: str


@dataclass(frozen=True)
class HeldUntil:
    """The result after a deploy."""

    hold: str
    until: int


class Deployed(World):
    """The bank after a deploy: one action, of this name and with these types."""

    def __init__(self, before: World, action: str, payload: Any = Debit, result: Any = Held) -> None:
        self.action, self.payload, self.result = action, payload, result
        super().__init__(before.flavour, before.url)

    def make_participant(self) -> Participant:
        bank = Participant(self.name, self.engine)
        if self.is_async:

            async def try_async(call: Any, db: Any) -> Any:
                return await db.run_sync(do_try, call)

            async def confirm_async(call: Any, db: Any) -> None:
                await db.run_sync(do_phase2, call, "confirm")

            async def cancel_async(call: Any, db: Any) -> None:
                await db.run_sync(do_phase2, call, "cancel")

            handlers: tuple[Any, ...] = (try_async, confirm_async, cancel_async)
        else:

            def try_(call: Any, db: Connection) -> Any:
                return do_try(db, call)

            def confirm(call: Any, db: Connection) -> None:
                do_phase2(db, call, "confirm")

            def cancel(call: Any, db: Connection) -> None:
                do_phase2(db, call, "cancel")

            handlers = (try_, confirm, cancel)
        call_of: Any = Call
        handlers[0].__annotations__.update({"call": call_of[self.payload], "return": self.result})
        definition = bank.action(self.action)(handlers[0])
        definition.confirm(handlers[1])
        definition.cancel(handlers[2])
        return bank


@asynccontextmanager
async def deployed(world: World, action: str, payload: Any = Debit, result: Any = Held) -> AsyncIterator[Deployed]:
    after = Deployed(world, action, payload, result)
    try:
        await after.start()
        yield after
    finally:
        await after.close()


async def test_case_2_a_cancel_that_arrives_before_its_try(world: Till) -> None:
    xid = new_xid()
    for phase, outcome in ((CANCEL, DONE), (CANCEL, DONE), (TRY, REFUSED), (TRY, REFUSED), (CANCEL, DONE)):
        assert (await world.call(phase, xid)).outcome == outcome
        assert (world.effects(xid), world.status(xid)) == ([], SUSPENDED)
    together = new_xid()
    calls = [world.message(CANCEL, together, call_id=1), world.message(TRY, together, call_id=2)]
    replies = await world.exchange(calls)
    assert (replies[1].outcome, replies[2].outcome, world.effects(together)) == (DONE, REFUSED, [])


async def test_case_3_a_slow_try_that_commits_after_cancel_was_sent(world: Till, other: Till) -> None:
    gate = world.gate("slow")
    xid = new_xid()
    trying = asyncio.create_task(world.call(TRY, xid, account="slow"))
    await gate.wait_reached()
    assert (await other.call(CANCEL, xid, account="slow", timeout=0.5)).outcome == UNKNOWN  # it waits for the row
    cancelling = asyncio.create_task(other.call(CANCEL, xid, account="slow"))
    gate.opened.set()
    assert ((await trying).outcome, (await cancelling).outcome) == (DONE, DONE)
    assert (world.effects(xid), world.status(xid)) == (["try", f"cancel {xid}#1"], ROLLBACKED)
    assert (await world.call(TRY, xid, account="slow")).outcome == REFUSED


async def test_case_7_a_confirm_whose_reply_was_lost(world: Till, other: Till) -> None:
    """Here its caller hangs up; then it asks again, at both instances."""
    xids = [new_xid() for _ in range(5)]
    for xid in xids:
        await world.call(TRY, xid)
        losing = asyncio.create_task(world.call(CONFIRM, xid))
        await asyncio.sleep(0)
        losing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await losing
    for xid in xids:
        for instance in (world, other, world):
            assert (await instance.call(CONFIRM, xid, attempt=2)).outcome == DONE
        assert (world.effects(xid), world.status(xid)) == (["try", f"confirm {xid}#1"], COMMITTED)


async def test_case_8_a_refused_try_that_is_delivered_again_and_then_cancelled(world: Till, other: Till) -> None:
    xid = new_xid()
    for instance in (world, other):
        reply = await instance.call(TRY, xid, "refuse")
        assert (reply.outcome, reply.refusal.reason) == (REFUSED, "insufficient_funds")
        assert reply.refusal.message == "alice has too little"
    for _ in range(2):
        assert (await other.call(CANCEL, xid, "refuse")).outcome == DONE
    assert (world.effects(xid), world.status(xid)) == ([], ROLLBACKED)


async def test_case_9_orders_that_no_transaction_has(world: Till) -> None:
    histories = {
        "confirm without try": ([], CONFIRM, None),
        "confirm after cancel": ([TRY, CANCEL], CONFIRM, ROLLBACKED),
        "confirm after an empty cancel": ([CANCEL], CONFIRM, SUSPENDED),
        "cancel after confirm": ([TRY, CONFIRM], CANCEL, COMMITTED),
    }
    for name, (before, phase, status) in histories.items():
        xid = new_xid()
        for earlier in before:
            assert (await world.call(earlier, xid)).outcome == DONE
        effects = world.effects(xid)
        for _ in range(2):
            reply = await world.call(phase, xid)
            assert (reply.outcome, reply.error != "") == (VIOLATION, True), name
        assert (world.effects(xid), world.status(xid)) == (effects, status), name


async def test_case_10_a_payload_that_no_longer_decodes_after_a_deploy(world: Till) -> None:
    xids = {phase: new_xid() for phase in (CONFIRM, CANCEL)}
    for xid in xids.values():
        await world.call(TRY, xid)
    late = new_xid()
    changes = [(DebitIn, Held, "currency is missing"), (Debit, HeldUntil, "until is missing")]
    for payload, result, error in changes:
        async with deployed(world, "debit", payload, result) as after:
            for phase, xid in xids.items():
                reply = await after.call(phase, xid)
                assert (reply.outcome, reply.attention) == (UNKNOWN, True)
                assert error in reply.error
                assert (world.effects(xid), world.status(xid)) == (["try"], TRIED)
            assert (await after.call(CANCEL, new_xid())).outcome == DONE  # where nothing has to be decoded
    async with deployed(world, "debit", DebitIn) as after:
        reply = await after.call(TRY, late)
        assert (reply.outcome, reply.refusal.reason) == (REFUSED, "invalid_payload")
        assert (await after.call(CANCEL, late)).outcome == DONE
    for phase, xid in xids.items():  # the deploy was rolled back
        assert (await world.call(phase, xid)).outcome == DONE
        assert len(world.effects(xid)) == 2


async def test_case_11_a_handler_that_was_renamed_while_transactions_are_open(
    world: Till, caplog: pytest.LogCaptureFixture
) -> None:
    xids = {phase: new_xid() for phase in (CONFIRM, CANCEL)}
    for xid in xids.values():
        await world.call(TRY, xid)
    await world.ask(TRY, charged := new_xid())
    await world.call(TRY, over := new_xid())
    await world.call(CONFIRM, over)
    caplog.clear()
    async with deployed(world, "take") as after:
        told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert ["1 tried branches" in told[0], "'charge'" in told[0]] == [True, True]
        assert ["2 tried branches" in told[1], "'debit'" in told[1], len(told)] == [True, True, 2]
        for phase, xid in xids.items():
            reply = await after.call(phase, xid)
            assert (reply.outcome, reply.attention) == (UNKNOWN, True)
            assert "has no action 'debit'" in reply.error
            assert (await after.call(phase, xid, action="take")).outcome == VIOLATION  # nor to the new one
            assert (world.effects(xid), world.status(xid)) == (["try"], TRIED)
        reply = await after.call(TRY, late := new_xid())
        assert (reply.outcome, reply.attention, world.status(late)) == (UNKNOWN, True, None)
    for phase, xid in {**xids, TRY: late}.items():
        assert (await world.call(phase, xid)).outcome == DONE
    assert (await world.ask(CONFIRM, charged)).outcome == DONE
    caplog.clear()
    async with deployed(world, "debit"):
        assert [record for record in caplog.records if record.levelno == logging.WARNING] == []


async def test_case_15_nothing_of_a_failed_call_is_left_for_the_next(world: Till) -> None:
    between: list[str | None] = []
    pool = getattr(world.engine, "sync_engine", world.engine).pool
    event.listen(pool, "checkout", lambda *_: between.append(current_xid()))
    event.listen(pool, "checkin", lambda *_: between.append(current_xid()))
    for mode in ("raise", "refuse", "exit", "plain") * 4:
        await world.call(TRY, new_xid(), mode)
    assert len(between) >= 32
    assert set(between) == {None}


async def test_case_17_a_hung_try_that_wakes_after_another_instance_has_cancelled(world: Till) -> None:
    """Hung is a process that was stopped before it could begin with the call."""
    sleeper = Till(world.flavour, world.url, world.provider)
    try:
        async with running(sleeper) as process:
            os.kill(process.process.pid, signal.SIGSTOP)
            try:
                xid = new_xid()
                trying = asyncio.create_task(sleeper.call(TRY, xid, timeout=60))
                assert (await world.call(CANCEL, xid)).outcome == DONE
                assert not trying.done()
            finally:
                os.kill(process.process.pid, signal.SIGCONT)
            reply = await trying
            assert (reply.outcome, reply.refusal.reason) == (REFUSED, "suspended")
        assert (world.effects(xid), world.status(xid)) == ([], SUSPENDED)
    finally:
        sleeper.serving = None
        await sleeper.close()


async def test_case_30_the_same_action_twice_in_one_transaction(world: Till) -> None:
    xid = new_xid()
    for branch_id, phase in ((1, CONFIRM), (2, CANCEL)):
        assert (await world.call(TRY, xid, branch_id=branch_id)).outcome == DONE
        assert (await world.call(phase, xid, branch_id=branch_id)).outcome == DONE
    assert (world.status(xid, 1), world.status(xid, 2)) == (COMMITTED, ROLLBACKED)
    assert world.effects(xid) == ["try", f"confirm {xid}#1", "try", f"cancel {xid}#2"]


async def test_case_31_two_participants_with_a_database_each_in_one_process(world: Till, tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    async with opened(Till("sqlite-sync", sqlite_url(tmp_path / "shop"), Provider(), name="shop")) as shop:
        assert shop.serving.fence_id != world.serving.fence_id
        xid = new_xid()
        for instance, branch_id in ((world, 1), (shop, 2)):
            assert (await instance.call(TRY, xid, branch_id=branch_id)).outcome == DONE
        assert (world.status(xid, 1), world.status(xid, 2)) == (TRIED, None)
        assert (shop.status(xid, 1), shop.status(xid, 2)) == (None, TRIED)
        assert (world.effects(xid), shop.effects(xid)) == (["try"], ["try"])


async def test_case_32_a_handler_that_commits_or_rolls_back(world: Till) -> None:
    for mode in ("commit", "commit_swallowed", "rollback", "raw_commit", "begin"):
        xid = new_xid()
        reply = await world.call(TRY, xid, mode)
        assert (reply.outcome, reply.error != "") == (UNKNOWN, True)
        assert ("the SDK owns the local transaction" in reply.error) == (mode != "begin")
        assert (world.effects(xid), world.status(xid)) == ([], None)
        assert (await world.call(CANCEL, xid, mode)).outcome == DONE


async def test_case_33_an_insert_into_the_fence_that_fails_of_something_else_than_a_duplicate(world: Till) -> None:
    """Neither "done before" nor "cancelled before" may be read out of it. Another unique key is not the key, either."""
    await world.call(TRY, new_xid())  # the only row when the index is made
    of_table = " ON tcc_fence_log" if world.flavour.startswith("mariadb") else ""
    spoilt = {
        "CREATE UNIQUE INDEX one ON tcc_fence_log (participant)": f"DROP INDEX one{of_table}",
        "ALTER TABLE tcc_fence_log RENAME TO away": "ALTER TABLE away RENAME TO tcc_fence_log",
    }
    for spoil, mend in spoilt.items():
        xids = [new_xid() for _ in range(2)]
        with world.auditor.begin() as db:
            db.execute(text(spoil))
        try:
            for phase, xid in zip((TRY, CANCEL), xids, strict=True):
                reply = await world.call(phase, xid, timeout=1.5)
                assert (reply.outcome, reply.error != "") == (UNKNOWN, True), (spoil, reply)
                assert world.effects(xid) == []
        finally:
            with world.auditor.begin() as db:
                db.execute(text(mend))
        assert [world.status(xid) for xid in xids] == [None, None]
        for phase, xid in zip((TRY, CANCEL), xids, strict=True):
            assert (await world.call(phase, xid)).outcome == DONE, mend
        assert [world.status(xid) for xid in xids] == [TRIED, SUSPENDED]


async def test_case_34_a_try_that_fails_after_its_effect_outside_the_database(world: Till) -> None:
    """With external=True, Cancel reaches what an ordinary Try would have forgotten with its rollback."""
    world.script = [world.charge, write("try"), fail(ConnectionError("no answer"))]
    xid = new_xid()
    assert (await world.ask(TRY, xid)).outcome == UNKNOWN
    assert (world.provider.authorised, world.effects(xid)) == ({(xid, 1): 10}, [])
    assert (await world.ask(CONFIRM, xid)).outcome == VIOLATION
    assert (await world.ask(CANCEL, xid)).outcome == DONE
    assert (world.provider.authorised, world.effects(xid)) == ({}, ["cancel None"])
