"""One call in a race: the points at which it stops until it is chosen, and what strikes it there."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Connection

from participant_sdk.call import IncomingCall, Reply
from participant_sdk.local_transaction import Steps
from tests.races import faults
from tests.races.faults import Fault, Killed, Traps
from tests.races.schedule import Runner, Schedule, State

ACTOR: Final[ContextVar[Actor]] = ContextVar("tricord_races_actor")


@dataclass
class Clock:
    """How much time a call has left, in s; it does not pass by itself."""

    left: float


@dataclass(frozen=True, slots=True)
class TimedCall(IncomingCall):
    """A call whose time is up when the race says so."""

    clock: Clock = field(default_factory=lambda: Clock(30.0), compare=False)

    def seconds_left(self) -> float:
        """See IncomingCall."""
        return self.clock.left


@dataclass(eq=False)
class Actor:
    """A call of one of the instances, and all that is known about it. What happened is told by numbers that rise."""

    name: str
    instance: int
    call: TimedCall
    traps: Traps
    number: Callable[[], int]
    loop: asyncio.AbstractEventLoop | None = None
    schedule: Schedule | None = None
    together: list[Actor] = field(default_factory=list)
    """All that run now, on every instance."""
    aside: list[str] = field(default_factory=list)
    """The trace of a call that meets nobody."""
    invoked: int = 0
    answered: int | None = None
    reply: Reply | None = None
    crashed: BaseException | None = None
    killed: bool = False
    died: int | None = None
    """When it was killed, if by then nothing was on its way that the database could still carry out."""
    struck: list[Fault] = field(default_factory=list)
    tried: list[str] = field(default_factory=list)
    """What the Try handler has returned, once per run of it."""
    handled: int = 0
    refused: list[str] = field(default_factory=list)
    lost_races: list[str] = field(default_factory=list)
    steps: Steps | None = None
    racing: bool = False
    really_dies: Callable[[str], None] | None = None
    """How the process dies at a place, where it is one of its own."""
    _raw: Any = None
    _connection: Connection | None = None

    def __post_init__(self) -> None:
        self._gate = threading.Semaphore(0)
        self._woken: asyncio.Event | None = None
        self.runner = Runner(self.name, self._wake)

    def hit_by(self, *kinds: str) -> bool:
        """Whether a fault of these kinds has struck it."""
        return any(fault.kind in kinds for fault in self.struck)

    def handles(self, what: str) -> str:
        """Its handler begins."""
        self.handled += 1
        self.note(f"handler: {what}")
        return what

    def ended(self, reply: Reply) -> None:
        """The SDK has answered; whether anybody hears it depends on the process."""
        if self.killed:
            raise Killed
        self.reply = reply
        self.answered = self.number()
        self.note(f"-> {shown(reply)}")

    def gone(self) -> None:
        """Its process is: no code of it may run any more, that of `finally` included."""
        self.note("is gone")
        for _ in range(3):
            with suppress(RuntimeError):  # a generator that yields once more
                if self.steps is not None:
                    self.steps.close()

    @property
    def hit_in_commit(self) -> bool:
        """Whether it does not know what became of a COMMIT."""
        return any(fault.place == faults.IN_COMMIT for fault in self.struck)

    # --- points ---

    def _wake(self) -> None:
        if self.loop is None:
            self._gate.release()
        elif self._woken is not None:
            self.loop.call_soon_threadsafe(self._woken.set)

    def point(self, text: str) -> None:
        """Stop until chosen. In a thread."""
        if self.schedule is None:
            self.aside.append(text)
        elif not self.schedule.arrive(self.runner, text):
            self._gate.acquire()
        self._check_alive()

    async def point_async(self, text: str) -> None:
        """Stop until chosen. In a task."""
        if self.schedule is None:
            self.aside.append(text)
        else:
            self._woken = asyncio.Event()
            if not self.schedule.arrive(self.runner, text):
                await self._woken.wait()
        self._check_alive()

    def note(self, text: str) -> None:
        """Put something into the trace."""
        if self.schedule is None:
            self.aside.append(text)
        else:
            self.schedule.note(self.runner, text)

    # --- what strikes ---

    def lent(self, connection: Connection) -> None:
        """It works on this connection now."""
        self._connection = connection
        self._raw = connection.connection.driver_connection

    def strike(self, place: str) -> Fault | None:
        """It has come to `place`: what happens there. The handler's own faults are given back to it."""
        fault = self.traps.at(self.call.phase, place)
        if fault is None:
            return None
        self.struck.append(fault)
        self.note(f"*** {fault.label}" + ("" if place in fault.label else f" {place}"))
        if fault.kind == faults.KILLED and self.really_dies is not None:
            self.really_dies(place)
        elif fault.kind == faults.KILLED:
            if place == faults.IN_COMMIT:
                self.cut(socket.SHUT_RD)
                return fault
            self.die_with_instance()
        elif fault.kind == faults.LOST:
            self.cut(socket.SHUT_RD if place == faults.IN_COMMIT else socket.SHUT_RDWR)
        elif fault.kind == faults.EXPIRED:
            self.call.clock.left = -1.0
        elif fault.kind == faults.SLOW:
            self.runner.sleepy = True
        return fault

    def die_with_instance(self) -> None:
        """The process is gone: this call and all others of its instance."""
        for actor in self.together:
            if actor.instance == self.instance and actor.answered is None:
                actor.killed = True
                if actor.runner.state is not State.WAITING and not actor.hit_in_commit:
                    actor.died = self.number()
                if actor is not self:
                    actor.note("*** killed with its instance")
                    if actor.runner.state is State.READY or not faults.is_file(actor._raw):
                        actor.cut()  # a file that somebody just uses cannot be closed; it ends soon
        self.killed = True
        self._check_alive()

    def _check_alive(self) -> None:
        if self.killed:
            self.cut()
            connection = self._connection
            if self.loop is None and connection is not None and not (connection.closed or connection.invalidated):
                with suppress(Exception):
                    connection.invalidate()
            raise Killed

    def cut(self, how: int = socket.SHUT_RDWR) -> None:
        """Break its connection."""
        if self._raw is not None:
            faults.cut(self._raw, how)

    def failed(self, what: str, error: BaseException) -> None:
        """A step has failed; if it is because the process is gone, it ends here."""
        self.note(f"{what} failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        self._check_alive()


def shown(reply: Reply) -> str:
    """A reply on one line."""
    more = [str(each) for each in (reply.refusal, reply.error) if each]
    if reply.result is not None:
        more.append(reply.result.data.decode(errors="replace"))
    return " ".join([reply.outcome.name, *more])


def name_of(error: BaseException) -> str:
    """The error, and the server's number of it."""
    inner = getattr(error, "orig", None) or error
    number = getattr(inner, "sqlite_errorname", None) or getattr(inner, "sqlstate", None)
    if inner.args and isinstance(inner.args[0], int):
        number = inner.args[0]
    return type(inner).__name__ if number is None else f"{type(inner).__name__} {number}"
