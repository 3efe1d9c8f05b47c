"""The store in an SQLite file in WAL mode.

What differs from PostgreSQL: only one local transaction writes at a time, whatever its key. So an atomic run takes
the file's lock for writing at its very start, and one that cannot have it is told that the key is not free, as if
another run had it. Every claim, renewal and take-over waits for that lock, as long as the connection's busy_timeout
says: a leased run's work should be short. Nobody is told of a run's end; whoever waits looks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from participant_sdk.databases.database import Script
from participant_sdk.databases.driver_errors import SQLITE
from participant_sdk.databases.sqlite import Sqlite, in_transaction
from participant_sdk.idempotency.sql import Sql, Values
from participant_sdk.idempotency.statements import SentStore
from participant_sdk.idempotency.store import Held, Met
from participant_sdk.steps import Ask, Commit, Send


class SqliteStore(SentStore):
    """See the module."""

    errors = SQLITE
    one_writer: ClassVar[bool] = True
    NOW_MS: ClassVar[str] = Sqlite.NOW_MS
    NOW_US: ClassVar[str] = f"{Sqlite.NOW_MS} * 1000"
    SIGN: ClassVar[str] = Sqlite.SIGN
    GREATEST: ClassVar[str] = "MAX"

    def lost_race(self, error: BaseException) -> bool:
        """See SentStore. Where the lock is not free it has waited for that, as long as the user said."""
        return self.changed_under(error)

    def _begin(self) -> Script[None]:
        """A local transaction that reads first cannot wait for the lock later."""
        if (yield Ask(in_transaction)):
            yield Send("ROLLBACK")
        yield Send("BEGIN IMMEDIATE")

    def _insert(self, insert: Sql, values: Values) -> Script[bool]:
        return bool((yield Send(f"{insert.text} ON CONFLICT DO NOTHING", insert.values(values))).hit == 1)

    def _renewed(self, held: Sequence[tuple[Held, int]]) -> Script[frozenset[bytes]]:
        update = (
            f"UPDATE {self.table} SET lease_until_ms = {self.NOW_MS} + ? WHERE key_hash = ? AND fence = ? AND state = 0"
        )
        mine = set()
        yield from self._begin()
        for one, lease_ms in held:
            if (yield Send(update, (lease_ms, one.key_hash, one.fence))).hit == 1:
                mine.add(one.key_hash)
        yield Commit()
        return frozenset(mine)

    def meet(self, key_hash: bytes, wait_ms: int) -> Script[Met]:
        """See Store."""
        free = True
        before = int((yield Send("PRAGMA busy_timeout")).rows[0][0])
        yield Send(f"PRAGMA busy_timeout = {int(wait_ms)}")
        try:
            if (yield Ask(in_transaction)):  # by a listener of the engine, or by the user: it goes on
                yield Send(f"DELETE FROM {self.table} WHERE key_hash = ? AND fence < 0", (key_hash,))
            else:
                yield Send("BEGIN IMMEDIATE")
        except Exception as error:
            if not self.is_transient(error):
                raise
            free = False
        finally:
            yield Send(f"PRAGMA busy_timeout = {before}")
        return Met(free, (yield from self._found(key_hash)))
