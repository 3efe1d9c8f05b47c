"""What may answer a repeat in front of the database: ended records only, and only for as long as they are to be kept.

A front proves nothing. What it holds is what the database has committed, so a hit can be replayed; a miss, a failure or
a front that is switched off means that the database is asked. It never says that there is no record.

A front may be shared by stores in several databases: records lie in it under a key of their store's own (`front_key`).
What an operator purges is forgotten by the fronts that he names; another process's own memory holds it for `age_max_s`
at the most.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeAlias, runtime_checkable

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.record import KEY_HASH_BYTES, Record

RECORD_BYTES: Final = 1_000
"""What a record takes in memory besides its texts and its answer, about."""
AGE_MAX_S: Final = 300.0


@runtime_checkable
class Front(Protocol):
    """Asked before the database. Any thread may call it. Neither method raises, or waits for long."""

    def get(self, key_hash: bytes) -> Record | None:
        """The ended record of that `key_hash`, if it is held and has not expired; its times are those of now."""

    def put(self, record: Record) -> None:
        """Hold a record that is committed. One that has not ended, or is older than what is held, is left out."""


@runtime_checkable
class AsyncFront(Protocol):
    """As `Front`, where asking has to be waited for."""

    async def get(self, key_hash: bytes) -> Record | None:
        """See Front."""

    async def put(self, record: Record) -> None:
        """See Front."""


AnyFront: TypeAlias = Front | AsyncFront


@runtime_checkable
class ErasingFront(Protocol):
    """A front from which records can be erased; `forget` may be a coroutine function."""

    def forget(self, fences: Mapping[bytes, int]) -> object:
        """Hold none of these keys' records with such a fence, or a lower one, any more, nor take it again later.

        Raises whatever keeps it from that: the caller has to know that something may be left.
        """


@dataclass(frozen=True, slots=True)
class FrontCounts:
    """What a front has done since it was made."""

    hits: int = 0
    misses: int = 0
    """The database was asked: not held, expired, unreadable, or the front could not be asked."""
    stored: int = 0
    errors: int = 0
    """Calls of a remote front that have failed or taken too long, or that met bytes that could not be read."""
    skipped: int = 0
    """Calls that were not made, since the last ones had failed."""
    entries: int = 0
    """Held now, by a front in this process."""
    bytes_held: int = 0
    """What these take, about."""


def check_fronts(fronts: Sequence[AnyFront], *, asyncio: bool) -> None:
    """Raises ConfigurationError for what is no front, or is one for asyncio in a program of threads."""
    for number, front in enumerate(fronts):
        if not isinstance(front, Front):  # looks at the names alone, so an AsyncFront is one too
            raise ConfigurationError(f"fronts[{number}] {front!r} has no get and put")
        if not asyncio and (inspect.iscoroutinefunction(front.get) or inspect.iscoroutinefunction(front.put)):
            raise ConfigurationError(f"fronts[{number}] {type(front).__name__} is for AsyncIdempotency")


def check_erasing(fronts: Sequence[ErasingFront], *, asyncio: bool) -> None:
    """Raises ConfigurationError for a front that cannot forget, or is one for asyncio in a program of threads."""
    for number, front in enumerate(fronts):
        if not isinstance(front, ErasingFront):
            raise ConfigurationError(f"fronts[{number}] {front!r} has no forget: what is purged would stay in it")
        if not asyncio and inspect.iscoroutinefunction(front.forget):
            raise ConfigurationError(f"fronts[{number}] {type(front).__name__} is for AsyncInspection")


def front_key(store: bytes, key_hash: bytes) -> bytes:
    """Under which a record lies in fronts: another one in each store, so that none is told another's answer."""
    return hashlib.blake2b(key_hash, key=store, digest_size=KEY_HASH_BYTES).digest()


def holdable(record: Record) -> bool:
    """Whether a front may hold it: its word is final, until a time that has not come yet."""
    return record.state.ended and record.expires_left_ms is not None and record.expires_left_ms > 0


def fit(record: Record | None, key_hash: bytes) -> Record | None:
    """What a front has given, if it is what a front may give."""
    return record if record is not None and record.key_hash == key_hash and holdable(record) else None


class MemoryFront:
    """Ended records in this process, the last used ones, in so many bytes. For threads and for asyncio.

    Raises ConfigurationError for a limit that is not above 0.
    """

    def __init__(
        self,
        bytes_max: int = 64 * 1024 * 1024,
        entries_max: int = 100_000,
        *,
        age_max_s: float = AGE_MAX_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = (("bytes_max", bytes_max), ("entries_max", entries_max), ("age_max_s", age_max_s))
        for name, limit in limits:
            if not 0 < limit < math.inf:
                raise ConfigurationError(f"MemoryFront: {name} {limit} is not above 0")
        self._bytes_max = bytes_max
        self._entries_max = entries_max
        self._age_max_ms = int(age_max_s * 1000)
        self._clock = clock
        self._lock = threading.Lock()
        self._held: OrderedDict[bytes, _Entry] = OrderedDict()
        self._bytes = 0
        self._hits = self._misses = self._stored = 0

    def get(self, key_hash: bytes) -> Record | None:
        """See Front."""
        now_ms = self._now_ms()
        with self._lock:
            entry = self._held.get(key_hash)
            if entry is not None and now_ms >= entry.until_ms:
                self._drop(key_hash)
                entry = None
            if entry is None or entry.record is None:
                self._misses += 1
                return None
            self._hits += 1
            self._held.move_to_end(key_hash)
        return later(entry.record, now_ms - entry.since_ms)

    def put(self, record: Record) -> None:
        """See Front. What alone is larger than the front is left out."""
        size = bytes_of(record)
        if not holdable(record) or size > self._bytes_max:
            return
        now_ms = self._now_ms()
        left_ms = min(record.expires_left_ms or 0, self._age_max_ms)
        entry = _Entry(record, record.fence, size, now_ms, now_ms + left_ms)
        with self._lock:
            self._stored += self._hold(record.key_hash, entry)

    def forget(self, fences: Mapping[bytes, int]) -> None:
        """See ErasingFront. Not in other processes."""
        now_ms = self._now_ms()
        with self._lock:
            for key_hash, fence in fences.items():
                self._hold(key_hash, _Entry(None, fence + 1, RECORD_BYTES, now_ms, now_ms + self._age_max_ms))

    def _hold(self, key_hash: bytes, entry: _Entry) -> bool:
        before = self._held.get(key_hash)
        if before is not None:
            if before.fence > entry.fence:
                return False
            self._drop(key_hash)
        self._held[key_hash] = entry
        self._bytes += entry.size
        while self._bytes > self._bytes_max or len(self._held) > self._entries_max:
            self._drop(next(iter(self._held)))
        return True

    def flush(self) -> None:
        """Forget everything."""
        with self._lock:
            self._held.clear()
            self._bytes = 0

    @property
    def counts(self) -> FrontCounts:
        """What it has done so far."""
        with self._lock:
            return FrontCounts(self._hits, self._misses, self._stored, entries=len(self._held), bytes_held=self._bytes)

    def _drop(self, key_hash: bytes) -> None:
        self._bytes -= self._held.pop(key_hash).size

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)


@dataclass(frozen=True, slots=True)
class _Entry:
    """`record` None: it was erased, and what has no higher fence is not taken again."""

    record: Record | None
    fence: int
    size: int
    since_ms: int
    until_ms: int


def later(record: Record, passed_ms: int) -> Record:
    """The record as it is so many ms after it was read."""
    left_ms = (record.expires_left_ms or 0) - passed_ms
    return replace(record, age_ms=record.age_ms + passed_ms, expires_left_ms=left_ms)


def bytes_of(record: Record) -> int:
    """What a record takes in memory, about."""
    texts = (record.tenant, record.operation, record.key_hint, record.reason, record.recovery_point or "")
    answer = 0 if record.answer is None else record.answer.bytes_held
    return RECORD_BYTES + 4 * sum(map(len, texts)) + len(record.phase_data or b"") + answer
