"""Phases of a run: committed one by one, skipped with their outputs later, and never in another order."""

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.errors import LeaseLost
from participant_sdk.idempotency.functions import idempotent
from participant_sdk.idempotency.guard import RunMisused
from participant_sdk.idempotency.record import State
from participant_sdk.idempotency.runs import AsyncRun, Run
from participant_sdk.idempotency.values import ValueCodec
from tests.contract.idempotency.shop import ATOMIC, LEASED, PHASED, Shop, Steps, insert, shop_of
from tests.contract.idempotency.world import World


@dataclass
class Line:
    total: Decimal


async def three(run: Steps, fail_at: str = "") -> list[Any]:
    """A phase, a call and a phase, of which one can fail."""

    def at(name: str, given: Any) -> Any:
        if name == fail_at:
            raise ZeroDivisionError
        return given

    def order(db: Connection) -> Any:
        insert(db, "order")
        return at("order", Line(Decimal("0.10")))

    def paid(db: Connection) -> Any:
        insert(db, "paid")
        return at("paid", None)

    return [
        await run.phase("order", order, kind=Line),
        await run.foreign("charge", lambda key: at("charge", key)),
        await run.phase("paid", paid, kind=Line | None),
    ]


async def twice(run: Steps) -> None:
    for _ in range(2):
        await run.phase("order", kind=Line)


async def overtaken(zombie: Steps, shop: Shop) -> None:
    await zombie.phase("order")
    shop.lapse()
    async with shop.running() as run:
        await run.phase("order")
        await run.phase("paid")
        await run.succeed()
        assert run.done == ["paid"]
    await zombie.phase("paid", lambda db: insert(db, "by the zombie"))


async def test_each_phase_is_committed_by_itself_and_the_run_at_its_end(world: World) -> None:
    async with shop_of(world) as shop, shop.running() as run:
        await run.phase("order")
        assert world.effects() == ["order"]
        record = await shop.record()
        assert (record.state, record.recovery_point) == (State.PROCESSING, "order")
        key = await run.foreign("charge")
        assert key == run.run.derived_key("charge") != run.run.derived_key("order")
        assert (await shop.record()).recovery_point == "charge"
        await run.phase("paid")
        await run.succeed()
        assert world.effects() == ["order", "paid"]
        assert (await shop.record()).state is State.SUCCEEDED


@pytest.mark.parametrize("fail_at", ["order", "charge", "paid"])
async def test_a_later_attempt_skips_what_is_done_and_has_its_outputs(world: World, fail_at: str) -> None:
    names = ["order", "charge", "paid"]
    at = names.index(fail_at)
    async with shop_of(world) as shop:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                async with shop.running() as run:
                    await three(run, fail_at)
            assert run.done[-1] == fail_at
            record = await shop.record()
            assert record.state is State.FAILED_RETRYABLE
            assert record.recovery_point == (names[at - 1] if at else None)
            assert world.effects() == (["order"] if at else [])
        async with shop.running() as run:
            assert await three(run) == [Line(Decimal("0.10")), run.run.derived_key("charge"), None]
            assert run.done == names[at:]
            await run.succeed()
        assert world.effects() == ["order", "paid"]
        assert (await shop.record()).attempt == 3


async def test_phases_in_another_order_are_refused(world: World) -> None:
    async with shop_of(world) as shop:
        with pytest.raises(ZeroDivisionError):
            async with shop.running() as run:
                await three(run, "paid")
        with pytest.raises(ConfigurationError, match="'charge' comes where an earlier attempt had the phase 'order'"):
            async with shop.running() as run:
                await run.foreign("charge")
        with pytest.raises(ConfigurationError, match="'order' comes a second time in one run"):
            async with shop.running() as run:
                await twice(run)
        with pytest.raises(ConfigurationError, match="what an earlier attempt has stored of it cannot be read"):
            async with shop.running() as run:
                await run.phase("order", kind=int)
        assert run.done == []
        assert world.effects() == ["order"]


async def test_what_a_failed_phase_has_written_is_in_no_other_phase(world: World) -> None:
    def fail(db: Connection) -> Any:
        insert(db, "half done")
        raise ZeroDivisionError

    async with shop_of(world) as shop, shop.running() as run:
        with pytest.raises(ZeroDivisionError):
            await run.phase("order", fail)
        for bad, kind in (({1}, None), (Line(Decimal(1)), None), (b"x" * (1 << 20), bytes)):

            def give(db: Connection, bad: Any = bad) -> Any:
                insert(db, "bad")
                return bad

            with pytest.raises((TypeError, ValueError), match="'order'"):
                await run.phase("order", give, kind=kind)
        await run.phase("instead")
        await run.succeed()
        assert world.effects() == ["instead"]


async def test_a_zombie_s_phase_rolls_back_and_what_another_has_done_stays(world: World) -> None:
    async with shop_of(world) as shop:
        with pytest.raises(LeaseLost):
            async with shop.running() as zombie:
                await overtaken(zombie, shop)
        assert world.effects() == ["order", "paid"]
        assert (await shop.record()).state is State.SUCCEEDED


async def test_a_run_that_is_known_to_be_lost_asks_nobody_any_more(world: World) -> None:
    async with shop_of(world) as shop:
        async with shop.running() as run:
            run.run.mark_lost()
            for step in (run.phase, run.foreign):
                with pytest.raises(LeaseLost):
                    await step("charge")
            await shop.call(run.run.fail_retryable)
        assert run.done == []


async def test_a_record_that_has_expired_leaves_no_phases(world: World) -> None:
    async with shop_of(world) as shop:
        with pytest.raises(ZeroDivisionError):
            async with shop.running() as run:
                await three(run, "paid")
        world.expire((await shop.record()).key_hash)
        async with shop.running() as run:
            await run.phase("order")
            await run.succeed()
            assert run.done == ["order"]
        assert world.effects() == ["order", "order"]


async def test_a_call_to_others_is_refused_while_a_local_transaction_is_open(world: World) -> None:
    async with shop_of(world) as shop, shop.running() as run:
        await shop.call(run.run.connect)
        with pytest.raises(ConfigurationError, match="while a local transaction is open"):
            await run.foreign("charge")
        await run.phase("order")
        await run.foreign("charge")
        await run.succeed()
        assert run.done == ["order", "charge"]


async def test_other_modes_have_no_phases(world: World) -> None:
    async with shop_of(world) as shop:
        for operation in (ATOMIC, LEASED):
            with pytest.raises(ConfigurationError, match="phases are for PHASED operations"):
                async with shop.running(operation=operation) as run:
                    await run.phase("order")
        assert world.effects() == []


async def test_a_phase_is_lent_a_session_or_nothing_as_it_is_annotated(world: World) -> None:
    def with_session(session: Session) -> str:
        session.execute(text("INSERT INTO effects (what) VALUES ('by a session')"))
        return "x"

    async def with_async_session(session: AsyncSession) -> str:
        await session.execute(text("INSERT INTO effects (what) VALUES ('by a session')"))
        return "x"

    def nothing() -> int:
        return 0

    async def nothing_async() -> int:
        return 0

    codec = ValueCodec(lambda value: value.encode() * 2, lambda data: data[: len(data) // 2].decode())
    async with shop_of(world) as shop, shop.running() as run:
        work: Any = with_async_session if world.is_async else with_session
        assert await shop.call(run.run.phase, "session", work, codec=codec) == "x"
        none: Any = nothing_async if world.is_async else nothing
        assert await shop.call(run.run.phase, "nothing", none) == 0
        await run.succeed()
        assert world.effects() == ["by a session"]


async def test_a_phased_function_is_lent_its_run_only(world: World) -> None:
    def with_connection(key: str, db: Connection) -> None: ...
    def with_run(key: str, run: Run) -> None: ...
    async def with_async_run(key: str, run: AsyncRun) -> None: ...

    async with shop_of(world) as shop:
        idempotent(shop.store, PHASED, key="key")(with_async_run if world.is_async else with_run)
        with pytest.raises(
            ConfigurationError, match=r"it is lent its run, and each phase a local transaction|takes an"
        ):
            idempotent(shop.store, PHASED, key="key")(with_connection)


async def test_a_phase_that_commits_by_itself_is_stopped_before_it_does(world: World) -> None:
    def commit(db: Connection) -> None:
        insert(db, "order")
        db.commit()

    async with shop_of(world) as shop, shop.running() as run:
        with pytest.raises(RunMisused, match=r"the phase 'order' of payments.pay called commit\(\)"):
            await run.phase("order", commit)
        await run.phase("instead")
        await run.succeed()
        assert world.effects() == ["instead"]
