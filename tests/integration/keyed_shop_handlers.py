"""What the methods of the keyed shop do, as plain functions and as coroutines: by the plan in their message.

A handler writes a row into `orders`, in the run's local transaction, so that each run that stays can be counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import grpc
from sqlalchemy import Column, Integer, LargeBinary, MetaData, Table
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from participant_sdk.context import current_xid, note_tried
from participant_sdk.idempotency.current import current_run
from participant_sdk.idempotency.grpc_answers import grpc_answer
from tricord.v1 import types_pb2

if TYPE_CHECKING:
    from .keyed_shop import Shop

CALL_S: Final = 60.0

orders_metadata: Final = MetaData()
orders: Final = Table(
    "orders",
    orders_metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("item", LargeBinary(1000)),
)

LOSE_A_RACE: Final = "DO $$ BEGIN RAISE EXCEPTION 'a race' USING ERRCODE = '40001'; END $$"


class Handlers:
    """The shop's methods as plain functions."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop

    def create(self, request: types_pb2.Payload, context: Any) -> Any:
        return self._work(request.data, request.content_type, context)

    change = unlisted = create

    def upload(self, requests: Iterable[types_pb2.Payload], context: Any) -> Any:
        first, *others = requests
        return self._work(b"+".join([first.data, *(each.data for each in others)]), first.content_type, context)

    def watch(self, request: types_pb2.Payload, context: Any) -> Any:
        for n in range(3):
            yield types_pb2.Payload(data=b"%d:" % n + request.data)
        yield self._work(request.data, request.content_type, context)

    def chat(self, requests: Iterable[types_pb2.Payload], context: Any) -> Any:
        for request in requests:
            yield self._work(request.data, request.content_type, context)

    def _work(self, item: bytes, plan: str, context: Any) -> Any:
        self.shop.runs += 1
        number = self.shop.runs
        run: Any = current_run()
        if run is None:
            return types_pb2.Payload(data=b"no run:" + item)
        if "gate" in plan:
            self.shop.gate.reached.release()
            assert self.shop.gate.open.wait(CALL_S)
        self._write(run, plan, item)
        self.shop.die_if(plan)
        for step in plan.split():
            name, _, argument = step.partition(":")
            if name == "initial":
                context.send_initial_metadata(initial(argument))
            elif name == "abort":
                context.abort(grpc.StatusCode[argument], f"no {item.decode()}")
            else:
                said(name, argument, context)
        return answer(plan, item, number)

    def _write(self, run: Any, plan: str, item: bytes) -> None:
        """The work, in a session of the handler's own if it is to `join` or to `complete`."""
        row = orders.insert().values(item=item[:100])
        if "join" in plan:
            session = Session(self.shop.engine)
            self.shop.sessions.append(session)
            run.join(session)
            session.execute(row)
        elif "complete" in plan:
            with Session(self.shop.engine) as session, session.begin():
                session.execute(row)
                run.complete(grpc_answer(types_pb2.Payload(data=b"completed")), session)
        elif "deferred" in plan:
            run.connection.exec_driver_sql("INSERT INTO receipt VALUES (7)")
        elif "race" in plan and self.shop.runs == 1:
            run.connection.exec_driver_sql(LOSE_A_RACE)
        else:
            run.connection.execute(row)


class AsyncHandlers:
    """The shop's methods as coroutines."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop

    async def create(self, request: types_pb2.Payload, context: Any) -> Any:
        return await self._work(request.data, request.content_type, context)

    change = unlisted = create

    async def upload(self, requests: Any, context: Any) -> Any:
        items, plan = [], ""
        async for request in requests:
            items.append(request.data)
            plan = plan or request.content_type
        return await self._work(b"+".join(items), plan, context)

    async def watch(self, request: types_pb2.Payload, context: Any) -> Any:
        for n in range(3):
            yield types_pb2.Payload(data=b"%d:" % n + request.data)
        yield await self._work(request.data, request.content_type, context)

    async def chat(self, requests: Any, context: Any) -> Any:
        async for request in requests:
            yield await self._work(request.data, request.content_type, context)

    async def _opened(self) -> None:
        while not self.shop.gate.open.is_set():  # noqa: ASYNC110  # a test opens it, from its own thread
            await asyncio.sleep(0.01)

    async def _work(self, item: bytes, plan: str, context: Any) -> Any:
        self.shop.runs += 1
        number = self.shop.runs
        run: Any = current_run()
        if run is None:
            return types_pb2.Payload(data=b"no run:" + item)
        if "gate" in plan:
            self.shop.gate.reached.release()
            try:
                await asyncio.wait_for(self._opened(), CALL_S)
            except asyncio.CancelledError:
                self.shop.cancelled += 1
                raise
        await self._write(run, plan, item)
        self.shop.die_if(plan)
        for step in plan.split():
            name, _, argument = step.partition(":")
            if name == "initial":
                await context.send_initial_metadata(initial(argument))
            elif name == "abort":
                await context.abort(grpc.StatusCode[argument], f"no {item.decode()}")
            else:
                said(name, argument, context)
        return answer(plan, item, number)

    async def _write(self, run: Any, plan: str, item: bytes) -> None:
        row = orders.insert().values(item=item[:100])
        if "join" in plan:
            session = AsyncSession(self.shop.async_engine)
            self.shop.sessions.append(session)
            await run.join(session)
            await session.execute(row)
        elif "complete" in plan:
            async with AsyncSession(self.shop.async_engine) as session, session.begin():
                await session.execute(row)
                await run.complete(grpc_answer(types_pb2.Payload(data=b"completed")), session)
        elif "deferred" in plan:
            await (await run.connect()).exec_driver_sql("INSERT INTO receipt VALUES (7)")
        elif "race" in plan and self.shop.runs == 1:
            await (await run.connect()).exec_driver_sql(LOSE_A_RACE)
        else:
            await (await run.connect()).execute(row)


def initial(argument: str) -> tuple[tuple[str, str | bytes], ...]:
    """What comes before the answer."""
    return (("receipt", "i1"), ("receipt-bin", b"\x00i"), ("request-id", argument))


def said(name: str, argument: str, context: Any) -> None:
    """One step of a plan that waits for nothing."""
    match name:
        case "code":
            context.set_code(grpc.StatusCode[argument])
        case "details":
            context.set_details(argument)
        case "raise":
            raise LookupError(argument)
        case "trailing":
            context.set_trailing_metadata(
                (("receipt", "r1"), ("receipt", "r2"), ("receipt-bin", b"\x00\xff"), ("request-id", argument))
            )
        case "tried":
            assert current_xid() == "a" * 32
            note_tried("a" * 32, [int(argument)])  # as told by a service that the handler has called
        case _:
            assert name in ("ok", "gate", "size", "join", "complete", "deferred", "race", "die"), name


def answer(plan: str, item: bytes, number: int) -> types_pb2.Payload:
    """What a handler answers; `number` tells its runs apart."""
    size = int(plan.partition("size:")[2].split()[0]) if "size:" in plan else 0
    return types_pb2.Payload(data=b"%d:" % number + item[:100] + b"x" * size)
