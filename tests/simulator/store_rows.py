"""The coordinators' database: rows that are durable, and who holds locks on them.

It does what PostgreSQL does for the two hot statements: a flush waits for the row locks of flushes that are still open,
decides by what is committed then, and commits some time later; a claim passes locked rows over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.model import FORMAT, Attention, State
from coordinator.store.registry import Instance, KnownParticipant
from coordinator.store.rows import Batch, Claim, PutOff, Row, names_of

from .handlers import ACTIONS
from .loop import EPOCH_US, SimLoop, World


class Database:
    """Rows that are durable, and who holds locks on them."""

    def __init__(self, world: World, on_commit: Callable[[Row | None, Row], None]) -> None:
        self.world = world
        self.rows: dict[bytes, Row] = {}
        self.keys: dict[bytes, bytes] = {}
        self.format = FORMAT
        self.skew_us = 0
        self.down = False
        """Whether nobody reaches it."""
        self.writers: dict[bytes, SimLoop] = {}
        """Which process has written a row last, or claimed it."""
        self._locked: dict[bytes, int] = {}
        self._waiting: list[tuple[list[bytes], Callable[[], None]]] = []
        self._on_commit = on_commit
        self._registered: dict[str, KnownParticipant] = {}
        self.incarnation = 1
        """Of its history: another one after a restore."""
        self.flagged: Sequence[bytes] = ()
        """For whoever opens it first after a restore: what that has given attention."""
        self.before_confirming: Callable[[], None] | None = None
        """Called before the next decision to confirm is durable."""
        self._saved: tuple[dict[bytes, Row], dict[bytes, bytes], int] | None = None

    def now_ms(self) -> int:
        """The clock that all coordinators go by."""
        return (EPOCH_US + self.world.now_us + self.skew_us) // 1000

    # --- locks ---------------------------------------------------------------------------------------------

    def lock(self, batch: Batch, locked: Callable[[], None]) -> None:
        """Take the locks that a flush needs, as soon as they are free, and then call back."""
        names = [row.xid for row in (*batch.begins, *batch.saves)] + [b"key " + r.key for r in batch.begins if r.key]
        if any(name in self._locked for name in names):
            self.world.counts["flush waited for a lock"] += 1
            self._waiting.append((names, locked))
            return
        for name in names:
            self._locked[name] = 1
        locked()

    def unlock(self, batch: Batch) -> None:
        """Give the locks of a flush back; whoever waits for them, goes on."""
        for row in (*batch.begins, *batch.saves):
            self._locked.pop(row.xid, None)
        for row in batch.begins:
            self._locked.pop(b"key " + row.key, None)
        waiting, self._waiting = self._waiting, []
        for n, (names, locked) in enumerate(waiting):
            if any(name in self._locked for name in names):
                self._waiting.append(waiting[n])
                continue
            for name in names:
                self._locked[name] = 1
            locked()

    # --- statements ----------------------------------------------------------------------------------------

    def commit(self, batch: Batch, writer: SimLoop) -> list[Row | None]:
        """What a flush does when it has its locks and goes through."""
        standing = [self._begin(row) for row in batch.begins] + [self._save(row) for row in batch.saves]
        for row, stands in zip((*batch.begins, *batch.saves), standing, strict=True):
            if stands is None:
                self.writers[row.xid] = writer
        return standing

    def _begin(self, row: Row) -> Row | None:
        standing = self.rows.get(row.xid)
        if standing is None and row.key in self.keys:
            standing = self.rows[self.keys[row.key]]
        if standing is None:
            if row.key:
                self.keys[row.key] = row.xid
            self._put(None, row)
            return None
        return None if standing.save_id == row.save_id and standing.xid == row.xid else standing

    def _save(self, row: Row) -> Row | None:
        standing = self.rows.get(row.xid)
        if standing is None:
            return Row(row.xid)
        if standing.version == row.version - 1:
            self._put(standing, self.merged(standing, row))
            return None
        if standing.save_id == row.save_id:
            return None
        self.world.counts["stale saves refused"] += 1
        return standing

    @staticmethod
    def merged(standing: Row, row: Row) -> Row:
        """What a save leaves: it writes the last columns."""
        return standing._replace(
            participants=row.participants or standing.participants, format=row.format, version=row.version,
            save_id=row.save_id, state=row.state, attention=row.attention, wake_ms=row.wake_ms,
            updated_ms=row.updated_ms, progress=row.progress,
        )  # fmt: skip

    def _put(self, before: Row | None, row: Row) -> None:
        if self.before_confirming is not None and row.state == State.CONFIRMING:
            self.before_confirming()
        self.rows[row.xid] = row
        self._on_commit(before, row)

    def claim(self, limit: int, lease_ms: int, put_off: PutOff | None, program: int) -> Claim:
        """See ``Backend.claim``; for a program that reads rows up to this format."""
        now_ms = self.now_ms()
        due = [row for row in self.rows.values() if row.wake_ms is not None and row.format <= program]
        due.sort(key=lambda row: (row.wake_ms, row.xid))
        rows: list[Row] = []
        off = 0
        for row in due:
            if row.wake_ms is None or row.wake_ms > now_ms or len(rows) + off >= limit:
                break
            if row.xid in self._locked:
                continue
            if put_off is not None and _is_put_off(row, now_ms, put_off):
                off += 1
                wake_ms = now_ms + int(self.world.random.uniform(put_off.least_ms, put_off.most_ms))
            else:
                wake_ms = now_ms + lease_ms
                rows.append(row._replace(wake_ms=wake_ms))
            self.rows[row.xid] = self.rows[row.xid]._replace(wake_ms=wake_ms)
        wakes = [row.wake_ms for row in self.rows.values() if row.wake_ms is not None and row.format <= program]
        return Claim(rows, now_ms, min(wakes, default=None), off)

    # --- an earlier time -----------------------------------------------------------------------------------

    def keep(self) -> None:
        """Take a backup."""
        self._saved = dict(self.rows), dict(self.keys), self.format

    def restore(self) -> None:
        """Put the backup in the place of all that there is, and do what opening such a store does (protocol A9)."""
        assert self._saved is not None
        self.incarnation += 1
        self.rows, self.keys, self.format = self._saved
        self._locked.clear()
        self._waiting.clear()
        self.writers.clear()
        self.flagged = [xid for xid, row in self.rows.items() if row.wake_ms is not None]
        for xid in self.flagged:
            row, save_id = self.rows[xid], self.world.random.getrandbits(62)
            attention = int(Attention.VIOLATION)
            self.rows[xid] = row._replace(attention=attention, version=row.version + 1, save_id=save_id)

    # --- who is where --------------------------------------------------------------------------------------

    def registered(self) -> Sequence[KnownParticipant]:
        """All participants."""
        return list(self._registered.values())

    def register(self, name: str, address: str, fence_id: str) -> None:
        """An instance is there."""
        actions = dict.fromkeys(ACTIONS, fence_id)
        others = self._others(name, address)
        self._registered[name] = KnownParticipant(name, actions, {}, (*others, Instance(address, actions)))

    def withdraw(self, name: str, address: str) -> None:
        """An instance goes; its participant stays known."""
        self._registered[name] = self._registered[name]._replace(instances=self._others(name, address))

    def _others(self, name: str, address: str) -> tuple[Instance, ...]:
        known = self._registered.get(name)
        return () if known is None else tuple(each for each in known.instances if each.address != address)


def _is_put_off(row: Row, now_ms: int, put_off: PutOff) -> bool:
    return (
        row.state in (State.CONFIRMING, State.CANCELLING)
        and row.updated_ms > now_ms - put_off.saved_within_ms
        and names_of(row.participants) <= set(put_off.participants)
    )
