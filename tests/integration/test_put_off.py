"""Far more decided transactions than anybody can look at owe to a participant that is gone."""

import asyncio
from collections import Counter
from pathlib import Path

from coordinator.codec import new_row, transaction
from coordinator.delivery import Delivery
from coordinator.engine import Engine, Until
from coordinator.filters import parse
from coordinator.ids import new_xid
from coordinator.machine import begin
from coordinator.model import BranchSpec, BranchStatus, Policy, Spec, State, Step, Transaction
from coordinator.participants import Participants
from coordinator.store.rows import Batch, ListFilter, ParticipantRow, PutOff
from coordinator.store.store import Store, backend_for
from tests.integration.participant_server import ParticipantServer

END_S = 60.0
OWED = 1_500
POLICY = Policy()
FENCE_ID = "fence-1"


class Counted(Delivery):
    """Tells when many were put off."""

    def __init__(self, participants: Participants) -> None:
        super().__init__(participants)
        self.count = 0
        self.many = asyncio.Event()

    def were_put_off(self, put_off: PutOff, count: int) -> None:
        super().were_put_off(put_off, count)
        self.count += count
        if self.count >= OWED / 2:
            self.many.set()


def confirming(now_ms: int, participant: str) -> Transaction:
    """A transaction whose coordinator has died just after its decision."""
    spec = Spec(new_xid(now_ms), b"", now_ms, 30_000, (BranchSpec(participant, "debit"),))
    step = Step(BranchStatus.TRIED, fence_id=FENCE_ID)
    tx = begin(spec, now_ms, POLICY)
    return tx._replace(
        state=State.CONFIRMING, steps=(step,), save_id=int.from_bytes(spec.xid[8:], "big") >> 2, wake_ms=now_ms
    )


async def test_they_cost_little_and_all_come_when_it_is_back(tmp_path: Path) -> None:
    store = Store(backend_for(str(tmp_path / "tricord.db"), POLICY.lease_ms))
    await store.open()
    delivery = Counted(Participants(store))
    engine = Engine(store, delivery, POLICY)
    bank, gone = ParticipantServer(), ParticipantServer()
    try:
        for name, server in (("bank", bank), ("gone", gone)):
            assert (
                await store.register(ParticipantRow(name, server.address, {"debit": FENCE_ID}), replace_fence=False)
                is None
            )
        now_ms = store.now_ms()
        owed = [confirming(now_ms, "gone") for _ in range(OWED)]
        others = [confirming(now_ms, "bank") for _ in range(30)]
        await store.flush(Batch([new_row(tx) for tx in [*owed, *others]], ()))
        with bank:
            await engine.start()
            for tx in others:
                assert (await engine.wait(tx, Until.FINISHED, END_S)).state is State.CONFIRMED
            await asyncio.wait_for(delivery.many.wait(), END_S)
            assert await store.list(ListFilter(parse("state = CONFIRMED AND participant = gone"))) == []
            with gone:
                async with asyncio.timeout(END_S):
                    while left := await store.list(ListFilter(parse("state = CONFIRMING"), limit=1)):
                        await engine.wait(transaction(left[0]), Until.FINISHED, END_S)
                assert set(Counter(seen.call.xid for seen in gone.seen("CONFIRM")).values()) == {1}
    finally:
        await engine.stop(1.0)
        await delivery.close()
        await store.close()
