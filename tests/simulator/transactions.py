"""What a simulated database holds, and its local transactions: row locks, snapshots, savepoints, COMMIT.

Rows are values under keys: ("fence", xid, branch_id), ("account", name), ("effect", xid, branch_id, phase). The locks
and the isolation levels are those that the fence was made for. The errors are the driver's own, so that the real
``is_transient`` judges them.
"""

from __future__ import annotations

from enum import Enum, unique
from typing import Any, NamedTuple

import psycopg
from psycopg import errors

from participant_sdk.call import Refusal
from participant_sdk.payload import Payload

Key = tuple[Any, ...]

WRITER: Key = ("writer",)
"""What a local transaction locks where only one at a time can write."""


@unique
class Flavour(Enum):
    """How a database isolates local transactions from each other."""

    READ_COMMITTED = "PostgreSQL, READ COMMITTED"
    SERIALIZABLE = "PostgreSQL, SERIALIZABLE: 40001 at a statement, or at COMMIT"
    LOCKING = "MariaDB: reads for update, and an error takes the whole local transaction with it"
    ONE_WRITER = "SQLite: one local transaction writes at a time"


class StoredRow(NamedTuple):
    """A row of the fence log."""

    participant: str
    action: str
    status: int
    modified_ms: int
    finished: bool = False
    algorithm: int | None = None
    fingerprint: bytes | None = None
    result: Payload | None = None
    refusal: Refusal | None = None
    intent: str | None = None
    lease_until_ms: int | None = None


class Account(NamedTuple):
    """Money. At rest nothing is ``held`` (to be taken away by Confirm), nor ``due`` (to be added by it)."""

    balance: int
    held: int = 0
    due: int = 0


class Change(NamedTuple):
    """What one COMMIT has made of one row; None: no row."""

    key: Key
    old: Any
    new: Any


class Blocked(Exception):
    """A statement has to wait for another's local transaction."""

    def __init__(self, owner: LocalTransaction) -> None:
        super().__init__()
        self.owner = owner


class Tables:
    """What is committed, with its history, and who has locked what."""

    def __init__(self) -> None:
        self.seq = 0
        self._versions: dict[Key, list[tuple[int, Any]]] = {}
        self.locks: dict[Key, LocalTransaction] = {}

    def latest(self, key: Key) -> Any:
        """The committed row; None if there is none."""
        versions = self._versions.get(key)
        return versions[-1][1] if versions else None

    def latest_seq(self, key: Key) -> int:
        """The number of the COMMIT that wrote it last; 0: none."""
        versions = self._versions.get(key)
        return versions[-1][0] if versions else 0

    def as_of(self, key: Key, seq: int) -> Any:
        """The row as it was after the COMMIT of that number."""
        for number, value in reversed(self._versions.get(key, ())):
            if number <= seq:
                return value
        return None

    def keys(self, kind: str) -> list[Key]:
        """Of all committed rows of a kind."""
        return [key for key, versions in self._versions.items() if key[0] == kind and versions[-1][1] is not None]

    def write(self, values: dict[Key, Any]) -> list[Change]:
        """Make these rows durable, all at once."""
        self.seq += 1
        changes = []
        for key, value in values.items():
            old = self.latest(key)
            if old != value:
                self._versions.setdefault(key, []).append((self.seq, value))
                changes.append(Change(key, old, value))
        return changes


class LocalTransaction:
    """One local transaction in the server. Its statements raise Blocked before they have done anything."""

    def __init__(self, tables: Tables, flavour: Flavour) -> None:
        self._tables = tables
        self._flavour = flavour
        self._snapshot: int | None = None
        self.writes: dict[Key, Any] = {}
        self._reads: set[Key] = set()
        self._locked: set[Key] = set()
        self._savepoint: tuple[dict[Key, Any], set[Key]] | None = None
        self.failed = False
        """PostgreSQL does nothing more in it after an error, but ROLLBACK."""
        self.ended = False
        self.waits_for: LocalTransaction | None = None

    def read(self, key: Key) -> Any:
        """SELECT."""
        self._check()
        if self._flavour is Flavour.SERIALIZABLE:
            self._reads.add(key)
        if key in self.writes:
            return self.writes[key]
        if self._flavour is Flavour.SERIALIZABLE:
            return self._tables.as_of(key, self._begun())
        return self._tables.latest(key)

    def lock(self, key: Key) -> Any:
        """SELECT … FOR UPDATE, and what an UPDATE does first: the row as it is now."""
        self._check()
        self._wait_for(key)
        self._refuse_newer(key)
        self._lock(key)
        return self.writes[key] if key in self.writes else self._tables.latest(key)

    def write(self, key: Key, value: Any) -> None:
        """UPDATE, or DELETE (None), of a row that is locked."""
        if self._tables.locks.get(key) is not self:
            raise AssertionError(f"{key} is not locked")
        self.writes[key] = value

    def insert(self, key: Key, value: Any) -> bool:
        """INSERT … ON CONFLICT DO NOTHING: whether it was inserted. Waits for one that may still come or go."""
        self._check()
        if self._flavour is Flavour.SERIALIZABLE:
            self._begun()
        owner = self._tables.locks.get(key)
        present = self._tables.latest(key) is not None
        if owner is not None and owner is not self and (not present or owner.writes.get(key, key) is None):
            raise Blocked(owner)
        self._refuse_newer(key)
        if self.writes.get(key) is not None or (present and key not in self.writes):
            return False
        self._lock(key)
        self.writes[key] = value
        return True

    def savepoint(self) -> None:
        """SAVEPOINT."""
        self._check()
        self._savepoint = dict(self.writes), set(self._locked)

    def release(self) -> None:
        """RELEASE SAVEPOINT."""
        self._check()
        self._saved()
        self._savepoint = None

    def rollback_to(self) -> None:
        """ROLLBACK TO SAVEPOINT; what was locked since is free again."""
        writes, locked = self._saved()
        self.writes = dict(writes)
        for key in self._locked - locked:
            del self._tables.locks[key]
        self._locked = set(locked)
        self.failed = False

    def check_commit(self) -> None:
        """What COMMIT may fail of."""
        self._check()
        if self._flavour is Flavour.SERIALIZABLE and self.writes:
            for key in self._reads:
                if self._tables.latest_seq(key) > self._begun() and self._tables.locks.get(key) is not self:
                    raise errors.SerializationFailure("could not serialize access due to dependencies")

    def end(self) -> None:
        """Give all locks back."""
        self.ended = True
        for key in self._locked:
            del self._tables.locks[key]
        self._locked.clear()

    def _begun(self) -> int:
        if self._snapshot is None:
            self._snapshot = self._tables.seq
        return self._snapshot

    def _check(self) -> None:
        if self.failed:
            raise errors.InFailedSqlTransaction("current transaction is aborted")

    def _wait_for(self, key: Key) -> None:
        owner = self._tables.locks.get(key)
        if owner is not None and owner is not self:
            if self._flavour is Flavour.SERIALIZABLE:
                self._begun()
            raise Blocked(owner)

    def _refuse_newer(self, key: Key) -> None:
        if self._flavour is Flavour.SERIALIZABLE and self._tables.latest_seq(key) > self._begun():
            raise errors.SerializationFailure("could not serialize access due to concurrent update")

    def _lock(self, key: Key) -> None:
        self._tables.locks[key] = self
        self._locked.add(key)

    def _saved(self) -> tuple[dict[Key, Any], set[Key]]:
        if self._savepoint is None:
            raise errors.InvalidSavepointSpecification("savepoint does not exist")
        return self._savepoint


def lost(text: str) -> psycopg.OperationalError:
    """The error of a connection that is gone."""
    return psycopg.OperationalError(f"connection lost: {text}")
