"""What the fence asks of a database. Each method is a script: a generator of steps on the call's connection.

The scripts keep one order on every database: begin, with every wait bounded below the call's time; meet the branch's
row; (the handler); the proof that the row is still there, without which nothing is committed; the last statement of
the call, which must hit exactly one row; COMMIT. They decide nothing: that is `local_transaction`. The proof is the
release of a savepoint, or lies in that last statement where the server runs none after an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias, TypeVar

from sqlalchemy import Connection, Dialect

from participant_sdk.call import IncomingCall, Refusal
from participant_sdk.databases.driver_errors import DriverErrors
from participant_sdk.fence import Phase, Status
from participant_sdk.fence_row import FenceRow, Meeting
from participant_sdk.fence_tables import FenceTables
from participant_sdk.payload import Payload
from participant_sdk.steps import CallFailed, Step

R = TypeVar("R")
Script = Generator[Step, Any, R]

SAVEPOINT: Final = "SAVEPOINT tricord_handler"
ROLLBACK_TO: Final = "ROLLBACK TO SAVEPOINT tricord_handler"
RELEASE: Final = "RELEASE SAVEPOINT tricord_handler"

LOCK_WAIT_MIN_MS: Final = 50
PHASE2_WAIT_MIN_MS: Final = 1_000
REPLY_MARGIN_MS: Final = 100
"""Left of a call's time for answering "unknown" after a wait that was in vain."""
IDLE_MIN_MS: Final = 10_000

FENCE_CHECKED: Final = "tricord.fence_id"

BY_THE_KEY: Final = "SELECT " + ", ".join(
    f"set_config('enable_{plan}', 'off', true)" for plan in ("seqscan", "bitmapscan", "sort")
)
"""For this local transaction, PostgreSQL reads by the index, in its order, and only as far as it must. Without numbers
about the table, or for a prepared statement, it may guess that it is quicker to read all that follows, and sort it."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The handler of a batch's member has returned."""

    call: IncomingCall
    status: Status
    result: Payload | None


@dataclass(frozen=True, slots=True)
class SaidNo:
    """A Try of a batch is refused. `handled`: by its handler, whose work is undone."""

    call: IncomingCall
    refusal: Refusal
    handled: bool


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A Try of a batch leaves nothing: the row that the batch made for it goes. `mark`: the batch's."""

    call: IncomingCall
    mark: int


Ended: TypeAlias = Finished | SaidNo | Withdrawn
"""How a member of a batch has ended, as it is to be stored."""


@dataclass(frozen=True, slots=True)
class Start:
    """The Confirm or Cancel of a batch that is to run next, and the row that it met."""

    call: IncomingCall
    row: FenceRow
    status: Status


class Database(ABC):
    """A database with the fence's tables in it, and the SQL for them.

    `fence_id` is known once the tables are made. `one_writer`: only one local transaction can write at a time.
    `errors`: what its drivers' errors mean.
    """

    errors: ClassVar[DriverErrors]
    one_writer: ClassVar[bool] = False
    restores: ClassVar[bool] = False

    def __init__(self, dialect: Dialect, tables: FenceTables) -> None:
        self.tables = tables
        self.fence_id = ""
        preparer = dialect.identifier_preparer
        self.log = preparer.format_table(tables.log)
        self.info = preparer.format_table(tables.info)

    @abstractmethod
    def meet(self, call: IncomingCall) -> Script[Meeting]:
        """Begin, and take the branch's fence row, whoever else wants it.

        Try and Cancel insert first: two of them in flight together meet on the primary key, and the later one waits
        for the earlier one's local transaction. A read first would see neither.
        """

    @abstractmethod
    def savepoint(self) -> Script[None]:
        """Before Try's handler, where one is needed to undo what it did, and to prove that the row is still there."""

    @abstractmethod
    def start(self, call: IncomingCall, row: FenceRow, status: Status) -> Script[None]:
        """Move `row` to `status`, unfinished, and set a savepoint if need be: before the handler of Confirm or Cancel.

        Raises RunAgain if the row is not any more what the verdict was about.
        """

    @abstractmethod
    def finish(self, call: IncomingCall, status: Status, result: Payload | None, intent: str | None) -> Script[None]:
        """After a handler: store that it has ended and what Try returned, and commit.

        With `intent`, only if the row is still this one's. Raises CallFailed, with nothing committed, if the row is not
        there as it was left, or if this is not the local transaction any more that has written it.
        """

    @abstractmethod
    def refuse(
        self, call: IncomingCall, refusal: Refusal, *, handled: bool, intent: str | None
    ) -> Script[Meeting | None]:
        """Store why Try said no, and commit; what its handler did (`handled`) is rolled back first.

        A repeat gets the same answer, and Cancel finds nothing to undo. None: it is stored. Else another call was
        quicker, while nothing was held, and this is what that one has stored.
        """

    @abstractmethod
    def commit(self) -> Script[None]:
        """Commit what `meet` has inserted."""

    @abstractmethod
    def meet_all(self, calls: Sequence[IncomingCall], mark: int) -> Script[list[Meeting]]:
        """As `meet`, for a batch: calls of one phase, sorted by branch, each of another.

        All rows are taken before any handler runs, in the order of their keys, so that batches and single calls never
        wait for one another in a circle (rule F1). The new rows of Trys carry `mark`, a negative number, until they
        are finished. May raise RunAgain, after which the calls have to be run one by one.
        """

    @abstractmethod
    def next_member(self, ended: Sequence[Ended], start: Start | None) -> Script[None]:
        """In a batch: store how its last members have ended, make the `start` of the next, and set its savepoint."""

    def has_begun(self) -> Script[bool]:
        """After an error in a batch: whether the last `next_member` came to its end, if that was not waited for."""
        yield from ()
        return True

    @abstractmethod
    def end_batch(self, ended: Sequence[Ended]) -> Script[None]:
        """Store how the last members have ended, and commit."""

    @abstractmethod
    def clear(self, calls: Sequence[IncomingCall], mark: int) -> Script[None]:
        """Delete what rows of Trys still carry `mark`, if there are any, and commit."""

    @abstractmethod
    def lease(self, call: IncomingCall, old: str | None, new: str, milliseconds: int) -> Script[None]:
        """Commit the intent `new` of an external Try, in place of `old` if it took over from one.

        Raises RunAgain if the row's intent is not `old` any more.
        """

    @abstractmethod
    def begin_within(self, connection: Connection, call: IncomingCall) -> None:
        """Begin with a savepoint, called by SQLAlchemy at an external handler's first statement."""

    @abstractmethod
    def begin(self, call: IncomingCall) -> Script[None]:
        """Begin a local transaction that meets nothing, with a savepoint."""

    @abstractmethod
    def lapse(self, call: IncomingCall, intent: str) -> Script[bool]:
        """End the lease of `intent` now, and commit; whether the row was still its."""

    def leave(self) -> Script[None]:
        """End a local transaction that has met a row and changes nothing. By closing the connection, if not here."""
        yield from ()

    def restore(self) -> Script[None]:
        """After the end, when the connection goes back to the user's pool."""
        yield from ()

    def is_transient(self, error: BaseException) -> bool:
        """Whether the driver's `error` only means that the local transaction lost a race, or its connection."""
        return self.errors.is_transient(error)

    def restored(self) -> Script[None]:
        """As `restore`; but the call has ended, and nothing that happens now may change its reply."""
        yield from ()

    def check_fence_id(self, found: str | None) -> None:
        """Raises CallFailed if this is not the database that the replies will name.

        The engine may have been led elsewhere since the start (a restored copy, another host behind the name): its
        answers would be those of another fence, under this one's id. Asked once per connection.
        """
        if self.fence_id and found != self.fence_id:
            raise CallFailed(
                f"the fence database is not the one it was at the start: its id is {found}, not {self.fence_id}",
                attention=True,
            )


def known_to_sqlalchemy(connection: Connection) -> bool:
    """Whatever the driver begins from now on is rolled back by SQLAlchemy, if nobody commits it."""
    if not connection.in_transaction():
        connection.begin()
    return True


def noted(connection: Connection, key: str) -> Any:
    """What is in the connection's `info`, None if it is lost: SQLAlchemy would make a new one to answer that."""
    return None if connection.invalidated else connection.info.get(key)


def wait_ms(call: IncomingCall) -> int:
    """How long a statement of this call may wait for a lock, in ms: less than the coordinator waits for the reply.

    Confirm and Cancel are owed however late they are, so they always get a moment.
    """
    least = LOCK_WAIT_MIN_MS if call.phase is Phase.TRY else PHASE2_WAIT_MIN_MS
    return max(least, int(call.seconds_left() * 1000) - REPLY_MARGIN_MS)


def most_patient(calls: Sequence[IncomingCall]) -> IncomingCall:
    """The call of a batch by whose time its waits are bounded: one that is in a hurry must not make all fail."""
    return max(calls, key=lambda call: call.expires_at)


def idle_ms(lock_ms: int) -> int:
    """How long a local transaction may be idle before the server ends it, so that a stopped process frees its locks."""
    return 2 * lock_ms if 2 * lock_ms > IDLE_MIN_MS else IDLE_MIN_MS
