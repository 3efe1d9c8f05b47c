"""Bugs in the fence, and in the local transaction around a handler."""

from __future__ import annotations

from .bugs import BRANCH, Bug, Edit, Seeds, Suite

FENCE = "participant_sdk/fence.py"
LOCAL = "participant_sdk/local_transaction.py"
CASES = Suite(("tests/contract/participant/test_cases_p.py",), "sqlite-sync")
TABLE = Suite(("tests/contract/participant/test_participant_table.py",), "sqlite-sync")
RACES = Suite(("tests/races/test_races.py",), "contradicts_the_table and postgres and read_committed")


def cell(phase: str, status: str, right: str, wrong: str, name: str, seen: str, catcher: Seeds | Suite = BRANCH) -> Bug:
    """Another verdict in the fence's table."""
    column = status if status == "None" else f"Status.{status}"
    old = f"    (Phase.{phase}, {column}): Verdict.{right},\n"
    new = f"    (Phase.{phase}, {column}): Verdict.{wrong},\n"
    return Bug(name, seen, (Edit(FENCE, old, new),), catcher)


BUGS = (
    cell(
        "CONFIRM",
        "None",
        "EMPTY_CONFIRM",
        "DONE",
        "an empty Confirm is acknowledged",
        "case 9: dtmrs-barrier, tcc-transaction; pitfall 5",
    ),
    cell(
        "TRY",
        "SUSPENDED",
        "REFUSE_SUSPENDED",
        "REPLAY_RESULT",
        "a late Try is reported as a success",
        "case 2: ByteTCC#134, tcc-transaction#170",
    ),
    cell(
        "CANCEL",
        "ROLLBACKED",
        "DONE",
        "RUN_CANCEL",
        "Cancel of a refused Try releases what was never reserved",
        "case 8: tcc-transaction#28, dtmrs-barrier",
    ),
    cell(
        "TRY",
        "ROLLBACKED",
        "REPLAY_REFUSAL",
        "REPLAY_RESULT",
        "a duplicate of a refused Try is a success",
        "pitfall 7: dtmrs (duplicate means done)",
    ),
    cell(
        "CONFIRM",
        "COMMITTED",
        "DONE",
        "RUN_CONFIRM",
        "a repeated Confirm runs again",
        "case 7: tcc-transaction#89 (its reply was lost)",
    ),
    cell(
        "CANCEL",
        "COMMITTED",
        "CANCEL_AFTER_CONFIRM",
        "RUN_CANCEL",
        "Cancel after Confirm runs",
        "case 9: dtmrs-barrier; pitfall 6",
        TABLE,  # no coordinator sends it
    ),
    cell(
        "SETTLE_CONFIRMED",
        "TRIED",
        "SETTLE_COMMITTED",
        "RUN_CONFIRM",
        "what was done by hand is done again by the handler",
        "pitfall 47: heuristic ends",
    ),
    Bug(
        "an empty Cancel leaves no mark",
        "case 3: servicecomb-pack#346; pitfall 1 (the Try that it has overtaken reserves for ever)",
        (
            Edit(
                LOCAL,
                "        case Verdict.SUSPEND, None:\n            yield from fence.database.commit()",
                "        case Verdict.SUSPEND, None:\n            yield from fence.database.leave()",
            ),
        ),
        BRANCH,
    ),
    Bug(
        "a transient error is stored as a refusal",
        "pitfall 13: DBOS#679, #761 (a lost race is made a business failure of)",
        (
            Edit(
                LOCAL,
                "        if is_transient(refused, fence.database):\n            raise RunAgain(",
                "        if is_transient(refused, fence.database) and False:\n            raise RunAgain(",
            ),
        ),
        BRANCH,
    ),
    Bug(
        "a lost COMMIT is told as a refusal",
        "pitfall 12: convex#559 (that the COMMIT was not acknowledged does not say that it failed)",
        (
            Edit(
                LOCAL,
                "    return Reply.unknown(told(error))\n",
                "    if call.phase is Phase.TRY:\n        return Reply.refused(storable('failed', told(error)))\n"
                "    return Reply.unknown(told(error))\n",
            ),
        ),
        BRANCH,
    ),
    Bug(
        "the result of a Try is not replayed",
        "pitfall 50: dtm#486; rule C2 (a repeat is answered as the first was)",
        (
            Edit(
                LOCAL,
                "            return Reply(Outcome.DONE, result=result)\n",
                "            return Reply(Outcome.DONE)\n",
            ),
        ),
        BRANCH,
    ),
    Bug(
        "what a refused Try has done stays",
        "case 32: dtm#460, dtm-php#17 (half of a Try is committed)",
        (
            Edit(
                LOCAL,
                "fence.database.refuse(call, refusal, handled=True, intent=None)",
                "fence.database.refuse(call, refusal, handled=False, intent=None)",
            ),
        ),
        BRANCH,
    ),
    Bug(
        "another call under the same branch runs",
        "pitfall 9: EasyTransaction; case 11: ByteTCC#52 (delivered to another handler)",
        (Edit(FENCE, "    if not same_call:\n", "    if status is None:\n"),),
        BRANCH,
    ),
    Bug(
        "the lease of an external Try is ignored",
        "case 34: seata#6374, #4530 (Cancel runs beside the Try that it is to undo); rule C4",
        (
            Edit(
                FENCE,
                "    (Phase.CANCEL, Progress.LEASED): Verdict.TRY_RUNS,\n",
                "    (Phase.CANCEL, Progress.LEASED): Verdict.RUN_CANCEL,\n",
            ),
        ),
        Suite(("tests/races/test_races.py",), "outside_effect and sqlite"),
    ),
    Bug(
        "a Try of any age runs",
        "pitfall 34: DBOS#769 (a message comes after what would have stopped it was purged); rule C7",
        (
            Edit(
                LOCAL,
                "if meeting.now_ms is not None and meeting.now_ms - xid_ms(call.xid) > fence.try_age_max_ms:",
                "if False:",
            ),
        ),
        BRANCH,
    ),
    Bug(
        "a fence row is changed without looking whether it is as it was met",
        "case 17: EasyTransaction#62; pitfalls 10 and 32 (read, then write)",
        (
            Edit(
                "participant_sdk/databases/postgresql.py",
                'WHERE {_THIS} AND status = $3 AND intent IS NOT DISTINCT FROM $4 "\n'
                '            "AND (finished_at IS NOT NULL) = $6"\n',
                'WHERE {_THIS}"\n',
            ),
        ),
        RACES,
    ),
    Bug(
        "an insert into the fence that fails goes unnoticed",
        "case 33: dtmgrpc-csharp#10; pitfall 31 (INSERT IGNORE hides other errors)",
        (
            Edit(
                "participant_sdk/databases/sqlite.py",
                '        rows = (yield Send(f"{self._insert} RETURNING {self.NOW_MS}"',
                "        rows = [(0,)]\n"
                "        with suppress(Exception):\n"
                '            rows = (yield Send(f"{self._insert} RETURNING {self.NOW_MS}"',
            ),
            Edit(
                "participant_sdk/databases/sqlite.py",
                "from collections.abc import Sequence\n",
                "from collections.abc import Sequence\nfrom contextlib import suppress\n",
            ),
        ),
        CASES,
    ),
)
