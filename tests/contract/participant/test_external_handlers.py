"""What the handler of an external Try may do with the database, and what it may not (protocol C4)."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from participant_sdk import Call, Participant, Refused
from participant_sdk.context import current_branch_id, current_xid
from tests.contract.participant.till import Inside, Outside, Provider, Till, key_of, wait, write
from tests.contract.participant.world import (
    CANCEL,
    CONFIRM,
    DONE,
    TRY,
    UNKNOWN,
    WAIT_SECONDS,
    Debit,
    Gate,
    Held,
    effect,
    new_xid,
    opened,
)

servers_only = pytest.mark.parametrize(
    "flavour", ["postgres-sync", "postgres-async", "mariadb-sync", "mariadb-async"], indirect=True
)


class SessionTill(Till):
    """The same with an ORM session, which has begun nothing when the handler starts."""

    def define(self, till: Participant) -> None:
        charging = till.action("charge", external=True, lease=self.lease)
        if self.is_async:

            async def charge_async(call: Call[Debit], session: AsyncSession) -> Held:
                await self.run_async(self.script, call, session)
                return self.result(call)

            async def phase2_async(call: Call[Debit], session: AsyncSession) -> None:
                await session.run_sync(lambda db: self.cancel(db.connection(), call))

            charging(charge_async).confirm(phase2_async)
            self_of(till).cancel(phase2_async)
        else:

            def charge(call: Call[Debit], session: Session) -> Held:
                self.run(self.script, call, session)
                return self.result(call)

            def phase2(call: Call[Debit], session: Session) -> None:
                self.cancel(session.connection(), call)

            charging(charge).confirm(phase2)
            self_of(till).cancel(phase2)


def self_of(till: Participant) -> Any:
    return till._definitions["charge"]


@pytest.fixture
def provider() -> Provider:
    return Provider()


@pytest.fixture(params=[Till, SessionTill])
async def till(
    request: pytest.FixtureRequest, flavour: str, participant_url: str, provider: Provider
) -> AsyncIterator[Till]:
    async with opened(request.param(flavour, participant_url, provider)) as till:
        yield till


def _statement(sql: str) -> Inside:
    return Inside(lambda db, call: db.execute(text(sql)))


FORBIDDEN = {
    "commit": lambda db, call: db.commit(),
    "rollback": lambda db, call: db.rollback(),
    "close": lambda db, call: db.close(),
    "a statement": lambda db, call: db.execute(text("COMMIT")),
}


async def test_the_handler_may_not_end_the_local_transaction(till: Till, provider: Provider) -> None:
    for name, what in FORBIDDEN.items():
        till.script = [till.charge, write("try"), Inside(what)]
        xid = new_xid()
        reply = await till.ask(TRY, xid)
        assert (reply.outcome, reply.attention) == (UNKNOWN, True), name
        assert "the SDK owns the local transaction" in reply.error, (name, reply.error)
        assert (till.effects(xid), till.intent(xid)) == ([], (1, False, True)), name
        if name == "close" and type(till) is Till:  # without a connection the SDK cannot even end the lease
            till.let_lease_lapse(xid)
        assert (await till.ask(CANCEL, xid)).outcome == DONE, name
        assert provider.asked_for(xid) == ["authorise", "void"], name


async def test_the_handler_may_not_change_how_its_statements_commit(till: Till) -> None:
    """Nothing has begun yet, so SQLAlchemy would let it, and each statement would be final by itself."""

    def autocommit(db: Any, call: Call[Debit]) -> None:
        if isinstance(db, Session):
            db = db.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        else:
            db.execution_options(isolation_level="AUTOCOMMIT")
        effect(db, call, "try")

    till.script = [till.charge, Inside(autocommit)]
    xid = new_xid()
    reply = await till.ask(TRY, xid)
    assert (reply.outcome, till.effects(xid)) == (UNKNOWN, [])
    assert "isolation level" in reply.error


async def test_what_it_writes_is_stored_with_its_end(till: Till) -> None:
    """Also what a session has not flushed; nothing of it without the end."""
    till.script = [write("a"), till.charge, write("b")]
    xid = new_xid()
    assert (await till.ask(TRY, xid)).outcome == DONE
    assert till.effects(xid) == ["a", "b"]
    till.unstorable = True
    xid = new_xid()
    assert (await till.ask(TRY, xid)).outcome == UNKNOWN
    assert till.effects(xid) == []


async def test_savepoints_are_its_own(till: Till) -> None:
    def nested(db: Any, call: Call[Debit]) -> None:
        savepoint = db.begin_nested()
        effect(db, call, "undone")
        savepoint.rollback()
        effect(db, call, "kept")

    till.script = [Inside(nested), till.charge]
    xid = new_xid()
    assert (await till.ask(TRY, xid)).outcome == DONE
    assert till.effects(xid) == ["kept"]


async def test_a_statement_that_fails_and_is_swallowed_does_not_end_well(till: Till) -> None:
    """The database, or the session, has undone more than the handler knows; PostgreSQL will not even go on."""

    def swallow(db: Any, call: Call[Debit]) -> None:
        statement = "INSERT OR ROLLBACK INTO things VALUES (1)" if till.is_sqlite else "INSERT INTO things VALUES (1)"
        with pytest.raises(Exception, match=r"things|1062"):
            db.execute(text(statement))

    till.script = [write("try"), till.charge, Inside(swallow)]
    xid = new_xid()
    outcome = (await till.ask(TRY, xid)).outcome
    if till.is_sqlite or till.is_postgres:
        assert (outcome, till.effects(xid)) == (UNKNOWN, [])
    else:  # there a statement fails by itself, and the rest stays
        assert (outcome, till.effects(xid)) == (DONE, ["try"])


@servers_only
async def test_a_deadlock_in_the_handler_runs_it_again(till: Till, provider: Provider) -> None:
    """Two of them take two rows in opposite order; the loser asks the provider again, under the same key."""
    with till.auditor.begin() as db:
        db.execute(text("INSERT INTO counters VALUES ('a', 0), ('b', 0)"))
    met = threading.Barrier(2)

    def lock(position: int) -> Inside:
        def do(db: Any, call: Call[Debit]) -> None:
            name = call.payload.account[position]
            db.execute(text("UPDATE counters SET n = n + 1 WHERE name = :name"), {"name": name})

        return Inside(do)

    def meet(call: Call[Debit]) -> None:
        if len(provider.asked_for(call.xid)) == 1:
            met.wait(WAIT_SECONDS)

    till.script = [till.charge, lock(0), Outside(meet), lock(1)]
    xids = [new_xid(), new_xid()]
    calls = [till.ask(TRY, xid, account=account, timeout=30) for xid, account in zip(xids, ("ab", "ba"), strict=True)]
    assert [reply.outcome for reply in await asyncio.gather(*calls)] == [DONE, DONE]
    assert sorted(len(provider.asked_for(xid)) for xid in xids) == [1, 2]
    assert {key for _, key in provider.asked} == {(xid, 1) for xid in xids}
    assert till.query("SELECT name, n FROM counters WHERE name <> 'hot' ORDER BY name") == [("a", 2), ("b", 2)]


@servers_only
async def test_a_connection_lost_in_the_handler_runs_it_again(till: Till, provider: Provider) -> None:
    """The lease is ended over another connection; whether the handler lets the error out or not."""
    id_of = "SELECT pg_backend_pid()" if till.is_postgres else "SELECT CONNECTION_ID()"
    kill = "SELECT pg_terminate_backend(:id)" if till.is_postgres else "KILL :id"

    def lose(db: Any, call: Call[Debit]) -> None:
        number = db.execute(text(id_of)).scalar_one()
        if len(provider.asked_for(call.xid)) == 1:
            with till.auditor.connect() as other:
                other.execute(text(kill), {"id": number})

    def swallow(db: Any, call: Call[Debit]) -> None:
        try:
            effect(db, call, "swallowed")
        except Exception:
            return

    def refuse(db: Any, call: Call[Debit]) -> None:
        try:
            effect(db, call, "refused")
        except Exception as error:
            raise Refused("busy") from error

    for name, last in {"raises": write("x"), "refuses": Inside(refuse), "swallows": Inside(swallow)}.items():
        till.script = [till.charge, Inside(lose), last]
        xid = new_xid()
        reply = await till.ask(TRY, xid)
        if name == "swallows":  # and that it was lost is not seen any more
            assert (reply.outcome, till.effects(xid)) == (UNKNOWN, [])
            reply = await till.ask(TRY, xid)
        assert reply.outcome == DONE, (name, reply)
        assert (provider.asked_for(xid), len(till.effects(xid))) == (["authorise"] * 2, 1)


@pytest.mark.parametrize("flavour", ["sqlite-async", "postgres-async", "mariadb-async"], indirect=True)
async def test_a_task_that_is_cancelled_leaves_its_lease_and_nothing_else(
    till: Till, participant_url: str, provider: Provider
) -> None:
    """When a process that stops gives up waiting for it. The connection, back in the pool, is as any other."""
    gate = Gate()
    till.script = [till.charge, wait(gate)]
    xid = new_xid()
    trying = asyncio.create_task(till.ask(TRY, xid))
    await gate.wait_reached()
    assert not await till.stop(grace=0.05)
    gate.opened.set()
    assert (await trying).outcome == UNKNOWN
    assert till.intent(xid) == (1, False, True)

    class SecondTill(type(till)):  # type: ignore[misc]
        """On the engine of the first."""

        def make_engine(self, **options: Any) -> Any:
            return till.engine

    async with opened(SecondTill(till.flavour, participant_url, provider)) as second:
        for _ in range(3):
            assert (await second.call(TRY, new_xid())).outcome == DONE
        assert (await second.ask(CANCEL, xid)).outcome == UNKNOWN
        second.let_lease_lapse(xid)
        assert (await second.ask(CANCEL, xid)).outcome == DONE


@pytest.mark.parametrize("flavour", ["sqlite-sync", "sqlite-async"], indirect=True)
async def test_the_engines_own_begin_is_not_the_handlers(
    flavour: str, participant_url: str, provider: Provider
) -> None:
    """SQLAlchemy's recipe for SQLite, BEGIN by an event, which comes when the handler runs its first statement."""

    class RecipeTill(Till):
        def make_engine(self, **options: Any) -> Any:
            engine = super().make_engine(**options)
            sync_engine = getattr(engine, "sync_engine", engine)

            @event.listens_for(sync_engine, "connect")
            def no_begin(connection: Any, record: Any) -> None:
                connection.isolation_level = None

            @event.listens_for(sync_engine, "begin")
            def begin(connection: Any) -> None:
                connection.exec_driver_sql("BEGIN")

            return engine

    async with opened(RecipeTill(flavour, participant_url, provider)) as till:
        till.script = [till.charge, write("try")]
        xid = new_xid()
        assert (await till.ask(TRY, xid)).outcome == DONE
        assert till.effects(xid) == ["try"]
        till.script = [till.charge, _statement("BEGIN")]
        assert "executed BEGIN" in (await till.ask(TRY, new_xid())).error


async def test_the_handler_knows_its_transaction(till: Till) -> None:
    seen: list[Any] = []
    till.script = [Inside(lambda db, call: seen.append((current_xid(), current_branch_id()) == key_of(call)))] * 2
    await till.ask(TRY, new_xid(), branch_id=3)
    assert seen == [True, True]
    assert (current_xid(), current_branch_id()) == (None, None)


async def test_many_on_one_connection(flavour: str, participant_url: str, provider: Provider) -> None:
    """What is sent again and again a driver may prepare by itself, which several statements in one do not bear."""
    async with opened(Till(flavour, participant_url, provider, try_workers=1)) as till:
        till.script = [till.charge, write("try")]
        for _ in range(12):
            xid = new_xid()
            assert (await till.ask(TRY, xid)).outcome == DONE
            assert (await till.ask(CONFIRM, xid)).outcome == DONE


async def test_trys_and_cancels_at_once(flavour: str, participant_url: str, provider: Provider) -> None:
    """Two instances, calls in any order: what is authorised in the end is exactly what is tried."""
    first, second = Till(flavour, participant_url, provider), Till(flavour, participant_url, provider)
    async with opened(first), opened(second):
        xids = [new_xid() for _ in range(15)]
        calls: list[Awaitable[Any]] = []
        for xid in xids:
            calls += [first.ask(TRY, xid), second.ask(CANCEL, xid), second.ask(TRY, xid, attempt=2)]
        await asyncio.gather(*calls)
        for xid in xids:
            assert (await second.ask(CANCEL, xid)).outcome == DONE
        assert provider.authorised == {}
        for xid in xids:
            asked = provider.asked_for(xid)  # a lost race asks again, for either; what it asks bears the same key
            assert asked == [] or asked[-1] == "void"
            assert asked == sorted(asked)
