"""The local transaction in which holds are compared: read only, one snapshot, no statement for longer than it may take.

The view of the engine brings the snapshot (see `snapshot_of`). What is set for the connection beyond that is given back
at a good end; after a bad one the connection is thrown away.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sqlalchemy import Connection

from participant_sdk.databases import Database
from participant_sdk.databases.database import Script, known_to_sqlalchemy
from participant_sdk.databases.mariadb import MariaDb, is_mariadb
from participant_sdk.databases.sqlite import Sqlite
from participant_sdk.fence import Status
from participant_sdk.holds_tally import Key, Tried, TriedBranches
from participant_sdk.steps import Ask, Look, Rollback, Send
from participant_sdk.upkeep_sql import FIRST, UpkeepSql

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

AnyEngine = TypeVar("AnyEngine", "Engine", "AsyncEngine")

TRIED_MAX: Final = 100_000
"""TRIED branches that are kept in memory, some tens of MB."""
PAGE_ROWS: Final = 5_000
_LAST: Final = "g"
"""Sorts behind every xid."""
_KEYS_MAX: Final = 100
_SAVEPOINT: Final = "SAVEPOINT tricord_tried"
_UNDONE: Final = "ROLLBACK TO SAVEPOINT tricord_tried"
_INSTRUCTIONS: Final = 10_000
"""Of SQLite's machine, between two looks at the clock."""
_TIME_BEFORE: Final = "tricord.statement_time"


@dataclass(frozen=True, slots=True)
class Owner:
    """What the fence row of a hold's branch says, if there is one."""

    participant: str
    action: str
    status: int


def snapshot_of(engine: AnyEngine) -> AnyEngine:
    """The engine for who reads twice and must see the same moment both times."""
    if engine.dialect.name == "sqlite":
        return engine
    if engine.dialect.name == "postgresql":
        return engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    return engine.execution_options(isolation_level="REPEATABLE READ")


class HoldsSql(UpkeepSql):
    """The scripts, in the order in which they run on one connection: begin, tried, (the holds), owners, end."""

    def __init__(self, database: Database, participant: str) -> None:
        super().__init__(database, participant)
        self.participant = participant
        sign, log = self._words.sign, database.log
        self._tried = (
            f"SELECT xid, branch_id, action, finished_at IS NOT NULL FROM {log} WHERE xid > {sign} AND xid {{}} {sign} "
            f"AND participant = {sign} AND status = {int(Status.TRIED)} ORDER BY xid, branch_id"
        )
        self._owners = f"SELECT xid, branch_id, participant, action, status FROM {log} WHERE xid IN "

    def begin(self, deadline: float) -> Script[None]:
        """Begin; statements end at `deadline` (of `time.monotonic`), or take no longer than what is left until it."""
        left_ms = max(1, int((deadline - time.monotonic()) * 1000))
        if isinstance(self._database, Sqlite):
            if (yield Ask(_begun_by_others)):
                yield Send("ROLLBACK")
            yield Ask(lambda connection: _end_at(connection, deadline))
            yield Send("PRAGMA query_only = ON")
            yield Send("BEGIN")
        elif isinstance(self._database, MariaDb):
            variable, in_ms = yield Look(_statement_time)
            before = (yield Send(f"SELECT @@SESSION.{variable}")).rows[0][0]
            yield Rollback()
            yield Look(lambda connection: connection.info.update({_TIME_BEFORE: (variable, before)}))
            yield Send(f"SET SESSION {variable} = {left_ms if in_ms else left_ms / 1000}")
            yield Send("SET TRANSACTION READ ONLY")
            yield Ask(known_to_sqlalchemy)
        else:
            yield Ask(known_to_sqlalchemy)
            yield Send(f"SET LOCAL statement_timeout = {left_ms}")
        _, fence_id = (yield Send(self._clock)).rows[0]
        self._database.check_fence_id(fence_id)

    def tried(self, until: float) -> Script[TriedBranches]:
        """The TRIED branches, oldest transaction first, as far as memory and the time `until` allow."""
        found, after = TriedBranches(), FIRST
        if self._words.prelude is not None:
            yield Send(_SAVEPOINT)  # what the prelude sets is not for the author's query
            yield Send(self._words.prelude)
        while True:
            ends = (yield Send(f"{self._end}{PAGE_ROWS - 1}", (after, _LAST))).rows
            end = ends[0][0] if ends else None
            sql = self._tried.format("<=" if end else "<")
            for xid, branch_id, action, finished in (yield Send(sql, (after, end or _LAST, self._participant))).rows:
                found.branches[xid, int(branch_id)] = Tried(action, bool(finished))
            if end is None:
                break
            after = end
            if len(found.branches) >= TRIED_MAX or time.monotonic() > until:
                found.until = end
                break
        if self._words.prelude is not None:
            yield Send(_UNDONE)
        return found

    def owners(self, keys: Sequence[Key]) -> Script[dict[Key, Owner]]:
        """Whose these branches are, of whatever participant, in this moment's snapshot."""
        found: dict[Key, Owner] = {}
        xids = sorted({xid for xid, _ in keys})
        for start in range(0, len(xids), _KEYS_MAX):
            part = xids[start : start + _KEYS_MAX]
            signs = ", ".join([self._words.sign] * len(part))
            for xid, branch_id, *rest in (yield Send(f"{self._owners}({signs})", part)).rows:
                participant, action, status = rest
                found[xid, int(branch_id)] = Owner(participant, action, int(status))
        return found

    def end(self) -> Script[None]:
        """Roll back, and give the connection back as it was."""
        yield Rollback()
        if isinstance(self._database, Sqlite):
            yield Send("PRAGMA query_only = OFF")
            yield Ask(lambda connection: _end_at(connection, None))
        elif isinstance(self._database, MariaDb):
            variable, before = yield Look(lambda connection: connection.info.pop(_TIME_BEFORE))
            yield Send(f"SET SESSION {variable} = {before}")


def _begun_by_others(connection: Connection) -> bool:
    known_to_sqlalchemy(connection)
    return bool(connection.connection.driver_connection.in_transaction)  # type: ignore[union-attr]


def _end_at(connection: Connection, deadline: float | None) -> None:
    """Have SQLite end a statement that runs at `deadline`; None: never."""
    handler = None if deadline is None else lambda: time.monotonic() > deadline
    driver: Any = connection.connection.driver_connection
    if isinstance(driver, sqlite3.Connection):
        driver.set_progress_handler(handler, _INSTRUCTIONS)
    else:
        adapted: Any = connection.connection.dbapi_connection
        adapted.run_async(lambda raw: raw.set_progress_handler(handler, _INSTRUCTIONS))


def _statement_time(connection: Connection) -> tuple[str, bool]:
    """The variable that bounds a statement's time, and whether it is in ms and not in s."""
    return ("max_statement_time", False) if is_mariadb(connection) else ("max_execution_time", True)
