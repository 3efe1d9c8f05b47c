"""The rows as values, and what a backend must offer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

    from ..filters_tree import Node


POSTGRES = ("postgresql://", "postgres://")
"""How URLs of stores on PostgreSQL begin."""


class Row(NamedTuple):
    """A transaction as stored, in the order of the table's columns.

    What never changes stands first, what each save writes last: an update then touches one end of the row, which is
    what PostgreSQL's log compresses best. Bytes and integers only, so that no text value can fail a flush.
    """

    xid: bytes
    created_ms: int = 0
    key: bytes = b""
    body: bytes = b""
    participants: str = ""
    """",a,b,": the names of the participants, for operators' filters. Empty in a save: as it was."""
    format: int = 1
    version: int = 1
    save_id: int = 0
    state: int = 0
    attention: int = 0
    wake_ms: int | None = None
    updated_ms: int = 0
    progress: bytes = b""


Labels = Mapping[bytes, Sequence[tuple[str, str]]]
"""Names and values, by xid; a transaction without labels is absent."""
NO_LABELS: Labels = MappingProxyType({})


def read_row(values: Iterable[Any]) -> Row:
    """A row as the database gave it: no key is stored as NULL."""
    row = Row._make(values)
    return row if row.key is not None else row._replace(key=b"")


def names_of(participants: str) -> set[str]:
    """The names in ``Row.participants``."""
    return {name for name in participants.split(",") if name}


class Batch(NamedTuple):
    """What one flush writes: at most one row per xid."""

    begins: Sequence[Row]
    saves: Sequence[Row]
    labels: Labels = NO_LABELS
    """Of begins; written with those of them that are really inserted."""


class PutOff(NamedTuple):
    """Which due rows a claim puts off, unread: nothing could be done for them, and they are many.

    Decided ones, whose participants are all among these, and which were saved lately: others are claimed all the
    same, so that their attempts go on being counted and a person hears of them.
    """

    participants: Sequence[str]
    saved_within_ms: int
    least_ms: int
    most_ms: int
    """Each for some time between these two."""


CLAIMS_MAX = 3
"""A row that was claimed so often, and not saved, is claimed alone, ever more rarely, and gets attention (A7)."""
ALONE_MS_MAX = 3_600_000
"""The longest lease of such a row."""


class Claim(NamedTuple):
    """What a look for due work found."""

    rows: Sequence[Row]
    now_ms: int
    """The store's clock."""
    next_wake_ms: int | None
    """When the next row is due that was not claimed; None if there is none."""
    put_off: int = 0
    """Rows that were put off."""
    claims: int = 0
    """How often the only row was claimed, this time included, if it was claimed alone."""


class LookedUp(NamedTuple):
    """What the store knows of some transactions."""

    states: Mapping[bytes, int]
    """By xid; those without a row are absent."""
    store_id: str
    incarnation: int
    """The history that was read: another number after a failover or a restore. 0: not known."""


class ParticipantRow(NamedTuple):
    """What an instance of a participant registers."""

    name: str
    address: str
    actions: Mapping[str, str]
    """Action name -> id of the database that holds its fence rows."""


class ListFilter(NamedTuple):
    """Which transactions an operator wants to see, in the order of their creation."""

    matching: Node | None = None
    """All that may match it: what only a row's body tells is for the caller to look at. None: all."""
    now_ms: int = 0
    """What ages are counted from."""
    oldest_first: bool = False
    beyond_xid: bytes | None = None
    """Only those that come after this one: the keyset of the next page."""
    limit: int = 50


class Fault(Enum):
    """What a database error means for the statement that met it."""

    AGAIN = "again"
    """Nothing was stored; the same may succeed now (serialization failure, deadlock, lock time-out, busy)."""
    LOST = "lost"
    """The connection is gone and it is not known whether the statement was stored: run it again on a new one."""
    REJECTED = "rejected"
    """The database will never accept it."""


class StoreError(Exception):
    """The store cannot be used: what is wrong, and what to do."""


class StoreUnreachable(StoreError):
    """The database does not answer."""


class RowRejected(StoreError):
    """The database does not accept this row. Nothing of it is stored."""


class Backend(Protocol):
    """The hot path of one database. Every method blocks; each runs on one thread at a time.

    ``flush`` and ``close_writer`` run on the writer's thread, ``claim`` and ``close_reader`` on the reader's. Those
    that are given a connection of ``engine`` run on any.
    """

    def engine(self) -> Engine:
        """A SQLAlchemy engine for everything that is not hot: schema, lists, participants."""

    def reading_engine(self) -> Engine | None:
        """An engine to read by, without ``prepare``: nothing is taken, changed or made; None if there is no database.

        Raises StoreError if it cannot be reached or is no database.
        """

    def prepare(self) -> None:
        """Check that the database is fit to be trusted, and take what must be held alone. Raises StoreError."""

    def incarnation(self) -> str:
        """Names the history that this database's log belongs to; another one after a restore or a failover."""

    def flush(self, batch: Batch) -> list[Row | None]:
        """Write a batch durably, all or nothing, and tell for each row (begins, then saves) what stands.

        None: this row stands. Else the row that stands in its place: for a begin, the holder of its key or xid; for a
        save, the version that was not the expected one (a row with state 0 if there is none at all).
        Running the same batch again is harmless, and waits for the lock of a COMMIT still on its way.
        """

    def claim(
        self, limit: int, lease_ms: int, put_off: PutOff | None = None, *, alone: bool = True, flags: bool = True
    ) -> Claim:
        """Move ``wake_ms`` of up to ``limit`` due rows forward by a lease, and return them. Never ``version``.

        Rows that are put off count among these, but are not returned. One that was claimed CLAIMS_MAX times without a
        save comes alone, when nothing else is due and if ``alone`` allows it, with a lease that doubles each time; if
        the claim ``flags``, it gets attention by that where it has none.
        """

    def states(self, connection: Connection, xids: Sequence[bytes]) -> Mapping[bytes, int]:
        """The states of those transactions that have a row, by xid; found by the primary key."""

    def timeline(self, connection: Connection) -> int:
        """Numbers the history that this very connection reads; 0 if the database does not tell."""

    def fault(self, error: Exception) -> Fault:
        """What an error raised by ``flush`` or ``claim`` means."""

    def interrupt(self) -> None:
        """Make calls that wait for the database fail now. The one method that is called from another thread."""

    def close_writer(self) -> None:
        """Close the writer's connection, or drop it if it is broken. The next ``flush`` opens a new one."""

    def close_reader(self) -> None:
        """Likewise for the reader's."""

    def release(self) -> None:
        """Give back what ``prepare`` took."""
