"""Coordinators broken on purpose, by substitution, to see that the judge notices. $TRICORD_CRASH_BROKEN names one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, cast

from coordinator.engine import Engine
from coordinator.journal import Started
from coordinator.live import Live
from coordinator.machine import due
from coordinator.model import Call, State, Transaction
from coordinator.store.postgres_flush import FLUSHES

VARIABLE: Final = "TRICORD_CRASH_BROKEN"

Come = Callable[[Iterable[str]], None]
"""Blocks until points have come."""


async def have_left(calls: Iterable[Call], come: Come) -> None:
    """Return when all have left this process."""
    await asyncio.to_thread(come, [f"after send {call.phase.name} {call.branch + 1}" for call in calls])


def decide_then_save(come: Come) -> None:
    """The calls that a decision owes leave before it is stored."""
    save = Live.save

    async def sends_first(self: Live, tx: Transaction) -> Transaction:
        if self.tx.state is State.TRYING and tx.state is not State.TRYING:
            calls = due(tx, self.now_ms(), cast(Engine, self._host).policy)
            self.send(tx, calls)
            await have_left(calls, come)
        return await save(self, tx)

    put(Live, save=sends_first)


def try_then_begin(come: Come) -> None:
    """Trys leave before their transaction is stored."""

    async def sends_first(self: Engine, tx: Transaction) -> Started:
        self._adopt(tx)
        await have_left(due(tx, self.store.now_ms(), self.policy), come)
        begun = await self.journal.begin(tx)
        return Started(begun.tx, begun.new)

    def begins(self: Engine, tx: Transaction) -> asyncio.Task[Started]:
        return asyncio.get_running_loop().create_task(sends_first(self, tx))

    put(Engine, _begin=begins)


def accept_stale_saves(come: Come) -> None:
    """A save goes over whatever version stands there (on PostgreSQL)."""
    compared = b" AND t.version = s.version - 1"
    for kind, statement in FLUSHES.items():
        if statement.count(compared) != kind.saves:
            raise AssertionError(f"the flush of {kind} does not compare as this was written for")
        FLUSHES[kind] = statement.replace(compared, b"")


BROKEN: Final[Mapping[str, Callable[[Come], None]]] = {
    "decide_then_save": decide_then_save,
    "try_then_begin": try_then_begin,
    "accept_stale_saves": accept_stale_saves,
}


def break_as_named(come: Come) -> None:
    """Break this process as the environment says, if it does."""
    name = os.environ.pop(VARIABLE, "")
    if name:
        BROKEN[name](come)


def put(owner: type, **replacements: Any) -> None:
    """Put functions in the place of a class's own."""
    for name, replacement in replacements.items():
        setattr(owner, name, replacement)
