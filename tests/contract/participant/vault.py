"""A participant with a row for each hold, whose `holds()` gives these, or whatever else the test wants."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any

import grpc
import pytest
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection

from participant_sdk import Call, Hold, Participant
from tests.contract.participant.world import DONE, TRY, Debit, World, new_xid
from tricord.v1 import participant_pb2 as pb

Query = Callable[[Connection], Iterable[Any]]

SELECT = text("SELECT xid, branch_id, amount, unit FROM vault")
INSERT = text("INSERT INTO vault (xid, branch_id, amount, unit) VALUES (:xid, :branch_id, :amount, :unit)")


def rows(db: Connection) -> Iterator[Hold]:
    for row in db.execute(SELECT, execution_options={"yield_per": 100}):
        yield Hold(*row)


class Vault:
    """`reserve` keeps a row while it is TRIED; `debit`, the world's own, keeps none."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.query: Query = rows
        self.before: Callable[[], None] | None = None
        """Called when the fence has been read, and the holds have not."""

    def define(self, bank: Participant) -> None:
        @bank.action("reserve")
        def reserve(call: Call[Debit], db: Connection) -> None:
            _put(db, call)

        @reserve.confirm
        def take(call: Call[Debit], db: Connection) -> None:
            _remove(db, call)

        @reserve.cancel
        def give_back(call: Call[Debit], db: Connection) -> None:
            _remove(db, call)

        @bank.holds("reserve")
        def holds(db: Connection) -> Iterator[Hold]:
            if self.before is not None:
                self.before()
            yield from self.query(db)

    def define_async(self, bank: Participant) -> None:
        @bank.action("reserve")
        async def reserve(call: Call[Debit], db: AsyncConnection) -> None:
            await db.run_sync(_put, call)

        @reserve.confirm
        async def take(call: Call[Debit], db: AsyncConnection) -> None:
            await db.run_sync(_remove, call)

        @reserve.cancel
        async def give_back(call: Call[Debit], db: AsyncConnection) -> None:
            await db.run_sync(_remove, call)

        @bank.holds("reserve")
        async def holds(db: AsyncConnection) -> AsyncIterator[Hold]:
            if self.before is not None:
                await asyncio.to_thread(self.before)
            for hold in await db.run_sync(lambda connection: list(self.query(connection))):
                yield hold

    async def call(self, phase: Any, xid: str, **changes: Any) -> pb.Reply:
        return await self.world.call(phase, xid, action="reserve", **changes)

    async def reserved(self, *phases: Any, **changes: Any) -> str:
        """The xid of a branch that is TRIED, and has then been through these phases."""
        xid = new_xid()
        for phase in (TRY, *phases):
            assert (await self.call(phase, xid, **changes)).outcome == DONE
        return xid

    async def execute(self, statement: str, **values: Any) -> int:
        """On the business tables, as no handler would."""

        def run() -> int:
            with self.world.auditor.begin() as db:
                return db.execute(text(statement), values).rowcount

        return await asyncio.to_thread(run)

    async def put(self, xid: str, amount: int = 10, branch_id: int = 1, unit: str = "EUR") -> None:
        """A hold of nobody's Try."""
        values = {"xid": xid, "branch_id": branch_id, "amount": amount, "unit": unit}
        assert await self.execute(INSERT.text, **values) == 1

    async def compare(self, seconds: float | None = None, **fields: Any) -> pb.CompareHoldsResponse:
        request = pb.CompareHoldsRequest(participant=self.world.name, **fields)
        compare: Callable[..., Awaitable[pb.CompareHoldsResponse]] = self.world.stub.CompareHolds
        return await compare(request, timeout=seconds)

    async def refused(self, seconds: float | None = None, **fields: Any) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.compare(seconds, **fields)
        return caught.value.code(), caught.value.details() or ""


def _put(db: Connection, call: Call[Debit]) -> None:
    amount = call.payload.amount
    db.execute(INSERT, {"xid": call.xid, "branch_id": call.branch_id, "amount": amount, "unit": "EUR"})


def _remove(db: Connection, call: Call[Debit]) -> None:
    mine = {"xid": call.xid, "branch_id": call.branch_id}
    assert db.execute(text("DELETE FROM vault WHERE xid = :xid AND branch_id = :branch_id"), mine).rowcount == 1


@asynccontextmanager
async def open_vault(
    world: World, define: Callable[[Vault], None] | None = None, **options: Any
) -> AsyncIterator[Vault]:
    """`define`: adds its own to the participant, in place of `reserve` and `holds`. `options`: of its start."""
    vault = Vault(world)
    try:
        with world.auditor.begin() as db:
            db.execute(text("CREATE TABLE vault (xid varchar(32), branch_id bigint, amount bigint, unit varchar(20))"))
        if define is not None:
            define(vault)
        else:
            (vault.define_async if world.is_async else vault.define)(world.participant)
        await world.start(**options)
        yield vault
    finally:
        await world.close()


def sums(response: pb.CompareHoldsResponse) -> dict[str, tuple[Decimal, Decimal]]:
    """By unit: in total, and under TRIED branches."""
    return {each.unit: (Decimal(each.reserved), Decimal(each.tried)) for each in response.sums}


def fits(response: pb.CompareHoldsResponse) -> bool:
    agree = all(each.reserved == each.tried for each in response.sums)
    return agree and not (response.leaked or response.missing or response.mismatches)
