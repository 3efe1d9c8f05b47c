"""What operators see of the records and may do to them, on every database, in threads and in asyncio."""

import inspect
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text, update
from sqlalchemy.ext.asyncio import create_async_engine

from participant_sdk.errors import ConfigurationError, InvalidRequest
from participant_sdk.idempotency.errors import StoreUnavailable
from participant_sdk.idempotency.inspection import AsyncInspection, Filter, Inspection, NoSuchRecord, RecordInUse
from participant_sdk.idempotency.inspection_sql import InspectionSql
from participant_sdk.idempotency.keys import key_hash
from participant_sdk.idempotency.machine import TRANSITIONS, Rules, TakeOver, Verdict, verdict
from participant_sdk.idempotency.record import Answer, Codec, State
from participant_sdk.idempotency.statements import IDENTITY_KEY
from participant_sdk.idempotency.stores import store_of
from participant_sdk.idempotency.sweepers import sweeping_view
from participant_sdk.idempotency.tables import IdempotencyTables
from participant_sdk.idempotency.words import words_of
from participant_sdk.steps import run
from tests.contract.idempotency.rows import DATABASES, HOUR_MS, Shelf, key_of, shelf_of

ANSWER = Answer(Codec.HTTP, 201, ((b"content-type", b"text/plain"),), b"paid")
OPEN = (State.PROCESSING, State.UNKNOWN)


@pytest.fixture(params=DATABASES)
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shelf]:
    with shelf_of(request.param, request, tmp_path) as shelf:
        yield shelf


class Desk:
    """An inspection of either kind, asked in the same words."""

    def __init__(self, inspection: Inspection | AsyncInspection) -> None:
        self._inspection = inspection

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any, **named: Any) -> Any:
            given = getattr(self._inspection, name)(*arguments, **named)
            return await given if inspect.isawaitable(given) else given

        return call


@pytest.fixture
async def desk(shelf: Shelf) -> AsyncIterator[Desk]:
    """In asyncio but on SQLite: what is asked is written once for both."""
    if shelf.engine.dialect.name == "sqlite":
        yield Desk(Inspection(shelf.engine, tables=shelf.tables))
        return
    engine = create_async_engine(shelf.async_url)
    yield Desk(AsyncInspection(engine, tables=shelf.tables))
    await engine.dispose()


def put_some(shelf: Shelf) -> None:
    """One of each state, then some of other tenants and operations."""
    for number, state in enumerate(State):
        shelf.put(number, state, left_ms=None if state in OPEN else HOUR_MS, lease_left_ms=HOUR_MS, age_ms=60_000)
    shelf.put(6, State.PROCESSING, lease_left_ms=-5_000, age_ms=2 * HOUR_MS)
    shelf.put(7, left_ms=-1, tenant="umbrella", age_ms=3 * HOUR_MS)
    shelf.put(8, left_ms=HOUR_MS, operation="refunds.create")
    shelf.put(9, State.UNKNOWN, age_ms=5 * HOUR_MS, reason="the bank did not answer")


def numbers_of(entries: Any) -> list[int]:
    return [int.from_bytes(entry.key_hash[:4]) for entry in entries]


@pytest.mark.parametrize(
    ("which", "numbers"),
    [
        (Filter(), list(range(10))),
        (Filter(states=(State.UNKNOWN,)), [4, 9]),
        (Filter(states=(State.PROCESSING, State.TOMBSTONE)), [0, 5, 6]),
        (Filter(tenant="umbrella"), [7]),
        (Filter(tenant="nobody"), []),
        (Filter(operation="refunds.create"), [8]),
        (Filter(older_than_ms=HOUR_MS), [6, 7, 9]),
        (Filter(lapsed=True), [6]),
        (Filter(older_than_ms=HOUR_MS, tenant="acme", states=(State.UNKNOWN,)), [9]),
        (Filter(tenant="acme' OR '1'='1"), []),
    ],
)
async def test_a_list_holds_what_matches(shelf: Shelf, desk: Desk, which: Filter, numbers: list[int]) -> None:
    put_some(shelf)
    page = await desk.page(which)
    assert numbers_of(page.entries) == numbers
    assert page.end is None


async def test_pages_leave_nothing_out_and_repeat_nothing(shelf: Shelf, desk: Desk) -> None:
    shelf.put_many(range(25), left_ms=HOUR_MS)
    seen, after = [], b""
    while True:
        page = await desk.page(Filter(tenant="acme"), after, 5)
        seen += numbers_of(page.entries)
        if page.end is None:
            break
        after = page.end
    assert seen == list(range(25))
    for rows in (0, 1_001):
        with pytest.raises(InvalidRequest, match=f"rows {rows} is not"):
            await desk.page(Filter(), b"", rows)


async def test_a_record_is_found_by_its_key_or_its_hash(shelf: Shelf, desk: Desk) -> None:
    of_operation, of_all = (
        key_hash("default", "acme", "orders.create", "order-1"),
        key_hash("default", "", "", "order-2"),
    )
    shelf.put(1, left_ms=HOUR_MS, key_hash=of_operation)
    shelf.put(2, left_ms=HOUR_MS, key_hash=of_all, tenant="")
    assert (await desk.find("order-1", "orders.create", "acme")).key_hash == of_operation
    assert (await desk.find("order-2", "orders.create")).key_hash == of_all, "its scope is the whole namespace"
    assert (await desk.find("order-2")).key_hash == of_all
    entry = await desk.show(of_operation)
    assert (entry.state, entry.tenant, entry.key_hint, entry.body_bytes) == (State.SUCCEEDED, "acme", "ord-", 2)
    for key, operation, tenant in (
        ("order-1", "orders.create", "umbrella"),
        ("order-1", "orders.create", ""),
        ("order-1", "refunds.create", "acme"),
        ("order-2", "refunds.create", ""),
        ("order-3", "orders.create", "acme"),
    ):
        with pytest.raises(NoSuchRecord):
            await desk.find(key, operation, tenant)
    with pytest.raises(NoSuchRecord):
        await desk.show(bytes(32))
    with pytest.raises(InvalidRequest, match="31 bytes, not 32"):
        await desk.show(bytes(31))


async def test_statistics(shelf: Shelf, desk: Desk) -> None:
    assert (await desk.statistics()).counts == []
    put_some(shelf)
    statistics = await desk.statistics()
    counts = {counted.state: counted for counted in statistics.counts}
    assert {state: counted.records for state, counted in counts.items()} == {
        State.PROCESSING: 2, State.SUCCEEDED: 3, State.FAILED_FINAL: 1, State.FAILED_RETRYABLE: 1, State.UNKNOWN: 2,
        State.TOMBSTONE: 1,
    }  # fmt: skip
    assert (counts[State.PROCESSING].lapsed, counts[State.SUCCEEDED].expired, counts[State.UNKNOWN].expired) == (
        1,
        1,
        0,
    )
    assert 2 * HOUR_MS <= counts[State.PROCESSING].oldest_ms < 3 * HOUR_MS
    assert numbers_of([statistics.oldest_processing, statistics.oldest_unknown]) == [6, 9]


@pytest.mark.parametrize(
    ("state", "answer", "then"),
    [
        (State.SUCCEEDED, ANSWER, Verdict.REPLAY),
        (State.FAILED_FINAL, Answer(Codec.HTTP, 402), Verdict.REPLAY),
        (State.TOMBSTONE, None, Verdict.NO_ANSWER),
        (State.FAILED_RETRYABLE, None, Verdict.RUN_AGAIN),
    ],
)
async def test_an_operators_word_ends_what_is_unknown(
    shelf: Shelf, desk: Desk, state: State, answer: Answer | None, then: Verdict
) -> None:
    assert state in TRANSITIONS[State.UNKNOWN]
    shelf.put(1, State.UNKNOWN, reason="the bank did not answer")
    entry = await desk.resolve(key_of(1), state, reason="the bank says so", answer=answer, ttl_s=60)
    assert (entry.state, entry.reason) == (state, "the bank says so")
    assert 0 < entry.expires_left_ms <= 60_000
    with shelf.engine.connect() as connection:
        record = run(store_of(shelf.engine.dialect, shelf.tables).read(key_of(1)), connection)
    assert record is not None
    assert record.answer == answer
    assert verdict(record, lambda _: True, Rules("orders.create", TakeOver.AUTO, None, 10)) is then
    with pytest.raises(RecordInUse, match=f"it is {state.name}: only what is UNKNOWN"):
        await desk.resolve(key_of(1), State.TOMBSTONE, reason="twice")


async def test_only_what_is_unknown_is_resolved(shelf: Shelf, desk: Desk) -> None:
    put_some(shelf)
    before = [tuple(shelf.row(number)) for number in range(10)]
    for number, state in (
        (1, State.SUCCEEDED),
        (2, State.FAILED_FINAL),
        (3, State.FAILED_RETRYABLE),
        (5, State.TOMBSTONE),
    ):
        for force in (False, True):
            with pytest.raises(RecordInUse, match=state.name):
                await desk.resolve(key_of(number), State.TOMBSTONE, reason="no", force=force)
    for force in (False, True):
        with pytest.raises(RecordInUse, match="it is being run: its lease has"):
            await desk.resolve(key_of(0), State.TOMBSTONE, reason="no", force=force)
    with pytest.raises(RecordInUse, match="with force"):
        await desk.resolve(key_of(6), State.TOMBSTONE, reason="no")
    with pytest.raises(NoSuchRecord):
        await desk.resolve(key_of(77), State.TOMBSTONE, reason="no")
    assert [tuple(shelf.row(number)) for number in range(10)] == before


async def test_with_force_a_run_whose_lease_is_over_is_resolved(shelf: Shelf, desk: Desk) -> None:
    put_some(shelf)
    entry = await desk.resolve(key_of(6), State.FAILED_RETRYABLE, reason="its host is gone", force=True)
    assert (entry.state, entry.reason) == (State.FAILED_RETRYABLE, "its host is gone")
    assert shelf.row(6).lease_until_ms is None


async def test_a_live_run_is_ended_where_that_is_said(shelf: Shelf, desk: Desk) -> None:
    put_some(shelf)
    entry = await desk.resolve(key_of(0), State.FAILED_RETRYABLE, reason="its host hangs", live=True)
    assert (entry.state, entry.reason) == (State.FAILED_RETRYABLE, "its host hangs")
    assert entry.fence > 1_000, "whatever it still does is refused by its fence"
    with pytest.raises(RecordInUse, match="with force"):
        await desk.resolve(key_of(6), State.TOMBSTONE, reason="no", live=True)
    with pytest.raises(RecordInUse, match="only what is UNKNOWN"):
        await desk.resolve(key_of(1), State.TOMBSTONE, reason="no", live=True)


@pytest.mark.parametrize("change", ["taken over", "renewed"])
async def test_what_has_changed_since_it_was_looked_at_stays(
    shelf: Shelf, desk: Desk, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the read and the word, another one comes."""
    shelf.put(1, State.PROCESSING, lease_left_ms=-1)
    store_class = type(store_of(shelf.engine.dialect, shelf.tables))
    give_up = store_class.give_up

    def late(store: Any, met: Any, reason: str) -> Any:
        changes = {"fence": 2_000} if change == "taken over" else {"lease_until_ms": shelf.now_ms() + HOUR_MS}
        with shelf.engine.begin() as connection:
            connection.execute(update(shelf.tables.records).values(**changes))
        return give_up(store, met, reason)

    monkeypatch.setattr(store_class, "give_up", late)
    with pytest.raises(RecordInUse, match="changed meanwhile"):
        await desk.resolve(key_of(1), State.FAILED_RETRYABLE, reason="its host is gone", force=True)
    assert shelf.row(1).state == State.PROCESSING


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"state": State.UNKNOWN}, "nothing can be resolved to UNKNOWN"),
        ({"state": State.PROCESSING}, "nothing can be resolved to PROCESSING"),
        ({"state": State.SUCCEEDED}, "SUCCEEDED needs the answer"),
        ({"state": State.FAILED_FINAL}, "FAILED_FINAL needs the answer"),
        ({"state": State.TOMBSTONE, "answer": ANSWER}, "TOMBSTONE has no answer"),
        ({"state": State.TOMBSTONE, "reason": " "}, "reason is not 1 to"),
        ({"state": State.TOMBSTONE, "reason": "x" * 2_001}, "reason is not 1 to 2000"),
        ({"state": State.TOMBSTONE, "ttl_s": 0}, "ttl_s 0 is not"),
        ({"state": State.TOMBSTONE, "ttl_s": float("nan")}, "ttl_s nan is not"),
    ],
)
async def test_a_word_that_makes_no_sense_is_refused(
    shelf: Shelf, desk: Desk, arguments: dict[str, Any], text: str
) -> None:
    shelf.put(1, State.UNKNOWN)
    with pytest.raises(InvalidRequest, match=text):
        await desk.resolve(key_of(1), **{"reason": "so", **arguments})
    assert shelf.row(1).state == State.UNKNOWN


async def test_extend(shelf: Shelf, desk: Desk) -> None:
    put_some(shelf)
    entry = await desk.extend(key_of(1), 7_200)
    assert 7_100_000 < entry.expires_left_ms <= 7_200_000
    again = await desk.extend(key_of(1), 60)
    assert again.expires_left_ms > 7_000_000, "never sooner"
    for number in OPEN:
        with pytest.raises(RecordInUse, match="does not expire"):
            await desk.extend(key_of(number), 60)
    with pytest.raises(RecordInUse, match="has expired"):
        await desk.extend(key_of(7), 60)
    with pytest.raises(InvalidRequest, match="ttl_s 0"):
        await desk.extend(key_of(1), 0)


async def test_purge_by_key(shelf: Shelf, desk: Desk) -> None:
    put_some(shelf)
    entry = await desk.purge(key_of(1), dry_run=True)
    assert entry.state is State.SUCCEEDED
    assert shelf.count() == 10
    await desk.purge(key_of(1))
    with pytest.raises(NoSuchRecord):
        await desk.purge(key_of(1))
    for number in (4, 6):
        with pytest.raises(RecordInUse, match="see force"):
            await desk.purge(key_of(number))
        await desk.purge(key_of(number), force=True)
    for force in (False, True):
        with pytest.raises(RecordInUse, match="it is being run"):
            await desk.purge(key_of(0), force=force)
    assert shelf.numbers() == [0, 2, 3, 5, 7, 8, 9]


@pytest.mark.parametrize(
    ("which", "force", "left"),
    [
        (Filter(tenant="acme"), False, [0, 4, 6, 7, 9]),
        (Filter(tenant="acme"), True, [0, 7]),
        (Filter(older_than_ms=HOUR_MS), False, [0, 1, 2, 3, 4, 5, 6, 8, 9]),
        (Filter(operation="refunds.create"), True, [0, 1, 2, 3, 4, 5, 6, 7, 9]),
        (Filter(states=(State.PROCESSING,)), True, [0, 1, 2, 3, 4, 5, 7, 8, 9]),
        (Filter(tenant="nobody"), True, list(range(10))),
    ],
)
async def test_purge_of_many_leaves_what_is_live(
    shelf: Shelf, desk: Desk, which: Filter, force: bool, left: list[int]
) -> None:
    put_some(shelf)
    assert await desk.purge_many(which, force=force, dry_run=True) == 10 - len(left)
    assert shelf.count() == 10
    assert await desk.purge_many(which, force=force) == 10 - len(left)
    assert shelf.numbers() == left


async def test_purge_of_many_goes_in_batches(shelf: Shelf, desk: Desk) -> None:
    shelf.put_many(range(450), left_ms=HOUR_MS)
    shelf.put_many(range(450, 460), left_ms=HOUR_MS, tenant="umbrella")
    assert await desk.purge_many(Filter(tenant="acme")) == 450
    assert shelf.numbers() == list(range(450, 460))
    with pytest.raises(InvalidRequest, match="say which records"):
        await desk.purge_many(Filter())


async def test_the_stores_identity_stays_and_is_no_record(shelf: Shelf, desk: Desk) -> None:
    store = store_of(shelf.engine.dialect, shelf.tables)
    with sweeping_view(shelf.engine).connect() as connection:
        identity = run(store.identity(), connection)
    assert len(identity) == 32
    assert (await desk.page()).entries == []
    assert (await desk.statistics()).counts == []
    assert await desk.purge_many(Filter(states=tuple(State)), force=True) == 0
    with pytest.raises(NoSuchRecord):
        await desk.purge(IDENTITY_KEY)
    assert (await shelf.sweep("sync")).deleted == 0
    with sweeping_view(shelf.engine).connect() as connection:
        assert run(store.identity(), connection) == identity


def test_purge_looks_once_more_at_what_it_deletes(shelf: Shelf) -> None:
    """Between the read and the delete, another one comes."""
    shelf.put(1, State.FAILED_RETRYABLE, left_ms=HOUR_MS)
    sql = InspectionSql(words_of(shelf.engine.dialect, shelf.tables))
    which = Filter(states=(State.FAILED_RETRYABLE,))
    with sweeping_view(shelf.engine).connect() as connection:
        keys = run(sql.deletable(which, b"", 10, unfinished=False), connection)
    assert keys == {key_of(1): 1_000}
    with shelf.engine.begin() as connection:
        connection.execute(update(shelf.tables.records).values(state=int(State.SUCCEEDED)))
    with sweeping_view(shelf.engine).connect() as connection:
        assert run(sql.delete(list(keys), which, unfinished=False), connection) == 0


async def test_purge_leaves_what_somebody_has_locked(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with shelf_of("postgres", request, tmp_path) as shelf:
        put_some(shelf)
        name = shelf.tables.records.name
        inspection = Inspection(shelf.engine, tables=shelf.tables)
        with shelf.engine.connect() as other:
            other.execute(text(f"SELECT state FROM {name} WHERE key_hash = :key FOR UPDATE"), {"key": key_of(1)})
            with pytest.raises(RecordInUse, match="locked or has changed"):
                inspection.purge(key_of(1))
            assert inspection.purge_many(Filter(tenant="acme")) == 4
        assert 1 in shelf.numbers()


async def test_a_database_that_cannot_be_asked(tmp_path: Path) -> None:
    engine = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    with pytest.raises(StoreUnavailable, match="records could not be asked for"):
        Inspection(engine).page()
    engine.dispose()
    engine = create_engine(f"sqlite:///{tmp_path / 'empty.db'}")
    with pytest.raises(StoreUnavailable, match="no such table: other"):
        Inspection(engine, tables=IdempotencyTables("other")).statistics()
    engine.dispose()


def test_a_database_that_cannot_hold_records_is_refused() -> None:
    from sqlalchemy.dialects import oracle

    class Engine:
        dialect = oracle.dialect()  # type: ignore[no-untyped-call]

    with pytest.raises(ConfigurationError, match="oracle is not supported"):
        Inspection(Engine())  # type: ignore[arg-type]
