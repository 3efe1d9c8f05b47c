"""The participants of a run: the SDK's own code in processes of the town, on simulated databases of theirs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import cast

from participant_sdk.call import Call
from participant_sdk.upkeep import Upkeep

from .calls_out import CallsOut
from .coordinators import Client
from .database_faults import DatabaseFaults
from .database_server import Committed, DatabaseServer
from .handlers import Behaviour, Business
from .instances import SimInstance
from .invariants import Watch, stray_name
from .loop import SimLoop, World
from .participants import Answered, Service
from .plan import ParticipantPlan
from .store_rows import Database
from .transactions import Flavour

BALANCE = 1_000
ACCOUNTS = ("a", "b")


class SimParticipant:
    """A participant: a name, a database, and the instances that serve it."""

    def __init__(
        self,
        world: World,
        plan: ParticipantPlan,
        watch: Watch,
        retention_ms: int,
        behaviour_of: Callable[[str, int], Behaviour],
        registry: Database,
        client_of: Callable[[SimLoop], Client],
        calls_out_of: Callable[[SimLoop], CallsOut],
    ) -> None:
        self.name = plan.name
        self.plan = plan
        source = random.Random(world.random.getrandbits(64))
        t = plan.trouble
        faults = DatabaseFaults(
            lost_before=t * 0.05, lost_after=t * 0.05, lands_later=t * 0.05, conflict=t * 0.1,
            conflict_at_commit=t * 0.15, slow=t * 0.05,
        )  # fmt: skip
        self.server = DatabaseServer(
            world, f"{plan.name}-db", source, flavour=Flavour[plan.flavour], faults=faults, skew_ms=plan.skew_ms
        )
        stray = DatabaseServer(
            world, f"{plan.name}-stray", source, flavour=Flavour[plan.flavour], faults=DatabaseFaults()
        )
        for server, name in ((self.server, plan.name), (stray, stray_name(plan.name))):
            for account in ACCOUNTS:
                server.open_account(account, BALANCE)
            watch.opens(name, ACCOUNTS, BALANCE)
            server.on_commit.append(partial(_tell, watch, name))

        async def call_below(call: Call[bytes]) -> None:
            await calls_out_of(cast(SimLoop, asyncio.get_running_loop())).call_below(call)

        business = Business(random.Random(source.getrandbits(64)), behaviour_of, call_below=call_below)
        self.service = Service(
            plan.name,
            self.server,
            business,
            retention_ms,
            lease_ms=plan.intent_lease_ms,
            upkeep=Upkeep(resolve_after=timedelta(seconds=plan.resolve_after_s), batch=2),
            says_error=plan.says_error,
            batch=world.seed % 2 == 1,
        )

        def answered(answer: Answered) -> None:
            name = plan.name if answer.node.fence_id == self.server.fence_id else stray_name(plan.name)
            watch.answered(name, answer.call, answer.true)

        self.service.on_answer.append(answered)
        self.service.on_resolve = partial(watch.resolves, plan.name)
        names = (plan.name, f"{plan.name}b") if plan.second else (plan.name,)
        self.instances = [
            SimInstance(world, name, plan, self.service, stray, registry, watch.losses, client_of, source)
            for name in names
        ]


def _tell(watch: Watch, name: str, committed: Committed) -> None:
    watch.committed(name, committed.changes)
