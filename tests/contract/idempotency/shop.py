"""An idempotent function of either flavour behind one face, so that each test says once what has to hold of both."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection

from participant_sdk.idempotency.fingerprints import RequestParts, keyed_request
from participant_sdk.idempotency.functions import idempotent
from participant_sdk.idempotency.idempotency import AsyncIdempotency, Idempotency
from participant_sdk.idempotency.keys import key_hash
from participant_sdk.idempotency.operation import Mode, Operation
from participant_sdk.idempotency.record import Answer, Codec, Record
from participant_sdk.idempotency.replay import Replay
from tests.contract.idempotency.world import World

NAME = "payments.pay"
ATOMIC = Operation(name=NAME)
LEASED = Operation(name=NAME, mode=Mode.LEASED)
PHASED = Operation(name=NAME, mode=Mode.PHASED)
MODES = (ATOMIC, LEASED)


@dataclass(frozen=True)
class Receipt:
    payment_id: str
    total: Decimal


class NoMoney(Exception):
    pass


class NoMoneyAtAll(NoMoney):
    pass


Work = Callable[[Connection, str, int], Any]


def insert(db: Connection, what: str) -> None:
    """The business: one row."""
    db.execute(text("INSERT INTO effects (what) VALUES (:what)"), {"what": what})


def pay_once(db: Connection, payment_id: str, amount: int) -> Receipt:
    """The usual work."""
    insert(db, payment_id)
    return Receipt(payment_id, Decimal(amount) / 10)


class Shop:
    """A store of a world, and its idempotent functions. `calls`: how often the work of any has run."""

    def __init__(self, world: World, options: dict[str, Any]) -> None:
        self.world = world
        self.calls = 0
        self.store: Any = (AsyncIdempotency if world.is_async else Idempotency)(
            world.engine, tables=world.tables, **options
        )

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A coroutine function, or a function that may block."""
        if self.world.is_async:
            return await function(*args, **kwargs)
        return await asyncio.to_thread(function, *args, **kwargs)

    def payer(self, work: Work = pay_once, *, returns: Any = Receipt, **settings: Any) -> Callable[..., Any]:
        """`await pay(payment_id, amount)`: `work` with a connection, once per `payment_id`."""
        settings = {"operation": ATOMIC, "key": "payment_id", **settings}

        def counted(db: Connection, payment_id: str, amount: int) -> Any:
            self.calls += 1
            return work(db, payment_id, amount)

        async def pay_async(payment_id: str, amount: int = 5, *, db: AsyncConnection) -> Any:
            return await db.run_sync(counted, payment_id, amount)

        def pay(payment_id: str, amount: int = 5, *, db: Connection) -> Any:
            return counted(db, payment_id, amount)

        function: Any = pay_async if self.world.is_async else pay
        function.__annotations__["return"] = returns
        decorated = idempotent(self.store, **settings)(function)
        return lambda *args, **kwargs: self.call(decorated, *args, **kwargs)

    @asynccontextmanager
    async def running(self, payment_id: str = "p-1", operation: Operation = PHASED) -> AsyncIterator["Steps"]:
        """A run that nothing stands in the way of, without a function around it."""
        run = await self.call(self.store.begin, operation, keyed_request(payment_id, "", RequestParts()))
        assert not isinstance(run, Replay)
        if self.world.is_async:
            async with run:
                yield Steps(self, run)
            return
        raised: BaseException | None = None
        await asyncio.to_thread(run.__enter__)
        try:
            yield Steps(self, run)
        except BaseException as error:
            raised = error
            raise
        finally:
            await asyncio.to_thread(run.__exit__, type(raised) if raised else None, raised, None)

    async def record(self, payment_id: str = "p-1", tenant: str = "") -> Record:
        """The record of a payment, which is there."""
        return await self.world.read(key_hash("default", tenant, NAME, payment_id))

    def lapse(self, payment_id: str = "p-1") -> None:
        """The time of the lease goes by."""
        self.world.lapse(key_hash("default", "", NAME, payment_id))


class Steps:
    """A phased run. `done`: the phases and calls whose work has run, by name."""

    def __init__(self, shop: Shop, run: Any) -> None:
        self.shop, self.run = shop, run
        self.done: list[str] = []

    async def phase(self, name: str, work: Callable[[Connection], Any] | None = None, **settings: Any) -> Any:
        """A phase, of one row if its work is not said."""

        def phase(db: Connection) -> Any:
            self.done.append(name)
            return insert(db, name) if work is None else work(db)

        async def phase_async(db: AsyncConnection) -> Any:
            return await db.run_sync(phase)

        return await self.shop.call(
            self.run.phase, name, phase_async if self.shop.world.is_async else phase, **settings
        )

    async def foreign(self, name: str, call: Callable[[str], Any] = str, **settings: Any) -> Any:
        """A call to somebody else."""

        def foreign(key: str) -> Any:
            self.done.append(name)
            return call(key)

        async def foreign_async(key: str) -> Any:
            return foreign(key)

        made = foreign_async if self.shop.world.is_async else foreign
        return await self.shop.call(self.run.foreign, name, made, **settings)

    async def succeed(self) -> None:
        """With an answer."""
        await self.shop.call(self.run.succeed, Answer(Codec.VALUE, body=b"done"))


@asynccontextmanager
async def shop_of(world: World, **options: Any) -> AsyncIterator[Shop]:
    """A program on the world's engine."""
    shop = Shop(world, options)
    await shop.call(shop.store.start)
    try:
        yield shop
    finally:
        await shop.call(shop.store.close)
