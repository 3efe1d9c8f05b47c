"""What operators can ask a participant about its fence: all of it, by page, one branch; on every database and stack."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from tests.contract.participant.records import (
    COMMITTED,
    ROLLBACKED,
    SUSPENDED,
    TRIED,
    branch,
    change,
    copies,
    old_xid,
    stored,
)
from tests.contract.participant.world import TRY, World, new_xid
from tricord.v1 import participant_pb2 as pb

HOUR_S = 3600


async def listed(world: World, page_size: int = 0, **filters: Any) -> list[pb.FenceBranch]:
    """All pages."""
    request = pb.ListBranchesRequest(participant=world.name, page_size=page_size, **filters)
    rows: list[pb.FenceBranch] = []
    while True:
        response = await world.stub.ListBranches(request)
        assert response.fence_id == world.serving.fence_id
        assert len(response.branches) <= (page_size or 100)
        rows += response.branches
        if not response.next_page_token:
            return rows
        request.page_token = response.next_page_token


def keys(rows: Sequence[pb.FenceBranch]) -> list[tuple[str, int]]:
    return [(row.xid, row.branch_id) for row in rows]


async def refused(world: World, method: str, request: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(world.stub, method)(request)
    return caught.value.code(), caught.value.details() or ""


async def test_rows_are_told_with_their_status_and_times(world: World) -> None:
    xids = {status: await branch(world, status, old_xid(days=1)) for status in (TRIED, COMMITTED, ROLLBACKED)}
    xids[SUSPENDED] = await branch(world, SUSPENDED, old_xid(days=1))
    rows = {row.status: row for row in await listed(world)}
    assert {int(status): row.xid for status, row in rows.items()} == xids
    now_s = time.time()
    for row in rows.values():
        assert row.action == "debit"
        assert row.finished
        assert not row.running
        assert abs(now_s - row.update_time.ToMilliseconds() / 1000 - HOUR_S) < 120  # dated back by the test
        assert abs(now_s - row.create_time.ToMilliseconds() / 1000) < 120
    for status in (TRIED, COMMITTED, ROLLBACKED, SUSPENDED):
        assert [row.xid for row in await listed(world, status=status)] == [xids[status]]


async def test_pages_hold_each_row_once_and_only_those_of_the_participant(world: World) -> None:
    first = await branch(world, COMMITTED, old_xid())
    await copies(world, first, [old_xid(days) for days in range(1, 24)])
    await copies(world, first, [other := old_xid(0.5)])
    await asyncio.to_thread(change, world, other, "participant = 'other'")
    wanted = sorted(stored(world) - {(other, 1)})
    for page_size in (1, 7, 0, 1_000):
        assert keys(await listed(world, page_size)) == wanted


async def test_only_what_is_old_enough(world: World) -> None:
    old = await branch(world, TRIED, old_xid(days=1))
    new = new_xid()
    await world.call(TRY, new)
    changed_lately = old_xid(days=2)
    await copies(world, new, [changed_lately])
    await copies(world, old, [new_xid()])
    request = pb.ListBranchesRequest(participant="bank")
    request.min_age.FromSeconds(HOUR_S // 2)
    assert keys(await listed(world, min_age=request.min_age)) == [(old, 1)]
    assert len(await listed(world)) == 4


async def test_half_done_rows_and_running_external_trys_are_told_apart(world: World) -> None:
    half_done = await branch(world, COMMITTED, old_xid(days=1))
    running = await branch(world, TRIED, old_xid(days=2))
    lapsed = await branch(world, TRIED, old_xid(days=3))
    soon_ms = int(time.time() * 1000) + HOUR_S * 1000
    await asyncio.to_thread(change, world, half_done, "finished_at = NULL")
    await asyncio.to_thread(change, world, running, f"finished_at = NULL, intent = 'a', lease_until_ms = {soon_ms}")
    await asyncio.to_thread(change, world, lapsed, "finished_at = NULL, intent = 'a', lease_until_ms = 1")
    rows = {row.xid: (row.finished, row.external, row.running) for row in await listed(world)}
    assert rows == {half_done: (False, False, False), running: (False, True, True), lapsed: (False, True, False)}


async def one(world: World, xid: str, branch_id: int = 1) -> pb.FenceBranch | None:
    """A single row."""
    response = await world.stub.GetBranch(pb.GetBranchRequest(participant="bank", xid=xid, branch_id=branch_id))
    assert response.fence_id == world.serving.fence_id
    assert response.now.ToMilliseconds() > 0
    return response.branch if response.HasField("branch") else None


async def test_a_single_branch_is_told_as_a_page_tells_it(world: World) -> None:
    another = await branch(world, TRIED, old_xid(days=1))
    for status in (COMMITTED, ROLLBACKED, SUSPENDED):
        await branch(world, status, old_xid(days=1))
    half_done = await branch(world, COMMITTED, old_xid(days=2))
    await asyncio.to_thread(change, world, half_done, "finished_at = NULL")
    await copies(world, half_done, [half_done], branch_ids=[2])
    rows = await listed(world)
    assert len(rows) == 6
    for row in rows:
        alone = await one(world, row.xid, row.branch_id)
        assert alone is not None
        for field in ("create_time", "update_time"):  # counted back from the clock by ages
            assert abs(getattr(alone, field).ToMilliseconds() - getattr(row, field).ToMilliseconds()) < 60_000
            getattr(alone, field).CopyFrom(getattr(row, field))
        assert alone == row
    assert await one(world, half_done, 3) is None
    assert await one(world, new_xid()) is None
    await asyncio.to_thread(change, world, another, "participant = 'other'")
    assert await one(world, another) is None


async def test_the_fence_as_a_whole(world: World) -> None:
    done = await branch(world, COMMITTED, old_xid())
    await copies(world, done, [old_xid(1), old_xid(2)])
    half = await branch(world, ROLLBACKED, old_xid(3))
    await branch(world, SUSPENDED, old_xid(4))
    await asyncio.to_thread(change, world, half, "finished_at = NULL")
    fence = await world.stub.GetFence(pb.GetFenceRequest(participant="bank"))
    assert fence.fence_id == world.serving.fence_id
    assert fence.database == ("sqlite" if world.is_sqlite else "postgresql" if world.is_postgres else "mysql")
    assert abs(fence.now.ToMilliseconds() / 1000 - time.time()) < 60
    assert fence.retention.ToSeconds() == 7 * 24 * HOUR_S
    counts = {(int(count.status), count.finished): count.rows for count in fence.counts}
    assert counts == {(COMMITTED, True): 3, (ROLLBACKED, False): 1, (SUSPENDED, True): 1}
    assert not fence.has_more_rows


@pytest.mark.parametrize("flavour", ["sqlite-sync", "sqlite-async"], indirect=True)
async def test_bad_requests_name_the_field_and_the_limit(world: World) -> None:
    request = pb.ListBranchesRequest(participant="bank", page_size=1_001)
    code, text = await refused(world, "ListBranches", request)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert text == "page_size: is 1001; the limit is 1000"
    code, text = await refused(world, "ListBranches", pb.ListBranchesRequest(participant="bank", page_token="no"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert text.startswith("page_token: ")
    request = pb.ListBranchesRequest(participant="bank")
    request.min_age.FromSeconds(-1)
    code, text = await refused(world, "ListBranches", request)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert text.startswith("min_age: ")
    request = pb.ListBranchesRequest(participant="bank", status=9)  # type: ignore[arg-type]
    assert (await refused(world, "ListBranches", request))[1] == "status: is 9, which is no status"
    for fields, said in ({"xid": "no", "branch_id": 1}, "xid: "), ({"xid": new_xid()}, "branch_id: is 0"):
        code, text = await refused(world, "GetBranch", pb.GetBranchRequest(participant="bank", **fields))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert text.startswith(said)
    for method, asked in (
        ("ListBranches", pb.ListBranchesRequest()),
        ("GetFence", pb.GetFenceRequest()),
        ("GetBranch", pb.GetBranchRequest()),
    ):
        asked.participant = "shop"
        code, text = await refused(world, method, asked)
        assert code is grpc.StatusCode.NOT_FOUND
        assert text == "this is participant 'bank', not 'shop'"


@pytest.mark.parametrize("flavour", ["postgres-sync", "mariadb-sync", "sqlite-async"], indirect=True)
async def test_a_locked_row_holds_up_nobody_who_looks(world: World) -> None:
    xid = await branch(world, TRIED, old_xid(1))
    with world.auditor.begin() as db:
        db.exec_driver_sql(f"UPDATE tcc_fence_log SET status = 2 WHERE xid = '{xid}'")
        assert [row.status for row in await listed(world)] == [TRIED]
    assert [row.status for row in await listed(world)] == [COMMITTED]


@pytest.mark.parametrize("flavour", ["postgres-sync", "postgres-async", "sqlite-sync"], indirect=True)
async def test_a_fence_that_cannot_be_read_is_an_error_and_harms_nothing(world: World) -> None:
    with world.auditor.begin() as db:
        db.exec_driver_sql("ALTER TABLE tcc_fence_log RENAME TO elsewhere")
    code, text = await refused(world, "GetFence", pb.GetFenceRequest(participant="bank"))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert text.startswith("the fence cannot be read: ")
    with world.auditor.begin() as db:
        db.exec_driver_sql("ALTER TABLE elsewhere RENAME TO tcc_fence_log")
    assert await listed(world) == []


@pytest.mark.parametrize("flavour", ["sqlite-sync", "sqlite-async"], indirect=True)
async def test_one_look_at_a_time(world: World) -> None:
    (inspection,) = world.serving._attached._service.inspections.values()
    if world.is_async:
        await inspection._lock.acquire()
    else:
        inspection._lock.acquire()
    try:
        for method, request in (
            ("GetFence", pb.GetFenceRequest(participant="bank")),
            ("ListBranches", pb.ListBranchesRequest(participant="bank")),
        ):
            assert (await refused(world, method, request))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await one(world, new_xid()) is None  # a single row holds nobody up, and is not held up
    finally:
        inspection._lock.release()
    assert await listed(world) == []
