"""Where the points of a request are in the code: what is there is replaced while a crash is armed, and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from participant_sdk.idempotency import ending, heartbeat, idempotency, joining, runs
from participant_sdk.idempotency.asking import Asked, Begun, begin
from participant_sdk.idempotency.lines import Line
from participant_sdk.idempotency.moves import GiveBack, Moves, carry_out, carry_out_async
from participant_sdk.idempotency.record import Answer
from participant_sdk.idempotency.replay import Replay
from participant_sdk.idempotency.run_state import AnyRun
from participant_sdk.idempotency.setup import Setup
from participant_sdk.idempotency.store import Held, Outcome
from participant_sdk.idempotency.testing.crash import Crash
from participant_sdk.idempotency.testing.points import Crashed, Point

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from participant_sdk.databases.database import Script

R = TypeVar("R")


def put(crash: Crash) -> Callable[[], None]:
    """Have the points of all runs in this process lead to the crash; gives what takes that away."""
    there = _seams(crash)
    before = [(home, name, getattr(home, name)) for home, name, _ in there]
    for home, name, value in there:
        setattr(home, name, value)

    def take_away() -> None:
        for home, name, value in before:
            setattr(home, name, value)

    return take_away


def _seams(crash: Crash) -> list[tuple[Any, str, Any]]:
    """Whose attribute is replaced, by what."""
    committed, told, do, do_async = ending._committed, ending._told, runs.Run._do, runs.AsyncRun._do
    handed, handed_over, to_renew = joining.handed, joining.handed_over, heartbeat.Leases.to_renew

    def begins(asked: Asked, setup: Setup) -> Moves[Replay | Begun]:
        crash.met(setup)
        crash.reach(Point.BEFORE_CLAIM, asked.operation)
        found = yield from begin(asked, setup)
        if isinstance(found, Begun):
            try:
                crash.reach(Point.AFTER_CLAIM, asked.operation)
            except Crashed:
                setup.running.pop(asked.claim.key_hash, None)
                if found.line is not None:
                    yield GiveBack(found.line, lost=True)
                raise
        return found

    def commits(run: AnyRun, line: Line, script: Callable[[bool], Script[Any]]) -> Moves[None]:
        crash.reach(Point.BEFORE_BUSINESS_COMMIT, run.operation)
        moves = committed(run, line, script)
        yield from (crash.cutting(line, moves) if crash.due(Point.DURING_COMMIT, run.operation) else moves)
        crash.reach(Point.AFTER_BUSINESS_COMMIT, run.operation)

    def tells(run: AnyRun, outcome: Outcome) -> Moves[None]:
        yield from told(run, outcome)
        crash.reach(Point.BEFORE_ANSWER, run.operation)

    def hands(run: AnyRun, answer: Answer, on: Any) -> Moves[None]:
        yield from handed(run, answer, on)
        crash.reach(Point.BEFORE_BUSINESS_COMMIT, run.operation)

    def hands_over(run: AnyRun) -> Moves[None]:
        crash.reach(Point.AFTER_BUSINESS_COMMIT, run.operation)
        yield from handed_over(run)
        crash.reach(Point.BEFORE_ANSWER, run.operation)

    def carries_out(moves: Moves[R], engine: Engine) -> R:
        return carry_out(crash.dead(moves), engine)

    async def carries_out_async(moves: Moves[R], engine: AsyncEngine) -> R:
        return await carry_out_async(crash.dead(moves), engine)

    def does(run: runs.Run, moves: Moves[R]) -> R:
        return do(run, crash.of_run(run, moves))

    async def does_async(run: runs.AsyncRun, moves: Moves[R]) -> R:
        return await do_async(run, crash.of_run(run, moves))

    def renews(leases: heartbeat.Leases) -> list[tuple[AnyRun, Held, int]]:
        return [] if crash.fired else to_renew(leases)

    return [
        (idempotency, "begin", begins),
        (ending, "_committed", commits),
        (ending, "_told", tells),
        (joining, "handed", hands),
        (joining, "handed_over", hands_over),
        (heartbeat.Leases, "to_renew", renews),
        (idempotency, "carry_out", carries_out),
        (idempotency, "carry_out_async", carries_out_async),
        (runs, "carry_out_async", carries_out_async),
        (runs.Run, "_do", does),
        (runs.AsyncRun, "_do", does_async),
    ]
