"""The shop's tables, beside the store's own, in one database: an order and its idempotency record are one COMMIT."""

from __future__ import annotations

from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, String, event, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

ASSORTMENT = {"tea": (450, 1_000_000), "mug": (900, 1)}
"""Price in cents and how many there are, of a new shop."""


class Base(DeclarativeBase):
    """The shop's tables."""


class Item(Base):
    """An item; prices in cents."""

    __tablename__ = "item"
    __table_args__ = (CheckConstraint("available >= 0", name="item_not_negative"),)

    sku: Mapped[str] = mapped_column(String(40), primary_key=True)
    price: Mapped[int]
    available: Mapped[int]


class Order(Base):
    """What a customer has ordered, under a reference of his own, which the shop does not look at."""

    __tablename__ = "orders"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    customer: Mapped[str] = mapped_column(String(40))
    reference: Mapped[str] = mapped_column(String(80))
    sku: Mapped[str] = mapped_column(ForeignKey("item.sku"))
    quantity: Mapped[int]
    total: Mapped[int]


class Payment(Base):
    """Of an order; `charge` is what the provider calls it, empty as long as it is not known to be charged."""

    __tablename__ = "payment"

    order_id: Mapped[str] = mapped_column(ForeignKey("orders.id"), primary_key=True)
    charge: Mapped[str] = mapped_column(String(64), default="")


class Label(Base):
    """A shipping label of an order; an order may have several parcels, so nothing here bars a second one."""

    __tablename__ = "label"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    order_id: Mapped[str] = mapped_column(ForeignKey("orders.id"), index=True)
    text: Mapped[str] = mapped_column(String(200))


def open_database(url: str, connections: int = 10) -> AsyncEngine:
    """The engine that the shop and its idempotency store share."""
    engine = create_async_engine(url, pool_size=connections, max_overflow=0, pool_pre_ping=True)
    if engine.dialect.name == "sqlite":

        @event.listens_for(engine.sync_engine, "connect")
        def use_wal(connection: Any, record: Any) -> None:
            cursor = connection.cursor()
            cursor.execute("PRAGMA journal_mode = WAL")
            cursor.execute("PRAGMA synchronous = FULL")
            cursor.close()

    return engine


async def open_shop(engine: AsyncEngine) -> None:
    """Create the tables, and the assortment if there is none yet; several processes may do so at once."""
    for again in (True, False):
        try:
            async with engine.begin() as db:
                await db.run_sync(Base.metadata.create_all)
            async with AsyncSession(engine) as session, session.begin():
                if not await session.scalar(select(func.count()).select_from(Item)):
                    session.add_all(Item(sku=sku, price=price, available=n) for sku, (price, n) in ASSORTMENT.items())
            return
        except IntegrityError:  # another process was faster
            if not again:
                raise
