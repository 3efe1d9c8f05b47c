"""One purge: delete what is over, and can be heard of no more (rule C7).

A row goes if its xid is older than the participant's retention, and the coordinator has it on record that its
transaction is finished. Age alone is not enough: Confirm and Cancel are repeated for as long as they are not answered.
Nor is the record: a Try may still be on its way, and where its row was it would find none, and run. So a Try that has
just inserted its row is refused if its xid is older than the retention, by the same clock, that of the database: read
after the insert, which comes after the delete, which comes after the purge has read it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from participant_sdk.background import Moves
from participant_sdk.fence import Status
from participant_sdk.local_transaction import xid_ms
from participant_sdk.transaction import TransactionState
from participant_sdk.upkeep import PurgeReport
from participant_sdk.upkeep_sql import DELETES_MAX, FIRST, Key, OldRow, Page
from participant_sdk.upkeep_steps import Job, Round, floor_of

CLOCK_MARGIN_MS: Final = 60_000
"""The purge's retention is longer by this than Try's: the database's clock may be set back, by a failover, too."""

_ENDS: Final = {
    TransactionState.CONFIRMED: frozenset((Status.COMMITTED,)),
    TransactionState.CANCELLED: frozenset((Status.ROLLBACKED, Status.SUSPENDED)),
}


def purging(job: Job) -> Moves[PurgeReport]:
    """Purge once; never raises for what goes wrong, which the report tells."""
    purge = Round(job)
    error = None
    try:
        yield from _purge(purge)
    except Exception as failure:
        error = failure
    return purge.report(PurgeReport, error)


def _purge(purge: Round) -> Moves[None]:
    sql, batch = purge.sql, purge.job.settings.batch
    now_ms: int = yield from purge.read(sql.clock)
    oldest_kept_ms = now_ms - purge.job.fence.retention_ms - CLOCK_MARGIN_MS
    below, after = floor_of(oldest_kept_ms), FIRST
    while True:
        started_at = time.monotonic()
        page: Page = yield from purge.read(sql.page, after, below, batch)
        # Once more by number: a database may sort text by its language.
        old = [row for row in page.rows if xid_ms(row.xid) < oldest_kept_ms]
        keys = yield from _sort_out(purge, old)
        for start in range(0, len(keys), DELETES_MAX):
            yield from _delete(purge, keys[start : start + DELETES_MAX])
        if page.end is None:
            return
        after = page.end
        yield from purge.rest_after(started_at)


def _sort_out(purge: Round, rows: Sequence[OldRow]) -> Moves[list[Key]]:
    """The rows that may go; the others are counted, and what a person should know of them is told."""
    states = yield from purge.ask(row.xid for row in rows)
    keys: list[Key] = []
    for row in rows:
        state = states.get(row.xid)
        if state is None:
            purge.counts["kept_unknown"] += 1
            purge.find(row.xid, "is older than the retention, but the coordinator has no record of it: rows are kept")
        elif not state.finished:
            purge.counts["kept_unfinished"] += 1
        elif row.settled and row.status in _ENDS[state]:
            keys.append(row.key)
        else:
            kept, what = _finding(row)
            purge.counts[kept] += 1
            purge.find(row.xid, f"is {state.value}, but its branch {row.branch_id} {what}: its row is kept")
    return keys


def _finding(row: OldRow) -> tuple[str, str]:
    """What is wrong with a row of a finished transaction: as what it is counted, and in words."""
    if row.status == Status.TRIED:
        return "kept_tried", "is still TRIED here"
    if row.settled:
        return "kept_contrary", f"is {Status(row.status).name} here"
    return "kept_half_done", f"is half done here (status {row.status})"


def _delete(purge: Round, keys: list[Key]) -> Moves[None]:
    while keys:
        started_at = time.monotonic()
        # None: another holds a lock on one of them; they can wait for the next purge.
        deleted, dealt_with = (yield from purge.write(purge.sql.delete, keys)) or (0, len(keys))
        purge.counts["purged"] += deleted
        purge.counts["kept_busy"] += dealt_with - deleted
        keys = keys[dealt_with:]
        yield from purge.rest_after(started_at)
