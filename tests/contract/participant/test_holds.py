"""CompareHolds: what is reserved in a participant's tables against its TRIED branches, on every database and stack."""

import asyncio
import threading
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from participant_sdk import Hold, holds_sql
from tests.contract.participant.records import COMMITTED, TRIED, change, old_xid
from tests.contract.participant.vault import SELECT, Vault, fits, open_vault, sums
from tests.contract.participant.world import CANCEL, CONFIRM, DONE, FLAVOURS, TRY, WAIT_SECONDS, World, new_xid
from tricord.v1 import participant_pb2 as pb

LEAKED, MISSING = pb.HOLD_MISMATCH_KIND_LEAKED, pb.HOLD_MISMATCH_KIND_MISSING
ONE_OF_EACH = ["sqlite-sync", "postgres-async", "mariadb-sync"]
SQLITE = ["sqlite-sync", "sqlite-async"]

Told = set[tuple[Any, ...]]


def told(response: pb.CompareHoldsResponse) -> Told:
    return {
        (each.kind, each.xid, each.branch_id, each.action, int(each.status), each.participant, each.amount, each.unit)
        for each in response.mismatches
    }


async def test_what_fits_is_counted_and_summed(vault: Vault) -> None:
    empty = await vault.compare()
    assert (empty.holds, empty.tried, list(empty.sums), fits(empty)) == (0, 0, [], True)
    for branch_id in (1, 2, 3):
        await vault.reserved(branch_id=branch_id)
    await vault.reserved(CONFIRM)
    await vault.reserved(CANCEL)
    await vault.call(CANCEL, new_xid())
    await vault.world.call(TRY, new_xid())  # which holds nothing, and need not
    response = await vault.compare()
    assert fits(response)
    assert (response.holds, response.tried, response.unfinished, response.compared_until) == (3, 4, 0, "")
    assert sums(response) == {"EUR": (Decimal(30), Decimal(30))}
    assert response.fence_id == vault.world.serving.fence_id


async def test_a_leak_and_a_missing_hold_are_told(vault: Vault) -> None:
    good = await vault.reserved()
    await vault.put(good, 5, unit="points")
    lost = await vault.reserved()
    assert await vault.execute("DELETE FROM vault WHERE xid = :xid", xid=lost) == 1
    confirmed = await vault.reserved(CONFIRM)
    await vault.put(confirmed, 7)
    await vault.put(unknown := new_xid(), 8, branch_id=2)
    other = await vault.reserved()
    await asyncio.to_thread(change, vault.world, other, "participant = 'other'")
    response = await vault.compare()
    assert told(response) == {
        (LEAKED, confirmed, 1, "reserve", COMMITTED, "bank", "7", "EUR"),
        (LEAKED, unknown, 2, "", 0, "", "8", "EUR"),
        (LEAKED, other, 1, "reserve", TRIED, "other", "10", "EUR"),
        (MISSING, lost, 1, "reserve", TRIED, "bank", "", ""),
    }
    assert (response.holds, response.tried, response.leaked, response.missing) == (5, 2, 3, 1)
    assert sums(response) == {"EUR": (Decimal(35), Decimal(10)), "points": (Decimal(5), Decimal(5))}
    await vault.reserved(CONFIRM)  # nothing of the look is left on the connections


async def test_both_sides_are_of_one_moment(vault: Vault) -> None:
    """What happens between the look at the fence and the author's query is seen by neither."""
    await vault.reserved()
    confirmed, cancelled = await vault.reserved(), await vault.reserved()
    reached, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        assert go_on.wait(WAIT_SECONDS)

    vault.before = wait
    looking = asyncio.create_task(vault.compare())
    try:
        assert await asyncio.to_thread(reached.wait, WAIT_SECONDS)
        assert (await vault.call(CONFIRM, confirmed)).outcome == DONE
        assert (await vault.call(CANCEL, cancelled)).outcome == DONE
        await vault.reserved()
    finally:
        go_on.set()
    response = await looking
    assert fits(response)
    assert response.holds == response.tried == 3
    vault.before = None
    assert (await vault.compare()).holds == 2


async def test_it_fits_while_traffic_runs(vault: Vault) -> None:
    stopping = False

    async def traffic(end: Any) -> int:
        done = 0
        while not stopping:
            xid = new_xid()
            for phase in (TRY, end):
                while (await vault.call(phase, xid)).outcome != DONE:
                    pass
            done += 1
        return done

    tasks = [asyncio.create_task(traffic(end)) for end in (CONFIRM, CANCEL, CONFIRM)]
    looks = 0
    try:
        while looks < 10 and not any(task.done() for task in tasks):
            response = await vault.compare()
            assert fits(response), response
            looks += 1
    finally:
        stopping = True
        assert all(await asyncio.gather(*tasks))


async def test_an_external_try_that_has_not_ended_is_its_own_case(vault: Vault) -> None:
    xid = await vault.reserved()
    await vault.world.call(TRY, new_xid())
    without = await vault.reserved()
    await vault.execute("DELETE FROM vault WHERE xid = :xid", xid=without)
    for each in (xid, without):
        await asyncio.to_thread(change, vault.world, each, "finished_at = NULL, intent = 'a', lease_until_ms = 1")
    response = await vault.compare()
    assert fits(response)
    assert (response.holds, response.tried, response.unfinished) == (1, 1, 2)


@pytest.mark.parametrize("flavour", ONE_OF_EACH, indirect=True)
async def test_only_so_many_are_told_and_all_are_counted(vault: Vault) -> None:
    for _ in range(5):
        await vault.put(new_xid())
        xid = await vault.reserved()
        await vault.execute("DELETE FROM vault WHERE xid = :xid", xid=xid)
    response = await vault.compare(mismatches_max=2)
    assert (response.leaked, response.missing) == (5, 5)
    assert sorted(each.kind for each in response.mismatches) == [LEAKED, LEAKED, MISSING, MISSING]


@pytest.mark.parametrize("flavour", ONE_OF_EACH, indirect=True)
async def test_more_than_memory_is_allowed_for_is_compared_in_part(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = [await vault.reserved() for _ in range(4)]
    await vault.execute("DELETE FROM vault WHERE xid = :xid", xid=old[0])
    await vault.execute("DELETE FROM vault WHERE xid = :xid", xid=old[3])
    await vault.put(early := old_xid())
    await vault.put(new_xid())
    monkeypatch.setattr(holds_sql, "PAGE_ROWS", 1)
    assert (await vault.compare()).compared_until == ""
    monkeypatch.setattr(holds_sql, "TRIED_MAX", 2)
    response = await vault.compare()
    assert response.compared_until == sorted(old)[1]
    assert (response.tried, response.holds, response.not_compared) == (2, 2, 2)
    assert {(each.kind, each.xid) for each in response.mismatches} == {(MISSING, old[0]), (LEAKED, early)}


class Base(DeclarativeBase):
    """The vault's rows as objects."""


class Row(Base):
    __tablename__ = "vault"
    xid: Mapped[str] = mapped_column(primary_key=True)
    branch_id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int]

    def hold(self) -> Hold:
        return Hold(self.xid, self.branch_id, self.amount, "EUR")


def with_session(vault: Vault) -> None:
    @vault.world.participant.holds("debit")
    def holds(session: Session) -> list[Hold]:
        return [row.hold() for row in session.scalars(select(Row))]


def with_async_session(vault: Vault) -> None:
    @vault.world.participant.holds("debit")
    async def holds(session: AsyncSession) -> list[Hold]:
        return [row.hold() for row in await session.scalars(select(Row))]


def with_async_stream(vault: Vault) -> None:
    @vault.world.participant.holds("debit")
    async def holds(db: AsyncConnection) -> AsyncIterator[Hold]:
        async with db.stream(SELECT) as streamed:
            async for row in streamed:
                yield Hold(*row)


@pytest.mark.parametrize("flavour", [each for each in FLAVOURS if each.count("-") == 1], indirect=True)
async def test_it_is_lent_what_it_asks_for(flavour: str, participant_url: str) -> None:
    kinds = (with_async_session, with_async_stream) if flavour.endswith("-async") else (with_session,)
    for define in kinds:
        async with open_vault(World(flavour, participant_url), define) as vault:
            xid = new_xid()
            await vault.world.call(TRY, xid)
            assert (await vault.compare()).missing == 1
            await vault.put(xid, 3)
            response = await vault.compare()
            assert fits(response)
            assert sums(response) == {"EUR": (Decimal(3), Decimal(3))}
            assert (await vault.world.call(CONFIRM, xid)).outcome == DONE
            await vault.execute("DROP TABLE vault")
