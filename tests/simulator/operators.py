"""Operators: what they do by hand, at any time, and what they put right in the end."""

from __future__ import annotations

import asyncio
import contextlib

from coordinator.engine import Engine
from coordinator.model import BranchStatus, State, Transaction
from coordinator.orders import OperatorCancel, Order, Resolve, Retry

from .coordinators import SERVED, Client, Unanswered
from .invariants import Watch, decision
from .loop import World
from .plan import OperatorPlan


async def put_right(client: Client, watch: Watch, world: World) -> None:
    """An operator who looks, again and again, at what needs a person.

    That is what another has resolved against the fence: what its participant says is not so, is resolved the other way
    round. And what a restored store has decided otherwise than what had been done by then.
    """
    while True:
        await asyncio.sleep(5.0)
        for xid, tx in list(watch.stands.items()):
            if tx.state.finished or not decision(tx.state):
                continue
            for n in range(len(tx.steps)):
                order = _contradicted(tx, n) or (_restored(tx, n) if xid in watch.losses else None)
                if order is not None:
                    await _ask_once(client, bytes.fromhex(xid), order)
                    world.counts[f"resolved by hand: {order.reason}"] += 1


def _contradicted(tx: Transaction, n: int) -> Resolve | None:
    resolution = tx.resolution_of(n)
    if resolution is None or "otherwise than it was resolved" not in tx.steps[n].error:
        return None
    return Resolve(n + 1, not resolution.confirmed, "op", "the participant says otherwise")


def _restored(tx: Transaction, n: int) -> Resolve | None:
    """What a restore has made of a branch that was done already; or that has another one's number by now."""
    step, confirmed = tx.steps[n], decision(tx.state) == "cancel"
    if step.status in (BranchStatus.CONFIRMED, BranchStatus.CANCELLED) or not step.error:
        return None
    if "another action or payload" in step.error:  # its fence keeps the row of the lost one: nobody can write it down
        return Resolve(n + 1, not confirmed, "op", "its number was another's", lost=True)
    return Resolve(n + 1, confirmed, "op", "done before a restore") if tx.resolution_of(n) is None else None


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
