"""What operators may see of the records, and their word on them, as moves.

No word of theirs touches a run that is live, unless that is what they say (`live`). Each compares and swaps on what was
read just before: what has changed meanwhile is left as it is, and told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from participant_sdk.background import Call, Do, Moves
from participant_sdk.errors import InvalidRequest
from participant_sdk.handling import told
from participant_sdk.idempotency.errors import IdempotencyError, StoreUnavailable
from participant_sdk.idempotency.fronts import ErasingFront, front_key
from participant_sdk.idempotency.inspection_sql import Counted, Entry, Filter, InspectionSql
from participant_sdk.idempotency.keys import key_hash
from participant_sdk.idempotency.record import KEY_HASH_BYTES, Answer, Record, State
from participant_sdk.idempotency.store import Held, Outcome
from participant_sdk.idempotency.stored import REASON_CHARS_MAX
from participant_sdk.idempotency.stores import store_of
from participant_sdk.idempotency.sweeping_sql import FIRST
from participant_sdk.idempotency.tables import IdempotencyTables
from participant_sdk.idempotency.words import words_of

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

ROWS_MAX: Final = 1_000
TTL_S_MAX: Final = 366 * 86_400
_BATCH: Final = 100


class NoSuchRecord(IdempotencyError):
    """There is no record under that key: it was never used, has been swept, or belongs to another tenant."""

    reason = "IDEMPOTENCY_NO_SUCH_RECORD"


class RecordInUse(IdempotencyError):
    """The record is not in a state in which that may be done to it, or has changed meanwhile; nothing was done."""

    reason = "IDEMPOTENCY_RECORD_IN_USE"


class FrontUnavailable(StoreUnavailable):
    """A front could not be told to forget; of the records that were to be purged, at least those at that point stay."""

    reason = "IDEMPOTENCY_FRONT_UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class Page:
    """Records in the order of their key hashes. `end`: after which the next page begins; None: there is none."""

    entries: Sequence[Entry]
    end: bytes | None


@dataclass(frozen=True, slots=True)
class Statistics:
    """How many records there are, and which of those that are not over are oldest."""

    counts: Sequence[Counted]
    oldest_processing: Entry | None
    oldest_unknown: Entry | None


class Inspecting:
    """Everything but who carries it out. See `Inspection` for what each method is."""

    def __init__(
        self, engine: Engine | AsyncEngine, namespace: str, tables: IdempotencyTables, fronts: Sequence[ErasingFront]
    ) -> None:
        self._namespace = namespace
        self._fronts = fronts
        self._store = store_of(engine.dialect, tables)
        self._sql = InspectionSql(words_of(engine.dialect, tables))

    def hashes(self, key: str, operation: str, tenant: str) -> tuple[bytes, ...]:
        """What a key may be stored under: as one of the operation, and as one of the whole namespace."""
        names = (operation, "") if operation else ("",)
        return tuple(key_hash(self._namespace, tenant, name, key) for name in names)

    def found(self, hashes: Sequence[bytes], operation: str = "") -> Moves[Entry]:
        """The record under the first of these hashes that has one."""
        for each in hashes:
            if len(each) != KEY_HASH_BYTES:
                raise InvalidRequest(f"the key's hash has {len(each)} bytes, not {KEY_HASH_BYTES}")
            entry: Entry | None = yield Do(self._sql.one(each))
            if entry is not None and operation in ("", entry.operation):
                return entry
        raise NoSuchRecord("no record under that key: never used, swept, or of another tenant or namespace")

    def page(self, which: Filter, after: bytes, rows: int) -> Moves[Page]:
        """The next records."""
        if not 1 <= rows <= ROWS_MAX:
            raise InvalidRequest(f"rows {rows} is not 1 to {ROWS_MAX}")
        entries: list[Entry] = yield Do(self._sql.page(which, after, rows))
        return Page(entries, entries[-1].key_hash if len(entries) == rows else None)

    def statistics(self) -> Moves[Statistics]:
        """What there is."""
        counts: list[Counted] = yield Do(self._sql.counts())
        there = {counted.state for counted in counts}
        oldest: list[Entry | None] = []
        for state in (State.PROCESSING, State.UNKNOWN):
            oldest.append((yield Do(self._sql.oldest(state))) if state in there else None)
        return Statistics(counts, *oldest)

    def resolve(self, key: bytes, outcome: Outcome, *, force: bool, live: bool) -> Moves[Entry]:
        """Say what became of it."""
        _check_outcome(outcome)
        entry = yield from self.found([key])
        if entry.live and live:
            met = yield Do(self._store.read(key))
            if met is None or met.fence != entry.fence or not (yield Do(self._store.seize(met, outcome))):
                raise RecordInUse("it has ended or changed meanwhile: look at it once more")
            return (yield from self.found([key]))
        if entry.state is State.PROCESSING:
            _check_lapsed(entry, force)
            met = yield Do(self._store.read(key))
            if met is None or met.fence != entry.fence or not (yield Do(self._store.give_up(met, outcome.reason))):
                raise RecordInUse("it has changed meanwhile: look at it once more")
        elif entry.state is not State.UNKNOWN:
            raise RecordInUse(f"it is {entry.state.name}: only what is UNKNOWN can be resolved")
        if not (yield Do(self._store.settle(Held(key, entry.fence, entry.attempt), outcome))):
            raise RecordInUse("it has changed meanwhile: look at it once more")
        return (yield from self.found([key]))

    def answer(self, key: bytes) -> Moves[Answer | None]:
        """What is said again to repeats."""
        record: Record | None = yield Do(self._store.read(key))
        return None if record is None else record.answer

    def extend(self, key: bytes, ttl_s: float) -> Moves[Entry]:
        """Let it expire later."""
        ttl_ms = ttl_ms_of(ttl_s)
        entry = yield from self.found([key])
        if entry.state in (State.PROCESSING, State.UNKNOWN):
            raise RecordInUse(f"it is {entry.state.name}, which does not expire")
        if entry.expired or not (yield Do(self._sql.extend(entry, ttl_ms))):
            raise RecordInUse("it has expired, so that the request may be running again")
        return (yield from self.found([key]))

    def purge_one(self, key: bytes, *, force: bool, dry_run: bool) -> Moves[Entry]:
        """Delete it."""
        entry = yield from self.found([key])
        if entry.live:
            raise RecordInUse(f"it is being run: its lease has {(entry.lease_left_ms or 0) / 1000:.1f} s left")
        if entry.state in (State.PROCESSING, State.UNKNOWN) and not force:
            raise RecordInUse(f"it is {entry.state.name}: without it the request would run once more; see force")
        if not dry_run:
            yield from self._forgotten({key: entry.fence})
            if not (yield Do(self._sql.delete([key], Filter(), unfinished=force))):
                raise RecordInUse("it is locked or has changed meanwhile: look at it once more")
        return entry

    def purge(self, which: Filter, *, force: bool, dry_run: bool) -> Moves[int]:
        """Delete all that match, in batches."""
        if which == Filter():
            raise InvalidRequest("say which records: without a filter all would go")
        after: bytes | None = FIRST
        purged = 0
        while after is not None:
            fences: dict[bytes, int] = yield Do(self._sql.deletable(which, after, _BATCH, unfinished=force))
            keys = list(fences)
            if keys and not dry_run:
                yield from self._forgotten(fences)
                purged += yield Do(self._sql.delete(keys, which, unfinished=force))
            elif keys:
                purged += len(keys)
            after = keys[-1] if len(keys) == _BATCH else None
        return purged

    def _forgotten(self, fences: Mapping[bytes, int]) -> Moves[None]:
        """By the fronts, and first: what they have failed to forget can still be found, and purged again."""
        if self._fronts:
            store_id: bytes = yield Do(self._store.identity())
            erased = {front_key(store_id, key): fence for key, fence in fences.items()}
            for front in self._fronts:
                try:
                    yield Call(front.forget, (erased,))
                except Exception as error:
                    raise FrontUnavailable(
                        f"a front could not be told, and nothing is deleted: {told(error)}"
                    ) from error


def _check_outcome(outcome: Outcome) -> None:
    answered = outcome.state in (State.SUCCEEDED, State.FAILED_FINAL)
    if not answered and outcome.state not in (State.TOMBSTONE, State.FAILED_RETRYABLE):
        raise InvalidRequest(f"nothing can be resolved to {outcome.state.name}")
    if answered != (outcome.answer is not None):
        raise InvalidRequest(f"{outcome.state.name} {'needs the answer' if answered else 'has no answer'} for repeats")
    if not outcome.reason.strip() or len(outcome.reason) > REASON_CHARS_MAX:
        raise InvalidRequest(f"reason is not 1 to {REASON_CHARS_MAX} characters")


def _check_lapsed(entry: Entry, force: bool) -> None:
    if entry.live:
        seconds = (entry.lease_left_ms or 0) / 1000
        raise RecordInUse(f"it is being run: its lease has {seconds:.1f} s left")
    if not force:
        raise RecordInUse(
            "it is PROCESSING, and its lease has ended: a repeat of the request says what becomes of it, or you, with "
            "force, once it is certain that nobody runs it any more"
        )


def ttl_ms_of(ttl_s: float) -> int:
    if not 1 <= ttl_s <= TTL_S_MAX:
        raise InvalidRequest(f"ttl_s {ttl_s} is not 1 to {TTL_S_MAX} seconds")
    return int(ttl_s * 1000)
