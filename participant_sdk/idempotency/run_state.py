"""What a run knows of itself, on either kind of engine."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from enum import Enum, unique
from typing import TYPE_CHECKING

from participant_sdk.idempotency.asking import Asked, Begun
from participant_sdk.idempotency.guard import RunMisused
from participant_sdk.idempotency.keys import joined
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.record import Record
from participant_sdk.idempotency.request import KeyedRequest
from participant_sdk.idempotency.setup import Setup

if TYPE_CHECKING:
    from participant_sdk.idempotency.current import bound_run
    from participant_sdk.idempotency.lines import Line
    from participant_sdk.idempotency.store import Claim, Held

logger = logging.getLogger("tricord.idempotency")


@unique
class Stage(Enum):
    """How far a run has come."""

    OPEN = "OPEN"
    HANDED = "HANDED"
    """`complete` was called: the user commits it."""
    ENDED = "ENDED"


class AnyRun:
    """What `Run` and `AsyncRun` have in common.

    `record` is what was met: with what an earlier attempt has left, such as its recovery point. `lost` becomes True
    when another run has taken over; `on_lost`, if you set it, is called then, by the heartbeat.
    """

    def __init__(self, asked: Asked, begun: Begun, setup: Setup) -> None:
        self.operation: Operation = asked.operation
        self.request: KeyedRequest = asked.request
        self.held: Held | None = begun.held
        """None for an ATOMIC run, whose record is written at its end."""
        self.record: Record | None = begun.met
        self.lost = False
        self.on_lost: Callable[[], None] | None = None
        self.asked = asked
        self._begun: Begun | None = begun  # for as long as the run is there its key is known to run here
        self.setup = setup
        self.line: Line | None = None
        if begun.line is not None:
            self.stand_on(begun.line)
        self.handed: Line | None = None
        self.stage = Stage.OPEN
        self._bound: bound_run | None = None
        self._beats = self.held is not None and self.operation.heartbeat
        if self._beats:
            setup.beat.add(self)

    @property
    def claim(self) -> Claim:
        """The run as it was to be stored."""
        return self.asked.claim

    @property
    def fence(self) -> int:
        """Grows with each run under the key: what you may hand on to refuse a zombie by. 0 for an ATOMIC run."""
        return 0 if self.held is None else self.held.fence

    @property
    def attempt(self) -> int:
        """How many runs have begun under the key, this one included."""
        if self.held is not None:
            return self.held.attempt
        return 1 if self.record is None else self.record.attempt + 1

    @property
    def ended(self) -> bool:
        """Whether it has an outcome, or `complete` was called."""
        return self.stage is not Stage.OPEN

    def derived_key(self, name: str) -> str:
        """A key for a call to somebody else, 64 hexadecimal characters: the same in every attempt, for each `name`."""
        return hashlib.sha256(joined(b"tricord derived key 1", self.claim.key_hash, name)).hexdigest()

    def _bind(self, bound: bound_run) -> None:
        self._bound = bound
        bound.__enter__()

    def _unbind(self) -> None:
        if self._bound is not None:
            self._bound.__exit__()
            self._bound = None

    def stand_on(self, line: Line) -> Line:
        """Work in this local transaction, which nobody else commits from now on."""
        self.line = line
        line.watch(f"{self.operation.name}: the work")
        return line

    @property
    def at_hand(self) -> Line | None:
        """Its own local transaction, if that has begun and the run is open; otherwise see `ending.connected`."""
        line = self.line
        return line if line is not None and line.on is None and self.stage is Stage.OPEN else None

    def check_open(self) -> None:
        """Raises RunMisused for a second outcome."""
        if self.stage is not Stage.OPEN:
            raise RunMisused(f"{self.operation.name}: the run has its outcome already")

    def mark_lost(self) -> None:
        """Another run has taken over."""
        self.lost = True
        self.renew_no_more()
        if self.on_lost is not None:
            try:
                self.on_lost()
            except Exception:
                logger.exception("%s: `on_lost` has failed", self.operation.name)

    def renew_no_more(self) -> None:
        """Its lease, if it has one that is renewed: it ends, or nobody has a claim to it any more."""
        if self._beats:
            self._beats = False
            self.setup.beat.remove(self)

    def over(self, stage: Stage = Stage.ENDED) -> None:
        """It runs no more."""
        self.stage = stage
        self._begun = None  # whose line knows the run: a ring would be left to the garbage collector
        if self.held is None:
            self.setup.running.pop(self.claim.key_hash, None)
        self.renew_no_more()
