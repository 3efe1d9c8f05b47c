"""A shop that takes part in purchases: the other kind of participant, with ``async def`` handlers on an AsyncEngine.

``reserve`` takes units of an item: Try moves them from ``free`` to ``held``, Confirm from there to ``sold``, Cancel
back. What is conserved is another sum than that of the banks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import BigInteger, CheckConstraint, Column, MetaData, String, Table, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from participant_sdk import Call, Participant, Refused

metadata = MetaData()

stock = Table(
    "stock",
    metadata,
    Column("item", String(64), primary_key=True),
    Column("free", BigInteger, nullable=False),
    Column("held", BigInteger, nullable=False, server_default="0"),
    Column("sold", BigInteger, nullable=False, server_default="0"),
    CheckConstraint("free >= 0 AND held >= 0 AND sold >= 0", name="stock_not_negative"),
)


@dataclass(frozen=True)
class Reserve:
    """Take units of an item."""

    item: str
    units: int


def add_actions(shop: Participant) -> None:
    """What the shop can do for a transaction."""

    @shop.action("reserve")
    async def reserve(call: Call[Reserve], db: AsyncConnection) -> None:
        item, units = call.payload.item, call.payload.units
        taken = await db.execute(
            update(stock)
            .where(stock.c.item == item, stock.c.free >= units)
            .values(free=stock.c.free - units, held=stock.c.held + units)
        )
        if taken.rowcount != 1:
            raise Refused("sold_out", f"there are fewer than {units} of {item}")

    @reserve.confirm
    async def sell(call: Call[Reserve], db: AsyncConnection) -> None:
        await _change(db, call.payload.item, held=-call.payload.units, sold=call.payload.units)

    @reserve.cancel
    async def put_back(call: Call[Reserve], db: AsyncConnection) -> None:
        await _change(db, call.payload.item, held=-call.payload.units, free=call.payload.units)


async def _change(db: AsyncConnection, item: str, **units: int) -> None:
    columns = {column: stock.c[column] + change for column, change in units.items()}
    changed = (await db.execute(update(stock).where(stock.c.item == item).values(columns))).rowcount
    if changed != 1:
        raise RuntimeError(f"item {item} is gone")


def open_database(url: str) -> AsyncEngine:
    """The shop's database: postgresql+psycopg://…"""
    return create_async_engine(url, pool_pre_ping=True)


async def open_stock(engine: AsyncEngine, opening: Mapping[str, int]) -> None:
    """Create the table, and the opening stock if there is none yet."""
    async with engine.begin() as db:
        await db.run_sync(metadata.create_all)
        if (await db.execute(select(func.count()).select_from(stock))).scalar_one() == 0:
            await db.execute(stock.insert(), [{"item": item, "free": units} for item, units in opening.items()])
