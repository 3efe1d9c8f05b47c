"""A block that runs once per key, and what functions and blocks are lent, on every database and in both stacks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import String
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.current import current_run
from participant_sdk.idempotency.errors import IdempotencyKeyReused, KeyMissing
from participant_sdk.idempotency.functions import idempotent
from participant_sdk.idempotency.guard import RunMisused
from participant_sdk.idempotency.idempotency import AsyncIdempotency, Idempotency
from participant_sdk.idempotency.once import AsyncOnce, Once
from participant_sdk.idempotency.record import State
from participant_sdk.idempotency.runs import AsyncRun, Run
from tests.contract.idempotency.shop import ATOMIC, LEASED, NAME, NoMoney, Receipt, Shop, insert, shop_of
from tests.contract.idempotency.world import World

RECEIPT = Receipt("p-1", Decimal("0.50"))


class Base(DeclarativeBase):
    pass


class Effect(Base):
    __tablename__ = "effects"
    what: Mapped[str] = mapped_column(String(100), primary_key=True)


class Block:
    """A block of either flavour."""

    def __init__(self, shop: Shop, once: Any) -> None:
        self.shop, self.once = shop, once

    async def insert(self, what: str) -> None:
        """Its work."""
        if isinstance(self.once, AsyncOnce):
            await (await self.once.run.connect()).run_sync(insert, what)
        else:
            await asyncio.to_thread(insert, self.once.run.connection, what)

    async def finish(self, value: Any) -> Any:
        """Its end."""
        return await self.shop.call(self.once.finish, value)


@asynccontextmanager
async def block(shop: Shop, **settings: Any) -> AsyncIterator[Block]:
    settings = {"operation": ATOMIC, "key": "p-1", "fields": {"amount": 5}, "returns": Receipt, **settings}
    if shop.world.is_async:
        async with AsyncOnce(shop.store, **settings) as once:
            yield Block(shop, once)
        return
    plain = Once(shop.store, **settings)
    await asyncio.to_thread(plain.__enter__)
    raised: BaseException | None = None
    try:
        yield Block(shop, plain)
    except BaseException as error:
        raised = error
        raise
    finally:
        await asyncio.to_thread(plain.__exit__, type(raised) if raised else None, raised, None)


async def refused(shop: Shop) -> None:
    async with block(shop, final_errors=(NoMoney,)) as once:
        await once.insert("never")
        raise NoMoney("not enough")


async def test_a_block_runs_once_and_then_gives_its_result(world: World) -> None:
    async with shop_of(world) as shop:
        for operation, key in ((ATOMIC, "p-1"), (LEASED, "p-2")):
            async with block(shop, operation=operation, key=key) as one:
                assert not one.once.replayed
                await one.insert(key)
                assert await one.finish(RECEIPT) is RECEIPT
            async with block(shop, operation=operation, key=key) as again:
                assert again.once.replayed
                assert again.once.value == RECEIPT
                with pytest.raises(ConfigurationError, match="it has run before"):
                    again.once.run  # noqa: B018
            with pytest.raises(IdempotencyKeyReused):
                await block(shop, operation=operation, key=key, fields={"amount": 6}).__aenter__()
        assert world.effects() == ["p-1", "p-2"]


async def test_a_block_s_final_error_is_raised_again_before_it_begins(world: World) -> None:
    async with shop_of(world) as shop:
        for _ in range(2):
            with pytest.raises(NoMoney, match="not enough"):
                await refused(shop)
        assert world.effects() == []
        assert (await shop.record()).state is State.FAILED_FINAL


async def test_a_block_that_is_left_without_a_result_leaves_nothing(world: World) -> None:
    async with shop_of(world) as shop:
        with pytest.raises(RunMisused, match="without an outcome"):
            async with block(shop) as once:
                await once.insert("never")
        async with block(shop) as once:
            await once.finish(RECEIPT)
        assert world.effects() == []


async def test_a_block_without_a_key_is_refused(world: World) -> None:
    async with shop_of(world) as shop:
        with pytest.raises(KeyMissing, match=r"^Idempotency-Key is not given"):
            await block(shop, key=None).__aenter__()


async def test_a_block_takes_a_store_of_its_flavour(world: World) -> None:
    async with shop_of(world) as shop:
        wrong: Any = Once if world.is_async else AsyncOnce
        with pytest.raises(ConfigurationError, match=r"payments.pay: (Async)?Once takes an "):
            wrong(shop.store, ATOMIC, key="p-1", fields={})


@dataclass
class Seen:
    fence: int
    current: bool


async def test_a_function_is_lent_its_run_and_a_session(world: World) -> None:
    def work(what: str, session: Session, run: Run) -> Seen:
        session.add(Effect(what=what))
        return Seen(run.fence, current_run() is run)

    async def work_async(what: str, session: AsyncSession, run: AsyncRun) -> Seen:
        session.add(Effect(what=what))
        return Seen(run.fence, current_run() is run)

    async with shop_of(world) as shop:
        function: Any = work_async if world.is_async else work
        for operation in (ATOMIC, LEASED):
            lent = idempotent(shop.store, operation, key="what")(function)
            what = operation.mode.value
            seen = await shop.call(lent, what)
            assert seen.current
            assert (seen.fence > 0) == (operation is LEASED)
            assert await shop.call(lent, what) == seen
        assert world.effects() == ["atomic", "leased"]


async def test_a_session_that_the_caller_gives_is_worked_in_and_committed(world: World) -> None:
    def work(what: str, session: Session) -> None:
        session.add(Effect(what=what))

    async def work_async(what: str, session: AsyncSession) -> None:
        session.add(Effect(what=what))

    async with shop_of(world) as shop:
        function: Any = work_async if world.is_async else work
        lent = idempotent(shop.store, ATOMIC, key="what")(function)
        if world.is_async:
            async with AsyncSession(world.engine) as session:
                session.add(Effect(what="mine"))
                await lent("a", session=session)
        else:
            with Session(world.engine) as plain:
                plain.add(Effect(what="mine"))
                await asyncio.to_thread(lent, "a", session=plain)
        await shop.call(lent, "a")
        assert world.effects() == ["a", "mine"]


async def test_a_store_is_asked_for_at_the_call_and_is_of_the_function_s_flavour(world: World) -> None:
    def work(what: str) -> int:
        return 7

    async def work_async(what: str) -> int:
        return 7

    function, other = (work_async, work) if world.is_async else (work, work_async)
    async with shop_of(world) as shop:
        later: list[Any] = []
        lent: Any = idempotent(lambda: later[0], NAME, key="what")(function)
        later.append(shop.store)
        assert await shop.call(lent, "a") == 7
        wanted = AsyncIdempotency if other is work_async else Idempotency
        with pytest.raises(ConfigurationError, match=f"it takes an {wanted.__name__}, not an "):
            idempotent(shop.store, NAME, key="what")(other)
        wrong: Any = idempotent(lambda: shop.store, NAME, key="what")(other)
        with pytest.raises(ConfigurationError, match=f"it takes an {wanted.__name__}, not an "):
            await (wrong("b") if other is work_async else asyncio.to_thread(wrong, "b"))
