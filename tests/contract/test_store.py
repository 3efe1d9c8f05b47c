"""What every store must do, whatever the database: flushes, compare-and-swap, claims, lists."""

import asyncio
from collections.abc import AsyncIterator
from unittest.mock import ANY

import pytest

from coordinator.model import Attention
from coordinator.store.rows import Batch, Claim, ListFilter, PutOff, Row, RowRejected
from coordinator.store.schema import transactions
from coordinator.store.store import Store

from .rows import CONFIRMED, CONFIRMING, DUE_MS, LEASE_MS, TRYING, begin, new_row, save, saved, stored
from .stores import KINDS, empty_store, stores

TOO_LARGE = 2**70


@pytest.fixture(params=KINDS)
def store_url(request: pytest.FixtureRequest) -> str:
    """The address of an empty store of each kind."""
    return empty_store(request)


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Store]:
    """An open store of each kind."""
    async with stores() as open_one:
        yield await open_one(store_url)


async def make_due(store: Store, row: Row) -> None:
    """As time does it."""
    due = transactions.update().where(transactions.c.xid == row.xid).values(wake_ms=DUE_MS)
    await store.within(lambda connection: connection.execute(due))


async def test_a_row_comes_back_as_it_was_stored(store: Store) -> None:
    row = new_row(b"\0order-1")
    assert await begin(store, row) == [None]
    assert await store.get(xid=row.xid) == row
    assert await store.get(key=b"\0order-1") == row
    after = saved(row, state=CONFIRMING, attention=1, updated_ms=row.updated_ms + 5, wake_ms=4_102_444_900_000)
    assert await save(store, after) == [None]
    assert await store.get(xid=row.xid) == after
    finished = saved(after, state=CONFIRMED, attention=0, wake_ms=None)
    assert await save(store, finished) == [None]
    assert await store.get(xid=row.xid) == finished


async def test_what_is_not_there_is_none(store: Store) -> None:
    assert await store.get(xid=bytes(16)) is None
    assert await store.get(key=b"\0nothing") is None


async def test_a_save_changes_only_what_a_save_may_change(store: Store) -> None:
    row = new_row(b"\0k")
    await begin(store, row)
    meddling = saved(row, body=b"other", key=b"\0other", created_ms=1)
    assert await save(store, meddling) == [None]
    found = await store.get(xid=row.xid)
    assert found is not None
    assert found[:6] == row[:6]


async def test_a_stale_save_is_refused_and_the_standing_row_returned(store: Store) -> None:
    row = new_row()
    await begin(store, row)
    first, second = saved(row, state=CONFIRMING), saved(row, attention=1)
    assert await save(store, first) == [None]
    assert await save(store, second) == [first]
    assert await store.get(xid=row.xid) == first


async def test_a_save_that_skips_a_version_is_refused(store: Store) -> None:
    row = new_row()
    await begin(store, row)
    assert await save(store, saved(saved(row))) == [row]


async def test_a_save_of_no_row_tells_that_there_is_none(store: Store) -> None:
    (standing,) = await save(store, saved(new_row()))
    assert isinstance(standing, Row)
    assert standing.state == 0


async def test_begin_with_a_taken_key_returns_its_holder(store: Store) -> None:
    holder = new_row(b"\0taken")
    await begin(store, holder)
    moved = saved(holder, state=CONFIRMING)
    await save(store, moved)
    late, companion = new_row(b"\0taken"), new_row(b"\0free")
    assert await begin(store, companion, late) == [None, moved]
    assert await store.get(xid=late.xid) is None
    assert await store.get(xid=companion.xid) == companion


async def test_rows_without_a_key_never_meet(store: Store) -> None:
    rows = [new_row() for _ in range(5)]
    assert await begin(store, *rows) == [None] * 5
    assert await stored(store, rows) == rows


async def test_one_key_twice_in_one_flush_is_stored_once(store: Store) -> None:
    first, second, third = new_row(b"\0twice"), new_row(b"\0other"), new_row(b"\0twice")
    standing = await begin(store, first, second, third)
    assert standing[1] is None
    kept = [row for row, other in zip((first, third), (standing[0], standing[2]), strict=True) if other is None]
    assert len(kept) == 1
    assert {standing[0], standing[2]} == {None, kept[0]}
    assert await store.get(key=b"\0twice") == kept[0]


async def test_begins_and_saves_share_a_flush_and_answers_come_in_order(store: Store) -> None:
    old = [new_row() for _ in range(4)]
    await begin(store, *old)
    await save(store, stale := saved(old[2]))
    begins = [new_row(b"\0z"), new_row(), new_row(b"\0a")]
    saves = [saved(old[3]), saved(old[0]), saved(old[2]), saved(old[1])]
    assert await store.flush(Batch(begins, saves)) == [None, None, None, None, None, stale, None]
    assert await stored(store, [*begins, *old]) == [*begins, saves[1], saves[3], stale, saves[0]]
    assert store.flushes == 3


class TestRunAgain:
    """The same batch a second time, as after a COMMIT of unknown outcome: ``save_id`` tells whose row it is (A1)."""

    async def test_nothing_changes_and_every_row_is_mine(self, store: Store) -> None:
        old = new_row()
        await begin(store, old)
        batch = Batch([new_row(b"\0k"), new_row()], [saved(old)])
        for _ in range(3):
            assert await store.flush(batch) == [None, None, None]
        assert await stored(store, [*batch.begins, old]) == [*batch.begins, *batch.saves]

    async def test_another_row_written_in_between_is_adopted(self, store: Store) -> None:
        old, fresh = new_row(), new_row(b"\0k")
        await begin(store, old)
        batch = Batch([fresh], [saved(old)])
        await store.flush(batch)
        others = [saved(fresh, state=CONFIRMING), saved(batch.saves[0], state=CONFIRMING)]
        await save(store, *others)
        assert await store.flush(batch) == others
        assert await stored(store, [fresh, old]) == others

    async def test_the_same_version_from_another_is_not_mistaken_for_mine(self, store: Store) -> None:
        row = new_row()
        await begin(store, row)
        theirs, mine = saved(row), saved(row)
        assert theirs.version == mine.version
        await save(store, theirs)
        assert await save(store, mine) == [theirs]


class TestOneBadRecord:
    """A record that the database rejects fails alone, never its companions."""

    @pytest.mark.parametrize("place", range(5))
    async def test_among_begins(self, store: Store, place: int) -> None:
        rows = [new_row(b"\0key %d" % n) for n in range(5)]
        rows[place] = rows[place]._replace(version=TOO_LARGE)
        standing = await begin(store, *rows)
        assert [isinstance(row, RowRejected) for row in standing] == [n == place for n in range(5)]
        assert [row is None for row in standing] == [n != place for n in range(5)]
        expected = [None if n == place else row for n, row in enumerate(rows)]
        assert await stored(store, rows) == expected

    @pytest.mark.parametrize("field", ["save_id", "wake_ms", "updated_ms"])
    async def test_among_saves_and_begins(self, store: Store, field: str) -> None:
        old = [new_row() for _ in range(3)]
        await begin(store, *old)
        saves = [saved(row) for row in old]
        saves[1] = saves[1]._replace(**{field: TOO_LARGE})  # type: ignore[arg-type]
        fresh = new_row()
        standing = await store.flush(Batch([fresh], saves))
        assert [type(row) for row in standing] == [type(None), type(None), RowRejected, type(None)]
        assert await stored(store, [fresh, *old]) == [fresh, saves[0], old[1], saves[2]]

    async def test_two_bad_ones_and_a_conflict(self, store: Store) -> None:
        await begin(store, holder := new_row(b"\0held"))
        rows = [new_row() for _ in range(9)]
        rows[2] = rows[2]._replace(save_id=TOO_LARGE)
        rows[3] = new_row(b"\0held")
        rows[8] = rows[8]._replace(created_ms=-TOO_LARGE)
        standing = await begin(store, *rows)
        assert [n for n, row in enumerate(standing) if isinstance(row, RowRejected)] == [2, 8]
        assert standing[3] == holder
        assert [n for n, row in enumerate(standing) if row is None] == [0, 1, 4, 5, 6, 7]


class TestClaim:
    """Take-over moves ``wake_ms`` and nothing else."""

    async def test_takes_what_is_due_and_leaves_the_rest(self, store: Store) -> None:
        due, later = new_row(wake_ms=DUE_MS), new_row()
        await begin(store, due, later)
        claim = await store.claim(10, LEASE_MS)
        (row,) = claim.rows
        assert row.wake_ms is not None
        assert claim.now_ms <= row.wake_ms <= claim.now_ms + LEASE_MS
        assert row == due._replace(wake_ms=row.wake_ms)
        assert await stored(store, [due, later]) == [row, later]
        assert claim.next_wake_ms == row.wake_ms

    async def test_never_changes_the_version_so_a_slow_holder_may_still_save(self, store: Store) -> None:
        row = new_row(wake_ms=DUE_MS)
        await begin(store, row)
        (claimed,) = (await store.claim(10, LEASE_MS)).rows
        assert (claimed.version, claimed.save_id) == (row.version, row.save_id)
        assert await save(store, saved(row)) == [None]

    async def test_takes_each_row_once_until_the_lease_is_over(self, store: Store) -> None:
        rows = [new_row(wake_ms=DUE_MS + n) for n in range(20)]
        await begin(store, *rows)
        taken = [await store.claim(8, LEASE_MS) for _ in range(4)]
        assert [len(claim.rows) for claim in taken] == [8, 8, 4, 0]
        xids = [row.xid for claim in taken for row in claim.rows]
        assert sorted(xids) == sorted(row.xid for row in rows)
        # The longest due come first.
        assert set(xids[:8]) == {row.xid for row in rows[:8]}

    async def test_never_takes_a_finished_row(self, store: Store) -> None:
        row = new_row(wake_ms=DUE_MS)
        await begin(store, row)
        await save(store, saved(row, state=CONFIRMED, wake_ms=None))
        claim = await store.claim(10, LEASE_MS)
        assert not claim.rows
        assert claim.next_wake_ms is None

    async def test_tells_when_the_next_is_due(self, store: Store) -> None:
        assert (await store.claim(10, LEASE_MS)).next_wake_ms is None
        await begin(store, new_row(wake_ms=4_102_444_900_000), new_row(wake_ms=4_102_444_800_001))
        claim = await store.claim(10, LEASE_MS)
        assert claim.next_wake_ms == 4_102_444_800_001
        assert abs(claim.now_ms - store.now_ms()) < 5_000

    async def test_takes_none_when_there_is_room_for_none(self, store: Store) -> None:
        await begin(store, new_row(wake_ms=DUE_MS))
        assert not (await store.claim(0, LEASE_MS)).rows

    async def test_puts_off_what_nothing_can_be_done_for(self, store: Store) -> None:
        now_ms = (await store.claim(0, LEASE_MS)).now_ms

        def lately(participants: str) -> Row:
            row = new_row(wake_ms=DUE_MS, participants=participants)
            return row._replace(state=CONFIRMING, updated_ms=now_ms)

        away = [lately(",gone,"), lately(",away,gone,")]
        others = [
            lately(",bank,gone,"),
            lately(",gone,")._replace(state=TRYING),
            lately(",gone,")._replace(updated_ms=now_ms - 700_000),
        ]
        await begin(store, *away, *others)
        put_off = PutOff(("gone", "away"), 600_000, 700_000, 800_000)
        claim = await store.claim(10, LEASE_MS, put_off)
        assert {row.xid for row in claim.rows} == {row.xid for row in others}
        assert all(row.wake_ms and row.wake_ms <= claim.now_ms + LEASE_MS for row in claim.rows)
        assert claim.put_off == 2
        for row, stands in zip(away, await stored(store, away), strict=True):
            assert stands is not None
            assert stands.wake_ms is not None
            assert now_ms + 700_000 <= stands.wake_ms <= claim.now_ms + 800_000
            assert stands == row._replace(wake_ms=stands.wake_ms)
        assert await store.claim(10, LEASE_MS, put_off) == Claim((), ANY, claim.next_wake_ms)

    async def test_puts_off_all_there_is(self, store: Store) -> None:
        now_ms = (await store.claim(0, LEASE_MS)).now_ms
        rows = [new_row()._replace(state=CONFIRMING, wake_ms=DUE_MS, updated_ms=now_ms) for _ in range(7)]
        await begin(store, *rows)
        put_off = PutOff(("bank",), 600_000, 700_000, 700_000)
        assert [(await store.claim(5, LEASE_MS, put_off)).put_off for _ in range(3)] == [5, 2, 0]

    async def test_a_row_that_was_claimed_three_times_in_vain_comes_alone(self, store: Store) -> None:
        """Protocol A7: it may have been the end of each who claimed it, and of what was claimed with it."""
        poison, innocent = new_row(wake_ms=DUE_MS), new_row(wake_ms=DUE_MS + 1)
        await begin(store, poison, innocent)
        claims = [await store.claim(10, 0) for _ in range(3)]
        assert [({row.xid for row in claim.rows}, claim.claims) for claim in claims] == [
            ({poison.xid, innocent.xid}, 0)
        ] * 3
        alone = [await store.claim(10, LEASE_MS) for _ in range(3)]
        assert [(len(claim.rows), claim.claims) for claim in alone] == [(1, 4), (1, 4), (0, 0)]
        assert {row.xid for claim in alone for row in claim.rows} == {poison.xid, innocent.xid}
        assert {row.attention for claim in alone for row in claim.rows} == {Attention.STUCK}
        other = new_row(wake_ms=DUE_MS)
        await begin(store, other)
        assert await save(store, saved(innocent, wake_ms=DUE_MS)) == [None]
        await make_due(store, poison)
        claim = await store.claim(10, LEASE_MS)
        assert ({row.xid for row in claim.rows}, claim.claims) == ({innocent.xid, other.xid}, 0)
        claim = await store.claim(10, LEASE_MS)
        assert ([row.xid for row in claim.rows], claim.claims) == ([poison.xid], 5)

    async def test_the_leases_of_what_comes_alone_double_up_to_an_hour(self, store: Store) -> None:
        row = new_row(wake_ms=DUE_MS)
        await begin(store, row)
        for _ in range(3):
            await store.claim(1, 0)
        for doubled_ms in (1_200_000, 2_400_000, 3_600_000, 3_600_000):
            claim = await store.claim(1, 600_000)
            wake_ms = claim.rows[0].wake_ms
            assert wake_ms is not None
            assert claim.now_ms + doubled_ms - 5_000 < wake_ms <= claim.now_ms + doubled_ms
            await make_due(store, row)

    async def test_a_claim_leaves_an_attention_that_is_there(self, store: Store) -> None:
        row = new_row(wake_ms=DUE_MS)._replace(attention=int(Attention.VIOLATION))
        await begin(store, row)
        found = [await store.claim(1, 0) for _ in range(5)]
        assert [claim.claims for claim in found] == [0, 0, 0, 4, 5]
        assert {claim.rows[0].attention for claim in found} == {Attention.VIOLATION}

    async def test_claims_and_flushes_at_once_lose_nothing(self, store: Store) -> None:
        rows = [new_row(wake_ms=DUE_MS) for _ in range(60)]
        await begin(store, *rows)
        claims = asyncio.gather(*(store.claim(3, LEASE_MS) for _ in range(25)))
        flushed = await asyncio.gather(*(save(store, saved(row, state=CONFIRMING)) for row in rows))
        assert flushed == [[None]] * 60
        await claims
        found = await stored(store, rows)
        assert all(row is not None and row.state == CONFIRMING and row.version == 2 for row in found)


class TestList:
    """Operators' lists: in order, in pages; ``test_store_lists`` has filters."""

    async def test_order_and_pages(self, store: Store) -> None:
        a, b, c = new_row(), new_row(), new_row()
        await begin(store, c, a, b)
        assert await store.list(ListFilter()) == [c, b, a]
        assert await store.list(ListFilter(oldest_first=True)) == [a, b, c]
        assert await store.list(ListFilter(beyond_xid=b.xid)) == [a]
        assert await store.list(ListFilter(beyond_xid=b.xid, oldest_first=True)) == [c]
        assert await store.list(ListFilter(limit=2)) == [c, b]
