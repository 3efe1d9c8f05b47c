"""Phased runs: recovery points, for work with calls to others in between.

    with idempotency.begin(operation, request) as run:
        order = run.phase("order", insert_order)                       # a local transaction of its own
        charge = run.foreign("charge", lambda key: psp.charge(order["amount"], idempotency_key=key))
        run.phase("paid", lambda db: mark_paid(db, charge["id"]))
        run.succeed(answer)

A later attempt skips what is done, and has its outputs. A call to somebody else is made between local transactions,
never in one; if the process dies before its output is stored, it is made again, with the same key. What a phase has
committed stays, however the run ends: where a later "no" is to undo it, undo it in a phase of its own before saying so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from participant_sdk.annotations import looked_up, only_argument, signature_of
from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.doubt import lease_lost
from participant_sdk.idempotency.ending import connected, doomed, recovery_point
from participant_sdk.idempotency.errors import RunUnknown
from participant_sdk.idempotency.moves import GiveBack, Moves, Told
from participant_sdk.idempotency.operation import Mode
from participant_sdk.idempotency.phase_log import Entry, PhaseLog, Sort
from participant_sdk.idempotency.run_state import AnyRun
from participant_sdk.idempotency.values import ValueCodec, checked_bytes, codec_of

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import Session

    from participant_sdk.idempotency.lines import Line

R = TypeVar("R")
T = TypeVar("T")


class Phased(AnyRun):
    """What phased runs of both flavours have in common."""

    phase_log: PhaseLog | None = None


class Phases(Phased):
    """The phases of a run on an Engine."""

    def phase(
        self,
        name: str,
        work: Callable[[], T] | Callable[[Connection], T] | Callable[[Session], T],
        *,
        kind: Any = None,
        codec: ValueCodec | None = None,
    ) -> T:
        """Do `work` in a local transaction of its own, and commit it with what it gives and with the recovery point.

        If an earlier attempt has done so, `work` does not run, and what it gave then is given again. `work` takes the
        connection, or a session if it is annotated so, or nothing; it neither commits nor rolls back. What it gives is
        stored as its result's annotation says, as `kind` says, or by `codec`.

        Raises ConfigurationError for a name that comes in another order than in an earlier attempt, or twice, and for
        an operation that is not PHASED; TypeError for what could not be given again; LeaseLost; StoreUnavailable.
        """
        return cast(T, self._do(_phase(self, name, work, kind, codec, asynchronous=False)))

    def foreign(
        self,
        name: str,
        call: Callable[[str], T],
        *,
        kind: Any = None,
        codec: ValueCodec | None = None,
        repeatable: bool = True,
    ) -> T:
        """Have `call` ask somebody else, with the key `run.derived_key(name)`; what it gives is then stored as a phase.

        If the process dies in between, or `call` raises, the next attempt calls again with the same key, by which the
        other side has to know it. `repeatable` False: the other side does not; then the run becomes UNKNOWN instead.

        Raises as `phase`, RunUnknown, and ConfigurationError while a local transaction is open.
        """
        return cast(T, self._do(_foreign(self, name, call, kind, codec, repeatable)))

    def _do(self, moves: Moves[R]) -> R:
        raise NotImplementedError


class AsyncPhases(Phased):
    """The phases of a run on an AsyncEngine."""

    async def phase(
        self,
        name: str,
        work: Callable[[], Awaitable[T]]
        | Callable[[AsyncConnection], Awaitable[T]]
        | Callable[[AsyncSession], Awaitable[T]],
        *,
        kind: Any = None,
        codec: ValueCodec | None = None,
    ) -> T:
        """As `Phases.phase`."""
        return cast(T, await self._do(_phase(self, name, work, kind, codec, asynchronous=True)))

    async def foreign(
        self,
        name: str,
        call: Callable[[str], Awaitable[T]],
        *,
        kind: Any = None,
        codec: ValueCodec | None = None,
        repeatable: bool = True,
    ) -> T:
        """As `Phases.foreign`."""
        return cast(T, await self._do(_foreign(self, name, call, kind, codec, repeatable)))

    async def _do(self, moves: Moves[R]) -> R:
        raise NotImplementedError


def _phase(
    run: Phased, name: str, work: Callable[..., Any], kind: Any, codec: ValueCodec | None, *, asynchronous: bool
) -> Moves[Any]:
    """See `Phases.phase`."""
    step = _step(run, name, Sort.PHASE, work, kind, codec)
    arguments = _arguments_of(step.who, work, asynchronous)
    if (entry := step.log.meet(name, Sort.PHASE)) is not None:
        return step.output(entry)
    line: Line = yield from connected(run)
    assert line.guard is not None
    try:
        with line.guard.lent_to(step.who):
            value = yield Told(work, arguments(line))
        yield from _reach(run, step, value)
    except Exception:
        if run.line is line:  # nothing of it goes into the next phase
            yield GiveBack(line)
            run.line = None
        raise
    return value


def _foreign(
    run: Phased, name: str, call: Callable[[str], Any], kind: Any, codec: ValueCodec | None, repeatable: bool
) -> Moves[Any]:
    """See `Phases.foreign`."""
    step = _step(run, name, Sort.FOREIGN, call, kind, codec)
    entry = step.log.meet(name, Sort.FOREIGN)
    if entry is not None and entry.sort is Sort.FOREIGN:
        return step.output(entry)
    if run.line is not None:
        raise ConfigurationError(f"{step.who} comes while a local transaction is open: end that with a phase before")
    if entry is not None and not repeatable:
        reason = f"{step.who} may have been made, and cannot be repeated"
        yield from doomed(run, reason)
        raise RunUnknown(reason)
    if not repeatable:
        pending = Entry(name, Sort.PENDING)
        yield from recovery_point(run, name, step.log.with_entry(pending))
        step.log.reached(pending)
    value = yield Told(call, (run.derived_key(name),))
    yield from _reach(run, step, value)
    return value


def _reach(run: Phased, step: _Step, value: Any) -> Moves[None]:
    entry = Entry(step.name, step.sort, checked_bytes(f"what {step.who} gave", step.codec, value))
    yield from recovery_point(run, step.name, step.log.with_entry(entry))
    step.log.reached(entry)


@dataclass(frozen=True, slots=True)
class _Step:
    """One phase, as it is met."""

    who: str
    log: PhaseLog
    name: str
    sort: Sort
    codec: ValueCodec

    def output(self, entry: Entry) -> Any:
        """What an earlier attempt has stored. Raises ConfigurationError if this program cannot read it."""
        try:
            return self.codec.read(entry.output)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{self.who}: what an earlier attempt has stored of it cannot be read: {error}"
            ) from error


def _step(run: Phased, name: str, sort: Sort, work: Callable[..., Any], kind: Any, codec: ValueCodec | None) -> _Step:
    operation = run.operation
    if operation.mode is not Mode.PHASED:
        raise ConfigurationError(f"{operation.name} is {operation.mode.name}: phases are for PHASED operations")
    run.check_open()
    if run.lost:
        raise lease_lost()
    who = f"the {sort.value} {name!r} of {operation.name}"
    if codec is None:
        codec = codec_of(who, looked_up(work, ("return",))["return"] if kind is None else kind)
    if run.phase_log is None:
        left = run.record.phase_data if run.record is not None and run.attempt > 1 else None  # 1: that has expired
        run.phase_log = PhaseLog(operation.name, left)
    return _Step(who, run.phase_log, name, sort, codec)


def _arguments_of(who: str, work: Callable[..., Any], asynchronous: bool) -> Callable[[Line], tuple[Any, ...]]:
    """What the work is called with: nothing, or what its one parameter is annotated as."""
    if not signature_of(work).parameters:
        return lambda line: ()
    session_class = only_argument(who, work, asynchronous=asynchronous)

    def arguments(line: Line) -> tuple[Any, ...]:
        if session_class is None:
            return (line.connection,)
        session = session_class(bind=line.connection)
        line.sessions.append(session)
        return (session,)

    return arguments
