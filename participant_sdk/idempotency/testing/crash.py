"""One crash: where it is to happen, and what a process that has died does no more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from participant_sdk.idempotency.fronts import MemoryFront
from participant_sdk.idempotency.lines import Line
from participant_sdk.idempotency.moves import CommitTheirs, GiveBack, Move, Moves, On
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.run_state import AnyRun
from participant_sdk.idempotency.setup import Setup
from participant_sdk.idempotency.testing.cutting import cut
from participant_sdk.idempotency.testing.points import Crashed, Point

R = TypeVar("R")


class Crash:
    """A crash that is armed. `fired`: it has happened. `seen`: how often its point was hit."""

    def __init__(self, point: Point, hit: int, operation: str, die: Callable[[Point], None]) -> None:
        self.point, self.hit, self.operation = point, hit, operation
        self.fired = False
        self.seen = 0
        self._die = die
        self._counting = threading.Lock()
        self._setups: dict[int, Setup] = {}

    def met(self, setup: Setup) -> None:
        """A store is in use in the process that is to die."""
        self._setups[id(setup)] = setup

    def forget(self) -> None:
        """What a process knows that has just been started."""
        for setup in self._setups.values():
            setup.running.clear()
            beat: Any = setup.beat
            for run, _, _ in beat._leases.to_renew():
                beat.remove(run)
            for front in setup.fronts:
                if isinstance(front, MemoryFront):
                    front.flush()

    def due(self, point: Point, operation: Operation) -> bool:
        """Whether this is where it is to happen."""
        if point is not self.point or self.operation not in ("", operation.name):
            return False
        with self._counting:
            self.seen += 1
            return self.seen == self.hit

    def reach(self, point: Point, operation: Operation) -> None:
        """A request is at that point."""
        if self.due(point, operation):
            self.now()

    def now(self) -> None:
        """Die."""
        self.fired = True
        self._die(self.point)

    def dead(self, moves: Moves[R]) -> Moves[R]:
        """The moves of a process that may be dead: then connections are dropped, and nothing else is done."""

        def perform(move: Move) -> Moves[Any]:
            if self.fired:
                if not isinstance(move, GiveBack):
                    raise Crashed(self.point)
                move = GiveBack(move.line, lost=True)
            return (yield move)

        return _through(moves, perform)

    def of_run(self, run: AnyRun, moves: Moves[R]) -> Moves[R]:
        """As `dead`; a run that dies by them drops its connection, whoever was to end it."""
        try:
            return (yield from self.dead(moves))
        except Crashed:
            line, run.line = run.line, None
            run.over()
            if line is not None:
                yield GiveBack(line, lost=True)
            raise

    def cutting(self, line: Line, moves: Moves[R]) -> Moves[R]:
        """The moves up to a COMMIT on that line, which is cut."""

        def perform(move: Move) -> Moves[Any]:
            if isinstance(move, CommitTheirs) or (isinstance(move, On) and line.on is None):
                cut(line, self.now)
            return (yield move)

        return _through(moves, perform)


def _through(moves: Moves[R], perform: Callable[[Move], Moves[Any]]) -> Moves[R]:
    """All that the moves do, each done by `perform`."""
    given: Any = None
    raised: BaseException | None = None
    while True:
        try:
            move = moves.send(given) if raised is None else moves.throw(raised)
        except StopIteration as stop:
            return cast(R, stop.value)
        try:
            given, raised = (yield from perform(move)), None
        except BaseException as error:
            raised = error
