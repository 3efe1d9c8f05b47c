"""The shop's stock, as a participant: what is free, what is held for orders, what is sold.

Try checks the order, price included, and holds the goods; Confirm makes them sold; Cancel puts them back. Because all
checks are here, in the local transaction that reserves, the web service needs none of its own.
"""

from __future__ import annotations

import logging
from typing import Any

from pydantic import BaseModel, Field
from sqlalchemy import CheckConstraint, String, event, func, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from participant_sdk import Call, Participant, Refused

logger = logging.getLogger("shop.stock")

ASSORTMENT = {"tea": (450, 10), "mug": (900, 1)}
"""Price in cents and how many there are, of a new shop."""


class Base(DeclarativeBase):
    """The shop's tables."""


class Item(Base):
    """An item; prices in cents."""

    __tablename__ = "item"
    __table_args__ = (CheckConstraint("available >= 0 AND held >= 0 AND sold >= 0", name="item_not_negative"),)

    sku: Mapped[str] = mapped_column(String(40), primary_key=True)
    price: Mapped[int]
    available: Mapped[int]
    held: Mapped[int] = mapped_column(default=0)
    sold: Mapped[int] = mapped_column(default=0)


class Reserve(BaseModel):
    """Some pieces of an item, for the price that the customer has seen."""

    sku: str = Field(max_length=40)
    quantity: int
    total: int


def open_database(url: str) -> AsyncEngine:
    """The shop's engine, with a connection for each call that may run (8 Trys, 4 others) and some for the web."""
    engine = create_async_engine(url, pool_size=20, max_overflow=0)
    if engine.dialect.name == "sqlite":

        @event.listens_for(engine.sync_engine, "connect")
        def use_wal(connection: Any, record: Any) -> None:
            cursor = connection.cursor()
            cursor.execute("PRAGMA journal_mode = WAL")
            cursor.execute("PRAGMA synchronous = FULL")
            cursor.close()

    return engine


async def open_shop(engine: AsyncEngine) -> None:
    """Create the table, and the assortment if there is none yet."""
    async with engine.begin() as db:
        await db.run_sync(Base.metadata.create_all)
    async with AsyncSession(engine) as session, session.begin():
        if not await session.scalar(select(func.count()).select_from(Item)):
            session.add_all(Item(sku=sku, price=price, available=n) for sku, (price, n) in ASSORTMENT.items())


def stock_of(engine: AsyncEngine) -> Participant:
    """The participant `stock`."""
    stock = Participant("stock", engine)

    @stock.action("reserve")
    async def reserve(call: Call[Reserve], session: AsyncSession) -> None:
        order = call.payload
        if not 1 <= order.quantity <= 1000:
            raise Refused("invalid_quantity", f"{order.quantity} is not 1 to 1000")
        item = await session.get(Item, order.sku, with_for_update=True)  # two orders cannot both get the last piece
        if item is None:
            raise Refused("unknown_item", f"there is no {order.sku}")
        if item.price * order.quantity != order.total:
            raise Refused("price_changed", f"{order.quantity} of {order.sku} cost {item.price * order.quantity}")
        if item.available < order.quantity:
            raise Refused("out_of_stock", f"there are not {order.quantity} of {order.sku} left")
        item.available -= order.quantity
        item.held += order.quantity
        logger.info("holds %d of %s", order.quantity, order.sku)

    @reserve.confirm
    async def sell(call: Call[Reserve], session: AsyncSession) -> None:
        item = await session.get_one(Item, call.payload.sku, with_for_update=True)
        item.held -= call.payload.quantity
        item.sold += call.payload.quantity

    @reserve.cancel
    async def release(call: Call[Reserve], session: AsyncSession) -> None:
        item = await session.get_one(Item, call.payload.sku, with_for_update=True)
        item.held -= call.payload.quantity
        item.available += call.payload.quantity

    return stock
