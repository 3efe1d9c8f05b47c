"""A simulated database server: it survives the processes that use it, and notices late that they are gone.

A request is a script of statements, which the server carries out when it arrives, whatever has become of its sender:
so a COMMIT may land after its sender was told that the connection is lost, and after the next run has begun.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from psycopg import errors

from tests.simulator.database_faults import DatabaseFaults as DatabaseFaults
from tests.simulator.database_faults import Fate
from tests.simulator.database_locks import LockQueue
from tests.simulator.transactions import (
    WRITER,
    Account,
    Blocked,
    Change,
    Flavour,
    Key,
    LocalTransaction,
    Tables,
    lost,
)


class Times(Protocol):
    """What the server needs of the world."""

    @property
    def now_ms(self) -> int:
        """The true time."""

    @property
    def now_us(self) -> int:
        """Since the beginning."""

    def at(self, delay_us: int, callback: Callable[..., object], *args: Any) -> None:
        """Have something happen in so many microseconds."""


class Committed(NamedTuple):
    """What became durable at one moment: the observers are told at this very moment."""

    database: DatabaseServer
    changes: Sequence[Change]


OnAnswer = Callable[[Any, BaseException | None], None]


@dataclass(slots=True, eq=False)
class Session:
    """One connection, as the server has it."""

    server: DatabaseServer
    alive: bool = True
    local: LocalTransaction | None = None
    lock_ms: int = 1_000
    idle_ms: int | None = None
    idle_since_us: int | None = None
    """Since when it does nothing inside of a local transaction; None: it works, or has none."""
    in_flight: int = 0
    """Requests that will arrive, or are being carried out."""
    gone: bool = False
    """Its client has closed its end; that comes after what is in flight."""

    def begun(self) -> LocalTransaction:
        """The local transaction, begun now if there is none."""
        if self.local is None:
            self.local = LocalTransaction(self.server.tables, self.server.flavour)
        return self.local


Statement = Callable[[Session], Any]


@dataclass(slots=True, eq=False)
class Request:
    """A script on its way, at its statement number ``place``."""

    session: Session
    script: Sequence[Statement]
    on_answer: OnAnswer
    conflict_at: int
    place: int = 0
    results: list[Any] = field(default_factory=list)
    give_up_us: int | None = None
    """Until then it waits for locks; None: it has not had to."""


class DatabaseServer:
    """The server of one database. ``fence_id`` names it; ``skew_ms``: how far its clock is ahead."""

    def __init__(
        self, world: Times, name: str, rng: random.Random, *, flavour: Flavour, faults: DatabaseFaults, skew_ms: int = 0
    ) -> None:
        self.world = world
        self.name = name
        self.rng = rng
        self.flavour = flavour
        self.faults = faults
        self.skew_ms = skew_ms
        self.fence_id = f"{rng.getrandbits(128):032x}"
        self.tables = Tables()
        self.on_commit: list[Callable[[Committed], None]] = []
        self.counts: dict[str, int] = {}
        """How often each fault has struck."""
        self._sessions: dict[Session, None] = {}
        self.locks = LockQueue(self)
        self._away_until_us = 0

    @property
    def now_ms(self) -> int:
        """The database's clock."""
        return self.world.now_ms + self.skew_ms

    @property
    def away(self) -> bool:
        """Whether it cannot be reached now."""
        return self.world.now_us < self._away_until_us

    def open_account(self, name: str, balance: int) -> None:
        """Before the run: nobody is told of it."""
        self.tables.write({("account", name): Account(balance)})

    def rows(self, kind: str) -> dict[Key, Any]:
        """All committed rows of a kind."""
        return {key: self.tables.latest(key) for key in self.tables.keys(kind)}

    def go_away(self, milliseconds: int) -> None:
        """Crash: all that is not committed is gone, and nobody can connect for so long."""
        self.count("away")
        self._away_until_us = max(self._away_until_us, self.world.now_us + milliseconds * 1000)
        for session in list(self._sessions):
            self.abort(session)

    def connect(self) -> Session:
        """A new connection; raises OperationalError if the server is away."""
        if self.away:
            raise lost("connection refused")
        session = Session(self)
        self._sessions[session] = None
        return session

    def abort(self, session: Session) -> None:
        """End a session: roll back."""
        if session.alive:
            session.alive = False
            del self._sessions[session]
            self.roll_back(session)

    def client_gone(self, session: Session) -> None:
        """The client has closed its end, or is dead: the server notices soon, or late."""
        session.gone = True
        if session.in_flight == 0:
            self._notice(session)

    def _notice(self, session: Session) -> None:
        late = self.rng.random() < 0.2
        self.world.at(1000 * self.rng.randint(0, self.faults.notice_ms if late else 5), self.abort, session)

    # --- requests ------------------------------------------------------------------------------------------

    def send(self, session: Session, script: Sequence[Statement], on_answer: OnAnswer, commits: bool) -> None:
        """A script on its way to the server; ``on_answer`` is called at most once, at once or later."""
        rng, at = self.rng, self.world.at
        blow = self.faults.blow(rng, len(script), commits, self.flavour is not Flavour.ONE_WRITER)
        for what in blow.told:
            self.count(what)
        request = Request(session, script, on_answer, blow.conflict_at)
        delay_us = blow.delay_us
        match blow.fate:
            case Fate.LOST_BEFORE:
                at(delay_us, on_answer, None, lost("before the request"))
                return
            case Fate.LOST_AFTER:
                request.on_answer = lambda _value, _error: on_answer(None, lost("while the answer was on its way"))
            case Fate.LANDS_LATER:
                request.on_answer = lambda _value, _error: None
                at(delay_us, on_answer, None, lost("while waiting for the answer"))
                delay_us += 1000 * rng.randint(0, self.faults.later_ms)
        session.in_flight += 1
        at(delay_us, self.work, request)

    def work(self, request: Request) -> None:
        """A request has arrived, or need not wait any longer."""
        session = request.session
        self.end_if_idle(session)
        if not session.alive:
            self.answer(request, None, lost("closed by the server"))
            return
        session.idle_since_us = None
        try:
            while request.place < len(request.script):
                if request.place == request.conflict_at:
                    request.conflict_at = -1
                    raise errors.SerializationFailure("could not serialize access")
                request.results.append(request.script[request.place](session))
                request.place += 1
        except Blocked as blocked:
            self.locks.wait(request, blocked.owner)
            return
        except Exception as error:
            self.fail(session)
            self.answer(request, None, error)
            return
        self.answer(request, request.results, None)

    def answer(self, request: Request, value: Any, error: BaseException | None) -> None:
        """A request is over."""
        session = request.session
        session.in_flight -= 1
        if session.local is not None:
            session.idle_since_us = self.world.now_us
        request.on_answer(value, error)
        if session.gone and session.in_flight == 0 and session.alive:
            self._notice(session)

    def fail(self, session: Session) -> None:
        """A statement has failed."""
        if self.flavour is Flavour.LOCKING:
            self.roll_back(session)
        elif session.local is not None and self.flavour is not Flavour.ONE_WRITER:
            session.local.failed = True

    def end_if_idle(self, session: Session) -> None:
        """A process that has stopped in the middle of a local transaction does not hold its locks for ever."""
        since_us = session.idle_since_us
        if since_us is None or session.idle_ms is None:
            return
        if self.world.now_us >= since_us + session.idle_ms * 1000:
            self.count("idle_timeout")
            self.abort(session)

    def holder(self, local: LocalTransaction) -> Session | None:
        """Whose local transaction it is."""
        return next((session for session in self._sessions if session.local is local), None)

    # --- ends ----------------------------------------------------------------------------------------------

    def roll_back(self, session: Session) -> None:
        """ROLLBACK, of what there is."""
        local, session.local, session.idle_since_us = session.local, None, None
        if local is not None:
            local.end()
            self.locks.free(local)

    def commit(self, session: Session) -> None:
        """COMMIT; raises the driver's error, with all rolled back."""
        local = session.begun()
        try:
            local.check_commit()
        except Exception:
            self.roll_back(session)
            raise
        changes = self.tables.write({key: value for key, value in local.writes.items() if key != WRITER})
        self.roll_back(session)  # nothing is left to be rolled back: its locks go, and who waits looks again
        if changes:
            committed = Committed(self, changes)
            for observer in self.on_commit:
                observer(committed)

    def count(self, what: str) -> None:
        """It has happened once more."""
        self.counts[what] = self.counts.get(what, 0) + 1
