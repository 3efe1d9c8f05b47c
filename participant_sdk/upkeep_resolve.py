"""One round of the resolver: settle branches that have been TRIED for too long, as the coordinator's record says.

What Try reserved waits for Confirm or Cancel, and the coordinator that owes them may not be able to reach this
participant: a wrong address, a wall between them, an operator's mistake. Then the participant asks. It never presumes:
only a stored record decides, and what has no record stays as it is until a person has looked (rule D1). And it never
settles past the fence: what it runs is the same call that the coordinator would send, through the same lanes.

Only a pass over the whole table finds every such row, as no index leads to them. So that is done rarely; the rounds
between look at what is new since the last, and again at what was still waiting then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from typing import Final

from participant_sdk.background import Moves
from participant_sdk.call import IncomingCall, Outcome, Reply, fingerprint
from participant_sdk.errors import TricordError
from participant_sdk.fence import SETTLES, Phase, Status
from participant_sdk.transaction import Branch, BranchState, Transaction, TransactionState
from participant_sdk.upkeep import ResolveReport
from participant_sdk.upkeep_sql import FIRST, Key, OldRow, Page
from participant_sdk.upkeep_steps import Fetch, Job, Round, RunCall, floor_of

CALL_SECONDS: Final = 10.0
PAGE_ROWS: Final = 10_000
"""Of them all, only those that are TRIED leave the database."""
UNREAD_MAX: Final = 5
"""Records in a row that cannot be read end the round; one that never can, must not keep it from all others."""
WAITING_MAX: Final = 10_000
WHOLE_EVERY_SECONDS: Final = 3600.0
WHOLE_SHARE: Final = 50
"""A pass over a table that is so large that it takes long is made more rarely: at most a fiftieth of the time."""

_PHASES: Final = {
    TransactionState.CONFIRMING: Phase.CONFIRM,
    TransactionState.CONFIRMED: Phase.CONFIRM,
    TransactionState.CANCELLING: Phase.CANCEL,
    TransactionState.CANCELLED: Phase.CANCEL,
}
_BY_HAND: Final = {BranchState.CONFIRMED: Phase.SETTLE_CONFIRMED, BranchState.CANCELLED: Phase.SETTLE_CANCELLED}
"""What an operator has done by hand is written down, and nothing run."""
_NO_RECORD: Final = "is TRIED here, but the coordinator has no record of it: a person has to decide"


@dataclass(slots=True)
class Scan:
    """How far the table has been looked through. Xids up to `upto` were, but for a Try that came late for its xid."""

    upto: str = FIRST
    waiting: set[Key] = field(default_factory=set)
    """Branches before that that were TRIED and stayed so. Beyond their limit the next whole pass finds them again."""
    whole_at: float = 0.0
    """When the next pass over everything is due, by `time.monotonic()`."""

    def begin(self) -> Sequence[Key]:
        """Begin a round; the branches that it has to look at again, apart from what comes after `upto`."""
        if time.monotonic() >= self.whole_at:
            self.upto = FIRST
            self.whole_at = float("-inf")  # until it has come to its end
            self.waiting.clear()
        waiting, self.waiting = sorted(self.waiting), set()
        return waiting

    def wait(self, keys: Sequence[Key]) -> None:
        """These are to be looked at again."""
        self.waiting.update(keys[: max(0, WAITING_MAX - len(self.waiting))])

    def end(self, seconds: float) -> None:
        """The round has come to its end."""
        if self.whole_at == float("-inf"):
            self.whole_at = time.monotonic() + max(WHOLE_EVERY_SECONDS, WHOLE_SHARE * seconds)


def resolving(job: Job, scan: Scan) -> Moves[ResolveReport]:
    """Resolve once; never raises for what goes wrong, which the report tells."""
    resolve = Round(job)
    error = None
    started_at = time.monotonic()
    waiting = scan.begin()
    try:
        yield from _resolve(resolve, scan, waiting)
        scan.end(time.monotonic() - started_at)
    except Exception as failure:
        error = failure
        scan.wait(waiting)
    return resolve.report(ResolveReport, error)


def _resolve(resolve: Round, scan: Scan, waiting: Sequence[Key]) -> Moves[None]:
    sql, after_ms = resolve.sql, resolve.job.settings.resolve_after // timedelta(milliseconds=1)
    now_ms: int = yield from resolve.read(sql.clock)
    below = floor_of(now_ms - after_ms + 1)
    settle = _Settling(resolve, scan, now_ms, after_ms)
    if waiting:
        rows: list[OldRow] = yield from resolve.read(sql.again, waiting, Status.TRIED)
        yield from settle.rows(rows)
    while True:
        started_at = time.monotonic()
        page: Page = yield from resolve.read(sql.page, scan.upto, below, PAGE_ROWS, Status.TRIED)
        yield from settle.rows(page.rows)
        scan.upto = max(scan.upto, page.end or below)
        if page.end is None:
            return
        yield from resolve.rest_after(started_at)


class _Settling:
    """What one round does with TRIED rows."""

    def __init__(self, resolve: Round, scan: Scan, now_ms: int, after_ms: int) -> None:
        self._round = resolve
        self._counts = resolve.counts
        self._scan = scan
        self._now_ms = now_ms
        self._after_ms = after_ms
        self._unread = 0

    def rows(self, rows: Sequence[OldRow]) -> Moves[None]:
        """Settle those that are due, as far as there is a record that says how."""
        due = [row for row in rows if row.age_ms >= self._after_ms]
        self._scan.wait([row.key for row in rows])  # what is settled is not TRIED any more in the next round
        if not due:
            return
        states = yield from self._round.ask(row.xid for row in due)
        decided: dict[Key, Phase] = {}
        for row in due:
            state = states.get(row.xid)
            if state is None:
                self._unknown(row.xid)
            elif (phase := _PHASES.get(state)) is None:
                self._counts["undecided"] += 1
            else:
                decided[row.key] = phase
        if decided:  # the coordinator may have come meanwhile
            still: list[OldRow] = yield from self._round.read(self._round.sql.again, list(decided), Status.TRIED)
            free = sorted(row.key for row in still if row.lease_left_ms <= 0)
            self._counts["left"] += len(still) - len(free)
            for xid, keys in groupby(free, key=lambda key: key[0]):
                branch_ids = [branch_id for _, branch_id in keys]
                yield from self._decided(xid, branch_ids, decided[xid, branch_ids[0]])

    def _decided(self, xid: str, branch_ids: Sequence[int], phase: Phase) -> Moves[None]:
        try:
            transaction: Transaction | None = yield Fetch(xid)
        except TricordError as error:
            self._unread += 1
            if self._unread >= UNREAD_MAX:
                raise
            self._counts["failed"] += len(branch_ids)
            self._round.find(xid, f"is TRIED here, and the coordinator's record of it cannot be read: {error}")
            return
        self._unread = 0
        if transaction is None:
            for _ in branch_ids:
                self._unknown(xid)
            return
        if _PHASES.get(transaction.state) is not phase or self._decided_lately(transaction):
            self._counts["left"] += len(branch_ids)  # told by one that lags behind: the next round asks again
            return
        branches = {branch.branch_id: branch for branch in transaction.branches}
        for branch_id in branch_ids:
            yield from self._settle(transaction, phase, branch_id, branches.get(branch_id))

    def _decided_lately(self, transaction: Transaction) -> bool:
        """Whether its coordinator is at it. Two hosts' clocks are compared: only courtesy hangs on it."""
        if transaction.state.finished or transaction.decided_at is None:
            return False
        return self._now_ms - transaction.decided_at.timestamp() * 1000 < self._after_ms

    def _settle(self, transaction: Transaction, phase: Phase, branch_id: int, branch: Branch | None) -> Moves[None]:
        name = self._round.job.participant
        if branch is None or branch.participant != name:
            self._counts["failed"] += 1
            text = (
                f"its branch {branch_id} is TRIED here, but by the coordinator's record not one of participant {name}"
            )
            self._round.find(transaction.xid, text)
            return
        if branch.resolved is not None:
            if branch.resolved not in _BY_HAND:
                self._counts["left"] += 1  # a newer coordinator's
                return
            phase = _BY_HAND[branch.resolved]
        call = IncomingCall(
            phase=phase,
            xid=transaction.xid,
            branch_id=branch_id,
            participant=name,
            action=branch.action,
            payload=branch.payload,
            attempt=branch.attempts + 1,
            expires_at=time.monotonic() + CALL_SECONDS,
            fingerprint=fingerprint(branch.action, branch.payload),
            metadata=transaction.metadata,
        )
        reply: Reply = yield RunCall(call)
        if reply.outcome is Outcome.DONE:
            self._counts["confirmed" if phase in (Phase.CONFIRM, Phase.SETTLE_CONFIRMED) else "cancelled"] += 1
            return
        self._counts["failed"] += 1
        called = "Settle" if phase in SETTLES else phase.name.capitalize()
        what = f"{called} of its branch {branch_id} is owed by the coordinator's record, but"
        self._round.find(transaction.xid, f"{what} ended as {reply.outcome.value}: {reply.error}")

    def _unknown(self, xid: str) -> None:
        self._counts["unknown"] += 1
        self._round.find(xid, _NO_RECORD)
