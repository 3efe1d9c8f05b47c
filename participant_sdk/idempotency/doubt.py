"""A COMMIT whose answer was lost: it may have been done. It is never taken for failed; it is found out.

Not by a plain read, which could come before a COMMIT that is still under way: by what has to wait for the end of that
local transaction, which is the record's fence for a LEASED run, and the bar on its key for an ATOMIC one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from participant_sdk.databases.driver_errors import leaves_doubt
from participant_sdk.errors import TricordError
from participant_sdk.idempotency.asking import LOCK_WAIT_MS, judged
from participant_sdk.idempotency.errors import LeaseLost, StoreUnavailable
from participant_sdk.idempotency.faults import told
from participant_sdk.idempotency.moves import Apart, GiveBack, Moves, On, Pause, Take
from participant_sdk.idempotency.record import Record, State
from participant_sdk.idempotency.replay import Replay
from participant_sdk.idempotency.setup import RETRYABLE_TTL_MS, Setup
from participant_sdk.idempotency.store import Met, Outcome

if TYPE_CHECKING:
    from participant_sdk.idempotency.run_state import AnyRun
    from participant_sdk.idempotency.store import Held

logger = logging.getLogger("tricord.idempotency")

DOUBT_S: Final = 10.0
"""How long a COMMIT's outcome is asked for."""
PAUSE_FIRST_S: Final = 0.05
PAUSE_MAX_S: Final = 1.0


def lease_lost() -> LeaseLost:
    """Another run has the key."""
    return LeaseLost("another run of this request has taken over: nothing of this one stays")


def is_in_doubt(error: Exception, setup: Setup) -> bool:
    """Whether a COMMIT that has raised `error` may have been done: its answer is not the database's own "no"."""
    return not isinstance(error, TricordError) and setup.is_of_database(error) and leaves_doubt(error)


def found_out(run: AnyRun, outcome: Outcome, error: Exception) -> Moves[None]:
    """Returns if the outcome is stored. Raises StoreUnavailable if it is not, or if that cannot be known by now."""

    def is_stored(record: Record) -> bool:
        return record.state is outcome.state

    if run.held is None:
        yield from _asked_again(run, error, lambda: _ask_atomic(run, outcome))
    else:
        yield from _asked_again(run, error, lambda: _ask_leased(run, is_stored))


def _asked_again(run: AnyRun, error: Exception, ask: Callable[[], Moves[bool | None]]) -> Moves[None]:
    logger.warning("%s: the answer of a COMMIT was lost: %s", run.operation.name, told(error))
    pauses = _Pauses()
    while True:
        try:
            known: bool | None = yield from ask()
        except Exception as again:
            if not run.setup.is_of_database(again):
                raise
            known = None
        if known:
            return
        if known is not None:
            raise StoreUnavailable(f"it was not committed, and nothing of it stays: {told(error)}") from error
        if (pause := pauses.next()) is None:
            raise StoreUnavailable(f"whether it was committed is not known yet: {told(error)}") from error
        yield Pause(pause)


def _ask_atomic(run: AnyRun, outcome: Outcome) -> Moves[bool | None]:
    """Nobody can have the key while the local transaction is there, so that who meets it free meets its outcome."""
    line = yield Take()
    try:
        met: Met = yield On(line, run.setup.store.meet(run.claim.key_hash, LOCK_WAIT_MS))
    finally:
        yield GiveBack(line)
    if not met.free:
        return None
    record = met.record
    if record is not None and record.state is outcome.state and record.answer == outcome.answer:
        return True
    if isinstance(judged(run.asked, record), Replay):
        raise lease_lost()
    return False


def _ask_leased(run: AnyRun, is_done: Callable[[Record], bool]) -> Moves[bool | None]:
    """Ending it another way waits for the local transaction that may be about to end it, and has no effect after it."""
    held, store = _held(run), run.setup.store
    record: Record | None = yield Apart(store.read(held.key_hash))
    if record is None or record.fence != held.fence:
        raise lease_lost()
    if is_done(record):
        return True
    if record.state is not State.PROCESSING:
        return False
    failed = Outcome(State.FAILED_RETRYABLE, None, RETRYABLE_TTL_MS, "its COMMIT was not done")
    yield Apart(store.settle(held, failed))
    return None


def point_found_out(run: AnyRun, point: str, phase_data: bytes, error: Exception) -> Moves[None]:
    """As `found_out`, of a recovery point. If it was not reached, the run has failed, and may run again."""

    def reached(record: Record) -> bool:
        return (record.recovery_point, record.phase_data) == (point, phase_data)

    yield from _asked_again(run, error, lambda: _ask_leased(run, reached))


def settled(run: AnyRun, outcome: Outcome) -> Moves[bool]:
    """End a run's record by itself; again, while the database is away. Whether it was still the run's."""
    held, store = _held(run), run.setup.store
    pauses = _Pauses()
    while True:
        try:
            if (yield Apart(store.settle(held, outcome))):
                return True
            record: Record | None = yield Apart(store.read(held.key_hash))
            return record is not None and record.fence == held.fence and record.state is outcome.state
        except Exception as error:
            if not run.setup.is_of_database(error):
                raise
            if (pause := pauses.next()) is None:
                raise StoreUnavailable(f"the outcome could not be stored: {told(error)}") from error
        yield Pause(pause)


class _Pauses:
    """Ever longer ones, until it has been asked for long enough."""

    def __init__(self) -> None:
        self._ends_at = time.monotonic() + DOUBT_S
        self._next_s = PAUSE_FIRST_S

    def next(self) -> float | None:
        """How long to pause now; None: no more."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, PAUSE_MAX_S)
        return pause_s if time.monotonic() < self._ends_at else None


def _held(run: AnyRun) -> Held:
    if run.held is None:
        raise AssertionError("an ATOMIC run holds no record")
    return run.held
