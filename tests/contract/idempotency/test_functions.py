"""Idempotent functions, `def` and `async def`, on every database: once, and an equal result or the same error again."""

import asyncio
import contextlib
import threading
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection

from participant_sdk.idempotency.current import current_run
from participant_sdk.idempotency.errors import AnswerNotStored, ConfigurationError, IdempotencyKeyReused, InProgress
from participant_sdk.idempotency.functions import idempotent
from participant_sdk.idempotency.guard import RunMisused
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.record import State
from tests.contract.idempotency.shop import (
    LEASED,
    MODES,
    NAME,
    NoMoney,
    NoMoneyAtAll,
    Receipt,
    insert,
    pay_once,
    shop_of,
)
from tests.contract.idempotency.world import TABLE, World

each_mode = pytest.mark.parametrize("operation", MODES, ids=lambda operation: operation.mode.value)


@each_mode
async def test_a_repeat_gets_an_equal_result_and_nothing_runs(world: World, operation: Operation) -> None:
    async with shop_of(world) as shop:
        pay = shop.payer(operation=operation)
        assert await pay("p-1", 5) == Receipt("p-1", Decimal("0.5"))
        for again in (await pay("p-1", 5), await pay("p-1", amount=5), await pay("p-1")):
            assert again == Receipt("p-1", Decimal("0.5"))
            assert type(again) is Receipt
        assert await pay("p-2") == Receipt("p-2", Decimal("0.5"))
        assert (shop.calls, world.effects()) == (2, ["p-1", "p-2"])
        assert (await shop.record()).state is State.SUCCEEDED


async def test_what_is_nothing_is_a_result_too(world: World) -> None:
    nothing: dict[str, Any] = {"a": None, "b": 0, "c": False, "d": "", "e": [], "f": {}, "g": 0.0, "h": {"a": [None]}}
    async with shop_of(world) as shop:
        pay = shop.payer(lambda db, payment_id, amount: nothing[payment_id], returns=Any)
        for key, value in [*nothing.items()] * 2:
            again = await pay(key)
            assert (again, type(again)) == (value, type(value))
        assert shop.calls == len(nothing)


@each_mode
async def test_other_arguments_under_the_key_are_refused(world: World, operation: Operation) -> None:
    async with shop_of(world) as shop:
        pay = shop.payer(operation=operation)
        await pay("p-1", 5)
        with pytest.raises(IdempotencyKeyReused):
            await pay("p-1", 6)
        assert world.effects() == ["p-1"]
        named = shop.payer(operation=operation, fields=(), revision=1, older_fields={0: ("amount",)})
        with pytest.raises(IdempotencyKeyReused):
            await named("p-1", 6)
        assert await named("p-1", 5) == Receipt("p-1", Decimal("0.5"))


@each_mode
async def test_a_final_error_leaves_no_work_and_is_raised_again(world: World, operation: Operation) -> None:
    def refuse(db: Connection, payment_id: str, amount: int) -> Any:
        insert(db, payment_id)
        raise NoMoney("not enough", amount)

    async with shop_of(world) as shop:
        pay = shop.payer(refuse, operation=operation, final_errors=(NoMoney,))
        for _ in range(3):
            with pytest.raises(NoMoney) as caught:
                await pay("p-1")
            assert type(caught.value) is NoMoney
            assert caught.value.args == ("not enough", 5)
        assert (shop.calls, world.effects()) == (1, [])
        assert (await shop.record()).state is State.FAILED_FINAL
        forgetful = shop.payer(operation=operation)
        with pytest.raises(AnswerNotStored, match="final_errors does not name any more"):
            await forgetful("p-1")
        assert world.effects() == []


@each_mode
async def test_any_other_error_leaves_nothing_and_the_call_may_run_again(world: World, operation: Operation) -> None:
    errors = [ZeroDivisionError("x"), NoMoneyAtAll("a subclass")]

    def fail_at_first(db: Connection, payment_id: str, amount: int) -> Any:
        insert(db, payment_id)
        if shop.calls <= len(errors):
            raise errors[shop.calls - 1]
        return pay_once(db, "then", amount)

    async with shop_of(world) as shop:
        pay = shop.payer(fail_at_first, operation=operation, final_errors=(NoMoney,))
        for error in errors:
            with pytest.raises(type(error)):
                await pay("p-1")
            assert world.effects() == []
            assert (await shop.record()).state is State.FAILED_RETRYABLE
        with pytest.raises(IdempotencyKeyReused):
            await pay("p-1", 6)
        assert await pay("p-1") == await pay("p-1") == Receipt("then", Decimal("0.5"))
        assert (shop.calls, world.effects()) == (3, ["p-1", "then"])


@each_mode
async def test_a_result_that_could_not_be_given_again_is_not_committed(world: World, operation: Operation) -> None:
    def forget(db: Connection, payment_id: str, amount: int) -> Any:
        insert(db, payment_id)
        return {"payment_id": payment_id}

    async with shop_of(world) as shop:
        with pytest.raises(TypeError, match=r"the result of .*pay.* cannot be given again"):
            await shop.payer(forget, operation=operation)("p-1")
        assert world.effects() == []
        assert await shop.payer(operation=operation)("p-1") == Receipt("p-1", Decimal("0.5"))


async def test_a_result_that_is_too_large_is_told_and_nothing_runs_again(world: World) -> None:
    async with shop_of(world) as shop:
        pay = shop.payer(operation=Operation(name=NAME, answer_bytes_max=70))
        await pay("p-1")
        with pytest.raises(AnswerNotStored):
            await pay("p-1")
        assert world.effects() == ["p-1"]


@each_mode
async def test_one_key_of_two_tenants_is_two_calls(world: World, operation: Operation) -> None:
    async with shop_of(world) as shop:
        of_tenant = [
            shop.payer(operation=operation, tenant=lambda *args, name=name: name) for name in ("acme", "other")
        ]
        for pay in of_tenant * 2:
            assert await pay("p-1") == Receipt("p-1", Decimal("0.5"))
        assert world.effects() == ["p-1", "p-1"]
        assert (await shop.record(tenant="acme")).tenant == "acme"


@each_mode
async def test_many_calls_at_once_are_one(world: World, operation: Operation) -> None:
    waiting = Operation(name=NAME, mode=operation.mode, wait_s=30.0)
    async with shop_of(world, poll_s=0.05, listen=False) as shop:
        pay = shop.payer(operation=waiting)
        results = await asyncio.gather(*(pay("p-1") for _ in range(8)))
        assert results == [Receipt("p-1", Decimal("0.5"))] * 8
        assert (shop.calls, world.effects()) == (1, ["p-1"])


async def test_a_call_that_is_in_progress_is_told_until_its_lease_has_ended(world: World) -> None:
    def die_at_first(db: Connection, payment_id: str, amount: int) -> bool:
        if shop.calls == 1:
            raise ZeroDivisionError
        return current_run() is not None

    async with shop_of(world) as shop:
        pay = shop.payer(die_at_first, operation=LEASED, returns=bool)
        with pytest.raises(ZeroDivisionError):
            await pay("p-1")
        world.change(f"UPDATE {TABLE} SET state = 0, lease_until_ms = 9999999999999, expires_ms = NULL")
        with pytest.raises(InProgress):
            await pay("p-1")
        with pytest.raises(IdempotencyKeyReused):
            await pay("p-1", 6)
        shop.lapse()
        assert await pay("p-1") is True
        assert current_run() is None
        assert (await shop.record()).attempt == 2


RACES = {
    "postgres": "DO $$ BEGIN RAISE EXCEPTION 'lost' USING ERRCODE = '40001'; END $$",
    "mariadb": "SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'lost'",
}


@each_mode
async def test_work_that_lost_a_race_runs_again_by_itself(world: World, operation: Operation) -> None:
    if world.is_sqlite:
        pytest.skip("a local transaction of SQLite that has begun to write loses no race")

    def lose(db: Connection, payment_id: str, amount: int) -> Any:
        insert(db, payment_id)
        if shop.calls <= losses:
            db.execute(text(RACES[world.flavour.partition("-")[0]]))
        return pay_once(db, "then", amount)

    async with shop_of(world) as shop:
        losses = 2
        assert await shop.payer(lose, operation=operation)("p-1") == Receipt("then", Decimal("0.5"))
        assert (shop.calls, world.effects()) == (3, ["p-1", "then"])
        losses = 100
        shop.calls = 0
        with pytest.raises(Exception, match="lost"):
            await shop.payer(lose, operation=operation, reruns=1)("p-2")
        assert shop.calls == 2
        assert world.effects() == ["p-1", "then"]


@each_mode
@pytest.mark.parametrize("flavour", ["postgres-sync-serializable", "postgres-async-serializable"], indirect=True)
async def test_functions_that_race_each_other_all_end_as_if_one_after_another(
    world: World, operation: Operation
) -> None:
    def count(db: Connection, payment_id: str, amount: int) -> int:
        number = int(db.execute(text("SELECT count(*) FROM effects")).scalar_one())
        if not world.is_async and shop.calls <= 3:
            together.wait()  # now all have seen none
        insert(db, payment_id)
        return number

    together = threading.Barrier(3, timeout=60)
    async with shop_of(world) as shop:
        pay = shop.payer(count, operation=operation, returns=int, reruns=100)
        numbers = await asyncio.gather(*(pay(f"p-{number}") for number in range(3)))
        assert sorted(numbers) == [0, 1, 2]
        assert world.is_async or shop.calls > 3
        assert [await pay(f"p-{number}") for number in range(3)] == numbers
        assert world.effects() == ["p-0", "p-1", "p-2"]


async def test_a_lost_race_is_not_run_again_where_the_caller_owns_the_transaction(world: World) -> None:
    if world.is_sqlite:
        pytest.skip("a local transaction of SQLite that has begun to write loses no race")

    def lose(db: Connection, payment_id: str, amount: int) -> Any:
        db.execute(text(RACES[world.flavour.partition("-")[0]]))

    async with shop_of(world) as shop, world.transaction() as transaction:
        with pytest.raises(Exception, match="lost"):
            await shop.payer(lose)("p-1", db=transaction.connection)
        assert shop.calls == 1


@each_mode
async def test_work_happens_on_the_connection_that_the_caller_gives(world: World, operation: Operation) -> None:
    async with shop_of(world) as shop:
        pay = shop.payer(operation=operation)
        async with world.transaction() as transaction:
            assert await pay("p-1", db=transaction.connection) == Receipt("p-1", Decimal("0.5"))
            assert not transaction.connection.in_transaction()
        assert world.effects() == ["p-1"]
        assert await pay("p-1") == Receipt("p-1", Decimal("0.5"))
        assert shop.calls == 1


async def test_what_the_caller_has_begun_is_committed_with_an_atomic_function(world: World) -> None:
    async with shop_of(world) as shop:
        async with world.transaction() as transaction:
            await transaction.work("mine")
            await shop.payer()("p-1", db=transaction.connection)
        assert world.effects() == ["mine", "p-1"]
        async with world.transaction() as transaction:
            await transaction.work("mine")
            with pytest.raises(ConfigurationError, match="give a session or connection that has not begun"):
                await shop.payer(operation=LEASED)("p-2", db=transaction.connection)
        assert (shop.calls, world.effects()) == (1, ["mine", "p-1"])


@each_mode
async def test_a_function_that_commits_by_itself_is_stopped_before_it_does(world: World, operation: Operation) -> None:
    statements = ["", "COMMIT", "commit;"]

    def commit(db: Connection, payment_id: str, amount: int) -> Any:
        insert(db, payment_id)
        statement = statements[shop.calls - 1]
        with contextlib.suppress(RunMisused):
            db.execute(text(statement)) if statement else db.commit()
        return Receipt(payment_id, Decimal(amount))

    async with shop_of(world) as shop:
        for _ in statements:
            with pytest.raises(
                RunMisused, match=r"(?i)pay.* (called|executed) commit.*: its local transaction ends with"
            ):
                await shop.payer(commit, operation=operation)("p-1")
            assert world.effects() == []
        assert await shop.payer(operation=operation)("p-1") == Receipt("p-1", Decimal("0.5"))
        assert world.effects() == ["p-1"]


@each_mode
async def test_a_function_that_rolls_back_by_itself_has_not_succeeded(world: World, operation: Operation) -> None:
    def roll_back(db: Connection, payment_id: str, amount: int) -> Any:
        insert(db, payment_id)
        db.rollback()
        return Receipt(payment_id, Decimal(amount))

    async with shop_of(world) as shop:
        with pytest.raises(RunMisused, match=r"called rollback\(\), and raised nothing"):
            await shop.payer(roll_back, operation=operation)("p-1")
        assert world.effects() == []
        assert await shop.payer(operation=operation)("p-1") == Receipt("p-1", Decimal("0.5"))


async def test_a_savepoint_is_the_function_s_own(world: World) -> None:
    def with_savepoints(db: Connection, payment_id: str, amount: int) -> Any:
        with db.begin_nested():
            insert(db, "kept")
        with contextlib.suppress(ZeroDivisionError), db.begin_nested():
            insert(db, "dropped")
            raise ZeroDivisionError
        return Receipt(payment_id, Decimal(amount))

    async with shop_of(world) as shop:
        await shop.payer(with_savepoints)("p-1")
        assert world.effects() == ["kept"]


class Stop(BaseException):
    """As SystemExit is one."""


@each_mode
async def test_a_function_that_is_stopped_leaves_nothing_and_may_run_again(world: World, operation: Operation) -> None:
    def stop(db: Connection, payment_id: str, amount: int) -> Any:
        insert(db, payment_id)
        raise Stop

    async with shop_of(world) as shop:
        with pytest.raises(Stop):
            await shop.payer(stop, operation=operation)("p-1")
        assert world.effects() == []
        assert await shop.payer(operation=operation)("p-1") == Receipt("p-1", Decimal("0.5"))
        assert world.effects() == ["p-1"]


@each_mode
async def test_a_task_that_is_cancelled_leaves_nothing_and_may_run_again(world: World, operation: Operation) -> None:
    if not world.is_async:
        pytest.skip("a thread cannot be cancelled")
    working = asyncio.Event()

    async def pay(payment_id: str, db: AsyncConnection) -> None:
        await db.run_sync(insert, payment_id)
        if not working.is_set():
            working.set()
            await asyncio.Event().wait()

    async with shop_of(world) as shop:
        decorated = idempotent(shop.store, operation, key="payment_id")(pay)
        task = asyncio.ensure_future(decorated("p-1"))
        await working.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert world.effects() == []
        await decorated("p-1")
        await decorated("p-1")
        assert world.effects() == ["p-1"]
