"""The SDK's own code, unchanged, with a point at each of its steps that can matter.

Its generator of steps is wrapped from outside; the loop that runs it, and runs it again, is the SDK's.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection

from participant_sdk import engines, external, local_transaction
from participant_sdk.call import IncomingCall, Reply
from participant_sdk.local_transaction import Fence, Steps
from participant_sdk.steps import Step
from tests.races import faults
from tests.races.actor import ACTOR, Actor, name_of
from tests.races.faults import Killed

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection


@dataclass(frozen=True, slots=True)
class Watched:
    """A step that is a point."""

    step: Step
    kind: str
    actor: Actor

    def perform(self, connection: Connection) -> Any:
        """See Step."""
        self.actor.lent(connection)
        self.actor.point(self.kind)
        breaks = self._before()
        try:
            answer = self.step.perform(connection)
        except Exception as error:
            self._failed(error, breaks)
            raise
        self._after(breaks, answer)
        return answer

    async def perform_async(self, connection: AsyncConnection) -> Any:
        """See Step."""
        assert connection.sync_connection is not None
        self.actor.lent(connection.sync_connection)
        await self.actor.point_async(self.kind)
        breaks = self._before()
        try:
            answer = await self.step.perform_async(connection)
        except Exception as error:
            self._failed(error, breaks)
            raise
        self._after(breaks, answer)
        return answer

    def _before(self) -> str | None:
        """What strikes while a COMMIT is on its way: the answer to it will be lost."""
        for place in faults.places_before(self.kind):
            self.actor.strike(place)
        fault = self.actor.strike(faults.IN_COMMIT) if self.kind == faults.COMMIT else None
        return None if fault is None else fault.kind

    def _failed(self, error: Exception, breaks: str | None) -> None:
        if breaks == faults.KILLED:
            self.actor.die_with_instance()
        self.actor.failed(self.kind, error)

    def _after(self, breaks: str | None, answer: Any) -> None:
        if breaks == faults.KILLED:
            self.actor.die_with_instance()
        elif breaks is not None:  # the answer was faster: whoever has the connection next must find it dead at once
            self.actor.cut()
        if self.kind == faults.FENCE_WRITE and answer is None:
            return  # it was not sent, since something has to be prepared first
        for place in faults.places_after(self.kind):
            self.actor.strike(place)


@dataclass(frozen=True, slots=True)
class Buried:
    """Any step of a task: if the process dies in it, its connection is gone before anybody can say ROLLBACK to it."""

    step: Step

    def perform(self, connection: Connection) -> Any:
        """See Step."""
        return self.step.perform(connection)

    async def perform_async(self, connection: AsyncConnection) -> Any:
        """See Step."""
        try:
            return await self.step.perform_async(connection)
        except Killed:
            with suppress(Exception):
                await connection.invalidate()
            raise


class WatchedSteps(Generator[Step, Any, Reply]):
    """The SDK's generator of steps, with points in it."""

    def __init__(self, steps: Steps, actor: Actor) -> None:
        self._steps = steps
        self._actor = actor

    def send(self, value: Any) -> Step:
        """See Generator."""
        return self._watched(self._steps.send(value))

    def throw(self, *error: Any) -> Step:
        """See Generator."""
        return self._watched(self._steps.throw(*error))

    def _watched(self, step: Step) -> Step:
        kind = faults.kind_of(step)
        if kind is not None:
            step = Watched(step, kind, self._actor)
        return step if self._actor.loop is None else Buried(step)


@contextmanager
def watched() -> Iterator[None]:
    """In the `with` block every call that the SDK runs is an Actor's; a lost race is run again without a pause."""
    steps_of, after_error = local_transaction.steps_of, local_transaction.after_error
    pause, aftermath_pause = local_transaction.PAUSE_FIRST_SECONDS, external.AFTERMATH_PAUSE_SECONDS

    def watched_steps(call: IncomingCall, fence: Fence) -> Steps:
        actor = ACTOR.get()
        actor.steps = steps_of(call, fence)
        return WatchedSteps(actor.steps, actor)

    def noted(call: IncomingCall, error: Exception, runs: int, *more: Any) -> Reply | float:
        following = after_error(call, error, runs, *more)
        actor = ACTOR.get()
        if isinstance(following, float):
            actor.lost_races.append(name_of(error))
        actor.note(f"run {runs} ended: {name_of(error)}" + (", again" if isinstance(following, float) else ""))
        return following

    vars(engines).update(steps_of=watched_steps, after_error=noted)
    vars(local_transaction).update(PAUSE_FIRST_SECONDS=0.0)
    vars(external).update(AFTERMATH_PAUSE_SECONDS=0.0)
    try:
        yield
    finally:
        vars(engines).update(steps_of=steps_of, after_error=after_error)
        vars(local_transaction).update(PAUSE_FIRST_SECONDS=pause)
        vars(external).update(AFTERMATH_PAUSE_SECONDS=aftermath_pause)
