"""Every cell of the fence's table, through a real server, on every database and stack."""

from typing import Any

import pytest

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
    World,
    new_xid,
    payload_of,
)

TRIED, COMMITTED, ROLLBACKED, SUSPENDED = 1, 2, 3, 4

HISTORIES: dict[str, list[Any]] = {
    "no row": [],
    "tried": [TRY],
    "committed": [TRY, CONFIRM],
    "rollbacked": [TRY, CANCEL],
    "suspended": [CANCEL],
}

CELLS = [
    # phase, history, outcome, effects that the call adds, status after it
    (TRY, "no row", DONE, 1, TRIED),
    (TRY, "tried", DONE, 0, TRIED),
    (TRY, "committed", DONE, 0, COMMITTED),
    (TRY, "rollbacked", REFUSED, 0, ROLLBACKED),
    (TRY, "suspended", REFUSED, 0, SUSPENDED),
    (CONFIRM, "no row", VIOLATION, 0, None),
    (CONFIRM, "tried", DONE, 1, COMMITTED),
    (CONFIRM, "committed", DONE, 0, COMMITTED),
    (CONFIRM, "rollbacked", VIOLATION, 0, ROLLBACKED),
    (CONFIRM, "suspended", VIOLATION, 0, SUSPENDED),
    (CANCEL, "no row", DONE, 0, SUSPENDED),
    (CANCEL, "tried", DONE, 1, ROLLBACKED),
    (CANCEL, "committed", VIOLATION, 0, COMMITTED),
    (CANCEL, "rollbacked", DONE, 0, ROLLBACKED),
    (CANCEL, "suspended", DONE, 0, SUSPENDED),
    (SETTLE_CONFIRMED, "no row", DONE, 0, SUSPENDED),
    (SETTLE_CONFIRMED, "tried", DONE, 0, COMMITTED),
    (SETTLE_CONFIRMED, "committed", DONE, 0, COMMITTED),
    (SETTLE_CONFIRMED, "rollbacked", VIOLATION, 0, ROLLBACKED),
    (SETTLE_CONFIRMED, "suspended", DONE, 0, SUSPENDED),
    (SETTLE_CANCELLED, "no row", DONE, 0, SUSPENDED),
    (SETTLE_CANCELLED, "tried", DONE, 0, ROLLBACKED),
    (SETTLE_CANCELLED, "committed", VIOLATION, 0, COMMITTED),
    (SETTLE_CANCELLED, "rollbacked", DONE, 0, ROLLBACKED),
    (SETTLE_CANCELLED, "suspended", DONE, 0, SUSPENDED),
]


@pytest.mark.parametrize("through", ["unary", "exchange"])
async def test_every_cell(world: World, through: str) -> None:
    for phase, history, outcome, added, status in CELLS:
        xid = new_xid()
        for earlier in HISTORIES[history]:
            assert (await world.call(earlier, xid)).outcome == DONE
        before = world.effects(xid)
        if through == "unary":
            reply = await world.call(phase, xid)
        else:
            reply = (await world.exchange([world.message(phase, xid)]))[7]
        cell = (phase, history)
        assert reply.outcome == outcome, cell
        assert len(world.effects(xid)) == len(before) + added, cell
        assert world.status(xid) == status, cell
        assert bool(reply.error) == (outcome == VIOLATION), cell
        if reply.outcome == REFUSED:
            assert reply.refusal.reason == "suspended"


async def test_a_repeated_try_gets_the_stored_result(world: World) -> None:
    xid = new_xid()
    first = await world.call(TRY, xid)
    assert first.result.content_type == "application/json"
    assert first.result.data == f'{{"hold":"{xid}#1"}}'.encode()
    assert (await world.call(TRY, xid, attempt=2)).result == first.result
    await world.call(CONFIRM, xid)
    assert (await world.call(TRY, xid, attempt=3)).result == first.result
    assert world.effects(xid) == ["try", f"confirm {xid}#1"]


async def test_confirm_and_cancel_get_what_try_returned(world: World) -> None:
    xid = new_xid()
    await world.call(TRY, xid)
    await world.call(CANCEL, xid)
    assert world.effects(xid) == ["try", f"cancel {xid}#1"]


async def test_a_try_may_return_nothing(world: World) -> None:
    xid = new_xid()
    reply = await world.call(TRY, xid, "nothing")
    assert reply.outcome == DONE
    assert not reply.HasField("result")
    assert (await world.call(CONFIRM, xid, "nothing")).outcome == DONE
    assert world.effects(xid) == ["try", "confirm None"]


async def test_a_refused_try_leaves_nothing_and_is_refused_again(world: World) -> None:
    xid = new_xid()
    first = await world.call(TRY, xid, "refuse")
    assert first.outcome == REFUSED
    assert (first.refusal.reason, first.refusal.message) == ("insufficient_funds", "alice has too little")
    again = await world.call(TRY, xid, "refuse", attempt=2)
    assert (again.outcome, again.refusal) == (REFUSED, first.refusal)
    assert (await world.call(CANCEL, xid, "refuse")).outcome == DONE
    assert world.effects(xid) == []
    assert world.status(xid) == ROLLBACKED


async def test_a_try_after_its_cancel_is_refused(world: World) -> None:
    xid = new_xid()
    assert (await world.call(CANCEL, xid)).outcome == DONE
    late = await world.call(TRY, xid)
    assert (late.outcome, late.refusal.reason) == (REFUSED, "suspended")
    assert (await world.call(CANCEL, xid)).outcome == DONE
    assert world.effects(xid) == []


async def test_what_was_settled_runs_no_handler_any_more(world: World) -> None:
    """A Confirm or Cancel that was still on its way (rule G1)."""
    for settle, same, opposite in ((SETTLE_CONFIRMED, CONFIRM, CANCEL), (SETTLE_CANCELLED, CANCEL, CONFIRM)):
        xid = new_xid()
        await world.call(TRY, xid)
        assert (await world.call(settle, xid)).outcome == DONE
        assert (await world.call(same, xid)).outcome == DONE
        assert (await world.call(opposite, xid)).outcome == VIOLATION
        assert world.effects(xid) == ["try"]
        assert (await world.call(TRY, new_xid(), attempt=2)).outcome == DONE


async def test_settling_needs_no_handler_and_no_payload_that_decodes(world: World) -> None:
    for settle in (SETTLE_CONFIRMED, SETTLE_CANCELLED):
        xid = new_xid()
        assert (await world.call(settle, xid, action="gone")).outcome == DONE
        late = await world.call(TRY, xid, action="gone")
        assert (late.outcome, late.refusal.reason) == (REFUSED, "suspended")


@pytest.mark.parametrize("history", ["tried", "committed", "rollbacked", "suspended"])
async def test_the_same_branch_with_another_payload_is_a_violation(world: World, history: str) -> None:
    xid = new_xid()
    for earlier in HISTORIES[history]:
        await world.call(earlier, xid)
    effects, status = world.effects(xid), world.status(xid)
    for phase in (TRY, CONFIRM, CANCEL, SETTLE_CONFIRMED, SETTLE_CANCELLED):
        for changes in ({"payload": payload_of(amount=11)}, {"action": "credit"}):
            reply = await world.call(phase, xid, **changes)
            assert reply.outcome == VIOLATION
            assert "another action or payload" in reply.error
    assert (world.effects(xid), world.status(xid)) == (effects, status)


async def test_two_branches_with_equal_payloads_are_two_branches(world: World) -> None:
    xid = new_xid()
    assert (await world.call(TRY, xid, branch_id=1)).outcome == DONE
    assert (await world.call(TRY, xid, branch_id=2)).outcome == DONE
    assert (await world.call(CANCEL, xid, branch_id=2)).outcome == DONE
    assert world.effects(xid) == ["try", "try", f"cancel {xid}#2"]
    assert (world.status(xid, 1), world.status(xid, 2)) == (TRIED, ROLLBACKED)


async def test_a_call_for_another_participant_stores_nothing(world: World) -> None:
    xid = new_xid()
    for phase in (TRY, CONFIRM, CANCEL):
        reply = await world.call(phase, xid, participant="bank-b")
        assert (reply.outcome, reply.attention) == (UNKNOWN, True)
        assert "'bank'" in reply.error
    assert world.status(xid) is None


@pytest.mark.parametrize(
    "changes",
    [{"xid": "F" * 32}, {"xid": "0" * 31}, {"xid": ""}, {"branch_id": 0}, {"action": "a b"}, {"action": "x" * 65}],
)
async def test_a_call_that_cannot_be_one_is_unknown(world: World, changes: dict[str, Any]) -> None:
    changes = {"xid": new_xid(), **changes}
    for phase in (TRY, CANCEL):
        reply = await world.call(phase, **changes)
        assert reply.outcome == UNKNOWN
        assert reply.error
    assert world.query("SELECT count(*) FROM tcc_fence_log") == [(0,)]


async def test_a_phase_that_does_not_fit_its_method_is_unknown(world: World) -> None:
    message = world.message(0, new_xid())
    assert (await world.exchange([message]))[7].outcome == UNKNOWN


async def test_an_unknown_action_is_unknown_until_something_is_stored(world: World) -> None:
    xid = new_xid()
    reply = await world.call(TRY, xid, action="renamed")
    assert (reply.outcome, reply.attention) == (UNKNOWN, True)
    assert "renamed" in reply.error
    assert world.status(xid) is None
    assert (await world.call(CANCEL, xid, action="renamed")).outcome == DONE
    assert (await world.call(TRY, xid, action="renamed")).outcome == REFUSED
    assert (await world.call(CANCEL, xid, action="renamed")).outcome == DONE


async def test_an_undecodable_try_is_refused_and_its_cancel_is_done(world: World) -> None:
    xid = new_xid()
    bad = payload_of(amount="ten")
    for _ in range(2):
        reply = await world.call(TRY, xid, payload=bad)
        assert (reply.outcome, reply.refusal.reason) == (REFUSED, "invalid_payload")
        assert reply.refusal.message == "amount is a string, wanted an integer"
    assert (await world.call(CANCEL, xid, payload=bad)).outcome == DONE
    assert world.status(xid) == ROLLBACKED
    other = new_xid()
    assert (await world.call(CANCEL, other, payload=bad)).outcome == DONE
    assert (await world.call(TRY, other, payload=bad)).refusal.reason == "suspended"


@pytest.mark.parametrize("phase", [CONFIRM, CANCEL])
async def test_what_no_longer_decodes_in_phase_2_waits_for_a_person(world: World, phase: Any) -> None:
    """As after a deploy that changed the payload's type: the row is there, the handler cannot be called."""
    for changes in ({"payload": payload_of(amount="ten")}, {"action": "renamed"}):
        xid = new_xid()
        await world.call(TRY, xid)
        message = world.message(phase, xid, **changes)
        _make_row_of(world, message)
        reply = await world.call(phase, xid, **changes)
        assert (reply.outcome, reply.attention) == (UNKNOWN, True)
        assert world.status(xid) == TRIED
        assert world.effects(xid) == ["try"]


def _make_row_of(world: World, message: Any) -> None:
    from sqlalchemy import text

    from participant_sdk.call import fingerprint
    from participant_sdk.payload import Payload

    digest = fingerprint(message.action, Payload(message.payload.data, message.payload.content_type))
    with world.auditor.begin() as db:
        db.execute(
            text("UPDATE tcc_fence_log SET fingerprint = :digest, action = :action WHERE xid = :xid"),
            {"digest": digest, "action": message.action, "xid": message.xid},
        )


async def test_a_row_of_a_newer_version_is_left_alone(world: World) -> None:
    from sqlalchemy import text

    for column in ("status", "fingerprint_algorithm"):
        xid = new_xid()
        await world.call(TRY, xid)
        with world.auditor.begin() as db:
            db.execute(text(f"UPDATE tcc_fence_log SET {column} = 99 WHERE xid = :xid"), {"xid": xid})
        for phase in (TRY, CONFIRM, CANCEL):
            reply = await world.call(phase, xid)
            assert (reply.outcome, reply.attention) == (UNKNOWN, True)
            assert "99" in reply.error
        assert world.effects(xid) == ["try"]
