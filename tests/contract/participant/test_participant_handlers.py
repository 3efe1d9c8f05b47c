"""How handlers may end, and what is left in the database then: a fence row with its effects, or neither."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import event, text

from tests.contract.participant.world import (
    CANCEL,
    CONFIRM,
    DONE,
    REFUSED,
    TRY,
    UNKNOWN,
    VIOLATION,
    World,
    new_xid,
)


@pytest.mark.parametrize("mode", ["swallow_error", "swallow_error_and_return_nothing"])
async def test_a_swallowed_database_error_leaves_no_effect_without_a_fence_row(world: World, mode: str) -> None:
    """Protocol C1: the database rolled everything back, the handler went on and returned."""
    xid = new_xid()
    reply = await world.call(TRY, xid, mode)
    assert (reply.outcome, reply.error != "") == (UNKNOWN, True)
    assert world.effects(xid) == []
    assert world.status(xid) is None
    assert (await world.call(CANCEL, xid, mode)).outcome == DONE
    assert world.effects(xid) == []


async def test_a_refusal_because_of_a_database_error_is_a_refusal(world: World) -> None:
    xid = new_xid()
    reply = await world.call(TRY, xid, "refuse_after_error")
    assert (reply.outcome, reply.refusal.reason) == (REFUSED, "duplicate")
    assert (world.effects(xid), world.status(xid)) == ([], 3)


@pytest.mark.parametrize("mode", ["commit", "commit_swallowed", "rollback", "close", "raw_commit"])
async def test_a_handler_that_ends_the_local_transaction_gets_a_clear_error(world: World, mode: str) -> None:
    xid = new_xid()
    reply = await world.call(TRY, xid, mode)
    assert (reply.outcome, reply.attention) == (UNKNOWN, True)
    assert "the SDK owns the local transaction" in reply.error
    assert world.effects(xid) == []
    assert world.status(xid) is None
    assert (await world.call(TRY, new_xid())).outcome == DONE  # nothing is left locked


@pytest.mark.parametrize("mode", ["driver_commit", "driver_commit_and_refuse"])
async def test_a_try_that_commits_behind_sqlalchemys_back_is_never_answered_done(world: World, mode: str) -> None:
    """What it committed stays, what came after is gone: that is neither done nor refused, but it can be cancelled."""
    xid = new_xid()
    reply = await world.call(TRY, xid, mode)
    assert reply.outcome in (UNKNOWN, VIOLATION)  # MariaDB's "no such savepoint" may mean a deadlock: it runs again
    assert any(text in reply.error.lower() for text in ("savepoint", "committed by itself"))
    assert (world.effects(xid), world.status(xid)) == (["try"], 1)
    for phase in (TRY, CONFIRM, TRY):
        reply = await world.call(phase, xid, mode)
        assert reply.outcome == VIOLATION
        assert "committed by itself" in reply.error
    assert (await world.call(CANCEL, xid, mode)).outcome == DONE
    assert (world.effects(xid), world.status(xid)) == (["try", "cancel None"], 3)
    assert (await world.call(CANCEL, xid, mode)).outcome == DONE
    assert (await world.call(TRY, new_xid())).outcome == DONE


@pytest.mark.parametrize(("phase", "what", "status"), [(CONFIRM, "confirm", 2), (CANCEL, "cancel", 3)])
async def test_phase_2_that_commits_behind_sqlalchemys_back_is_never_answered_done(
    world: World, phase: Any, what: str, status: int
) -> None:
    mode = f"{what}_commits"
    xid = new_xid()
    await world.call(TRY, xid, mode)
    assert (await world.call(phase, xid, mode)).outcome in (UNKNOWN, VIOLATION)
    for _ in range(2):
        reply = await world.call(phase, xid, mode)
        assert reply.outcome == VIOLATION
        assert "committed by itself" in reply.error
    assert (world.effects(xid), world.status(xid)) == (["try", f"{what} {xid}#1"], status)


async def test_a_handler_that_begins_a_local_transaction_of_its_own_gets_a_clear_error(world: World) -> None:
    xid = new_xid()
    reply = await world.call(TRY, xid, "begin")
    assert reply.outcome == UNKNOWN
    assert "begin" in reply.error
    assert (world.effects(xid), world.status(xid)) == ([], None)


async def test_a_handler_may_use_savepoints_of_its_own(world: World) -> None:
    xid = new_xid()
    assert (await world.call(TRY, xid, "nested")).outcome == DONE
    assert world.effects(xid) == ["try"]


async def test_any_other_error_is_unknown_and_told_on_one_bounded_line(world: World) -> None:
    xid = new_xid()
    reply = await world.call(TRY, xid, "raise")
    assert (reply.outcome, reply.attention) == (UNKNOWN, False)
    assert reply.error.startswith("ValueError: bad luck")
    assert reply.error.isprintable()
    assert len(reply.error) < 1_200
    assert (world.effects(xid), world.status(xid)) == ([], None)


async def test_a_handler_that_exits_ends_its_call_only(world: World) -> None:
    xid = new_xid()
    assert (await world.call(TRY, xid, "exit")).outcome == UNKNOWN
    assert (world.effects(xid), world.status(xid)) == ([], None)
    assert (await world.call(TRY, xid, "exit")).outcome == UNKNOWN


async def test_a_result_that_cannot_be_stored_is_unknown(world: World) -> None:
    xid = new_xid()
    reply = await world.call(TRY, xid, "unstorable")
    assert (reply.outcome, reply.attention) == (UNKNOWN, True)
    assert "set" in reply.error
    assert (world.effects(xid), world.status(xid)) == ([], None)


@pytest.mark.parametrize("mode", ["large", "odd_content_type"])
async def test_a_result_that_no_coordinator_takes_is_unknown(world: World, mode: str) -> None:
    xid = new_xid()
    reply = await world.call(TRY, xid, mode)
    assert (reply.outcome, reply.attention) == (UNKNOWN, True)
    assert "65536 are allowed" in reply.error or "content type" in reply.error
    assert (world.effects(xid), world.status(xid)) == ([], None)
    assert (await world.call(TRY, new_xid(), "largest")).outcome == DONE


@pytest.mark.parametrize("mode", ["refuse_oddly", "raise_oddly"])
async def test_whatever_a_handler_says_can_be_sent(world: World, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """A text that is no Unicode, or longer than a message may be, would take all replies of its stream with it."""
    caplog.set_level("CRITICAL", "tricord.participant")  # the traceback has the text as it is
    messages = [world.message(TRY, new_xid(), each, call_id=n) for n, each in enumerate([mode, "plain", mode], 1)]
    replies = await world.exchange(messages)
    assert replies[2].outcome == DONE
    for reply in (replies[1], replies[3]):
        assert reply.outcome == (REFUSED if mode == "refuse_oddly" else UNKNOWN)
        for text_ in (reply.error, reply.refusal.reason, reply.refusal.message):
            assert text_.isprintable()
            assert len(text_) <= 1_000
    xid = new_xid()
    await world.call(TRY, xid, "confirm_refuses_oddly")
    reply = await world.call(CONFIRM, xid, "confirm_refuses_oddly")
    assert (reply.outcome, reply.attention) == (UNKNOWN, True)
    assert reply.error.isprintable()
    assert len(reply.error) <= 500


@pytest.mark.parametrize(("phase", "what"), [(CONFIRM, "confirm"), (CANCEL, "cancel")])
async def test_a_refusal_from_phase_2_is_never_stored(world: World, phase: Any, what: str) -> None:
    mode = f"{what}_refuses"
    xid = new_xid()
    await world.call(TRY, xid, mode)
    for _ in range(2):
        reply = await world.call(phase, xid, mode)
        assert (reply.outcome, reply.attention) == (UNKNOWN, True)
        assert "too_late" in reply.error
    assert (world.effects(xid), world.status(xid)) == (["try"], 1)


@pytest.mark.parametrize(("phase", "what"), [(CONFIRM, "confirm"), (CANCEL, "cancel")])
async def test_an_error_in_phase_2_keeps_the_branch_tried(world: World, phase: Any, what: str) -> None:
    mode = f"{what}_raises"
    xid = new_xid()
    await world.call(TRY, xid, mode)
    reply = await world.call(phase, xid, mode)
    assert (reply.outcome, reply.attention, reply.error) == (UNKNOWN, False, "RuntimeError: not now")
    assert (world.effects(xid), world.status(xid)) == (["try"], 1)


@pytest.mark.parametrize("flavour", ["sqlite-sync", "sqlite-async"], indirect=True)
async def test_sqlites_busy_timeout_is_the_calls_until_it_has_ended(world: World) -> None:
    """COMMIT may have to wait for readers, too; then the connection goes back to the user as it was."""
    engine = getattr(world.engine, "sync_engine", world.engine)
    seen: dict[str, int] = {}

    def on_commit(connection: Any) -> None:
        seen["commit"] = _busy_timeout_of(connection.connection.dbapi_connection)

    event.listen(engine, "commit", on_commit)
    event.listen(engine.pool, "checkout", lambda raw, *_: seen.update(checkout=_busy_timeout_of(raw)))
    for mode in ("plain", "swallow_error", "refuse"):
        seen.clear()
        await world.call(TRY, new_xid(), mode, timeout=9)
        assert seen["checkout"] == 5_000
        if mode != "swallow_error":
            assert 8_000 < seen["commit"] < 9_000


def _busy_timeout_of(raw: Any) -> int:
    cursor = raw.cursor()
    cursor.execute("PRAGMA busy_timeout")
    ((found,),) = cursor.fetchall()
    cursor.close()
    return int(found)


@pytest.mark.parametrize("flavour", ["postgres-sync", "postgres-async"], indirect=True)
class TestPostgres:
    """What only PostgreSQL has."""

    async def test_a_deferred_constraint_is_the_handlers_error(self, world: World) -> None:
        """Protocol C9: found inside the savepoint, not at COMMIT."""
        commits: list[Any] = []
        event.listen(getattr(world.engine, "sync_engine", world.engine), "commit", commits.append)
        xid = new_xid()
        reply = await world.call(TRY, xid, "deferred")
        assert reply.outcome == UNKNOWN
        assert reply.error.startswith("ForeignKeyViolation")
        assert commits == []
        assert (world.effects(xid), world.status(xid)) == ([], None)

    async def test_a_refusal_drops_deferred_violations(self, world: World) -> None:
        xid = new_xid()
        assert (await world.call(TRY, xid, "deferred_refused")).outcome == REFUSED
        assert (world.effects(xid), world.status(xid)) == ([], 3)

    async def test_a_lock_timeout_is_unknown_and_never_stored(self, world: World) -> None:
        xid = new_xid()
        with world.auditor.begin() as other:
            other.execute(text("UPDATE counters SET n = n WHERE name = 'hot'"))
            reply = await world.call(TRY, xid, "other_account", timeout=0.6)
        assert reply.outcome == UNKNOWN
        assert world.status(xid) is None
        assert (await world.call(TRY, xid, "other_account")).outcome == DONE

    async def test_a_refusal_because_of_a_lost_race_is_not_one(self, world: World) -> None:
        xid = new_xid()
        with world.auditor.begin() as other:
            other.execute(text("UPDATE counters SET n = n WHERE name = 'hot'"))
            reply = await world.call(TRY, xid, "refuse_when_locked", timeout=1)
        assert reply.outcome == UNKNOWN
        assert "busy" in reply.error
        assert world.status(xid) is None
        assert (await world.call(TRY, xid, "refuse_when_locked")).outcome == DONE

    async def test_a_wait_for_the_fence_row_ends_before_the_callers_patience(self, world: World) -> None:
        xid = new_xid()
        await world.call(TRY, xid)
        with world.auditor.begin() as other:
            other.execute(text("SELECT 1 FROM tcc_fence_log WHERE xid = :xid FOR UPDATE"), {"xid": xid})
            started = asyncio.get_running_loop().time()
            reply = await world.call(CONFIRM, xid, timeout=1.5)
            assert asyncio.get_running_loop().time() - started < 1.5
        assert (reply.outcome, world.status(xid)) == (UNKNOWN, 1)
        assert "LockNotAvailable" in reply.error
        assert (await world.call(CONFIRM, xid)).outcome == DONE

    async def test_serialization_failures_are_run_again(self, world: World) -> None:
        """Twelve increments of one counter by read and write, under SERIALIZABLE: none is lost, none is refused."""
        with world.auditor.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
            name = db.execute(text("SELECT current_database()")).scalar_one()
            db.execute(text(f"ALTER DATABASE \"{name}\" SET default_transaction_isolation = 'serializable'"))
        await world.dispose(world.engine)  # so that new connections have it
        xids = [new_xid() for _ in range(12)]
        done: set[str] = set()
        for _ in range(20):
            waiting = [xid for xid in xids if xid not in done]
            replies = await asyncio.gather(*(world.call(TRY, xid, "other_account") for xid in waiting))
            for xid, reply in zip(waiting, replies, strict=True):
                assert reply.outcome in (DONE, UNKNOWN)
                if reply.outcome == DONE:
                    done.add(xid)
        assert len(done) == len(xids)
        assert world.query("SELECT n FROM counters WHERE name = 'hot'") == [(12,)]
        assert world.query("SELECT count(*), count(distinct xid) FROM effects") == [(12, 12)]

    async def test_lost_connections_are_run_again(self, world: World) -> None:
        for _ in range(3):
            await world.call(TRY, new_xid())
        with world.auditor.connect() as db:
            ended = db.execute(
                text(
                    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            ).scalar_one()
        assert ended > 0
        xid = new_xid()
        assert (await world.call(TRY, xid)).outcome == DONE
        assert world.effects(xid) == ["try"]

    async def test_a_connection_lost_in_the_handler_ends_in_one_effect(self, world: World) -> None:
        gate = world.gate("slow")
        xid = new_xid()
        calling = asyncio.create_task(world.call(TRY, xid, account="slow"))
        await gate.wait_reached()
        with world.auditor.connect() as db:
            db.execute(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND state = 'idle in transaction'"
                )
            )
        gate.opened.set()
        reply = await calling
        assert reply.outcome == DONE
        assert gate.count == 2
        assert world.effects(xid) == ["try"]
