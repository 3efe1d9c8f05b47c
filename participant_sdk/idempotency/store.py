"""What the idempotency-key store asks of a database. Each method is a script: a generator of steps on a connection.

As the fence's `Database` (participant_sdk.databases), it is written once for Engine and AsyncEngine. A script decides
nothing: `machine.verdict` does. All writes compare and swap on the fence number, all times are the database's.

`complete`, `reach` and `write` without `commit` consist of `Send` alone, which needs no more than a cursor, so that
they can be carried out in a local transaction of the driver's own connection too. A local transaction of the store's
own that loses a race (a serialization failure, a deadlock) is run again here, a bounded number of times.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from participant_sdk.databases.database import Script
from participant_sdk.databases.driver_errors import DriverErrors
from participant_sdk.idempotency.record import Answer, Fingerprint, Record, State
from participant_sdk.steps import Rollback

if TYPE_CHECKING:
    from participant_sdk.idempotency.tables import IdempotencyTables


@dataclass(slots=True)
class Claim:
    """A run that wants to begin, as it is to be stored."""

    key_hash: bytes
    tenant: str
    operation: str
    key_hint: str
    fingerprint: Fingerprint
    owner: str
    lease_ms: int
    durable: bool = True
    """Whether the claim itself has to survive a crash of the database server. Not where the only effect of the run is
    the local transaction that completes it: a completion that is durable makes the claim before it durable, too, and
    without one nothing has happened. Where there is a choice (PostgreSQL), such a claim costs no flush."""


@dataclass(frozen=True, slots=True)
class Held:
    """The record of a run in progress: only whoever still has this fence may change it."""

    key_hash: bytes
    fence: int
    attempt: int


@dataclass(slots=True)
class Outcome:
    """How a run has ended, as it is to be stored. `ttl_ms` counts from now; None for UNKNOWN."""

    state: State
    answer: Answer | None
    ttl_ms: int | None
    reason: str = ""


@dataclass(slots=True)
class Met:
    """What an atomic run has met. `free`: nobody else runs this key, nor can until the local transaction ends."""

    free: bool
    record: Record | None


class Store(ABC):
    """A database with the table of records in it.

    `channel`: where PostgreSQL tells of the end of a run that somebody waits for; its payload is the key's hash in
    hexadecimal. None where a database cannot tell: whoever waits looks again from time to time. `errors`: what the
    database's drivers' errors mean.
    """

    channel: str | None = None
    one_writer: ClassVar[bool] = False
    errors: ClassVar[DriverErrors]

    def __init__(self, tables: IdempotencyTables) -> None:
        self.tables = tables

    def is_transient(self, error: BaseException) -> bool:
        """Whether the driver's `error` only means that a local transaction lost a race, or its connection."""
        return self.errors.is_transient(error)

    def leave(self) -> Script[None]:
        """End a local transaction that `meet` has begun and that changes nothing."""
        yield Rollback()

    @abstractmethod
    def identity(self) -> Script[bytes]:
        """32 random bytes that stay the same for as long as the table does; made when they are first asked for.

        They stand in a row of the table that belongs to no operation, and never expires.
        """

    # Leased and phased: each of these is a local transaction of its own, with its COMMIT.

    @abstractmethod
    def claim(self, claim: Claim) -> Script[Held | Record]:
        """Make the record, PROCESSING; or the record that is there already. Waits for no other claim's work."""

    @abstractmethod
    def take_over(self, claim: Claim, met: Record) -> Script[Held | None]:
        """PROCESSING with the next fence and attempt, if fence and state are still those of `met`; else None.

        For a record that has expired, attempts count from 1 again, and what its phases left is gone. Does not wait for
        whoever has the record locked, such as for a completion that is not committed yet: then it is None too.
        """

    @abstractmethod
    def renew(self, held: Sequence[tuple[Held, int]]) -> Script[frozenset[bytes]]:
        """Move the leases' ends to that many ms from now; the key hashes of those that are still theirs.

        One statement for all runs of a process; a lease that has ended, and that nobody has taken, is renewed too.
        """

    @abstractmethod
    def settle(self, held: Held, outcome: Outcome) -> Script[bool]:
        """End a run whose work has left nothing (failed, or UNKNOWN), if the fence is still its; whether it was.

        Also for the operator's word on an UNKNOWN record. Raises ValueError for PROCESSING.
        """

    @abstractmethod
    def give_up(self, met: Record, reason: str) -> Script[bool]:
        """UNKNOWN, if fence and state are still those of `met` and its lease has ended; whether they were."""

    @abstractmethod
    def seize(self, met: Record, outcome: Outcome) -> Script[bool]:
        """End a run that may be live, if it is still as it was met; whether it was.

        Its fence is not the record's any more: whatever it still does in its local transaction rolls back. Does not
        wait for a completion that is under way.
        """

    @abstractmethod
    def read(self, key_hash: bytes) -> Script[Record | None]:
        """The record, in one statement; leaves no local transaction open."""

    @abstractmethod
    def await_end(self, held: Record) -> Script[None]:
        """Note that somebody waits for the end of this run, so that it is told (see `end`)."""

    # In the local transaction of the work, which somebody else commits.

    @abstractmethod
    def complete(self, held: Held, outcome: Outcome, *, commit: bool = False) -> Script[bool]:
        """End a leased run together with its work; whether anybody waits for it. `commit`: and commit.

        Raises LeaseLost if the fence is not its any more: the work must then roll back.
        """

    @abstractmethod
    def reach(
        self, held: Held, point: str, phase_data: bytes, *, lease_ms: int = 0, commit: bool = False
    ) -> Script[None]:
        """Store a recovery point together with a phase's work. Raises LeaseLost as `complete`.

        From then on the lease lasts for `lease_ms` more, if it would end sooner.
        """

    def pin(self, held: Held, *, again: bool) -> Script[None]:
        """Where a local transaction sees one snapshot, first of all: bar what would bar its completion.

        That is each renewal of the lease, which would change the record under it. So the record is locked, and a lease
        that ends meanwhile is nobody's to take. `again`: nothing has happened in it, so that it may begin again.
        """
        yield from ()

    @abstractmethod
    def meet(self, key_hash: bytes, wait_ms: int) -> Script[Met]:
        """For an atomic run, first thing in its local transaction: bar this key to others, and read its record.

        Does not wait for another run of the key: then `free` is False. A record that has ended is read all the same.
        `wait_ms` bounds the wait for what else is in the way: on SQLite, the only lock for writing.
        """

    @abstractmethod
    def write(self, claim: Claim, met: Record | None, outcome: Outcome, *, commit: bool = False) -> Script[None]:
        """For an atomic run, last thing in its local transaction: its record, in place of `met` if there was one.

        Raises LeaseLost if another has written one meanwhile.
        """
