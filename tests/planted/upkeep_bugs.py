"""Bugs in the upkeep of fence rows: what is purged, and what a participant settles by itself."""

from __future__ import annotations

from .bugs import BRANCH, TOWN, Bug, Edit, Suite

PURGE = "participant_sdk/upkeep_purge.py"
SQL = "participant_sdk/upkeep_sql.py"
RESOLVE = "participant_sdk/upkeep_resolve.py"
PURGES = Suite(("tests/contract/participant/test_purge.py",), "sqlite")

BUGS = (
    Bug(
        "rows are purged by the coordinator's record alone",
        "pitfall 27: dtmrs (the barrier's keys expire before the last message comes)",
        (
            Edit(
                PURGE,
                "    oldest_kept_ms = now_ms - purge.job.fence.retention_ms - CLOCK_MARGIN_MS",
                "    oldest_kept_ms = now_ms",
            ),
        ),
        BRANCH,
    ),
    Bug(
        "rows are purged by their age alone",
        "pitfall 34: DBOS#769; rule C7 (Confirm is repeated for as long as it is not answered)",
        (
            Edit(PURGE, "        elif not state.finished:\n", "        elif state is None:\n"),
            Edit(
                PURGE,
                "        elif row.settled and row.status in _ENDS[state]:",
                "        elif row.settled:",
            ),
        ),
        BRANCH,
    ),
    Bug(
        "a purge takes TRIED siblings along",
        "rule C7; pitfall 27 (Cancel then sees what was never tried, and what is reserved stays so)",
        (
            Edit(
                SQL,
                "_SETTLED: Final = frozenset((Status.COMMITTED, Status.ROLLBACKED, Status.SUSPENDED))",
                "_SETTLED: Final = frozenset(Status)",
            ),
            Edit(
                PURGE,
                "        elif row.settled and row.status in _ENDS[state]:",
                "        elif row.settled:",
            ),
        ),
        PURGES,
    ),
    Bug(
        "a transaction without a record is presumed to be over",
        "pitfall 15: ByteTCC#146 (presumed cancel of what the coordinator has forgotten)",
        (
            Edit(
                PURGE,
                '            purge.counts["kept_unknown"] += 1\n',
                "            keys.append(row.key)\n            continue\n",
            ),
        ),
        PURGES,
    ),
    Bug(
        "a participant cancels by its own clock",
        "pitfall 25: mp-lra#302 (self-cancel of what the coordinator goes on to confirm)",
        (
            Edit(
                RESOLVE,
                "_PHASES: Final = {\n",
                "_PHASES: Final = {\n    TransactionState.TRYING: Phase.CANCEL,\n",
            ),
        ),
        TOWN,
    ),
)
