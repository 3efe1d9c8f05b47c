"""The user's own local transactions in a run: joining one, completing in one, and lending a session on the run's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.asking import LOCK_WAIT_MS, RETRY_AFTER_MS
from participant_sdk.idempotency.ending import connected, let_go, may_still_run, outcome_of, stored
from participant_sdk.idempotency.errors import InProgress
from participant_sdk.idempotency.lines import Line
from participant_sdk.idempotency.moves import Flush, GiveBack, Moves, On, StandOn
from participant_sdk.idempotency.record import Answer, State
from participant_sdk.idempotency.run_state import AnyRun, Stage
from participant_sdk.idempotency.store import Met


def joined(run: AnyRun, on: Any) -> Moves[None]:
    """See `Run.join`."""
    run.check_open()
    if run.line is not None and run.line.is_on(on) and not run.line.is_over:
        return
    line: Line = yield StandOn(on)
    line.check_endable()
    yield from run.setup.check_database(line)
    before, run.line = run.line, None
    if before is not None:
        yield GiveBack(before)
    run.stand_on(line)
    if run.held is not None:
        yield from connected(run)
        return
    met: Met = yield On(line, run.setup.store.meet(run.claim.key_hash, LOCK_WAIT_MS))
    if not may_still_run(run, met):
        run.over()
        raise InProgress(RETRY_AFTER_MS)


def handed(run: AnyRun, answer: Answer, on: Any) -> Moves[None]:
    """See `Run.complete`."""
    run.check_open()
    if run.held is None:
        if run.line is None or not run.line.is_on(on):
            raise ConfigurationError(
                f"{run.operation.name} is ATOMIC: complete it on what it was begun on (`begin(…, on=…)`, or `join`)"
            )
        line = run.line
    elif run.line is not None and run.line.is_on(on):
        line = run.line
    else:
        before, run.line = run.line, None
        if before is not None:  # it may have the record locked
            yield GiveBack(before)
        line = yield StandOn(on)
        yield from run.setup.check_database(line)
    yield Flush(line)
    line.may_commit()
    run.renew_no_more()  # a renewal would wait for the local transaction in which the record is changed
    yield On(line, stored(run, outcome_of(run, State.SUCCEEDED, answer), commit=False))
    run.handed = line
    if line.on is not None and line is run.line:
        run.line = None  # it is the user's again, who ends it
    run.over(Stage.HANDED)


def handed_over(run: AnyRun) -> Moves[None]:
    """The block has ended in which the user was to commit: who waits here may look."""
    yield from let_go(run)
    run.setup.waiting.ended(run.claim.key_hash, None)


def lent(run: AnyRun, factory: Callable[..., Any] | None, *, asynchronous: bool) -> Moves[Any]:
    """See `Run.session`."""
    line = yield from connected(run)
    if factory is None:
        from sqlalchemy.ext.asyncio import AsyncSession
        from sqlalchemy.orm import Session

        factory = AsyncSession if asynchronous else Session
    session = factory(bind=line.connection)
    line.sessions.append(session)
    return session
