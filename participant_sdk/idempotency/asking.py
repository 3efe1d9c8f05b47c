"""From a request to a run, or to the stored answer: what happens in between, written once.

Fronts first, which know ended records only; then the database, where a record is made, met or taken over; then, if
somebody else runs it, the wait. `machine.verdict` says what each record that is met means.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Final

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.claiming import Claiming
from participant_sdk.idempotency.errors import (
    AnswerNotStored,
    IdempotencyKeyReused,
    InProgress,
    NotComparable,
    RunUnknown,
    StoreUnavailable,
)
from participant_sdk.idempotency.faults import told
from participant_sdk.idempotency.keys import key_hash, key_hint
from participant_sdk.idempotency.lines import Line
from participant_sdk.idempotency.machine import TakeOver, Verdict, verdict
from participant_sdk.idempotency.moves import Apart, GiveBack, Moves, On, StandOn, Take
from participant_sdk.idempotency.operation import KeyScope, Mode, Operation
from participant_sdk.idempotency.reaching import Reach
from participant_sdk.idempotency.record import Record
from participant_sdk.idempotency.replay import Replay
from participant_sdk.idempotency.request import KeyedRequest
from participant_sdk.idempotency.setup import Setup
from participant_sdk.idempotency.store import Claim, Held, Met
from participant_sdk.idempotency.waiting import Await, Turn, Waiter

RETRY_AFTER_MS: Final = 1_000
"""When who is not to wait here may come back."""
LOCK_WAIT_MS: Final = 5_000
"""How long an ATOMIC run waits for what else is in its way, such as SQLite's one writer."""
RACES_MAX: Final = 20
"""How often a record may change between being met and being taken."""
LEASE_MS_MIN: Final = 100
OUT_OF_LEASES: Final = "the lease of its last run has ended without an outcome"


@dataclass(slots=True)
class Asked:
    """A request on its way. `ends_at`, of `time.monotonic`: when nobody waits for it any more; None: not said."""

    operation: Operation
    request: KeyedRequest
    claim: Claim
    on: Any
    ends_at: float | None
    reach: Reach = field(default_factory=Reach)

    @property
    def lease_ms(self) -> int:
        """What a lease may last from now, in ms; not above 0: nobody waits any more."""
        lease_ms = int(self.operation.lease_s * 1000)
        if self.ends_at is None:
            return lease_ms
        return min(lease_ms, int((self.ends_at - time.monotonic()) * 1000))


def asked_of(setup: Setup, operation: Operation, request: KeyedRequest, on: Any, deadline_s: float | None) -> Asked:
    """A request that has just come. Raises ConfigurationError for what does not go together."""
    if on is not None and operation.mode is not Mode.ATOMIC:
        raise ConfigurationError(f"{operation.name} is {operation.mode.value}: what it is to join is said to the run")
    ends_at = None if deadline_s is None else time.monotonic() + deadline_s
    lease_ms = int(operation.lease_s * 1000)
    if deadline_s is not None:
        lease_ms = max(LEASE_MS_MIN, min(lease_ms, int(deadline_s * 1000)))
    claim = Claim(
        hash_of(setup, operation, request.key, request.tenant),
        request.tenant,
        operation.name,
        key_hint(request.key, operation.key_hint_chars),
        request.fingerprint,
        setup.owner,
        lease_ms,
        # What may run again by itself has no effect but the local transaction that completes it.
        durable=operation.take_over is not TakeOver.AUTO or operation.mode is Mode.PHASED,
    )
    return Asked(operation, request, claim, on, ends_at)


def hash_of(setup: Setup, operation: Operation, key: str, tenant: str) -> bytes:
    """By which the record is found."""
    return key_hash(setup.namespace, tenant, operation.name if operation.scope is KeyScope.OPERATION else "", key)


def looked_up(setup: Setup, operation: Operation, key: str, tenant: str) -> Moves[Record | None]:
    """The record of a key. Raises StoreUnavailable."""
    try:
        record: Record | None = yield Apart(setup.store.read(hash_of(setup, operation, key, tenant)))
    except Exception as error:
        if not setup.is_of_database(error):
            raise
        raise StoreUnavailable(f"the store could not be asked: {told(error)}") from error
    return record


@dataclass(slots=True, weakref_slot=True, eq=False)
class Begun:
    """The request may run. `line`: its local transaction, if that has begun. `met`: the record that it stands on."""

    line: Line | None
    held: Held | None
    met: Record | None


@dataclass(slots=True)
class Busy:
    """Somebody else runs it; `record` if there is one."""

    record: Record | None


Found = Replay | Begun | Busy


def begin(asked: Asked, setup: Setup) -> Moves[Replay | Begun]:
    """Raises what `Idempotency.begin` raises."""
    try:
        if setup.fronts:
            record = yield from setup.peek(asked.claim.key_hash)
            if record is not None and isinstance(replay := judged(asked, record), Replay):
                return replay
        found = yield from _attempt(asked, setup)
        if isinstance(found, Busy):
            asked.reach.busy = True
            found = yield from _waited(asked, setup)
    except Exception as error:
        if not setup.is_of_database(error):
            raise
        text = f"the store could not be asked, and nothing has run: {told(error)}"
        raise StoreUnavailable(text, down=asked.reach.is_down(error)) from error
    if isinstance(found, Replay) and setup.fronts:
        yield from setup.keep(found.record)
    return found


def _waited(asked: Asked, setup: Setup) -> Moves[Replay | Begun]:
    until = time.monotonic() + asked.operation.wait_s
    if asked.ends_at is not None:
        until = min(until, asked.ends_at)
    waiter = None
    if until > time.monotonic():
        waiter = setup.waiting.enter(asked.claim.key_hash, until, may_be_told=_may_be_told(asked, setup))
    if waiter is None:
        raise InProgress(RETRY_AFTER_MS)
    away = None
    try:
        while True:
            turn: Record | Turn = yield Await(waiter)
            match turn:
                case Turn.OVER if away is not None:
                    raise away
                case Turn.OVER:
                    raise InProgress(RETRY_AFTER_MS)
                case Turn.LOOK:
                    try:
                        found = yield from _look(asked, setup, waiter)
                    except Exception as error:
                        if not setup.is_of_database(error):
                            raise
                        away = error  # for as long as it may wait, it may come back
                        waiter.looked(None, None)
                        continue
                    away = None
                    if not isinstance(found, Busy):
                        return found
                case Record():
                    if isinstance(replay := judged(asked, turn), Replay):
                        return replay
    finally:
        waiter.leave()


def _look(asked: Asked, setup: Setup, waiter: Waiter) -> Moves[Found]:
    """Attempt again; who waits for the same gets what is found."""
    found = yield from _attempt(asked, setup)
    told_of = _may_be_told(asked, setup)
    if told_of and isinstance(found, Busy) and found.record is not None and found.record.fence != waiter.watch.flagged:
        waiter.watch.flagged = found.record.fence
        yield Apart(setup.store.await_end(found.record))
        found = yield from _attempt(asked, setup)  # it may have ended before that was noted
    record = found.record if isinstance(found, Busy | Replay) else None
    has_lease = record is not None and isinstance(found, Busy)
    waiter.looked(record, record.lease_left_ms / 1000 if has_lease and record is not None else None)
    return found


def _may_be_told(asked: Asked, setup: Setup) -> bool:
    """An ATOMIC run has no record, before its end, in which somebody could note that he waits."""
    return setup.store.channel is not None and asked.operation.mode is not Mode.ATOMIC


def judged(asked: Asked, record: Record | None) -> Replay | Verdict:
    """What a record that was met means for the request; raises where it says no."""
    said = verdict(record, asked.request.matches, asked.operation.rules)
    match said:
        case Verdict.REPLAY if record is not None and record.answer is not None:
            return Replay(record, record.answer)
        case Verdict.MISMATCH:
            raise IdempotencyKeyReused("the idempotency key belongs to another request")
        case Verdict.NOT_COMPARABLE:
            raise NotComparable("the record of this key was written by a newer program, whose fingerprint is not known")
        case Verdict.UNKNOWN:
            raise RunUnknown("an earlier run of this request may or may not have had its effect; it will not run again")
        case Verdict.NO_ANSWER | Verdict.REPLAY:
            raise AnswerNotStored("this request was done once; its answer is not stored, and it will not run again")
        case _:
            return said


def _attempt(asked: Asked, setup: Setup) -> Moves[Found]:
    repeats, key_hash, atomic = setup.repeats, asked.claim.key_hash, asked.operation.mode is Mode.ATOMIC
    known = key_hash in repeats
    if (known or (atomic and repeats.prevail())) and asked.on is None:
        said = judged(asked, (yield Apart(setup.store.read(key_hash))))
        if isinstance(said, Replay):
            return said
    found = yield from (_meet(asked, setup) if atomic else _claim(asked, setup))
    if not (known or isinstance(found, Busy)):
        repeats.met(key_hash, repeat=isinstance(found, Replay))
    return found


def _meet(asked: Asked, setup: Setup) -> Moves[Found]:
    key_hash = asked.claim.key_hash
    if key_hash in setup.running:
        return Busy(None)
    line: Line = yield Take() if asked.on is None else StandOn(asked.on)
    try:
        if asked.on is not None:
            line.check_endable()
            yield from setup.check_database(line)
        met: Met = yield On(line, setup.store.meet(key_hash, LOCK_WAIT_MS))
        said = judged(asked, met.record)
    except BaseException as error:
        if asked.on is None:
            yield GiveBack(line, lost=not isinstance(error, Exception))
        raise
    if met.free and said in (Verdict.RUN, Verdict.RUN_AGAIN):
        begun = setup.running[key_hash] = Begun(line, None, met.record)
        return begun
    if asked.on is None:
        try:
            yield On(line, setup.store.leave())
        except BaseException:
            yield GiveBack(line, lost=True)
            raise
        yield GiveBack(line)
    if said is Verdict.GIVE_UP and met.record is not None:  # it was not ATOMIC when that run began
        yield from _give_up(met.record, setup)
    return said if isinstance(said, Replay) else Busy(None)


def _claim(asked: Asked, setup: Setup) -> Moves[Found]:
    store, claim = setup.store, asked.claim
    for _ in range(RACES_MAX):
        met: Held | Record = yield Claiming(asked.reach.claiming(store.claim(claim)), setup)
        if isinstance(met, Held):
            return Begun(None, met, None)
        match judged(asked, met):
            case Replay() as replay:
                return replay
            case Verdict.IN_PROGRESS:
                return Busy(met)
            case Verdict.GIVE_UP:
                yield from _give_up(met, setup)
            case Verdict.RUN | Verdict.RUN_AGAIN:
                held: Held | None = yield Claiming(asked.reach.claiming(store.take_over(claim, met)), setup)
                if held is not None:
                    return Begun(None, held, met)
    return Busy(None)


def _give_up(met: Record, setup: Setup) -> Moves[None]:
    if (yield Apart(setup.store.give_up(met, OUT_OF_LEASES))):
        raise RunUnknown("its last run has ended without an outcome, and it may not run again by itself")
