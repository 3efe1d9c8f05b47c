"""What all requests of one Idempotency share."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakSet, WeakValueDictionary

from sqlalchemy import Dialect, Pool
from sqlalchemy import exc as sqlalchemy_errors

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.claiming import Undoing
from participant_sdk.idempotency.fronts import fit, holdable
from participant_sdk.idempotency.lines import Line
from participant_sdk.idempotency.moves import Moves, Told
from participant_sdk.idempotency.record import Record, State
from participant_sdk.idempotency.same_database import check_same
from participant_sdk.idempotency.store import Held, Outcome, Store
from participant_sdk.idempotency.waiting import Waiting
from participant_sdk.steps import CallFailed

if TYPE_CHECKING:
    from participant_sdk.databases.database import Script
    from participant_sdk.idempotency.asking import Begun
    from participant_sdk.idempotency.run_state import AnyRun

logger = logging.getLogger("tricord.idempotency")

RETRYABLE_TTL_MS: Final = 24 * 3_600_000
"""How long a fingerprint is kept of what has failed and may run again."""


class Beat(Protocol):
    """Whoever renews leases."""

    def add(self, run: AnyRun) -> None:
        """Renew this run's lease from now on."""

    def remove(self, run: AnyRun) -> None:
        """Renew it no more."""


@dataclass(slots=True)
class Setup:
    """`fronts`: the nearest first. `pool`: the engine's. `identity`: what names the store's database, once known."""

    store: Store
    dialect: Dialect
    pool: Pool
    namespace: str
    owner: str
    fronts: Sequence[Any]
    waiting: Waiting
    beat: Beat
    identity: str | None = None
    running: WeakValueDictionary[bytes, Begun] = field(default_factory=WeakValueDictionary)
    """The ATOMIC runs in this process: nobody need ask the database whether those keys are free."""
    proven: WeakSet[Any] = field(default_factory=WeakSet)
    """Pools, and connections of the driver, that lead to the store's database too."""
    undoing: Undoing = field(init=False)

    def __post_init__(self) -> None:
        self.undoing = Undoing(self._undo)

    def _undo(self, held: Held) -> Script[bool]:
        """Of a claim that nobody is there for any more."""
        return self.store.settle(held, Outcome(State.FAILED_RETRYABLE, None, RETRYABLE_TTL_MS, "cancelled"))

    def is_of_database(self, error: Exception) -> bool:
        """Whether the database, or the way to it, has raised it."""
        kinds = sqlalchemy_errors.SQLAlchemyError, OSError, self.dialect.loaded_dbapi.Error, CallFailed
        return isinstance(error, kinds)

    def check_database(self, line: Line) -> Moves[None]:
        """Raises ConfigurationError if the line is bound to another database than the store's."""
        engine = getattr(line.synchronous, "engine", None)
        through = line.on if engine is None else engine.pool
        if through is not self.pool and through not in self.proven:
            self.identity = yield from check_same(line, self.dialect, self.identity)
            self.proven.add(through)

    def peek(self, key_hash: bytes) -> Moves[Record | None]:
        """The ended record that a front has, which those before it have from now on; a front that fails has none."""
        for number, front in enumerate(self.fronts):
            try:
                record = fit((yield Told(front.get, (key_hash,))), key_hash)
            except Exception:
                logger.warning("a front could not be asked; the database is", exc_info=True)
            else:
                if record is not None:
                    yield from self._put(self.fronts[:number], record)
                    return record
        return None

    def keep(self, record: Record) -> Moves[None]:
        """Put an ended record that is durable into the fronts."""
        yield from self._put(self.fronts, record)

    def _put(self, fronts: Sequence[Any], record: Record) -> Moves[None]:
        if not holdable(record):
            return
        for front in fronts:
            try:
                yield Told(front.put, (record,))
            except Exception:
                logger.warning("a front could not be given a record", exc_info=True)


def default_owner() -> str:
    """Host, process and thread, for people."""
    return f"{socket.gethostname()[:60]}:{os.getpid()}:{threading.current_thread().name[:20]}"


def check_bounds(waiters_max: int, waiters_per_key_max: int, poll_s: float, owner: str | None) -> None:
    """Raises ConfigurationError for settings that cannot work."""
    for field_name, value in (("waiters_max", waiters_max), ("waiters_per_key_max", waiters_per_key_max)):
        if not 0 <= value <= 1_000_000:
            raise ConfigurationError(f"{field_name} {value} is not 0 to 1000000")
    if not (math.isfinite(poll_s) and 0.01 <= poll_s <= 60):
        raise ConfigurationError(f"poll_s {poll_s} is not 0.01 to 60 seconds")
    if owner is not None and len(owner) > 100:
        raise ConfigurationError(f"owner has {len(owner)} characters; at most 100 are taken")
