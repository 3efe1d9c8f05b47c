"""What operators want to know of the fence, as scripts: short reads by the primary key, as those of the upkeep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from participant_sdk.databases import Database
from participant_sdk.databases.database import Script
from participant_sdk.fence import Status
from participant_sdk.steps import Rollback, Send
from participant_sdk.upkeep_sql import UpkeepSql

COUNTED_MAX: Final = 10_000
"""Rows of the table that are counted at the most."""


@dataclass(frozen=True, slots=True)
class Counted:
    """How many of the participant's rows have a status, and whether their last call has ended."""

    status: int
    finished: bool
    rows: int


@dataclass(frozen=True, slots=True)
class Branch:
    """A fence row. The ages are those of the row and of its last change, in ms."""

    xid: str
    branch_id: int
    action: str
    status: int
    finished: bool
    created_age_ms: int
    age_ms: int
    lease_left_ms: int | None
    """Of the intent of an external Try; None: it has none."""


@dataclass(frozen=True, slots=True)
class BranchPage:
    """Rows by xid. `end`: the xid after which the next page begins; None: there is none."""

    rows: Sequence[Branch]
    end: str | None


class InspectionSql(UpkeepSql):
    """The scripts about one participant's rows; each has its own connection."""

    def __init__(self, database: Database, participant: str) -> None:
        super().__init__(database, participant)
        words, log, ended = self._words, database.log, "finished_at IS NOT NULL"
        mine = f"participant = {words.sign}"
        ages = ", ".join(words.age_ms.format(column) for column in ("created_at", "modified_at"))
        lease_left = f"CASE WHEN intent IS NOT NULL THEN lease_until_ms - {words.now_ms} END"
        columns = f"xid, branch_id, action, status, {ended}, {ages}, {lease_left}"
        self._branches = f"SELECT {columns} FROM {log} WHERE xid > {words.sign} AND xid {{}} {words.sign} AND {mine}"
        self._branch = f"SELECT {columns} FROM {log} WHERE xid = {words.sign} AND branch_id = {words.sign} AND {mine}"
        oldest = f"SELECT participant, status, finished_at FROM {log} ORDER BY xid, branch_id LIMIT {COUNTED_MAX}"
        self._counts = f"SELECT status, {ended}, count(*) FROM ({oldest}) oldest WHERE {mine} GROUP BY status, {ended}"
        self._more = f"SELECT xid FROM {log} ORDER BY xid, branch_id LIMIT 1 OFFSET {COUNTED_MAX}"

    def counts(self) -> Script[tuple[list[Counted], bool]]:
        """The participant's rows among the oldest of the table, and whether the table has more than these."""
        yield from self._begin()
        more = (yield Send(self._more)).rows
        rows = (yield Send(self._counts, (self._participant,))).rows
        yield Rollback()
        return [Counted(int(status), bool(finished), int(n)) for status, finished, n in rows], bool(more)

    def branches(self, after: str, below: str, rows: int, status: Status | None, age_ms: int) -> Script[BranchPage]:
        """The participant's rows among the next so many of the table, with that status and at least that old."""
        yield from self._begin()
        ends = (yield Send(f"{self._end}{int(rows) - 1}", (after, below))).rows
        end = ends[0][0] if ends else None
        sql = self._branches.format("<=" if end else "<") + ("" if status is None else f" AND status = {int(status)}")
        found = (yield Send(sql, (after, end or below, self._participant))).rows
        yield Rollback()
        branches = [_branch(row) for row in found]
        old = [branch for branch in branches if branch.age_ms >= age_ms]
        return BranchPage(sorted(old, key=lambda branch: (branch.xid, branch.branch_id)), end)

    def branch(self, xid: str, branch_id: int) -> Script[Branch | None]:
        """One row of the participant; None if there is none."""
        yield from self._begin()
        found = (yield Send(self._branch, (xid, branch_id, self._participant))).rows
        yield Rollback()
        return _branch(found[0]) if found else None


def _branch(row: Sequence[Any]) -> Branch:
    xid, branch_id, action, status, finished, created_age_ms, age_ms, lease_left_ms = row
    lease = None if lease_left_ms is None else int(lease_left_ms)
    ages = int(created_age_ms or 0), int(age_ms or 0)
    return Branch(xid, int(branch_id), action, int(status), bool(finished), *ages, lease)
