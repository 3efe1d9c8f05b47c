"""Operators: what they do by hand, at any time, and what they put right in the end."""

from __future__ import annotations

import asyncio
import contextlib

from coordinator.engine import Engine
from coordinator.model import State, Transaction
from coordinator.orders import OperatorCancel, Order, Resolve, Retry

from .coordinators import SERVED, Client, Unanswered
from .invariants import Watch
from .loop import World
from .plan import OperatorPlan


async def put_right(client: Client, watch: Watch, world: World) -> None:
    """An operator who looks, again and again, at what needs attention for what another has resolved against the fence.

    What its participant says is not so, is resolved the other way round.
    """
    while True:
        await asyncio.sleep(5.0)
        for xid, tx in list(watch.stands.items()):
            for n, step in enumerate(tx.steps):
                resolution = tx.resolution_of(n)
                if tx.state.finished or resolution is None or "otherwise than it was resolved" not in step.error:
                    continue
                order = Resolve(n + 1, not resolution.confirmed, "op", "the participant says otherwise")
                await _ask_once(client, bytes.fromhex(xid), order)
                world.counts["resolved by hand the other way"] += 1


async def _ask_once(client: Client, xid: bytes, order: Order) -> None:
    async def work(engine: Engine) -> Transaction:
        return await engine.order(xid, order)

    with contextlib.suppress(*SERVED, Unanswered):
        await client.ask(client.any(), "operator resolve", work, 2.0)


class Operator:
    """Does by hand what a plan says, once."""

    def __init__(self, client: Client, watch: Watch, world: World, key: bytes, plan: OperatorPlan) -> None:
        self._client = client
        self._watch = watch
        self._world = world
        self._key = key
        self._plan = plan

    async def run(self) -> None:
        """One request, whatever comes of it."""
        plan = self._plan
        orders: dict[str, Order] = {
            "cancel": OperatorCancel("op", "asked to"),
            "retry": Retry(),
            "resolve": Resolve(plan.branch_id, plan.confirmed, "op", "by hand"),
        }
        order = orders[plan.action]

        async def work(engine: Engine) -> Transaction | None:
            found = await engine.get(key=self._key)
            return None if found is None else await engine.order(found.spec.xid, order)

        try:
            tx = await self._client.ask(self._client.any(), f"operator {plan.action}", work, 2.0)
        except (*SERVED, Unanswered) as error:
            self._world.counts[f"operator {plan.action} failed"] += 1
            self._world.note("operator", f"{plan.action}: {type(error).__name__} {error}")
            return
        if tx is not None:
            self._world.counts[f"operator {plan.action}"] += 1
            self._watch.told(self._key, tx)
            if plan.action == "cancel" and tx.state not in (State.CANCELLING, State.CANCELLED):
                self._watch.wrong(6, f"an operator was told that {tx.spec.xid.hex()} is cancelled: {tx.state.name}")
