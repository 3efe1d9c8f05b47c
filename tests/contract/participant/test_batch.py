"""Calls that run together (rules F1, F2): each gets what it would have got by itself, on every database and stack."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.contract.participant.test_participant_table import CELLS, HISTORIES
from tests.contract.participant.together import Together
from tests.contract.participant.world import (
    CANCEL,
    CONFIRM,
    DONE,
    REFUSED,
    SETTLE_CANCELLED,
    SETTLE_CONFIRMED,
    TRY,
    UNKNOWN,
    VIOLATION,
    new_xid,
    opened,
    payload_of,
)

TRIED, COMMITTED, ROLLBACKED, SUSPENDED = 1, 2, 3, 4
WHAT = {TRY: "try", CONFIRM: "confirm", CANCEL: "cancel"}


@pytest.fixture
async def world(flavour: str, participant_url: str) -> AsyncIterator[Together]:
    """A participant that serves, and runs calls together."""
    async with opened(Together(flavour, participant_url)) as world:
        yield world


async def tried(world: Together, mode: str = "plain") -> str:
    xid = new_xid()
    assert (await world.ask(TRY, xid, mode)).outcome == DONE
    return xid


def sent(world: Together, phase: Any, xids: list[str], *modes: str, **changes: Any) -> list[Any]:
    """A call for each of them, with call ids from 1."""
    modes = modes or ("plain",) * len(xids)
    pairs = enumerate(zip(xids, modes, strict=True), 1)
    return [world.message(phase, **world.of(xid, mode, call_id=n, **changes)) for n, (xid, mode) in pairs]


@pytest.mark.parametrize("phase", [TRY, CONFIRM, CANCEL])
async def test_every_cell_in_one_batch(world: Together, phase: Any) -> None:
    """Two branches of each history, all at once: what runs, runs in one local transaction."""
    cells = [cell for cell in CELLS if cell[0] == phase] * 2
    xids = new_xids(len(cells))
    for xid, (_, history, *_) in zip(xids, cells, strict=True):
        for earlier in HISTORIES[history]:
            assert (await world.ask(earlier, xid)).outcome == DONE
    before = {xid: world.effects(xid) for xid in xids}
    world.ran.clear()
    replies = await world.together(sent(world, phase, xids))
    for n, (xid, cell) in enumerate(zip(xids, cells, strict=True), 1):
        _, _, outcome, added, status = cell
        assert replies[n].outcome == outcome, cell
        assert len(world.effects(xid)) == len(before[xid]) + added, cell
        assert world.status(xid) == status, cell
        assert bool(replies[n].error) == (outcome == VIOLATION), cell
        if replies[n].outcome == REFUSED:
            assert replies[n].refusal.reason == "suspended"
    one_by_one = phase == CONFIRM and world.flavour.startswith("mariadb")  # a row is missing: rule C8
    assert world.batches(*xids) == ([1, 1] if one_by_one else [2])
    assert unfinished(world) == []


def new_xids(count: int) -> list[str]:
    """In the order in which they run."""
    return sorted(new_xid() for _ in range(count))


def unfinished(world: Together) -> list[Any]:
    """Rows that look as if a handler had committed by itself, or that still carry the mark of a batch."""
    return world.query(
        "SELECT xid FROM tcc_fence_log WHERE (finished_at IS NULL AND status <> 4) OR lease_until_ms IS NOT NULL"
    )


async def test_fifty_and_no_more_run_together(world: Together) -> None:
    xids = new_xids(60)
    replies = await world.together(sent(world, TRY, xids))
    assert {reply.outcome for reply in replies.values()} == {DONE}
    assert world.batches(*xids) == [50, 10]
    for n, xid in enumerate(xids, 1):
        assert replies[n].result.data == f'{{"hold":"{xid}#1"}}'.encode()
    for phase, status in ((CONFIRM, COMMITTED), (CANCEL, ROLLBACKED)):
        part = xids[:30] if phase == CONFIRM else xids[30:]
        world.ran.clear()
        assert {reply.outcome for reply in (await world.together(sent(world, phase, part))).values()} == {DONE}
        assert world.batches(*part) == [30]
        for xid in part:
            assert world.effects(xid) == ["try", f"{WHAT[phase]} {xid}#1"]
            assert world.status(xid) == status
    assert unfinished(world) == []


async def test_members_run_in_the_order_of_their_branches(world: Together) -> None:
    """However they have arrived."""
    xids = new_xids(5)
    await world.together(sent(world, TRY, xids[::-1]))
    assert [xid for _, xid, *_ in world.ran if xid in xids] == sorted(xids)


async def test_each_key_and_each_kind_runs_by_itself(world: Together) -> None:
    xids = [await tried(world) for _ in range(4)]
    new = new_xids(2)
    other = new_xids(2)
    world.ran.clear()
    calls = [
        *(world.message(CONFIRM, **world.of(xid, call_id=n)) for n, xid in enumerate(xids[:2], 1)),
        *(world.message(CANCEL, **world.of(xid, call_id=n)) for n, xid in enumerate(xids[2:], 3)),
        *(world.message(TRY, **world.of(xid, call_id=n)) for n, xid in enumerate(new, 5)),
        *(world.message(TRY, xid, account="cold", call_id=n) for n, xid in enumerate(other, 7)),
    ]
    replies = await world.exchange(calls)
    assert {reply.outcome for reply in replies.values()} == {DONE}
    by_transaction: dict[int, set[Any]] = {}
    for what, xid, _, transaction in world.ran:
        by_transaction.setdefault(id(transaction), set()).add((what, xid in other))
    assert all(len(kinds) == 1 for kinds in by_transaction.values())


async def test_one_that_is_refused_fails_alone(world: Together) -> None:
    xids = new_xids(5)
    modes = ["plain", "refuse", "nothing", "refuse_oddly", "plain"]
    replies = await world.together(sent(world, TRY, xids, *modes))
    assert [replies[n].outcome for n in range(1, 6)] == [DONE, REFUSED, DONE, REFUSED, DONE]
    assert (replies[2].refusal.reason, replies[2].refusal.message) == ("insufficient_funds", "alice has too little")
    assert not replies[3].HasField("result")
    assert world.batches(*xids) == [5]
    assert [world.effects(xid) for xid in xids] == [["try"], [], ["try"], [], ["try"]]
    assert [world.status(xid) for xid in xids] == [TRIED, ROLLBACKED, TRIED, ROLLBACKED, TRIED]
    again = await world.together(sent(world, TRY, xids, *modes, attempt=2))
    for n in range(1, 6):
        assert (again[n].outcome, again[n].result, again[n].refusal) == (
            replies[n].outcome,
            replies[n].result,
            replies[n].refusal,
        )
    assert unfinished(world) == []


@pytest.mark.parametrize(
    "mode", ["raise", "exit", "swallow_error", "commit", "commit_swallowed", "rollback", "raw_commit", "unstorable"]
)
async def test_an_error_in_the_middle_fails_alone(world: Together, mode: str) -> None:
    """All is rolled back, and they run one by one: only the bad one is unknown."""
    xids = new_xids(5)
    modes = ["plain", "refuse", mode, "plain", "refuse"]
    replies = await world.together(sent(world, TRY, xids, *modes))
    assert [replies[n].outcome for n in range(1, 6)] == [DONE, REFUSED, UNKNOWN, DONE, REFUSED]
    assert [world.effects(xid) for xid in xids] == [["try"], [], [], ["try"], []]
    assert [world.status(xid) for xid in xids] == [TRIED, ROLLBACKED, None, TRIED, ROLLBACKED]
    alone = await world.ask(TRY, new_xid(), mode)
    assert (replies[3].attention, replies[3].error) == (alone.attention, alone.error)
    assert set(world.batches(*xids)[1:]) == {1}  # InnoDB's savepoint that is gone looks like a lost race: run again


async def test_a_handler_may_roll_back_its_own_savepoint(world: Together) -> None:
    """After which psycopg deallocates what is prepared: the first time, they run one by one."""
    for _ in range(2):
        xids = new_xids(3)
        modes = ["plain", "nested", "refuse"]
        replies = await world.together(sent(world, TRY, xids, *modes))
        assert [replies[n].outcome for n in (1, 2, 3)] == [DONE, DONE, REFUSED]
        assert [world.effects(xid) for xid in xids] == [["try"], ["try"], []]
        assert unfinished(world) == []


@pytest.mark.parametrize("phase", [CONFIRM, CANCEL])
async def test_an_error_in_phase_2_fails_alone(world: Together, phase: Any) -> None:
    for bad in ("raises", "refuses"):
        modes = ["plain", f"{WHAT[phase]}_{bad}", "plain"]
        xids = [await tried(world, mode) for mode in modes]
        replies = await world.together(sent(world, phase, xids, *modes))
        assert [replies[n].outcome for n in (1, 2, 3)] == [DONE, UNKNOWN, DONE]
        ended = COMMITTED if phase == CONFIRM else ROLLBACKED
        assert [world.status(xid) for xid in xids] == [ended, TRIED, ended]
        assert [len(world.effects(xid)) for xid in xids] == [2, 1, 2]


async def test_one_that_made_its_batch_fail_goes_alone_from_then_on(world: Together) -> None:
    xids = new_xids(3)
    modes = ["plain", "raise", "plain"]
    await world.together(sent(world, TRY, xids, *modes))
    more = [xids[1], *(new_xid() for _ in range(3))]
    replies = await world.together(sent(world, TRY, more, "raise", "plain", "plain", "plain", attempt=2))
    assert [replies[n].outcome for n in range(1, 5)] == [UNKNOWN, DONE, DONE, DONE]
    assert world.batches(*more[1:]) == [3]


async def test_what_fails_at_commit_fails_alone(world: Together) -> None:
    """A deferred constraint, which PostgreSQL checks for each member; so a refusal may still come after it."""
    if not world.is_postgres:
        pytest.skip("only PostgreSQL defers constraints")
    xids = new_xids(5)
    modes = ["plain", "deferred_refused", "deferred", "plain", "deferred_refused"]
    replies = await world.together(sent(world, TRY, xids, *modes))
    assert [replies[n].outcome for n in range(1, 6)] == [DONE, REFUSED, UNKNOWN, DONE, REFUSED]
    assert [world.status(xid) for xid in xids] == [TRIED, ROLLBACKED, None, TRIED, ROLLBACKED]
    assert world.query("SELECT * FROM children") == []


async def test_a_handler_that_commits_by_itself_harms_no_other(world: Together) -> None:
    """Rule C1, in the middle of a batch: it is half done, those before it stand, those after it run."""
    xids = new_xids(5)
    modes = ["plain", "plain", "driver_commit", "plain", "refuse"]
    replies = await world.together(sent(world, TRY, xids, *modes))
    assert [replies[n].outcome for n in range(1, 6)] == [DONE, DONE, VIOLATION, DONE, REFUSED]
    assert [world.effects(xid) for xid in xids] == [["try"], ["try"], ["try"], ["try"], []]
    cancelled = await world.together(sent(world, CANCEL, xids, *modes))
    assert [cancelled[n].outcome for n in range(1, 6)] == [DONE] * 5
    assert world.effects(xids[2]) == ["try", "cancel None"]
    assert unfinished(world) == []


async def test_a_confirm_that_commits_by_itself_harms_no_other(world: Together) -> None:
    modes = ["plain", "confirm_commits", "plain"]
    xids = [await tried(world, mode) for mode in modes]
    replies = await world.together(sent(world, CONFIRM, xids, *modes))
    assert [replies[n].outcome for n in (1, 2, 3)] == [DONE, VIOLATION, DONE]
    assert [world.effects(xid) for xid in (xids[0], xids[2])] == [
        ["try", f"confirm {xid}#1"] for xid in (xids[0], xids[2])
    ]


async def test_repeats_of_one_branch_are_one_member(world: Together) -> None:
    xids = new_xids(3)
    calls = sent(world, TRY, [*xids, xids[1], xids[1]])
    replies = await world.together(calls)
    assert {reply.outcome for reply in replies.values()} == {DONE}
    assert replies[2].result == replies[4].result == replies[5].result
    assert [world.effects(xid) for xid in xids] == [["try"]] * 3


async def test_a_cancel_and_a_late_try_in_batches(world: Together) -> None:
    """Cancels before their Trys suspend their branches; then the Trys are refused, and repeated Cancels are done."""
    xids = new_xids(4)
    for phase, outcome in ((CANCEL, DONE), (TRY, REFUSED), (CANCEL, DONE)):
        replies = await world.together(sent(world, phase, xids))
        assert {reply.outcome for reply in replies.values()} == {outcome}
        assert {world.status(xid) for xid in xids} == {SUSPENDED}
    assert [world.effects(xid) for xid in xids] == [[]] * 4


async def test_the_phases_of_a_branch_follow_one_another(world: Together) -> None:
    """Its Cancel waits for its Try, which is in a batch."""
    xids = new_xids(4)
    calls = [*sent(world, TRY, xids), *(world.message(CANCEL, **world.of(xid, call_id=10 + n)) for n, xid in
             enumerate(xids))]  # fmt: skip
    replies = await world.together(calls)
    assert {reply.outcome for reply in replies.values()} == {DONE}
    for xid in xids:
        assert world.effects(xid) == ["try", f"cancel {xid}#1"]


async def test_a_payload_that_does_not_decode_goes_alone_and_is_refused(world: Together) -> None:
    good = new_xids(2)
    bad = new_xid()
    calls = [
        *sent(world, TRY, good),
        world.message(TRY, bad, payload=payload_of(account="hot", amount="ten"), call_id=3),
    ]
    replies = await world.together(calls)
    assert [replies[n].outcome for n in (1, 2, 3)] == [DONE, DONE, REFUSED]
    assert replies[3].refusal.reason == "invalid_payload"


async def test_the_same_branch_with_another_payload_is_a_violation_in_a_batch(world: Together) -> None:
    xids = [await tried(world) for _ in range(3)]
    for phase in (TRY, CONFIRM):
        calls = sent(world, phase, xids)
        calls[1] = world.message(phase, xids[1], payload=payload_of(account="hot", amount=11), call_id=2)
        replies = await world.together(calls)
        assert [replies[n].outcome for n in (1, 2, 3)] == [DONE, VIOLATION, DONE]
        assert "another action or payload" in replies[2].error
    assert [world.status(xid) for xid in xids] == [COMMITTED, TRIED, COMMITTED]


async def test_a_try_that_is_too_old_is_refused_in_a_batch_and_leaves_nothing(world: Together) -> None:
    xids = new_xids(3)
    xids[1] = f"{int(xids[1][:12], 16) - 26 * 3_600_000:012x}{xids[1][12:]}"
    replies = await world.together(sent(world, TRY, xids))
    assert [replies[n].outcome for n in (1, 2, 3)] == [DONE, REFUSED, DONE]
    assert replies[2].refusal.reason == "too_old"
    assert world.status(xids[1]) is None
    assert world.batches(*xids) == [2]
    assert unfinished(world) == []


async def test_settled_branches_in_a_batch(world: Together) -> None:
    xids = [await tried(world) for _ in range(4)]
    for xid, settle in zip(xids, (SETTLE_CONFIRMED, SETTLE_CANCELLED) * 2, strict=True):
        assert (await world.ask(settle, xid)).outcome == DONE
    replies = await world.together(sent(world, CONFIRM, xids))
    assert [replies[n].outcome for n in range(1, 5)] == [DONE, VIOLATION] * 2
    assert [world.effects(xid) for xid in xids] == [["try"]] * 4
