"""From a run to its outcome: every way to end one, written once.

What is stored is stored with the work, in one COMMIT, or after the work was rolled back. A COMMIT whose answer was
lost may have been done: `doubt` finds out, before anything is said of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from participant_sdk.databases.database import Script
from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.asking import LOCK_WAIT_MS, judged
from participant_sdk.idempotency.doubt import found_out, is_in_doubt, lease_lost, point_found_out, settled
from participant_sdk.idempotency.driver_connections import DriverConnection
from participant_sdk.idempotency.errors import LeaseLost, StoreUnavailable
from participant_sdk.idempotency.faults import LostRace, lost_a_race, told
from participant_sdk.idempotency.lines import Line
from participant_sdk.idempotency.moves import Apart, CommitTheirs, Flush, GiveBack, Moves, On, StandOn, Take
from participant_sdk.idempotency.operation import Mode
from participant_sdk.idempotency.record import Answer, Record, State
from participant_sdk.idempotency.replay import Replay
from participant_sdk.idempotency.run_state import AnyRun, Stage
from participant_sdk.idempotency.setup import RETRYABLE_TTL_MS
from participant_sdk.idempotency.statements import BARRED
from participant_sdk.idempotency.store import Held, Met, Outcome
from participant_sdk.steps import Ask

logger = logging.getLogger("tricord.idempotency")


def connected(run: AnyRun) -> Moves[Line]:
    """The local transaction of the run; begun, if it was not."""
    run.check_open()
    if run.line is not None and run.line.is_over:
        run.stand_on((yield StandOn(run.line.on)))
    try:
        line: Line = run.line or run.stand_on((yield Take()))
        if run.held is not None and not line.pinned:
            yield On(line, _pinned(run, line, run.held))
            line.pinned = True
    except Exception as error:
        if not run.setup.is_of_database(error):
            raise
        if lost_a_race(error):
            raise LostRace(f"{run.operation.name}: {BARRED}") from error
        raise StoreUnavailable(f"no connection for the work: {told(error)}") from error
    return line


def _pinned(run: AnyRun, line: Line, held: Held) -> Script[None]:
    """What the local transaction of a run that holds its record begins with."""
    if isinstance(line.connection, DriverConnection):
        yield Ask(lambda connection: connection.begin_now())  # type: ignore[attr-defined]
    if run.operation.heartbeat:
        yield from run.setup.store.pin(held, again=line.on is None)


def outcome_of(run: AnyRun, state: State, answer: Answer) -> Outcome:
    """As it is to be stored: an answer that is too large leaves only the word that it was done."""
    ttl_ms = int(run.operation.ttl_s * 1000)
    if answer.bytes_held > run.operation.answer_bytes_max:
        return Outcome(State.TOMBSTONE, None, ttl_ms, f"the answer has {answer.bytes_held} bytes")
    return Outcome(state, answer, ttl_ms)


def succeeded(run: AnyRun, answer: Answer) -> Moves[None]:
    """See `Run.succeed`."""
    if run.line is not None:
        run.line.check_there()
    line = yield from connected(run)
    if line.on is not None or line.sessions:
        yield Flush(line)
    yield from _ended_with_work(run, line, outcome_of(run, State.SUCCEEDED, answer))


def failed_for_good(run: AnyRun, answer: Answer) -> Moves[None]:
    """See `Run.fail_final`. Of an ATOMIC run the key is met again: between the two another one may be faster."""
    run.check_open()
    outcome = outcome_of(run, State.FAILED_FINAL, answer)
    if run.held is not None:
        yield from _ended_without_work(run, outcome)
        return
    line = yield from connected(run)
    try:
        if line.on is None:
            yield On(line, run.setup.store.leave())
        else:
            yield GiveBack(line)
            line = yield StandOn(line.on)
            run.stand_on(line)
        met: Met = yield On(line, run.setup.store.meet(run.claim.key_hash, LOCK_WAIT_MS))
    except Exception as error:
        yield from let_go(run, lost=True)
        if not run.setup.is_of_database(error):
            raise
        raise StoreUnavailable(f"why it failed could not be stored: {told(error)}") from error
    if not may_still_run(run, met):
        yield from let_go(run)
        raise lease_lost()
    yield from _ended_with_work(run, line, outcome)


def failed_for_now(run: AnyRun, reason: str, *, cut_off: bool = False) -> Moves[None]:
    """See `Run.fail_retryable`. `cut_off`: in the middle of something, so that its connection says nothing more."""
    if run.stage is Stage.ENDED:
        return
    handed_on = run.handed
    yield from let_go(run, lost=cut_off)
    outcome = Outcome(State.FAILED_RETRYABLE, None, RETRYABLE_TTL_MS, reason)
    try:
        if handed_on is not None and handed_on.on is not None and handed_on.synchronous.in_transaction():
            return  # its owner has not rolled back yet, and the record is locked for so long
        if run.held is not None:
            yield Apart(run.setup.store.settle(run.held, outcome))
        elif handed_on is None and not cut_off:
            yield from _note_failure(run, outcome)
    except Exception as error:
        logger.warning("%s: that it failed could not be stored: %s", run.operation.name, told(error))
    finally:
        run.setup.waiting.ended(run.claim.key_hash, None)


def doomed(run: AnyRun, reason: str) -> Moves[None]:
    """See `Run.unknown`."""
    run.check_open()
    if run.held is None:
        raise ConfigurationError(f"{run.operation.name} is ATOMIC: what is rolled back there is never unknown")
    yield from _ended_without_work(run, Outcome(State.UNKNOWN, None, None, reason))


def recovery_point(run: AnyRun, point: str, phase_data: bytes) -> Moves[None]:
    """See `Run.reach`."""
    if run.held is None or run.operation.mode is not Mode.PHASED:
        raise ConfigurationError(f"{run.operation.name} is not PHASED: it has no recovery points")
    held = run.held
    line = yield from connected(run)
    yield Flush(line)
    try:
        lease_ms = run.asked.lease_ms
        yield from _committed(
            run, line, lambda commit: run.setup.store.reach(held, point, phase_data, lease_ms=lease_ms, commit=commit)
        )
    except Exception as error:
        in_doubt = is_in_doubt(error, run.setup)
        run.line = None
        yield GiveBack(line, lost=in_doubt)
        try:
            if not in_doubt:
                raise
            yield from point_found_out(run, point, phase_data, error)
        except LeaseLost:
            run.lost = True
            run.over()
            raise
        except StoreUnavailable:
            run.over()
            raise
        return
    run.line = None
    if line.on is None:
        yield GiveBack(line)
    else:
        run.stand_on((yield StandOn(line.on)))


def _ended_with_work(run: AnyRun, line: Line, outcome: Outcome) -> Moves[None]:
    run.renew_no_more()
    try:
        yield from _committed(run, line, lambda commit: stored(run, outcome, commit=commit))
    except Exception as error:
        in_doubt = is_in_doubt(error, run.setup)
        if isinstance(error, LeaseLost):
            run.lost = True
        elif not in_doubt:
            if lost_a_race(error):
                raise LostRace(f"it was not committed, and nothing of it stays: {told(error)}") from error
            raise
        yield from let_go(run, lost=in_doubt)
        if not in_doubt:
            yield from _given_up(run)
            raise
        yield from found_out(run, outcome, error)
    run.over()
    run.line = None
    if line.on is None:
        yield GiveBack(line)
    yield from _told(run, outcome)


def _committed(run: AnyRun, line: Line, script: Callable[[bool], Script[Any]]) -> Moves[None]:
    line.may_commit()
    if line.on is None:
        yield On(line, script(True))
    else:
        yield On(line, script(False))
        yield CommitTheirs(line)


def stored(run: AnyRun, outcome: Outcome, *, commit: bool) -> Script[Any]:
    store = run.setup.store
    if run.held is None:
        return store.write(run.claim, run.record, outcome, commit=commit)
    return store.complete(run.held, outcome, commit=commit)


def _ended_without_work(run: AnyRun, outcome: Outcome) -> Moves[None]:
    """What the work has written is rolled back; then the record is ended by itself."""
    yield from let_go(run)
    ours = yield from settled(run, outcome)
    if not ours:
        run.lost = True
        raise lease_lost()
    yield from _told(run, outcome)


def let_go(run: AnyRun, lost: bool = False) -> Moves[None]:
    """Roll back, and hold nothing any more."""
    line, run.line = run.line, None
    run.over()
    if line is not None:
        yield GiveBack(line, lost)


def _note_failure(run: AnyRun, outcome: Outcome) -> Moves[None]:
    """In a local transaction of its own, since the run's is rolled back; only if nobody has been faster."""
    store, line = run.setup.store, (yield Take())
    try:
        met: Met = yield On(line, store.meet(run.claim.key_hash, 0))
        if may_still_run(run, met):
            yield On(line, store.write(run.claim, run.record, outcome, commit=True))
    finally:
        yield GiveBack(line)


def _given_up(run: AnyRun) -> Moves[None]:
    """Its fence may still be its: where a local transaction sees one snapshot, a renewal has barred its completion."""
    if run.held is not None:
        lost = Outcome(State.FAILED_RETRYABLE, None, RETRYABLE_TTL_MS, "its completion was barred")
        try:
            yield Apart(run.setup.store.settle(run.held, lost))
        except Exception as error:
            logger.warning("%s: that it failed could not be stored: %s", run.operation.name, told(error))


def _told(run: AnyRun, outcome: Outcome) -> Moves[None]:
    """To those who wait here, and to the fronts."""
    setup, record = run.setup, None
    if outcome.state.ended:
        setup.repeats.add(run.claim.key_hash)
    if outcome.state.ended and (setup.fronts or setup.waiting):
        record = _record_of(run, outcome)
    setup.waiting.ended(run.claim.key_hash, record)
    if record is not None and setup.fronts:
        yield from setup.keep(record)


def _record_of(run: AnyRun, outcome: Outcome) -> Record:
    """As it would be read now; the fence of an atomic run, which only the database knows, as low as it may be."""
    claim = run.claim
    least = 1 if run.record is None else run.record.fence + 1
    return Record(
        key_hash=claim.key_hash,
        tenant=claim.tenant,
        operation=claim.operation,
        key_hint=claim.key_hint,
        state=outcome.state,
        fingerprint=claim.fingerprint,
        fence=run.fence or least,
        attempt=run.attempt,
        age_ms=0,
        expires_left_ms=outcome.ttl_ms,
        answer=outcome.answer,
        reason=outcome.reason,
    )


def may_still_run(run: AnyRun, met: Met) -> bool:
    """After the key was let go for a moment: whether nobody was faster. Its record is what the run stands on now."""
    if not met.free or isinstance(judged(run.asked, met.record), Replay):
        return False
    run.record = met.record
    return True
