"""Initiators: they ask, wait, ask again elsewhere, and sometimes die."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from coordinator.engine import Engine, KeyReused, UnknownXid, Until
from coordinator.model import BranchSpec, BranchStatus, Joined, Payload, State, Transaction
from coordinator.orders import AddBranch, Cancel, Confirm, Denied, Order, Renew
from participant_sdk.client_enlisting import Enlisted
from participant_sdk.enlist_errors import NotEnlisted
from participant_sdk.errors import Refused
from participant_sdk.payload import BYTES

from .calls_out import TIMES_MAX, CallsOut
from .coordinators import SERVED, Client, CoordinatorNode, Unanswered
from .handlers import Behaviour, payload_of
from .invariants import Watch
from .loop import World
from .plan import BranchPlan, TransactionPlan

TRIES_MAX = 200
PAUSE_S_MIN, PAUSE_S_MAX = 0.05, 1.0


class Gone(Exception):
    """Its transaction is not on record any more."""


class GaveUp(Exception):
    """Asked many times, and never answered."""


def key_of(plan: TransactionPlan) -> bytes:
    """The idempotency key of a planned transaction."""
    return b"town\0order-%d" % plan.number


def specs_of(plan: TransactionPlan) -> tuple[BranchSpec, ...]:
    """What it asks for."""
    return tuple(_spec_of(branch) for _, branch in plan.branches)


def behaviours_of(plan: TransactionPlan) -> dict[BranchSpec, Behaviour]:
    """How its branches behave, those below them too."""
    behaviours = {}
    for _, branch in plan.branches:
        each: BranchPlan | None = branch
        while each is not None:
            behaviours[_spec_of(each)] = each.behaviour
            each = each.below
    return behaviours


def _spec_of(branch: BranchPlan) -> BranchSpec:
    below = None if branch.below is None else _spec_of(branch.below)
    calls = None if below is None else (below.participant, below.action, below.payload.data)
    payload = payload_of(branch.account, branch.amount, calls)
    return BranchSpec(f"p{branch.participant + 1}", branch.action, Payload(payload, BYTES))


class Initiator:
    """One process that wants one transaction."""

    def __init__(
        self,
        world: World,
        client: Client,
        watch: Watch,
        plan: TransactionPlan,
        name: str,
        calls_out: CallsOut,
    ) -> None:
        self._world = world
        self._calls_out = calls_out
        self._client = client
        self._watch = watch
        self._plan = plan
        self.name = name
        self._key = key_of(plan)
        self.answer: Transaction | None = None
        """The final answer that it was told."""
        self.ended = False

    async def run(self) -> None:
        """Until it knows how its transaction has ended."""
        try:
            if self._plan.interactive:
                self.answer = await self._interactive()
            else:
                self.answer = await self._execute(specs_of(self._plan))
        except KeyReused as error:
            self.ended = True
            self._world.counts["keys refused to the later request"] += 1
            self._watch.refused(self._key, error.xid, specs_of(self._plan))
            return
        except Gone:
            self.ended = True
            self._world.counts["initiators whose transaction is gone"] += 1
            return
        self.ended = True
        self._world.note(self.name, f"is told {self.answer.state.name}")

    async def run_other(self) -> None:
        """Ask for something else under the same key: refused, unless it comes first."""
        branches = specs_of(self._plan)
        other = (*branches[:-1], branches[-1]._replace(payload=Payload(payload_of("a", 41), BYTES)))
        try:
            tx = await self._execute(other)
        except KeyReused as error:
            self._world.counts["keys refused to another request"] += 1
            self._watch.refused(self._key, error.xid, other)
        else:
            if tx.spec.branches[: tx.begun] != other:
                self._watch.ran_other(self._key, f"another request was told {tx.state.name}")
        self.ended = True

    # --- begun with all its branches -----------------------------------------------------------------------

    async def _execute(self, branches: tuple[BranchSpec, ...]) -> Transaction:
        plan = self._plan
        until = Until[plan.until]

        async def work(engine: Engine) -> Transaction:
            started = await engine.begin(self._key, plan.timeout_ms, branches, ordered=plan.kind == "ordered")
            return await engine.wait(started.tx, until, plan.patience_s * 0.9)

        while True:
            tx: Transaction = await self._ask("Execute", work)
            self._watch.told(self._key, tx)
            if until(tx):
                return tx

    # --- interactive ---------------------------------------------------------------------------------------

    async def _interactive(self) -> Transaction:
        plan = self._plan

        async def begin(engine: Engine) -> Transaction:
            return (await engine.begin(self._key, plan.timeout_ms, (), interactive=True)).tx

        tx = await self._ask("Begin", begin)
        self._watch.told(self._key, tx)
        xid = tx.spec.xid
        if plan.renews:
            await self._order(xid, Renew(plan.timeout_ms))
        branches = list(enumerate(specs_of(plan)))
        if plan.together:
            ids = await asyncio.gather(*(self._join(xid, n, branch) for n, branch in branches))
        else:
            ids = [await self._join(xid, n, branch) for n, branch in branches]
        tried = [branch_ids for branch_ids in ids if branch_ids]
        if plan.forgets:
            tried = tried[1:]
        seen = {branch_id for branch_ids in tried for branch_id in branch_ids}
        swallows = plan.kind == "direct" and plan.forgets  # what failed, is done without
        if seen and (swallows or len(tried) == len(ids)) and not plan.cancels:
            self._watch.confirms.setdefault(self._key, set()).update(seen)
            ended = await self._order(xid, Confirm(frozenset(seen)))
            if ended is None and swallows:
                ended = await self._order(xid, Cancel("a branch is missing"))
        elif plan.forgets and seen:
            ended = await self._order(xid, Confirm(frozenset(seen)))
            if ended is None:
                ended = await self._order(xid, Cancel("forgot a branch"))
        else:
            ended = await self._order(xid, Cancel("not all were tried"))
        until = Until[plan.until]

        async def wait(engine: Engine) -> Transaction:
            return await engine.wait(await engine.get_by_xid(xid), until, plan.patience_s * 0.9)

        while ended is None or not until(ended):
            ended = await self._ask("Get", wait)
            self._watch.told(self._key, ended)
        return ended

    async def _join(self, xid: bytes, n: int, branch: BranchSpec) -> frozenset[int]:
        """Have a branch tried, by the coordinator or directly; its branch_id and those below it, if it was tried."""
        if self._plan.kind == "direct" and n % 2 == 0:
            return await self._call(xid, n, branch)
        return await self._try(xid, n, branch)

    async def _call(self, xid: bytes, n: int, branch: BranchSpec) -> frozenset[int]:
        """Call a participant directly, a few times with the same branch key; then go on without it."""
        for _ in range(TIMES_MAX):
            end = await self._calls_out.call(xid.hex(), 0, f"b{n}", branch, self._plan.patience_s * 2)
            if isinstance(end, Enlisted):
                self._world.counts["branches enlisted and tried"] += 1
                return end.tried_branch_ids | {end.branch_id}
            if isinstance(end, Refused | NotEnlisted):
                return frozenset()
        self._world.counts["direct calls given up"] += 1
        return frozenset()

    async def _try(self, xid: bytes, n: int, branch: BranchSpec) -> frozenset[int]:
        """Add a branch, and ask again until its Try is answered; its branch_id if it was tried."""
        order = AddBranch(branch, Joined(f"b{n}"))

        async def work(engine: Engine) -> tuple[Transaction, int]:
            tx = await engine.order(xid, order)
            index = order.find(tx)
            assert index is not None

            def answered(now: Transaction) -> bool:
                return now.steps[index].status is not BranchStatus.PENDING or now.state is not State.TRYING

            return await engine.wait(tx, answered, self._plan.patience_s * 0.9), index

        while True:
            try:
                tx, index = await self._ask(f"Try {n + 1}", work)
            except Denied as denied:
                self._world.counts[f"denied {denied.reason}"] += 1
                return frozenset()
            self._watch.told(self._key, tx)
            if tx.steps[index].status is BranchStatus.TRIED and tx.state is State.TRYING:
                return frozenset((int(index) + 1,))
            if tx.state is not State.TRYING or tx.steps[index].status is BranchStatus.REFUSED:
                return frozenset()

    async def _order(self, xid: bytes, order: Order) -> Transaction | None:
        """Have an order carried out; None if it was denied."""

        async def work(engine: Engine) -> Transaction:
            return await engine.order(xid, order)

        try:
            tx: Transaction = await self._ask(type(order).__name__, work)
        except Denied as denied:
            self._world.counts[f"denied {denied.reason}"] += 1
            return None
        self._watch.told(self._key, tx)
        return tx

    async def _ask(self, what: str, work: Callable[[Engine], Awaitable[Any]]) -> Any:
        """Ask until there is an answer, each time some coordinator. Raises KeyReused, Denied, GaveUp."""
        pause_s = PAUSE_S_MIN
        target = self._client.any()
        for _ in range(TRIES_MAX):
            try:
                return await self._client.ask(target, f"{what} {self._plan.number}", work, self._plan.patience_s)
            except (KeyReused, Denied):
                raise
            except (*SERVED, Unanswered) as error:
                if isinstance(error, UnknownXid) and self._watch.losses.lost:
                    raise Gone from error
                self._world.counts["initiators asked again"] += 1
                self._world.note(self.name, f"asks again after {type(error).__name__}")
            if isinstance(target, CoordinatorNode):
                target = self._client.any()
            await asyncio.sleep(pause_s * (0.5 + self._world.random.random()))
            pause_s = min(pause_s * 2, PAUSE_S_MAX)
        raise GaveUp(what)
