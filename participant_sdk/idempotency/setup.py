"""What all requests of one Idempotency share."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakSet, WeakValueDictionary

from sqlalchemy import Dialect, Pool
from sqlalchemy import exc as sqlalchemy_errors

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.fronts import fit, front_key, holdable
from participant_sdk.idempotency.lines import Line
from participant_sdk.idempotency.moves import Apart, Moves, Told
from participant_sdk.idempotency.record import Record, State
from participant_sdk.idempotency.repeats import Repeats
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

CRASH_VARIABLE: Final = "TRICORD_IDEMPOTENCY_CRASH_AT"
"""Names the point at which a process under test is to kill itself: see participant_sdk.idempotency.testing."""


class Beat(Protocol):
    """Whoever renews leases."""

    def add(self, run: AnyRun) -> None:
        """Renew this run's lease from now on."""

    def remove(self, run: AnyRun) -> None:
        """Renew it no more."""


@dataclass(slots=True)
class Setup:
    """`fronts`: the nearest first. `pool`: the engine's.

    `identity`: what names the store's database, `store_id`: the store itself; once they are known.
    """

    store: Store
    dialect: Dialect
    pool: Pool
    namespace: str
    owner: str
    fronts: Sequence[Any]
    waiting: Waiting
    beat: Beat
    identity: str | None = None
    store_id: bytes | None = None
    running: WeakValueDictionary[bytes, Begun] = field(default_factory=WeakValueDictionary)
    """The ATOMIC runs in this process: nobody need ask the database whether those keys are free."""
    repeats: Repeats = field(default_factory=Repeats)
    proven: WeakSet[Any] = field(default_factory=WeakSet)
    """Pools, and connections of the driver, that lead to the store's database too."""
    carried: set[asyncio.Task[Any]] = field(default_factory=set)
    """What undoes claims whose tasks were cancelled."""

    def __post_init__(self) -> None:
        if CRASH_VARIABLE in os.environ:
            import_module("participant_sdk.idempotency.testing.crashes").arm_from_environment()

    def undo(self, held: Held) -> Script[bool]:
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

    def know(self) -> Moves[bytes]:
        """The store's id, which fronts need. Raises what the database does."""
        if self.store_id is None:
            self.store_id = yield Apart(self.store.identity())
        return self.store_id

    def peek(self, key_hash: bytes) -> Moves[Record | None]:
        """The ended record that a front has, which those before it have from now on; a front that fails has none.

        Raises what the database does, where it has to be asked first which store this is.
        """
        key = front_key((yield from self.know()), key_hash)
        for number, front in enumerate(self.fronts):
            try:
                record = fit((yield Told(front.get, (key,))), key)
            except Exception:
                logger.warning("a front could not be asked; the database is", exc_info=True)
            else:
                if record is not None:
                    yield from self._put(self.fronts[:number], record)
                    return replace(record, key_hash=key_hash)
        return None

    def keep(self, record: Record) -> Moves[None]:
        """Put an ended record that is durable into the fronts."""
        if not holdable(record):
            return
        try:
            store_id = yield from self.know()
        except Exception as error:
            if not self.is_of_database(error):
                raise
            logger.warning("a front could not be given a record", exc_info=True)
            return
        yield from self._put(self.fronts, replace(record, key_hash=front_key(store_id, record.key_hash)))

    def _put(self, fronts: Sequence[Any], record: Record) -> Moves[None]:
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
