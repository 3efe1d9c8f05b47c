"""The sweeper on every database, in threads and in asyncio."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, delete, event, text, update
from sqlalchemy.ext.asyncio import create_async_engine

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.record import Answer, Codec, Fingerprint, State
from participant_sdk.idempotency.store import Claim, Outcome
from participant_sdk.idempotency.stores import store_of
from participant_sdk.idempotency.sweepers import AsyncSweeper, Sweeper, sweeping_view
from participant_sdk.idempotency.sweeping import Sweep, SweepReport
from participant_sdk.idempotency.sweeping_sql import FIRST, SweepingSql
from participant_sdk.idempotency.tables import IdempotencyTables
from participant_sdk.idempotency.words import words_of
from participant_sdk.steps import Commit, run
from tests.contract.idempotency.rows import DATABASES, HOUR_MS, Shelf, key_of, shelf_of
from tests.postgres import PostgresServer

SOON = Sweep(every_s=0.1, page=7, batch=3)


@pytest.fixture(params=DATABASES)
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shelf]:
    with shelf_of(request.param, request, tmp_path) as shelf:
        yield shelf


@pytest.fixture(params=[name for name in DATABASES if name != "sqlite"])
def locking(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shelf]:
    """One where several may write."""
    with shelf_of(request.param, request, tmp_path) as shelf:
        yield shelf


@pytest.fixture(params=["sync", "async"])
def stack(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def sql_of(shelf: Shelf) -> SweepingSql:
    return SweepingSql(words_of(shelf.engine.dialect, shelf.tables), store_of(shelf.engine.dialect, shelf.tables))


async def test_only_what_has_expired_goes(shelf: Shelf, stack: str) -> None:
    kept: list[int] = []
    gone: list[int] = []
    for number, state in enumerate(State):
        shelf.put(10 * number, state, left_ms=-1)
        (
            gone if state in (State.SUCCEEDED, State.FAILED_FINAL, State.FAILED_RETRYABLE, State.TOMBSTONE) else kept
        ).append(10 * number)
        shelf.put(10 * number + 1, state, left_ms=HOUR_MS)
        shelf.put(10 * number + 2, state, left_ms=None)
        kept += [10 * number + 1, 10 * number + 2]
    report = await shelf.sweep(stack)
    assert report.error == ""
    assert shelf.numbers() == sorted(kept)
    assert (report.looked_at, report.deleted, report.left_busy) == (18, 4, 0)
    assert (report.processing, report.unknown) == (3, 3)


async def test_a_run_stays_however_long_its_lease_has_been_over(shelf: Shelf, stack: str) -> None:
    """Pitfall 49: whether it did anything is not known, so only its next repeat, or a person, may say."""
    shelf.put(1, State.PROCESSING, left_ms=-HOUR_MS, lease_left_ms=-1_000 * HOUR_MS, age_ms=1_000 * HOUR_MS)
    shelf.put(2, State.PROCESSING, lease_left_ms=HOUR_MS, age_ms=5_000)
    shelf.put(3, State.UNKNOWN, left_ms=-HOUR_MS, age_ms=2_000 * HOUR_MS, reason="the bank did not answer")
    report = await shelf.sweep(stack)
    assert shelf.numbers() == [1, 2, 3]
    assert (report.deleted, report.processing, report.lapsed, report.unknown) == (0, 2, 1, 1)
    assert 1_000 * HOUR_MS <= report.oldest_processing_ms < 1_001 * HOUR_MS
    assert 2_000 * HOUR_MS <= report.oldest_unknown_ms < 2_001 * HOUR_MS


async def test_it_walks_through_all_pages(shelf: Shelf, stack: str) -> None:
    shelf.put_many(range(0, 200, 2), left_ms=-1)
    shelf.put_many(range(1, 200, 2), left_ms=HOUR_MS)
    report = await shelf.sweep(stack, SOON)
    assert (report.looked_at, report.deleted, report.error) == (200, 100, "")
    assert shelf.numbers() == list(range(1, 200, 2))
    again = await shelf.sweep(stack, SOON)
    assert (again.looked_at, again.deleted) == (100, 0)


@pytest.mark.parametrize("rows", [0, 7, 14])
async def test_the_last_page_may_be_full_or_empty(shelf: Shelf, stack: str, rows: int) -> None:
    shelf.put_many(range(rows), left_ms=HOUR_MS) if rows else None
    assert (await shelf.sweep(stack, SOON)).looked_at == rows


async def test_several_at_once_do_it_once(shelf: Shelf) -> None:
    shelf.put_many(range(300), left_ms=-1)
    reports = await asyncio.gather(
        *(asyncio.to_thread(lambda: Sweeper(shelf.engine, shelf.tables, SOON).sweep()) for _ in range(3))
    )
    assert [report.error for report in reports] == [""] * 3
    assert sum(report.deleted for report in reports) == 300
    assert shelf.count() == 0


@pytest.mark.parametrize("change", ["taken over", "extended", "gone"])
def test_what_has_changed_since_it_was_seen_stays(shelf: Shelf, change: str) -> None:
    shelf.put(1, left_ms=-1)
    sql = sql_of(shelf)
    records = shelf.tables.records
    view = sweeping_view(shelf.engine)
    with view.connect() as connection:
        page = run(sql.page(FIRST, 10), connection)
    assert page.expired == [key_of(1)]
    with shelf.engine.begin() as connection:
        match change:
            case "taken over":
                connection.execute(update(records).values(state=int(State.PROCESSING)))
            case "extended":
                connection.execute(update(records).values(expires_ms=shelf.now_ms() + HOUR_MS))
            case "gone":
                connection.execute(delete(records))
    with view.connect() as connection:
        assert run(sql.delete(page.expired), connection) == 0
    assert shelf.numbers() == ([] if change == "gone" else [1])


async def test_what_others_have_locked_is_left_without_waiting(locking: Shelf, stack: str) -> None:
    locking.put_many(range(10), left_ms=-1)
    name = locking.tables.records.name
    with locking.engine.connect() as other:
        other.execute(text(f"SELECT state FROM {name} WHERE key_hash = :key FOR UPDATE"), {"key": key_of(4)})
        report = await asyncio.wait_for(locking.sweep(stack), 30)
        assert (report.deleted, report.left_busy, report.error) == (9, 1, "")
        assert locking.numbers() == [4]
    assert (await locking.sweep(stack)).deleted == 1


def test_inserts_go_on_while_it_deletes(locking: Shelf) -> None:
    """Stopped before its COMMIT, where it has all its locks."""
    locking.put_many(range(0, 20, 2), left_ms=-1)
    hurry: dict[str, Any] = {"init_command": "SET innodb_lock_wait_timeout = 5"}
    if locking.engine.dialect.name == "postgresql":
        hurry = {"options": "-c lock_timeout=5s"}
    impatient = replace(locking, engine=create_engine(locking.url, connect_args=hurry))
    sql = sql_of(locking)
    keys = [key_of(number) for number in range(20)]
    stopped, go_on = threading.Event(), threading.Event()

    def stopping_before_commit() -> Any:
        script = sql.delete(keys)
        step = next(script)
        while not isinstance(step, Commit):
            step = script.send((yield step))
        stopped.set()
        assert go_on.wait(60)
        yield step

    def work() -> None:
        with sweeping_view(locking.engine).connect() as connection:
            run(stopping_before_commit(), connection)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert stopped.wait(60)
        impatient.put_many(range(1, 20, 2), left_ms=HOUR_MS)
        impatient.put(50, left_ms=HOUR_MS)
    finally:
        go_on.set()
        thread.join()
        impatient.engine.dispose()
    assert locking.numbers() == [*range(1, 20, 2), 50]


async def test_in_the_background(shelf: Shelf, stack: str) -> None:
    shelf.put_many(range(30), left_ms=-1)
    shelf.put(40, State.UNKNOWN)
    reports: list[SweepReport] = []
    twice = threading.Event()

    def on_report(report: SweepReport) -> None:
        reports.append(report)
        if len(reports) >= 2:
            twice.set()
            raise RuntimeError("a mistake of the user's, which stops nothing")

    settings = Sweep(every_s=0.1, page=7, batch=3, on_report=on_report)
    if stack == "sync":
        sweeper = Sweeper(shelf.engine, shelf.tables, settings)
        sweeper.start()
        sweeper.start()
        assert await asyncio.to_thread(twice.wait, 60)
        sweeper.stop()
        sweeper.stop()
        state = sweeper.state
    else:
        engine = create_async_engine(shelf.async_url)
        asynchronous = AsyncSweeper(engine, shelf.tables, settings)
        asynchronous.start()
        asynchronous.start()
        assert await asyncio.to_thread(twice.wait, 60)
        await asynchronous.stop()
        await asynchronous.stop()
        state = asynchronous.state
        await engine.dispose()
    assert shelf.numbers() == [40]
    assert state.rounds >= 2
    assert (state.deleted, state.failed) == (30, 0)
    assert state.last is not None
    assert state.last.unknown == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "tricord-sweep"]


def test_the_turn_is_one_processs_at_a_time(shelf: Shelf) -> None:
    sql = sql_of(shelf)

    def done(script: Any) -> bool:
        with sweeping_view(shelf.engine).connect() as connection:
            return bool(run(script, connection))

    def lapse() -> None:
        with shelf.engine.begin() as connection:
            connection.execute(update(shelf.tables.records).values(lease_until_ms=0))

    assert not done(sql.keep_turn("one", HOUR_MS)), "nobody has it yet"
    assert done(sql.take_turn("one", HOUR_MS))
    assert not done(sql.take_turn("other", HOUR_MS))
    assert not done(sql.keep_turn("other", HOUR_MS))
    assert done(sql.keep_turn("one", HOUR_MS))
    lapse()
    assert done(sql.take_turn("other", HOUR_MS)), "of one that has died"
    assert not done(sql.keep_turn("one", HOUR_MS)), "it only stood still, and is told"


def end_turn(shelf: Shelf) -> None:
    with shelf.engine.begin() as connection:
        connection.execute(update(shelf.tables.records).values(lease_until_ms=0))


async def test_only_one_process_sweeps_in_the_background(shelf: Shelf, stack: str) -> None:
    shelf.put_many(range(30), left_ms=-1)
    with sweeping_view(shelf.engine).connect() as connection:
        assert run(sql_of(shelf).take_turn("another process", HOUR_MS), connection)
    engine: Any = create_engine(shelf.url) if stack == "sync" else create_async_engine(shelf.async_url)
    swept, asked = threading.Event(), threading.Semaphore(0)
    event.listen(getattr(engine, "sync_engine", engine).pool, "checkout", lambda *_: asked.release())
    settings = replace(SOON, on_report=lambda report: swept.set())
    sweeper: Any = (Sweeper if stack == "sync" else AsyncSweeper)(engine, shelf.tables, settings)
    sweeper.start()
    try:
        for _ in range(4):
            assert await asyncio.to_thread(asked.acquire, timeout=60)
        assert not swept.is_set()
        assert (sweeper.state.rounds, shelf.count()) == (0, 30)
        await asyncio.to_thread(end_turn, shelf)  # in this thread the sweeper may be in the middle of a statement
        assert await asyncio.to_thread(swept.wait, 60)
    finally:
        if stack == "sync":
            sweeper.stop()
            engine.dispose()
        else:
            await sweeper.stop()
            await engine.dispose()
    assert shelf.count() == 0


async def test_it_keeps_its_pace(shelf: Shelf, stack: str) -> None:
    """40 records at 20 a second, but for the last page, after which there is nothing to wait for."""
    shelf.put_many(range(40), left_ms=HOUR_MS)
    settings = Sweep(page=10, rows_per_s=20)
    if stack == "sync":
        report = await asyncio.to_thread(lambda: Sweeper(shelf.engine, shelf.tables, settings).sweep(rests=True))
    else:
        report = await shelf.on_async_engine(
            lambda engine: AsyncSweeper(engine, shelf.tables, settings).sweep(rests=True)
        )
    assert report.looked_at == 40
    assert report.seconds >= 1.4


@pytest.mark.parametrize("level", ["SERIALIZABLE", "AUTOCOMMIT"])
def test_the_engines_own_isolation_does_not_matter(shelf: Shelf, level: str) -> None:
    shelf.put_many(range(20), left_ms=-1)
    engine = create_engine(shelf.url, isolation_level=level)
    report = Sweeper(engine, shelf.tables, SOON).sweep()
    engine.dispose()
    assert (report.deleted, report.error) == (20, "")


def test_a_database_that_is_busy_or_has_no_table_is_told(shelf: Shelf) -> None:
    report = Sweeper(shelf.engine, IdempotencyTables("other_records")).sweep()
    assert "other_records" in report.error
    assert report.deleted == 0


def test_on_sqlite_another_writer_is_not_waited_for_without_end(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with shelf_of("sqlite", request, tmp_path) as shelf:
        shelf.put_many(range(3), left_ms=-1)
        engine = create_engine(shelf.url, connect_args={"timeout": 0.1})
        with shelf.engine.connect() as writer:
            writer.exec_driver_sql("BEGIN IMMEDIATE")
            report = Sweeper(engine, shelf.tables).sweep()
            assert "database is locked" in report.error
            writer.exec_driver_sql("ROLLBACK")
        assert Sweeper(engine, shelf.tables).sweep().deleted == 3
        engine.dispose()


async def test_it_outlives_its_database(own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("participant_sdk.idempotency.sweeping.BACKOFF_S_MAX", 0.2)
    with own_server.lent_database() as dsn:
        engine = create_engine(dsn.replace("postgresql:", "postgresql+psycopg:"))
        tables = IdempotencyTables()
        tables.metadata.create_all(engine)
        shelf = Shelf(dsn, dsn, engine, tables)
        shelf.put(1, State.UNKNOWN)
        failed, well = threading.Event(), threading.Event()

        def on_report(report: SweepReport) -> None:
            if report.error:
                failed.set()
            elif failed.is_set():
                well.set()

        sweeper = Sweeper(engine, tables, Sweep(every_s=0.1, on_report=on_report))
        own_server.kill()
        sweeper.start()
        try:
            assert await asyncio.to_thread(failed.wait, 60)
            own_server.start()
            assert await asyncio.to_thread(well.wait, 60)
        finally:
            sweeper.stop()
            engine.dispose()
        assert sweeper.state.failed >= 1
        assert sweeper.state.last is not None
        assert sweeper.state.last.unknown == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("every_s", 0), ("every_s", float("nan")), ("page", 0), ("page", 10**6), ("batch", 0), ("rows_per_s", 0)],
)
def test_a_setting_that_cannot_be_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"Sweep: {name} "):
        Sweep(**{name: value})


def test_what_an_atomic_run_has_met_is_not_taken_from_under_it(locking: Shelf) -> None:
    """It has read that the record has expired, and is going to write over it."""
    locking.put_many([1, 2], State.SUCCEEDED, left_ms=-1)
    store = store_of(locking.engine.dialect, locking.tables)
    claim = Claim(key_of(1), "acme", "orders.create", "ord-", Fingerprint(1, bytes(32)), "host-1", 30_000)
    done = Outcome(State.SUCCEEDED, Answer(Codec.VALUE), HOUR_MS)
    with locking.engine.connect() as connection:
        met = run(store.meet(key_of(1), 1_000), connection)
        assert met.free
        report = Sweeper(locking.engine, locking.tables).sweep()
        assert (report.deleted, report.left_busy) == (1, 1)
        run(store.write(claim, met.record, done, commit=True), connection)
    assert locking.numbers() == [1]
    assert Sweeper(locking.engine, locking.tables).sweep().deleted == 0
