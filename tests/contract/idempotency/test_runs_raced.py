"""A COMMIT that loses a race: nothing stays, and whoever asked is told to come back."""

import pytest
from sqlalchemy import text

from participant_sdk.idempotency.errors import StoreUnavailable
from participant_sdk.idempotency.operation import Operation
from tests.contract.idempotency.runs_world import MODES, desk_of
from tests.contract.idempotency.world import World

pytestmark = pytest.mark.parametrize("flavour", ["postgres-async-serializable"], indirect=True)


@pytest.mark.parametrize("operation", MODES, ids=lambda operation: operation.mode.value)
async def test_a_commit_that_is_not_serializable_is_retryable(world: World, operation: Operation) -> None:
    async with desk_of(world) as desk:
        async with world.transaction() as other, await desk.begun(operation) as working:
            connection = await working.do("connect")
            await desk.on(connection, lambda db: db.execute(text("SELECT count(*) FROM effects")).scalar())
            await working.work("order")
            await other.call(lambda db: db.execute(text("SELECT count(*) FROM effects")).scalar())
            await other.work("other")
            await other.commit()
            with pytest.raises(StoreUnavailable, match="nothing of it stays") as raised:
                await working.succeed()
            assert raised.value.retryable
            await working.do("fail_retryable")
        assert world.effects() == ["other"]
        await (await desk.begun(operation)).succeed()
        await desk.replayed(operation)
