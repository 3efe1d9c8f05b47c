"""The upkeep's statements: short reads by the primary key, which lock nothing, and deletes of a few rows by whole key.

No other index than the primary key exists, as every call would pay for it. xids begin with the time, so "old" is a
range of that key, and it is read page by page: first the xid at which a page ends, then what is wanted of it. No
statement is about more than one page, however few of its rows are wanted, and no xid lies in two pages.

A delete names one row by its whole key, because of InnoDB: a range would lock the gaps in it, and bar others'
inserts. Even so, a row that is not there any more leaves a lock on its gap, so the local transaction ends with it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from participant_sdk.background import WAIT_SECONDS
from participant_sdk.call import IncomingCall
from participant_sdk.databases import Database
from participant_sdk.databases.database import BY_THE_KEY, Script
from participant_sdk.databases.mariadb import MariaDb
from participant_sdk.databases.sqlite import Sqlite
from participant_sdk.fence import Phase, Status
from participant_sdk.payload import Payload
from participant_sdk.steps import Commit, Rollback, Send

Key = tuple[str, int]

FIRST: Final = ""
"""Sorts before every xid."""
DELETES_MAX: Final = 100
"""Rows that one local transaction deletes: no lock is held for long, on SQLite the only one for writing."""
_KEYS_MAX: Final = 100

_SETTLED: Final = frozenset((Status.COMMITTED, Status.ROLLBACKED, Status.SUSPENDED))
_PURGEABLE: Final = (
    f"status IN ({', '.join(str(int(status)) for status in sorted(_SETTLED))}) "
    f"AND (finished_at IS NOT NULL OR status = {int(Status.SUSPENDED)})"
)


@dataclass(frozen=True, slots=True)
class OldRow:
    """What the upkeep wants to know of a fence row. Its age is the time since its last change."""

    xid: str
    branch_id: int
    status: int
    finished: bool
    age_ms: int
    lease_left_ms: int

    @property
    def key(self) -> Key:
        """Its primary key."""
        return self.xid, self.branch_id

    @property
    def settled(self) -> bool:
        """Whether no call that may still come has anything to do."""
        return self.status in _SETTLED and (self.finished or self.status == Status.SUSPENDED)


@dataclass(frozen=True, slots=True)
class Page:
    """Rows in the order of their xids. `end` is the xid after which the next page begins; None: there is none."""

    rows: Sequence[OldRow]
    end: str | None


@dataclass(frozen=True, slots=True)
class _Words:
    """What the databases say differently. `prelude` begins each local transaction that reads."""

    sign: str
    now_ms: str
    age_ms: str
    """Of the time that is put in for `{}`."""
    prelude: str | None = None


def _words_of(database: Database) -> _Words:
    if isinstance(database, Sqlite):
        age_ms = "CAST((julianday('now') - julianday({})) * 86400000 AS INTEGER)"
        return _Words(database.SIGN, database.NOW_MS, age_ms)
    if isinstance(database, MariaDb):
        age_ms = "TIMESTAMPDIFF(MICROSECOND, {}, UTC_TIMESTAMP(6)) DIV 1000"
        return _Words(database.SIGN, database.NOW_MS, age_ms)
    now_ms = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
    return _Words("%s", now_ms, "(extract(epoch FROM clock_timestamp() - {}) * 1000)::bigint", BY_THE_KEY)


class UpkeepSql:
    """The scripts of the upkeep of one participant's rows; none of them is a call, each has its own connection."""

    def __init__(self, database: Database, participant: str) -> None:
        self._database = database
        self._participant = participant
        words = self._words = _words_of(database)
        log, sign, mine = database.log, words.sign, f"participant = {words.sign}"
        finished, lease_left = "finished_at IS NOT NULL", f"lease_until_ms - {words.now_ms}"
        age_ms = words.age_ms.format("modified_at")
        columns = f"xid, branch_id, status, {finished}, {age_ms}, {lease_left}"
        self._clock = f"SELECT {words.now_ms}, (SELECT fence_id FROM {database.info})"
        self._end = f"SELECT xid FROM {log} WHERE xid > {sign} AND xid < {sign} ORDER BY xid LIMIT 1 OFFSET "
        self._rows = f"SELECT {columns} FROM {log} WHERE xid > {sign} AND xid <= {sign} AND {mine}"
        self._again = f"SELECT {columns} FROM {log} WHERE {mine} AND xid IN "
        self._delete = f"DELETE FROM {log} WHERE xid = {sign} AND branch_id = {sign} AND {mine} AND {_PURGEABLE}"

    def clock(self) -> Script[int]:
        """The database's clock, in ms since 1970. Raises CallFailed if it is not the database of the start."""
        now_ms, fence_id = (yield Send(self._clock)).rows[0]
        yield Rollback()
        self._database.check_fence_id(fence_id)
        return int(now_ms)

    def page(self, after: str, below: str, rows: int, status: Status | None = None) -> Script[Page]:
        """The participant's rows (with that status) among the next so many of the table, xids `after` to `below`."""
        yield from self._begin()
        ends = (yield Send(f"{self._end}{int(rows) - 1}", (after, below))).rows
        end = ends[0][0] if ends else None
        # `below` is shorter than an xid, so none is equal to it.
        found = yield from self._read(f"{self._rows}{_having(status)}", (after, end or below, self._participant))
        return Page(sorted(found, key=lambda row: row.key), end)

    def again(self, keys: Sequence[Key], status: Status) -> Script[list[OldRow]]:
        """Those of these rows that have that status now."""
        found: list[OldRow] = []
        xids = sorted({xid for xid, _ in keys})
        for start in range(0, len(xids), _KEYS_MAX):
            part = xids[start : start + _KEYS_MAX]
            signs = ", ".join([self._words.sign] * len(part))
            yield from self._begin()
            found += yield from self._read(f"{self._again}({signs}){_having(status)}", (self._participant, *part))
        wanted = set(keys)
        return [row for row in found if row.key in wanted]

    def delete(self, keys: Sequence[Key]) -> Script[tuple[int, int]]:
        """Delete these rows, if they are still settled; how many it has deleted, and how many of `keys` are dealt with.

        They are fewer than `keys` if one was not there: delete the others in another local transaction.
        """
        try:
            dealt_with = yield from self._delete_begun(keys)
        except Exception:
            yield from self._database.restored()
            raise
        yield from self._database.restored()
        return dealt_with

    def _delete_begun(self, keys: Sequence[Key]) -> Script[tuple[int, int]]:
        yield from self._database.begin(unhurried())
        deleted = 0
        for number, key in enumerate(keys, 1):
            if (yield Send(self._delete, (*key, self._participant))).hit != 1:
                break
            deleted = number
        yield Commit()
        return deleted, number

    def _begin(self) -> Script[None]:
        if self._words.prelude is not None:
            yield Send(self._words.prelude)

    def _read(self, sql: str, parameters: Sequence[Any]) -> Script[list[OldRow]]:
        rows = (yield Send(sql, parameters)).rows
        yield Rollback()  # the driver may have begun, and nothing is left to be read in this snapshot
        return [
            OldRow(xid, int(branch_id), int(status), bool(finished), int(age_ms or 0), int(lease or 0))
            for xid, branch_id, status, finished, age_ms, lease in rows
        ]


def _having(status: Status | None) -> str:
    return "" if status is None else f" AND status = {int(status)}"


def unhurried() -> IncomingCall:
    """What a Database bounds its waits by, where there is no call: behind the Trys, and never for long."""
    return IncomingCall(
        phase=Phase.TRY,
        xid="",
        branch_id=0,
        participant="upkeep",
        action="upkeep",
        payload=Payload(),
        attempt=1,
        expires_at=time.monotonic() + WAIT_SECONDS,
        fingerprint=b"",
    )
