"""On PostgreSQL a refused Try holds nothing on the way of its refusal: what another call has stored by then holds."""

from typing import Any

import pytest

from tests.contract.participant.world import CANCEL, CONFIRM, DONE, REFUSED, TRY, World, new_xid


@pytest.mark.parametrize("flavour", ["postgres-sync", "postgres-async-serializable"], indirect=True)
@pytest.mark.parametrize(
    ("others", "mode", "outcome", "reason", "status"),
    [
        ([TRY], "plain", DONE, "", 1),
        ([TRY, CONFIRM], "plain", DONE, "", 2),
        ([TRY, CANCEL], "plain", REFUSED, "suspended", 3),
        ([TRY], "refuse", REFUSED, "insufficient_funds", 3),
        ([CANCEL], "plain", REFUSED, "suspended", 4),
    ],
)
async def test_a_refusal_that_comes_too_late_answers_what_is_stored(
    world: World, others: list[Any], mode: str, outcome: Any, reason: str, status: int
) -> None:
    other, xid = new_xid(), new_xid()
    for phase in others:
        await world.call(phase, other, mode)
    for _ in range(2):
        reply = await world.call(TRY, xid, "refuse_too_late", account=other)
        assert (reply.outcome, reply.refusal.reason) == (outcome, reason)
        assert reply.result.data == (await world.call(TRY, other, mode)).result.data
    assert (world.effects(xid), world.status(xid)) == ([], status)
