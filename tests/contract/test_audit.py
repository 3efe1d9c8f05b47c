"""The audit in every store: records come back as they were written, newest first, a page at a time, and stay."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator

import pytest

from coordinator.ids import new_xid
from coordinator.store import audit
from coordinator.store.audit import AuditFilter, AuditRow
from coordinator.store.rows import StoreError
from coordinator.store.store import Store

from .stores import KINDS, empty_store, stores

NOW_MS = 1_800_000_000_000
XID, OTHER_XID = new_xid(NOW_MS), new_xid(NOW_MS)


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """An open store of each kind."""
    url = empty_store(request)
    async with stores() as open_one:
        yield await open_one(url)


def record(after_ms: int = 0, xid: bytes | None = XID, **changes: object) -> AuditRow:
    time_ms = NOW_MS + after_ms
    row = AuditRow(new_xid(time_ms), time_ms, "cancel", xid, "Zoë 李", "ipv4:127.0.0.1:1", "why: …", '{"a": 1}', "")
    return row._replace(**changes)  # type: ignore[arg-type]


async def test_records_come_back_as_they_were_written_newest_first(store: Store) -> None:
    rows = [record(n) for n in range(3)]
    await store.add_audit(rows[1:])
    await store.add_audit(rows[:1])
    assert await store.audit(AuditFilter()) == rows[::-1]


async def test_by_transaction(store: Store) -> None:
    mine, other, none = record(1), record(2, OTHER_XID), record(3, None)
    await store.add_audit([mine, other, none])
    assert await store.audit(AuditFilter(XID)) == [mine]
    assert await store.audit(AuditFilter(bytes(16))) == []


async def test_by_time_both_ends_included(store: Store) -> None:
    rows = [record(n) for n in range(5)]
    await store.add_audit(rows)
    assert await store.audit(AuditFilter(from_ms=NOW_MS + 1, to_ms=NOW_MS + 3)) == rows[3:0:-1]
    assert await store.audit(AuditFilter(from_ms=NOW_MS + 4)) == rows[4:]
    assert await store.audit(AuditFilter(to_ms=NOW_MS)) == rows[:1]


async def test_pages_are_read_by_their_last_id_and_nothing_new_shifts_them(store: Store) -> None:
    rows = [record(n // 2) for n in range(7)]  # two in a millisecond
    rows.sort(key=lambda row: row.id)
    await store.add_audit(rows)
    read: list[AuditRow] = []
    before_id = None
    while page := await store.audit(AuditFilter(before_id=before_id, limit=2)):
        read += page
        before_id = page[-1].id
        await store.add_audit([record(100 + len(read))])
    assert read == rows[::-1]


async def test_run_again_a_record_stays_as_it_was(store: Store) -> None:
    """As after a COMMIT of unknown outcome: the same records, some of them there."""
    first, second = record(1), record(2)
    await store.add_audit([first])
    await store.add_audit([first._replace(reason="another"), second])
    assert await store.audit(AuditFilter()) == [second, first]


async def test_all_or_none(store: Store) -> None:
    with pytest.raises(StoreError):
        await store.add_audit([record(1), record(2, actor=None)])
    assert await store.audit(AuditFilter()) == []


def test_nothing_updates_or_deletes_records() -> None:
    source = inspect.getsource(audit)
    assert ".insert()" in source
    assert not any(word in source for word in (".update(", ".delete(", "UPDATE ", "DELETE "))
