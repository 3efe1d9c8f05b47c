"""A shop whose handlers are lent an ORM session, and do with it what the test tells them."""

import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from sqlalchemy import Connection, ForeignKey, String, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncAttrs, AsyncConnection, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from participant_sdk import Call, Participant
from tests.contract.participant.world import TRY, Debit, World, new_xid

Work = Callable[[Session, Call[Debit]], Any]
AsyncWork = Callable[[AsyncSession, Call[Debit]], Awaitable[Any]]


class Base(AsyncAttrs, DeclarativeBase):
    """The shop's tables."""


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    xid: Mapped[str] = mapped_column(String(32))
    lines: Mapped[list["Line"]] = relationship()


class Line(Base):
    __tablename__ = "order_lines"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"))
    name: Mapped[str] = mapped_column(String(20))


class Seat(Base):
    __tablename__ = "seats"
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    xid: Mapped[str] = mapped_column(String(32))


class ShopSession(Session):
    """A user's own, as a program has it that sets its defaults once."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"expire_on_commit": False, "autoflush": False, **options})


class AsyncShopSession(AsyncSession):
    sync_session_class = ShopSession


class Shop:
    """A participant whose handlers do what the test tells them, with a session (Cancel: with the connection)."""

    def __init__(self, world: World, **options: Any) -> None:
        self.world = world
        self.options = options
        self.work: Work = lambda session, call: session.add(Order(xid=call.xid))
        self.async_work: AsyncWork | None = None
        self.confirm_work: Work = lambda session, call: session.add(Order(xid=call.xid))
        self.lent: list[Any] = []

    async def attempt(self, work: Work, async_work: AsyncWork | None = None, **changes: Any) -> tuple[str, Any]:
        """The xid and the reply of a Try that does this."""
        self.work, self.async_work = work, async_work
        xid = new_xid()
        return xid, await self.call(TRY, xid, **changes)

    async def call(self, phase: Any, xid: str, **changes: Any) -> Any:
        return await self.world.call(phase, xid, action="order", **changes)

    def orders(self, xid: str) -> int:
        return int(self.world.query("SELECT count(*) FROM orders WHERE xid = :xid", xid=xid)[0][0])

    def define(self, shop: Participant) -> None:
        @shop.action("order", **self.options)
        def order(call: Call[Debit], session: Session) -> Any:
            self.lent.append(session)
            return self.work(session, call)

        @order.confirm
        def confirm_order(call: Call[Debit], session: ShopSession) -> None:
            self.lent.append(session)
            self.confirm_work(session, call)

        @order.cancel
        def cancel_order(call: Call[Debit], db: Connection) -> None:
            self.lent.append(db)
            db.execute(text("DELETE FROM orders WHERE xid = :xid"), {"xid": call.xid})

    def define_async(self, shop: Participant) -> None:
        @shop.action("order", **self.options)
        async def order(call: Call[Debit], session: AsyncSession) -> Any:
            self.lent.append(session)
            if self.async_work is not None:
                return await self.async_work(session, call)
            return await session.run_sync(self.work, call)

        @order.confirm
        async def confirm_order(call: Call[Debit], session: AsyncShopSession) -> None:
            self.lent.append(session)
            await session.run_sync(self.confirm_work, call)

        @order.cancel
        async def cancel_order(call: Call[Debit], db: AsyncConnection) -> None:
            self.lent.append(db)
            await db.execute(text("DELETE FROM orders WHERE xid = :xid"), {"xid": call.xid})


@asynccontextmanager
async def open_shop(world: World, **options: Any) -> AsyncIterator[Shop]:
    """`options`: of the action."""
    shop = Shop(world, **options)
    try:
        Base.metadata.create_all(world.auditor)
        with world.auditor.begin() as db:
            db.execute(text("INSERT INTO seats VALUES (1, '')"))
        (shop.define_async if world.is_async else shop.define)(world.participant)
        await world.start()
        yield shop
    finally:
        await world.close()
        gc.collect()  # what was left unclosed warns now


def add(session: Session, call: Call[Debit]) -> None:
    session.add(Order(xid=call.xid))


def add_and_flush(session: Session, call: Call[Debit]) -> None:
    add(session, call)
    session.flush()


def take_seat(session: Session, call: Call[Debit]) -> None:
    add_and_flush(session, call)
    session.add(Seat(number=1, xid=call.xid))


def bulk(session: Session, call: Call[Debit]) -> None:
    add_and_flush(session, call)
    session.bulk_save_objects([Seat(number=1, xid=call.xid)])


def flush_seat(session: Session, call: Call[Debit]) -> None:
    take_seat(session, call)
    session.flush()


def swallow(session: Session, call: Call[Debit]) -> str:
    with suppress(IntegrityError):
        flush_seat(session, call)
    return "taken"
