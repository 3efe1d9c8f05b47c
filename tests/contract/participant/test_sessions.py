"""Handlers that are lent an ORM session: what it flushes is in the local transaction of the fence row, and no other."""

import re
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Dialect, String, TypeDecorator, create_engine, literal, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, object_session

from participant_sdk import Call, ConfigurationError, Participant, Refused
from tests.contract.participant.session_ends import WAYS
from tests.contract.participant.shop import (
    AsyncShopSession,
    Line,
    Order,
    Shop,
    ShopSession,
    add,
    add_and_flush,
    bulk,
    flush_seat,
    open_shop,
    swallow,
    take_seat,
)
from tests.contract.participant.world import (
    CANCEL,
    CONFIRM,
    DONE,
    REFUSED,
    TRY,
    UNKNOWN,
    Debit,
    World,
    sqlite_url,
)

OURS = "the SDK owns the local transaction"


@pytest.fixture
async def shop(flavour: str, participant_url: str) -> AsyncIterator[Shop]:
    async with open_shop(World(flavour, participant_url)) as shop:
        yield shop


async def test_what_is_added_is_stored_with_the_fence_row(shop: Shop) -> None:
    """Nobody has to flush, in any of the three handlers, each of which is lent what it asks for."""
    world = shop.world
    xid, reply = await shop.attempt(add)
    assert (reply.outcome, shop.orders(xid), world.status(xid)) == (DONE, 1, 1)
    assert (await shop.call(CONFIRM, xid)).outcome == DONE
    assert (shop.orders(xid), world.status(xid)) == (2, 2)
    other, _ = await shop.attempt(add)
    assert (await shop.call(CANCEL, other)).outcome == DONE
    assert (shop.orders(other), world.status(other)) == (0, 3)
    wanted = [AsyncSession, AsyncShopSession, AsyncSession, AsyncConnection]
    if not world.is_async:
        wanted = [Session, ShopSession, Session, Connection]
    assert [type(lent) for lent in shop.lent] == wanted


async def test_a_handler_that_ends_the_local_transaction_gets_a_clear_error(shop: Shop) -> None:
    """Case 32, for sessions: whatever the way, nothing is half done, and the next call is as if nothing had been."""
    for name, (work, async_work) in WAYS.items():
        xid, reply = await shop.attempt(work, async_work)
        assert (reply.outcome, reply.attention) == (UNKNOWN, True), (name, reply)
        assert OURS in reply.error, (name, reply.error)
        assert ("commit" in reply.error.lower()) == ("commit" in name.lower() or "begin" in name), (name, reply.error)
        assert (shop.orders(xid), shop.world.status(xid)) == (0, None), name
        assert (await shop.call(CANCEL, xid)).outcome == DONE, name  # nothing is left locked
        xid, reply = await shop.attempt(add)
        assert (reply.outcome, shop.orders(xid)) == (DONE, 1), name


async def test_savepoints_of_the_session_are_the_handlers_own(shop: Shop) -> None:
    def nested(session: Session, call: Call[Debit]) -> None:
        with session.begin_nested():
            add(session, call)
        with suppress(IntegrityError), session.begin_nested():
            take_seat(session, call)
        savepoint = session.begin_nested()
        add_and_flush(session, call)
        savepoint.rollback()
        add(session, call)

    xid, reply = await shop.attempt(nested)
    assert (reply.outcome, shop.orders(xid)) == (DONE, 2), reply


async def test_a_flush_that_fails_is_the_handlers_error(shop: Shop) -> None:
    """Also the one that the SDK does, and the one that a handler swallows: it has lost what it added before."""
    world = shop.world
    for work in (take_seat, flush_seat, bulk, swallow):
        xid, reply = await shop.attempt(work)
        assert reply.outcome == UNKNOWN, (work, reply)
        assert OURS not in reply.error
        assert reply.attention == (work is swallow)
        wanted = "a flush of the handler's session failed" if work is swallow else "Violation|IntegrityError"
        assert re.search(wanted, reply.error), reply.error
        assert (shop.orders(xid), world.status(xid)) == (0, None)
    xid, _ = await shop.attempt(add)
    shop.confirm_work = take_seat
    assert (await shop.call(CONFIRM, xid)).outcome == UNKNOWN
    assert (shop.orders(xid), world.status(xid)) == (1, 1)
    shop.confirm_work = add
    assert (await shop.call(CONFIRM, xid)).outcome == DONE
    assert (shop.orders(xid), world.status(xid)) == (2, 2)


async def test_a_failed_flush_leaves_nothing_in_a_pool_that_does_not_roll_back(
    flavour: str, participant_url: str
) -> None:
    """SQLAlchemy takes the local transaction for rolled back by then; the next call would commit what is left."""

    class BareWorld(World):
        def make_engine(self, **options: Any) -> Any:
            return super().make_engine(pool_reset_on_return=None, **options)

    async with open_shop(BareWorld(flavour, participant_url)) as shop:
        for work in (flush_seat, swallow):
            xid, reply = await shop.attempt(work)
            assert reply.outcome == UNKNOWN
            assert (await shop.attempt(add))[1].outcome == DONE
            assert (shop.orders(xid), shop.world.status(xid)) == (0, None)


async def test_a_refusal_leaves_nothing(shop: Shop) -> None:
    """Neither of what was added nor of what was flushed; a flush that failed may be the reason."""

    def refuse(session: Session, call: Call[Debit]) -> None:
        add_and_flush(session, call)
        add(session, call)
        raise Refused("sold_out")

    def refuse_inside_flush(session: Session, call: Call[Debit]) -> None:
        try:
            flush_seat(session, call)
        except IntegrityError as error:
            raise Refused("sold_out") from error

    def refuse_after_flush(session: Session, call: Call[Debit]) -> None:
        swallow(session, call)
        raise Refused("sold_out")

    for work in (refuse, refuse_inside_flush, refuse_after_flush):
        xid, reply = await shop.attempt(work)
        assert (reply.outcome, reply.refusal.reason) == (REFUSED, "sold_out"), (work, reply)
        assert (shop.orders(xid), shop.world.status(xid)) == (0, 3)
        assert (await shop.call(TRY, xid)).refusal.reason == "sold_out"


@pytest.mark.parametrize("flavour", ["postgres-sync", "postgres-async", "mariadb-sync", "mariadb-async"], indirect=True)
async def test_a_connection_lost_in_a_flush_is_run_again(shop: Shop) -> None:
    world = shop.world
    id_of = "SELECT pg_backend_pid()" if world.is_postgres else "SELECT CONNECTION_ID()"
    kill = "SELECT pg_terminate_backend(:id)" if world.is_postgres else "KILL :id"
    runs: list[str] = []

    def lose(session: Session, call: Call[Debit]) -> None:
        runs.append(call.xid)
        add_and_flush(session, call)
        if runs.count(call.xid) == 1:
            number = session.execute(text(id_of)).scalar_one()
            with world.auditor.connect() as db:
                db.execute(text(kill), {"id": number})
        add_and_flush(session, call)

    def lose_and_swallow(session: Session, call: Call[Debit]) -> None:
        with suppress(DBAPIError):
            lose(session, call)

    for work in (lose, lose_and_swallow):
        xid, reply = await shop.attempt(work)
        assert (reply.outcome, runs.count(xid), shop.orders(xid)) == (DONE, 2, 2), (work, reply)


async def test_an_error_is_told_without_what_was_to_be_stored(shop: Shop) -> None:
    """Also where SQLAlchemy finds it, before the driver does; the reply goes to the coordinator and its operators."""

    class Card(TypeDecorator[str]):
        impl = String
        cache_ok = True

        def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
            raise ValueError("not a card")

    xid, reply = await shop.attempt(lambda session, call: session.execute(select(literal("4111 1111", Card()))))
    assert (reply.outcome, reply.error) == (UNKNOWN, "ValueError: not a card")
    assert shop.world.status(xid) is None


async def test_a_session_stays_on_its_connection(shop: Shop) -> None:
    """What it wrote elsewhere would be in another local transaction, which nobody commits."""

    def elsewhere(session: Session, call: Call[Debit]) -> None:
        insert = text("INSERT INTO orders (id, xid) VALUES (999, :xid)")
        session.execute(insert, {"xid": call.xid}, bind_arguments={"bind": shop.world.auditor})

    xid, reply = await shop.attempt(elsewhere)
    assert (reply.outcome, reply.attention) == (UNKNOWN, True)
    assert "used another connection through its session" in reply.error
    assert (shop.orders(xid), shop.world.status(xid)) == (0, None)
    assert shop.world.auditor.pool.checkedout() == 0  # type: ignore[attr-defined]


async def test_lazy_loading_is_as_always(shop: Shop) -> None:
    names: list[str] = []

    def load(session: Session, call: Call[Debit]) -> None:
        session.add(Order(xid=call.xid, lines=[Line(name="tea"), Line(name="jam")]))
        session.flush()
        session.expire_all()
        names.extend(line.name for line in session.scalars(select(Order).filter_by(xid=call.xid)).one().lines)

    async def load_async(session: AsyncSession, call: Call[Debit]) -> None:
        session.add(Order(xid=call.xid, lines=[Line(name="tea"), Line(name="jam")]))
        await session.flush()
        session.expire_all()
        order = (await session.scalars(select(Order).filter_by(xid=call.xid))).one()
        names.extend(line.name for line in await order.awaitable_attrs.lines)

    assert (await shop.attempt(load, load_async))[1].outcome == DONE
    assert sorted(names) == ["jam", "tea"]


async def test_nothing_of_a_session_outlives_its_call(shop: Shop) -> None:
    kept: list[Order] = []

    def keep(session: Session, call: Call[Debit]) -> None:
        assert not list(session.identity_map.values())
        assert not session.new
        for order in kept:
            assert object_session(order) is None
        session.add(order := Order(xid=call.xid))
        kept.append(order)

    xids = [(await shop.attempt(keep))[0] for _ in range(3)]
    assert [order.xid for order in kept] == xids  # still readable: nothing has expired
    assert [shop.orders(xid) for xid in xids] == [1, 1, 1]


async def test_the_users_own_sessions_are_not_touched(shop: Shop) -> None:
    """They are of the same classes and on the same engine, and commit, roll back and close as they like."""
    xid, _ = await shop.attempt(add)
    if shop.world.is_async:
        for async_kind in (AsyncSession, AsyncShopSession):
            async with async_kind(shop.world.engine) as async_session:
                async_session.add(Order(xid=xid))
                await async_session.commit()
                await async_session.rollback()
    else:
        for kind in (Session, ShopSession):
            with kind(bind=shop.world.engine) as session, session.begin():
                session.add(Order(xid=xid))
    assert shop.orders(xid) == 3


def test_a_session_that_cannot_be_lent_is_told_at_the_start(tmp_path: Path) -> None:
    """Not when its first call comes."""

    class Closed(Session):
        def __init__(self) -> None:
            super().__init__(autoflush=False)

    def by_text(call: Call[bytes], session: "ShopsSession") -> None:  # type: ignore[name-defined]  # noqa: F821
        ...

    def by_class(call: Call[bytes], session: Any) -> None: ...

    by_class.__annotations__["session"] = Closed
    engine = create_engine(sqlite_url(tmp_path))
    for handler, error in (
        (by_text, r"annotated 'ShopsSession', which cannot be looked up; .*lent a Connection or Session"),
        (by_class, r"wants a Closed, which is lent as Closed\(bind=\.\.\.\)"),
    ):
        shop = Participant("shop", engine)
        order = shop.action("order")(handler)
        order.confirm(lambda call, db: None)
        order.cancel(lambda call, db: None)
        with pytest.raises(ConfigurationError, match=f"the Try handler of action 'order' .*{error}"):
            shop.check()
