"""What the participant of the races does: it moves money, in its own database or at a payment provider.

A Try holds money on its accounts, Confirm spends it, Cancel gives it back, and each leaves a row in `effects`, which
has no unique key. Of every account `available + held + spent` never changes. The external action tells a provider,
which remembers all that it was told. The handlers are written once, as generators of statements and points.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from sqlalchemy import Connection, TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from participant_sdk import Call, Participant, Refused
from tests.races import faults
from tests.races.actor import ACTOR

MOVE: Final = "move"
AUTHORISE: Final = "authorise"
"""The two actions; the second is external."""
REFUSAL: Final = "no_funds"
TOLD_TRY: Final = "authorise"
TOLD_CONFIRM: Final = "capture"
TOLD_CANCEL: Final = "void"

_HOLD = text("UPDATE accounts SET available = available - :amount, held = held + :amount WHERE id = :account")
_SPEND = text("UPDATE accounts SET held = held - :amount, spent = spent + :amount WHERE id = :account")
_RETURN = text("UPDATE accounts SET held = held - :amount, available = available + :amount WHERE id = :account")
_EFFECT = text("INSERT INTO effects (xid, branch_id, what) VALUES (:xid, :branch_id, :what)")

R = TypeVar("R")
Work: TypeAlias = Generator["str | tuple[TextClause, dict[str, Any]]", None, R]
"""What a handler does: names points, and gives statements to execute."""


@dataclass(frozen=True)
class Move:
    """The payload. `writes`: whether the Try of the external action uses the database, too."""

    accounts: list[int]
    amount: int
    writes: bool = True


@dataclass(frozen=True)
class Held:
    """What Try returns: which run of its handler it was."""

    run: str


class Provider:
    """What it was told about each branch, in order, and by which call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: dict[tuple[str, int], list[tuple[str, str]]] = {}
        self._runs = 0

    def next_run(self) -> str:
        """A number that no other run of a Try handler has."""
        with self._lock:
            self._runs += 1
            return str(self._runs)

    def tell(self, call: Call[Move], what: str) -> None:
        """It does as it is told, at once and for good."""
        actor = ACTOR.get()
        with self._lock:
            self._told.setdefault((call.xid, call.branch_id), []).append((what, actor.name))
        actor.note(f"the provider is told: {what}")

    def told(self, xid: str, branch_id: int) -> list[tuple[str, str]]:
        """All that it was told about a branch: what, and by whom."""
        return self._told.get((xid, branch_id), [])


class HasProvider(Protocol):
    """Where the handlers look for the provider."""

    provider: Provider


class Handlers:
    """The handlers' work, for both stacks."""

    def __init__(self, bank: HasProvider) -> None:
        self._bank = bank

    @property
    def _provider(self) -> Provider:
        return self._bank.provider

    def hold(self, call: Call[Move]) -> Work[Held]:
        """Try of `move`."""
        actor = ACTOR.get()
        run = actor.handles(self._provider.next_run())
        yield from _on_accounts(call, _HOLD, "hold")
        yield from _stop(faults.IN_HANDLER, run)
        yield _effect(call, f"try {run}")
        actor.tried.append(run)
        return Held(run)

    def spend(self, call: Call[Move]) -> Work[None]:
        """Confirm of `move`."""
        ACTOR.get().handles("confirm")
        yield from _on_accounts(call, _SPEND, "spend")
        yield from _stop(faults.IN_HANDLER)
        yield _effect(call, f"confirm {_run(call)}")

    def give_back(self, call: Call[Move]) -> Work[None]:
        """Cancel of `move`."""
        ACTOR.get().handles("cancel")
        yield from _on_accounts(call, _RETURN, "give back")
        yield from _stop(faults.IN_HANDLER)
        yield _effect(call, f"cancel {_run(call)}")

    def authorise(self, call: Call[Move]) -> Work[Held]:
        """Try of `authorise`."""
        actor = ACTOR.get()
        run = actor.handles(self._provider.next_run())
        yield from _stop(faults.IN_HANDLER, run)
        if call.payload.writes:
            yield _effect(call, f"try {run}")
        self._provider.tell(call, TOLD_TRY)
        yield from _stop(faults.AFTER_EFFECT)
        actor.tried.append(run)
        return Held(run)

    def capture(self, call: Call[Move]) -> Work[None]:
        """Confirm of `authorise`."""
        ACTOR.get().handles("confirm")
        self._provider.tell(call, TOLD_CONFIRM)
        yield from _stop(faults.IN_HANDLER)
        yield _effect(call, f"confirm {_run(call)}")

    def void(self, call: Call[Move]) -> Work[None]:
        """Cancel of `authorise`."""
        ACTOR.get().handles("cancel")
        self._provider.tell(call, TOLD_CANCEL)
        yield from _stop(faults.IN_HANDLER)
        yield _effect(call, f"cancel {_run(call)}")


def _stop(place: str, run: str = "") -> Iterator[str]:
    """A point where something may strike; the handler's own faults come true here."""
    actor = ACTOR.get()
    fault = actor.strike(place)
    yield place
    if fault is not None and fault.kind == faults.FAILING:
        raise RuntimeError("a failing handler")
    if fault is not None and fault.kind == faults.REFUSING and run:
        actor.refused.append(run)
        raise Refused(REFUSAL, run)


def _on_accounts(call: Call[Move], statement: TextClause, what: str) -> Iterator[Any]:
    for number, account in enumerate(call.payload.accounts):
        if number:
            yield f"{what}: between two accounts"
        yield statement, {"account": account, "amount": call.payload.amount}


def _effect(call: Call[Move], what: str) -> tuple[TextClause, dict[str, Any]]:
    return _EFFECT, {"xid": call.xid, "branch_id": call.branch_id, "what": what}


def _run(call: Call[Move]) -> str | None:
    return None if call.result is None else str(call.result.run)


def _done(work: Work[R], db: Connection) -> R:
    try:
        while True:
            step = next(work)
            if isinstance(step, str):
                ACTOR.get().point(step)
            else:
                db.execute(*step)
    except StopIteration as stop:
        result: R = stop.value
        return result


async def _done_async(work: Work[R], db: AsyncConnection) -> R:
    while True:
        try:
            step = next(work)
        except StopIteration as stop:
            result: R = stop.value
            return result
        if isinstance(step, str):
            await ACTOR.get().point_async(step)
        else:
            await db.execute(*step)


def define(participant: Participant, handlers: Handlers) -> None:
    """Both actions, for an Engine."""

    @participant.action(MOVE)
    def move(call: Call[Move], db: Connection) -> Held:
        return _done(handlers.hold(call), db)

    @move.confirm
    def spend(call: Call[Move], db: Connection) -> None:
        _done(handlers.spend(call), db)

    @move.cancel
    def give_back(call: Call[Move], db: Connection) -> None:
        _done(handlers.give_back(call), db)

    @participant.action(AUTHORISE, external=True)
    def authorise(call: Call[Move], db: Connection) -> Held:
        return _done(handlers.authorise(call), db)

    @authorise.confirm
    def capture(call: Call[Move], db: Connection) -> None:
        _done(handlers.capture(call), db)

    @authorise.cancel
    def void(call: Call[Move], db: Connection) -> None:
        _done(handlers.void(call), db)


def define_async(participant: Participant, handlers: Handlers) -> None:
    """Both actions, for an AsyncEngine."""

    @participant.action(MOVE)
    async def move(call: Call[Move], db: AsyncConnection) -> Held:
        return await _done_async(handlers.hold(call), db)

    @move.confirm
    async def spend(call: Call[Move], db: AsyncConnection) -> None:
        await _done_async(handlers.spend(call), db)

    @move.cancel
    async def give_back(call: Call[Move], db: AsyncConnection) -> None:
        await _done_async(handlers.give_back(call), db)

    @participant.action(AUTHORISE, external=True)
    async def authorise(call: Call[Move], db: AsyncConnection) -> Held:
        return await _done_async(handlers.authorise(call), db)

    @authorise.confirm
    async def capture(call: Call[Move], db: AsyncConnection) -> None:
        await _done_async(handlers.capture(call), db)

    @authorise.cancel
    async def void(call: Call[Move], db: AsyncConnection) -> None:
        await _done_async(handlers.void(call), db)
