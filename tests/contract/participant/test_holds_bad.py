"""CompareHolds where the author's query is wrong, slow, or not there: it is told, and harms nothing."""

import asyncio
import sys
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from uuid import uuid4

import grpc
import pytest
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection

from participant_sdk import Hold, service_holds
from tests.contract.participant.vault import Query, Vault, fits, open_vault, rows
from tests.contract.participant.world import CONFIRM, DONE, TRY, WAIT_SECONDS, World, new_xid
from tricord.v1 import participant_pb2 as pb

SQLITE = ["sqlite-sync", "sqlite-async"]


def bad(**changes: Any) -> Query:
    return lambda db: [Hold(**{"xid": new_xid(), "branch_id": 1, "amount": 1, **changes})]


def commits(db: Connection) -> Iterator[Hold]:
    yield Hold(new_xid(), 1, 1)
    db.commit()


def writes(db: Connection) -> Iterator[Hold]:
    db.execute(text("DELETE FROM vault"))
    yield from ()


def exits(db: Connection) -> Iterator[Hold]:
    yield from sys.exit(3)


def fails(db: Connection) -> Iterator[Hold]:
    yield Hold(new_xid(), 1, 1)
    raise ValueError("no\nsuch \x00 thing")


UUID = uuid4()
XID_FORM = "not 32 hexadecimal digits"
BAD = [
    (bad(xid=UUID), "holds(): hold 1: xid is of type UUID, not "),
    (bad(xid=UUID.bytes), "holds(): hold 1: xid is b"),
    (bad(xid=str(UUID)), f"holds(): hold 1: xid is '{UUID}' (str), not "),
    (bad(branch_id="1"), "holds(): hold 1: branch_id is '1' (str), not a number from 1"),
    (bad(branch_id=True), "holds(): hold 1: branch_id is True (bool), not a number from 1"),
    (bad(branch_id=0), "holds(): hold 1: branch_id is 0 (int), not a number from 1"),
    (bad(branch_id=2**63), "holds(): hold 1: branch_id is 9223372036854775808 (int), not a number from 1"),
    (bad(amount=1.5), "holds(): hold 1: amount is 1.5 (float), not an int or a Decimal"),
    (bad(amount=None), "holds(): hold 1: amount is of type NoneType, not an int or a Decimal"),
    (bad(amount=-1), "holds(): hold 1: amount is not from 0 to below 1e30"),
    (bad(amount=10**5000), "holds(): hold 1: amount is not from 0 to below 1e30"),
    (bad(amount=Decimal("NaN")), "holds(): hold 1: amount is NaN, which is not finite"),
    (bad(amount=Decimal("1e-31")), "holds(): hold 1: amount has more than 30 decimal places"),
    (bad(unit=None), "holds(): hold 1: unit is of type NoneType, not text of up to 64 characters"),
    (bad(unit="x" * 65), "holds(): hold 1: unit is 'xxx"),
    (bad(unit="\ud800"), "holds(): hold 1: unit is "),
    (lambda db: [Hold(new_xid(), 1, 1), ("a", 1, 1)], "holds(): hold 2 is of type tuple, not a Hold"),
    (lambda db: (Hold(new_xid(), 1, 1, f"u{n}") for n in range(200)), "holds(): hold 101: unit is 'u100', the 101th"),
    (lambda db: db.execute(text("SELECT * FROM nowhere")), "holds(): "),
    (commits, "holds(): LocalTransactionMisused: the handler called commit()"),
    (writes, "holds(): "),
    (exits, "holds(): SystemExit: 3"),
    (fails, "holds(): ValueError: no such thing"),
]


@pytest.mark.parametrize("flavour", [*SQLITE, "postgres-sync", "mariadb-async"], indirect=True)
async def test_what_is_wrong_with_the_query_is_told_and_harms_nothing(vault: Vault) -> None:
    xid = await vault.reserved()
    for query, text_begins in BAD:
        vault.query = query
        code, text = await vault.refused()
        assert code is grpc.StatusCode.FAILED_PRECONDITION, text
        assert text.startswith(text_begins)
        assert len(text) < 1_000
        assert text.isprintable()
    vault.query = rows
    assert (await vault.compare()).holds == 1
    assert (await vault.call(CONFIRM, xid)).outcome == DONE


async def test_a_query_ends_when_its_time_is_up(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_holds, "SECONDS_MAX", 0.5)
    endless = {
        "sqlite": "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
        "postgresql": "SELECT pg_sleep(600)",
        "mysql": "SELECT SLEEP(600)",
    }[vault.world.auditor.dialect.name]

    def forever(db: Connection) -> Iterator[Hold]:
        db.execute(text(endless)).all()
        yield from ()

    xid = await vault.reserved()
    for query in (forever, on_and_on) if not vault.world.is_async else (forever,):
        vault.query = query
        code, why = await vault.refused()
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED, why
        assert why.startswith("holds() had not ended after 0.5 s, and ")
    vault.query = rows
    monkeypatch.undo()
    assert (await vault.compare()).holds == 1
    assert (await vault.call(CONFIRM, xid)).outcome == DONE


def on_and_on(db: Connection) -> Iterator[Hold]:
    while True:
        yield Hold(new_xid(), 1, 1)


@pytest.mark.parametrize("flavour", ["sqlite-sync"], indirect=True)
async def test_a_query_ends_before_its_callers_time(vault: Vault) -> None:
    vault.query = on_and_on
    code, _ = await vault.refused(seconds=2.0)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    vault.query = rows

    async def answers() -> bool:
        try:
            return fits(await vault.compare())
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            return False

    async with asyncio.timeout(service_holds.SECONDS_MAX - 3.0):
        while not await answers():
            pass


SETTINGS = {
    "postgresql": "SELECT current_setting('transaction_isolation'), current_setting('transaction_read_only'), "
    "current_setting('enable_seqscan')",
    "mysql": "SELECT @@tx_isolation, '', ''",
    "sqlite": "SELECT '', '', (SELECT query_only FROM pragma_query_only)",
}
WITHIN = {
    "postgresql": ("repeatable read", "on", "on"),
    "mysql": ("REPEATABLE-READ", "", ""),
    "sqlite": ("", "", 1),
}
LEFT = {
    "postgresql": "SELECT current_setting('statement_timeout'), current_setting('transaction_read_only')",
    "mysql": "SELECT @@max_statement_time, @@tx_read_only",
    "sqlite": "SELECT 0, query_only FROM pragma_query_only",
}


async def test_its_local_transaction_is_read_only_and_leaves_nothing_behind(vault: Vault) -> None:
    within: list[tuple[Any, ...]] = []

    def asks(db: Connection) -> Iterator[Hold]:
        within.append(tuple(db.execute(text(SETTINGS[db.dialect.name])).one()))
        yield from ()

    vault.query = asks
    name = vault.world.auditor.dialect.name
    for _ in range(2):
        await vault.compare()
        assert within.pop() == WITHIN[name]

    def left(db: Connection) -> tuple[Any, ...]:
        return tuple(db.execute(text(LEFT[name])).one())

    if vault.world.is_async:
        async with vault.world.engine.connect() as db:
            found = await db.run_sync(left)
    else:
        with vault.world.engine.connect() as db:
            found = left(db)
    with vault.world.auditor.connect() as db:
        assert found == left(db)


@pytest.mark.parametrize("flavour", SQLITE, indirect=True)
async def test_bad_requests(vault: Vault) -> None:
    code, why = await vault.refused(mismatches_max=1_001)
    assert (code, why) == (grpc.StatusCode.INVALID_ARGUMENT, "mismatches_max: is 1001; the limit is 1000")
    vault.world.name = "shop"
    code, why = await vault.refused()
    assert (code, why) == (grpc.StatusCode.NOT_FOUND, "this is participant 'bank', not 'shop'")


@pytest.mark.parametrize("flavour", SQLITE, indirect=True)
async def test_a_participant_that_declares_none(world: World) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await world.stub.CompareHolds(pb.CompareHoldsRequest(participant="bank"))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert caught.value.details() == "participant 'bank' declares no holds()"


@pytest.mark.parametrize("flavour", ["postgres-sync", "mariadb-sync", "sqlite-sync"], indirect=True)
async def test_a_fence_that_cannot_be_read_is_not_the_querys_error(vault: Vault) -> None:
    await vault.execute("ALTER TABLE tcc_fence_log RENAME TO elsewhere")
    code, why = await vault.refused()
    assert code is grpc.StatusCode.UNAVAILABLE
    assert why.startswith("the fence cannot be read: ")


@pytest.mark.parametrize("flavour", ["sqlite-async", "postgres-async"], indirect=True)
async def test_a_coroutine_that_waits_for_something_else_is_stopped(
    flavour: str, participant_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_holds, "SECONDS_MAX", 0.5)
    stopped = asyncio.Event()

    def waits(vault: Vault) -> None:
        @vault.world.participant.holds()
        async def holds(db: AsyncConnection) -> list[Hold]:
            try:
                await asyncio.Event().wait()
            finally:
                stopped.set()
            return []

    async with open_vault(World(flavour, participant_url), waits) as vault:
        code, why = await vault.refused()
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED, why
        assert why == "holds() had not ended after 0.5 s, and 0 holds"
        async with asyncio.timeout(WAIT_SECONDS):
            await stopped.wait()
        assert (await vault.world.call(TRY, new_xid())).outcome == DONE
