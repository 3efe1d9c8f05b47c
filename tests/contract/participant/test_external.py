"""`external=True`: a Try with an effect outside the database (protocol C4, case 34), on every database and stack.

"Hung" stands for dead, too: an instance whose handler waits at a gate has committed its intent and holds nothing else,
like a process that was killed there. Only what it does when it wakes up is its own.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import NullPool, create_engine, text

from participant_sdk import Refused, external
from participant_sdk.databases.postgresql import PostgreSQL
from participant_sdk.databases.statements import OneByOne
from participant_sdk.steps import RunAgain, Step
from tests.contract.participant.till import Outside, Provider, Script, Till, fail, key_of, wait, write
from tests.contract.participant.world import (
    CANCEL,
    CONFIRM,
    DONE,
    REFUSED,
    TRY,
    UNKNOWN,
    VIOLATION,
    WAIT_SECONDS,
    Gate,
    new_xid,
    opened,
)
from tests.servers import eventually

TRIED, COMMITTED, ROLLBACKED = 1, 2, 3
RUNNING = (TRIED, False, True)
"""An intent: neither is its Try finished, nor is it anybody else's."""


def lost_answer(script: Callable[..., Generator[Step, Any, Any]]) -> Callable[..., Generator[Step, Any, None]]:
    """The script's COMMIT is done, and its answer is lost."""

    def lost(*arguments: Any, **named: Any) -> Generator[Step, Any, None]:
        yield from script(*arguments, **named)
        raise RunAgain("the connection was lost in COMMIT")

    return lost


@pytest.fixture
def provider() -> Provider:
    return Provider()


@pytest.fixture
async def till(flavour: str, participant_url: str, provider: Provider) -> AsyncIterator[Till]:
    async with opened(Till(flavour, participant_url, provider)) as till:
        yield till


@pytest.fixture
async def other(flavour: str, participant_url: str, provider: Provider, till: Till) -> AsyncIterator[Till]:
    """A second instance on the same database."""
    async with opened(Till(flavour, participant_url, provider)) as other:
        yield other


@dataclass
class Hung:
    """A Try whose handler has charged, and waits."""

    xid: str
    gate: Gate
    trying: asyncio.Task[Any]

    async def wake(self) -> Any:
        """Its reply, in the end."""
        self.gate.opened.set()
        return await self.trying


@asynccontextmanager
async def hung(till: Till, *after: Any, before: Any = None) -> AsyncIterator[Hung]:
    gate = Gate()
    till.script = [before or till.charge, wait(gate), *after]
    xid = new_xid()
    trying = asyncio.create_task(till.ask(TRY, xid, timeout=60))
    try:
        await gate.wait_reached()
        till.script = [till.charge]
        yield Hung(xid, gate, trying)
    finally:
        gate.opened.set()
        await trying


@contextmanager
def closed_to_all(till: Till) -> Iterator[None]:
    """PostgreSQL takes no connection to the till's database meanwhile, and ends those that there are."""
    url = till.auditor.url
    allow = f'ALTER DATABASE "{url.database}" ALLOW_CONNECTIONS '
    others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"
    engine = create_engine(url.set(database="postgres"), poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as db:
        db.execute(text(allow + "false"))
        try:
            db.execute(text(others), {"name": url.database})
            yield
        finally:
            db.execute(text(allow + "true"))
            till.auditor.dispose()  # what it has kept is gone


class TestCells:
    """fence.EXTERNAL, cell by cell: a Try that hangs (or is dead), and what reaches another instance meanwhile."""

    async def test_while_the_lease_runs(self, till: Till, other: Till, provider: Provider) -> None:
        async with hung(till, write("try")) as first:
            for phase, outcome, attention in (
                (TRY, UNKNOWN, False),
                (CANCEL, UNKNOWN, False),
                (CONFIRM, VIOLATION, False),
            ):
                reply = await other.ask(phase, first.xid)
                assert (reply.outcome, reply.attention) == (outcome, attention)
                assert reply.error
                assert other.intent(first.xid) == RUNNING
            assert (await first.wake()).outcome == DONE
        assert (provider.asked_for(first.xid), till.effects(first.xid)) == (["authorise"], ["try"])
        assert till.intent(first.xid) == (TRIED, True, False)

    async def test_a_repeat_after_the_lease_runs_under_the_same_key(
        self, till: Till, other: Till, provider: Provider
    ) -> None:
        async with hung(till) as first:
            till.let_lease_lapse(first.xid)
            assert (await other.ask(CONFIRM, first.xid)).outcome == VIOLATION
            reply = await other.ask(TRY, first.xid, attempt=2)
            assert (reply.outcome, reply.result.data) == (DONE, f'{{"hold":"{first.xid}#1"}}'.encode())
            assert provider.asked == [("authorise", (first.xid, 1))] * 2
            assert (await other.ask(TRY, first.xid, attempt=3)).result == reply.result
            assert (await other.ask(CONFIRM, first.xid)).outcome == DONE
        assert provider.asked_for(first.xid) == ["authorise", "authorise", "capture"]
        assert other.effects(first.xid) == [f"confirm {first.xid}#1"]
        assert (await other.ask(CANCEL, first.xid)).outcome == VIOLATION

    async def test_a_cancel_after_the_lease_runs(self, till: Till, other: Till, provider: Provider) -> None:
        async with hung(till) as first:
            till.let_lease_lapse(first.xid)
            assert (await other.ask(CANCEL, first.xid)).outcome == DONE
            assert (provider.authorised, provider.voided) == ({}, {(first.xid, 1)})
            assert (await other.ask(CANCEL, first.xid)).outcome == DONE
            assert (await other.ask(TRY, first.xid)).refusal.reason == "suspended"
            assert provider.asked_for(first.xid) == ["authorise", "void"]
            assert other.effects(first.xid) == ["cancel None"]

    async def test_another_call_of_the_branch_is_a_violation(self, till: Till, other: Till) -> None:
        async with hung(till) as first:
            for phase in (TRY, CONFIRM, CANCEL):
                assert (await other.ask(phase, first.xid, account="bob")).outcome == VIOLATION
            assert other.intent(first.xid) == RUNNING


async def test_a_lease_ends_by_itself(flavour: str, participant_url: str, provider: Provider) -> None:
    """By the database's clock; who waits for it asks again, as a coordinator does."""
    hasty = Till(flavour, participant_url, provider, timedelta(seconds=1))
    async with opened(hasty) as till, opened(Till(flavour, participant_url, provider)) as other, hung(till) as first:
        asked = 0
        while (reply := await other.ask(CANCEL, first.xid)).outcome == UNKNOWN:
            asked += 1
            await asyncio.sleep(0.05)
        assert (reply.outcome, asked > 1) == (DONE, True)
        assert provider.asked_for(first.xid) == ["authorise", "void"]


class TestOvertaken:
    """A handler that outlived its lease and ends after others have acted on it."""

    @pytest.mark.parametrize("end", ["returns", "raises", "refuses"])
    async def test_by_cancel(
        self, till: Till, other: Till, provider: Provider, caplog: pytest.LogCaptureFixture, end: str
    ) -> None:
        """Its effect may have come after the void: Cancel's handler runs once more, and a person is told."""
        after = {"returns": [], "raises": [fail(ValueError("lost"))], "refuses": [fail(Refused("declined"))]}[end]
        nothing_yet = Outside(lambda call: None)
        late = Outside(lambda call: provider.authorised.update({key_of(call): 10}))  # at one that bars nothing
        async with hung(till, late, write("try"), *after, before=nothing_yet) as first:
            till.let_lease_lapse(first.xid)
            assert (await other.ask(CANCEL, first.xid)).outcome == DONE
            caplog.clear()
            reply = await first.wake()
        assert (reply.outcome, reply.attention) == (UNKNOWN, True)
        assert "Cancel's handler has run again" in reply.error
        assert provider.authorised == {}
        assert provider.asked_for(first.xid) == ["void", "void"]
        assert till.effects(first.xid) == ["cancel None", "cancel None"]  # and no "try"
        assert till.intent(first.xid) == (ROLLBACKED, True, False)
        (told,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert first.xid in told.getMessage()
        assert "Cancel's handler runs again" in told.getMessage()
        assert (await other.ask(CANCEL, first.xid)).outcome == DONE

    async def test_by_cancel_and_what_it_missed_fails(
        self, till: Till, other: Till, provider: Provider, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with hung(till, write("try")) as first:
            till.let_lease_lapse(first.xid)
            assert (await other.ask(CANCEL, first.xid)).outcome == DONE
            till.cancel_script = [fail(ConnectionError("the provider is away"))]
            reply = await first.wake()
        assert (reply.outcome, reply.attention) == (UNKNOWN, True)
        assert "the provider is away" in reply.error
        assert till.effects(first.xid) == ["cancel None"]
        assert till.intent(first.xid) == (ROLLBACKED, True, False)
        assert [record.levelno for record in caplog.records].count(logging.ERROR) == 2

    @pytest.mark.parametrize("flavour", ["postgres-sync", "postgres-async"], indirect=True)
    @pytest.mark.parametrize("missed", [False, True])
    async def test_by_cancel_and_the_database_is_away(
        self,
        till: Till,
        other: Till,
        provider: Provider,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
        missed: bool,
    ) -> None:
        """For longer than a race takes: what Cancel may have missed is undone when it is back, and until then told."""
        pause, pauses = external.Pause, list[float]()

        def short(seconds: float) -> external.Pause:
            pauses.append(seconds)
            return pause(0.01)

        monkeypatch.setattr(external, "Pause", short)
        nothing_yet = Outside(lambda call: None)
        late = Outside(lambda call: provider.authorised.update({key_of(call): 10}))
        async with hung(till, late, before=nothing_yet) as first:
            if missed:
                till.let_lease_lapse(first.xid)
                assert (await other.ask(CANCEL, first.xid)).outcome == DONE
            caplog.clear()
            with closed_to_all(till):
                waking = asyncio.create_task(first.wake())
                assert await asyncio.to_thread(
                    eventually, lambda: len(pauses) > 3 * external.AFTERMATH_RUNS, WAIT_SECONDS
                )
                assert caplog.text.count("nobody undoes what its Try has done") == 1
                assert (waking.done(), provider.authorised) == (False, {(first.xid, 1): 10})
            reply = await waking
        assert max(pauses) == external.AFTERMATH_PAUSE_SECONDS_MAX
        if missed:
            assert (reply.outcome, reply.attention) == (UNKNOWN, True)
            assert "Cancel's handler has run again" in reply.error
            assert provider.asked_for(first.xid) == ["void", "void"]
            assert (provider.authorised, till.intent(first.xid)) == ({}, (ROLLBACKED, True, False))
        else:  # its lease has been ended, so that it could run again at once
            assert (reply.outcome, till.intent(first.xid)) == (DONE, (TRIED, True, False))

    @pytest.mark.parametrize("end", ["returns", "raises", "refuses"])
    async def test_by_another_run(self, till: Till, other: Till, provider: Provider, end: str) -> None:
        """What it wrote to the database is the other's to write; the effect has one key, and is there once."""
        after = {"returns": [], "raises": [fail(ValueError("lost"))], "refuses": [fail(Refused("declined"))]}[end]
        async with hung(till, write("first"), *after) as first:
            till.let_lease_lapse(first.xid)
            other.script = [other.charge, write("second")]
            assert (await other.ask(TRY, first.xid)).outcome == DONE
            reply = await first.wake()
        assert reply.outcome == UNKNOWN
        assert ("outlived its lease" in reply.error, reply.attention) == (end != "raises", end != "raises")
        assert till.intent(first.xid) == (TRIED, True, False)
        assert till.effects(first.xid) == ["second"]
        assert provider.authorised == {(first.xid, 1): 10}
        assert (await till.ask(CONFIRM, first.xid)).outcome == DONE

    async def test_by_another_run_that_is_not_over(self, till: Till, other: Till) -> None:
        async with hung(till, write("first")) as first:
            till.let_lease_lapse(first.xid)
            gate = Gate()
            other.script = [other.charge, wait(gate), write("second")]
            second = asyncio.create_task(other.ask(TRY, first.xid))
            await gate.wait_reached()
            assert (await first.wake()).outcome == UNKNOWN
            assert till.intent(first.xid) == RUNNING
            gate.opened.set()
            assert (await second).outcome == DONE
        assert till.effects(first.xid) == ["second"]


class TestEnds:
    """A handler that ends in time."""

    async def test_its_result_is_stored_and_replayed(self, till: Till, provider: Provider) -> None:
        scripts: list[Script] = [[till.charge], [till.charge, write("a")], [write("a"), till.charge, write("b")]]
        for script in scripts:
            till.script = script
            xid = new_xid()
            reply = await till.ask(TRY, xid)
            assert (reply.outcome, reply.result.data) == (DONE, f'{{"hold":"{xid}#1"}}'.encode())
            assert till.intent(xid) == (TRIED, True, False)
            assert (await till.ask(TRY, xid, attempt=2)).result == reply.result
            assert provider.asked_for(xid) == ["authorise"]
            assert len(till.effects(xid)) == len(script) - 1
            assert (await till.ask(CANCEL, xid)).outcome == DONE
            assert till.effects(xid)[-1] == f"cancel {xid}#1"

    async def test_an_error_ends_the_lease_at_once(self, till: Till, provider: Provider) -> None:
        for phase, outcome in ((TRY, DONE), (CANCEL, DONE)):
            till.script = [till.charge, write("try"), fail(TimeoutError("no answer"))]
            xid = new_xid()
            reply = await till.ask(TRY, xid)
            assert (reply.outcome, reply.error) == (UNKNOWN, "TimeoutError: no answer")
            assert (till.intent(xid), till.effects(xid)) == (RUNNING, [])
            till.script = [till.charge]
            assert (await till.ask(CONFIRM, xid)).outcome == VIOLATION
            assert (await till.ask(phase, xid)).outcome == outcome
            assert provider.asked_for(xid) == ["authorise", "authorise" if phase == TRY else "void"]

    async def test_a_refusal_is_stored_and_nothing_is_undone(self, till: Till, provider: Provider) -> None:
        """What the provider declines leaves nothing there: the handler says so by refusing."""
        till.script = [till.charge, write("try"), fail(Refused("declined", "the card has expired"))]
        xid = new_xid()
        for _ in range(2):
            reply = await till.ask(TRY, xid)
            assert (reply.outcome, reply.refusal.reason) == (REFUSED, "declined")
        assert (await till.ask(CANCEL, xid)).outcome == DONE
        assert (await till.ask(CONFIRM, xid)).outcome == VIOLATION
        assert (provider.asked_for(xid), till.effects(xid)) == (["authorise"], [])
        assert till.intent(xid) == (ROLLBACKED, True, False)

    async def test_a_refusal_whose_commit_was_done_and_told_as_failed_is_a_refusal(
        self, till: Till, provider: Provider, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The row that it meets afterwards is its own, not one that Cancel has left: there is nothing to undo."""
        for database in (PostgreSQL, OneByOne):
            monkeypatch.setattr(database, "refuse", lost_answer(database.refuse))
        till.script = [till.charge, fail(Refused("declined"))]
        xid = new_xid()
        replies = [await till.ask(TRY, xid) for _ in range(2)]
        assert replies[-1].outcome == REFUSED
        assert [reply.attention for reply in replies] == [False, False]
        assert provider.asked_for(xid) == ["authorise"]
        assert (till.intent(xid), till.effects(xid)) == ((ROLLBACKED, True, False), [])

    async def test_a_refusal_after_a_run_that_was_lost_is_left_to_cancel(self, till: Till, provider: Provider) -> None:
        """What the first run did may be there, and to a branch that has refused no Cancel would come for it."""
        till.script = [till.charge, fail(TimeoutError("no answer"))]
        xid = new_xid()
        assert (await till.ask(TRY, xid)).outcome == UNKNOWN
        till.script = [fail(Refused("declined"))]
        for _ in range(2):
            assert (await till.ask(TRY, xid)).outcome == UNKNOWN
            assert till.intent(xid) == RUNNING
        assert (await till.ask(CANCEL, xid)).outcome == DONE
        assert (provider.asked_for(xid), provider.authorised) == (["authorise", "void"], {})

    async def test_a_result_that_cannot_be_stored_leaves_what_cancel_undoes(
        self, till: Till, provider: Provider
    ) -> None:
        till.unstorable = True
        xid = new_xid()
        reply = await till.ask(TRY, xid)
        assert (reply.outcome, reply.attention) == (UNKNOWN, True)
        assert (await till.ask(CANCEL, xid)).outcome == DONE
        assert provider.asked_for(xid) == ["authorise", "void"]


async def test_no_local_transaction_is_open_while_the_provider_is_asked(till: Till) -> None:
    """Before its first statement: others write meanwhile, also to SQLite, which only one can write to at a time."""
    async with hung(till, write("try")) as first:
        if till.is_postgres:
            states = (
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'"
            )
            assert till.query(states) == [(0,)]
        elif not till.is_sqlite:  # whose view of them is up to 0.1 s old
            count = "SELECT count(*) FROM information_schema.innodb_trx"
            assert await asyncio.to_thread(eventually, lambda: till.query(count) == [(0,)])
        with till.auditor.begin() as db:
            db.exec_driver_sql("UPDATE counters SET n = n + 1")
        for phase in (TRY, CONFIRM):
            assert (await till.call(phase, f"{first.xid[:-4]}abcd")).outcome == DONE  # of the same instance
        assert (await first.wake()).outcome == DONE
    assert till.effects(first.xid) == ["try"]
