"""A bank whose calls of one account run together, and a way to have them wait for one another."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection

from participant_sdk import Call, Participant
from tests.contract.participant.world import (
    CANCEL,
    CONFIRM,
    DONE,
    TRY,
    Debit,
    Gate,
    Held,
    World,
    do_phase2,
    do_try,
    new_xid,
)
from tricord.v1 import participant_pb2

ACCOUNT = "hot"
LAST = 9_999


class Together(World):
    """`ran` has what handlers ran for: phase, xid, branch, and the local transaction that they were lent."""

    def make_participant(self) -> Participant:
        self.ran: list[tuple[str, str, int, Any]] = []
        self.stopper: tuple[str, str, Gate] | None = None
        bank = Participant(self.name, self.engine, **self.settings)
        (self.define_async if self.is_async else self.define)(bank)
        return bank

    def define(self, bank: Participant) -> None:
        @bank.action("debit", batch=True, batch_key="account")
        def debit(call: Call[Debit], db: Connection) -> Held:
            self.hold_up("try", call)
            self.note("try", db, call)
            return do_try(db, call)  # type: ignore[no-any-return]

        @debit.confirm
        def confirm_debit(call: Call[Debit], db: Connection) -> None:
            self.hold_up("confirm", call)
            self.note("confirm", db, call)
            do_phase2(db, call, "confirm")

        @debit.cancel
        def cancel_debit(call: Call[Debit], db: Connection) -> None:
            self.hold_up("cancel", call)
            self.note("cancel", db, call)
            do_phase2(db, call, "cancel")

    def define_async(self, bank: Participant) -> None:
        @bank.action("debit", batch=True, batch_key="account")
        async def debit(call: Call[Debit], db: AsyncConnection) -> Held:
            await asyncio.to_thread(self.hold_up, "try", call)
            await db.run_sync(lambda db: self.note("try", db, call))
            return await db.run_sync(do_try, call)

        @debit.confirm
        async def confirm_debit(call: Call[Debit], db: AsyncConnection) -> None:
            await asyncio.to_thread(self.hold_up, "confirm", call)
            await db.run_sync(lambda db: self.note("confirm", db, call))
            await db.run_sync(do_phase2, call, "confirm")

        @debit.cancel
        async def cancel_debit(call: Call[Debit], db: AsyncConnection) -> None:
            await asyncio.to_thread(self.hold_up, "cancel", call)
            await db.run_sync(lambda db: self.note("cancel", db, call))
            await db.run_sync(do_phase2, call, "cancel")

    def note(self, what: str, db: Connection, call: Call[Debit]) -> None:
        self.ran.append((what, call.xid, call.branch_id, db.get_transaction()))
        if call.payload.mode == "hot" and what == "try":
            db.execute(text("UPDATE counters SET n = n + 1 WHERE name = 'hot'"))

    def hold_up(self, what: str, call: Call[Debit]) -> None:
        """The one call that the others have to wait for does so here, and whoever is to be slow."""
        if self.stopper is not None and self.stopper[:2] == (what, call.xid):
            self.stopper[2].pass_through()
        elif call.payload.mode == "slow" and (gate := self.gates.get(call.xid)) is not None:
            gate.pass_through()

    def of(self, xid: str, mode: str = "plain", **changes: Any) -> dict[str, Any]:
        """What `message` and `call` are given for a call that runs together with its like."""
        return {"xid": xid, "mode": mode, "account": ACCOUNT, **changes}

    async def ask(self, phase: Any, xid: str, mode: str = "plain", **changes: Any) -> participant_pb2.Reply:
        """One unary call."""
        return await self.call(phase, **self.of(xid, mode, **changes))

    async def together(self, messages: Iterable[participant_pb2.Call]) -> dict[int, participant_pb2.Reply]:
        """Have these run in one batch, behind a call of the same kind that keeps them waiting; replies by call id."""
        sent = list(messages)
        async with Stopped(self, sent[0].phase):
            return await self.answers(sent)

    async def answers(self, sent: list[participant_pb2.Call]) -> dict[int, participant_pb2.Reply]:
        """Send them on one stream; when all have arrived, the call that they wait for goes on."""
        assert len({each.call_id for each in sent}) == len(sent)
        last = self.message(TRY, new_xid(), participant="another", call_id=LAST)

        async def requests() -> AsyncIterator[participant_pb2.ExchangeRequest]:
            yield participant_pb2.ExchangeRequest(calls=[*sent, last])

        replies = {}
        async for response in self.stub.Exchange(requests()):
            replies.update({reply.call_id: reply for reply in response.replies})
            if LAST in replies and self.stopper is not None:
                self.stopper[2].opened.set()
        del replies[LAST]
        return replies

    def batches(self, *xids: str, what: str | None = None) -> list[int]:
        """How many handlers ran in each local transaction, for these, in the order of their beginnings."""
        counts: dict[int, int] = {}
        for ran, xid, _, transaction in self.ran:
            if xid in xids and what in (None, ran):
                counts[id(transaction)] = counts.get(id(transaction), 0) + 1
        return list(counts.values())


class Stopped:
    """In the block a call of that phase runs, and waits until its gate is opened."""

    def __init__(self, world: Together, phase: Any) -> None:
        self._world = world
        self._phase = phase

    async def __aenter__(self) -> Gate:
        world, xid = self._world, new_xid()
        if self._phase != TRY:
            assert (await world.ask(TRY, xid)).outcome == DONE
        what = {TRY: "try", CONFIRM: "confirm", CANCEL: "cancel"}[self._phase]
        gate = Gate()
        world.stopper = what, xid, gate
        self._call = asyncio.create_task(world.ask(self._phase, xid, timeout=30))
        await gate.wait_reached()
        return gate

    async def __aexit__(self, *_: object) -> None:
        assert self._world.stopper is not None
        self._world.stopper[2].opened.set()
        assert (await self._call).outcome == DONE
        self._world.stopper = None
