"""What one round of upkeep is made of: its steps as values, and what purging and resolving share.

Rounds are generators, written once for both flavours; `upkeep_loops` carries their steps out. An error of a step is
thrown into the round, which ends with it: a report says how far it came, and the next round begins anew.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar

from participant_sdk.background import Do, Moves, Rest
from participant_sdk.call import IncomingCall
from participant_sdk.context import is_xid
from participant_sdk.databases.database import Script
from participant_sdk.errors import TricordError, printable
from participant_sdk.handling import lost_a_race, told
from participant_sdk.local_transaction import Fence
from participant_sdk.steps import CallFailed
from participant_sdk.transaction import LookedUp, TransactionState
from participant_sdk.upkeep import Report, Upkeep
from participant_sdk.upkeep_sql import UpkeepSql

logger = logging.getLogger("tricord.participant")

P = ParamSpec("P")
R = TypeVar("R")
AnyReport = TypeVar("AnyReport", bound=Report)

FINDINGS_MAX: Final = 10
"""Findings that one round logs; what is left is logged by the rounds after it."""
TOLD_MAX: Final = 10_000
SCRIPT_RUNS_MAX: Final = 3
PAUSE_SECONDS: Final = 0.1
REST_MIN_SECONDS: Final = 0.005


@dataclass(frozen=True, slots=True)
class LookUp:
    """Ask the coordinator how far these transactions have come; gives a LookedUp."""

    xids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask the coordinator for one whole transaction; gives a Transaction, or None if it has no record of it."""

    xid: str


@dataclass(frozen=True, slots=True)
class RunCall:
    """Have a call run as if it had arrived; gives its Reply."""

    call: IncomingCall


Move: TypeAlias = Do | LookUp | Fetch | RunCall | Rest


class StoreChanged(TricordError):
    """The coordinator answers out of another store, or another history of it, than before."""

    reason = "STORE_CHANGED"


@dataclass(slots=True)
class Memory:
    """What is known from earlier rounds, in this process: which store answered, and what has been told."""

    store_id: str = ""
    incarnation: int = 0
    told: set[str] = field(default_factory=set)

    def check_store(self, answer: LookedUp) -> None:
        """Raises StoreChanged if another store has answered, which from now on is the one that is known.

        Its records may be older than what has happened, or be none at all. One round's respite, and the log, are for
        whoever has brought that about; the coordinator has flagged what was open by then.
        """
        before = self.store_id, self.incarnation
        self.store_id, self.incarnation = answer.store_id, answer.incarnation or self.incarnation
        if before[0] and before[0] != answer.store_id:
            raise StoreChanged(
                f"nothing is done in this round: the coordinator's store is {answer.store_id!r}, and was {before[0]!r}"
            )
        if before[1] and answer.incarnation and before[1] != answer.incarnation:
            raise StoreChanged(
                "nothing is done in this round: the coordinator's store has another history than before (incarnation "
                f"{answer.incarnation}, and was {before[1]}): a failover, or a restore to an earlier time"
            )


@dataclass(frozen=True, slots=True)
class Job:
    """Whose upkeep it is, and how it is to be done."""

    participant: str
    fence: Fence
    settings: Upkeep
    memory: Memory

    @property
    def sql(self) -> UpkeepSql:
        """The statements."""
        return UpkeepSql(self.fence.database, self.participant)


class Round:
    """One round: what it has counted so far, and its findings for a person, a line in the log each."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.sql = job.sql
        self.counts: Counter[str] = Counter()
        self._started_at = time.monotonic()
        self._told = 0
        self._untold = 0

    def find(self, about: str, text: str) -> None:
        """Log a finding, once in this process; `about` and `text` say which it is."""
        told = self.job.memory.told
        finding = f"{about}: {text}"
        if finding in told:
            return
        if self._told >= FINDINGS_MAX:
            self._untold += 1
            return
        if len(told) >= TOLD_MAX:
            told.clear()
        told.add(finding)
        self._told += 1
        logger.warning("participant %s: %s", self.job.participant, finding)

    def report(self, kind: Callable[..., R], error: Exception | None) -> R:
        """What has become of it."""
        if self._untold:
            logger.warning("participant %s: %d more findings of that kind", self.job.participant, self._untold)
        seconds = time.monotonic() - self._started_at
        return kind(self.job.participant, **self.counts, seconds=seconds, error=error_text(error))

    def read(self, script: Callable[P, Script[R]], *arguments: P.args, **named: P.kwargs) -> Moves[R]:
        """Run a script that reads, again if it only lost its connection."""
        answer: R = yield from self._run(lambda: Do(script(*arguments, **named)))
        return answer

    def write(self, script: Callable[P, Script[R]], *arguments: P.args, **named: P.kwargs) -> Moves[R | None]:
        """Run a script that writes; None if it has lost its race again and again, so that nothing is written."""
        try:
            answer: R = yield from self._run(lambda: Do(script(*arguments, **named), writes=True))
            return answer
        except Exception as error:
            if not self._lost_a_race(error):
                raise
            return None

    def _run(self, do: Callable[[], Do]) -> Moves[Any]:
        for runs_left in reversed(range(SCRIPT_RUNS_MAX)):
            try:
                return (yield do())
            except Exception as error:
                if not runs_left or not self._lost_a_race(error):
                    raise
            yield Rest(PAUSE_SECONDS)
        raise AssertionError("unreachable")

    def _lost_a_race(self, error: Exception) -> bool:
        return lost_a_race(error, self.job.fence.database)

    def ask(self, xids: Iterable[str]) -> Moves[Mapping[str, TransactionState]]:
        """How far these transactions have come, by what is stored; what is not in the answer has no record."""
        states: dict[str, TransactionState] = {}
        wanted = sorted({xid for xid in xids if is_xid(xid)})
        for start in range(0, len(wanted), self.job.settings.batch):
            answer: LookedUp = yield LookUp(tuple(wanted[start : start + self.job.settings.batch]))
            self.job.memory.check_store(answer)
            states.update(answer.states)
        return states

    def rest_after(self, started_at: float) -> Moves[None]:
        """Rest for as long as the work took: at least half of the time is the database free of it."""
        yield Rest(max(REST_MIN_SECONDS, time.monotonic() - started_at))


def error_text(error: Exception | None) -> str:
    """What a report says of an error: on one line, and without statements and their parameters."""
    if error is None:
        return ""
    if isinstance(error, TricordError | CallFailed):
        return printable(str(error))
    return told(error)


def floor_of(milliseconds: int) -> str:
    """What sorts before every xid of that time or later, and after all earlier ones."""
    return f"{max(0, milliseconds):012x}"


def finish(job: Job, report: AnyReport | None, error_before: str = "") -> AnyReport:
    """Tell what a round has done, and return it: to the log, its error only if it is news, and to `on_report`."""
    if report is None:
        raise AssertionError("nobody stops a round of which the report is waited for")
    what = type(report).__name__.removesuffix("Report").lower()
    if report.did_something:
        logger.info("participant %s: %s: %s", job.participant, what, report)
    if report.error and report.error != error_before:
        logger.warning("participant %s: %s ended early: %s", job.participant, what, report.error)
    if job.settings.on_report is not None:
        try:
            job.settings.on_report(report)
        except Exception:
            logger.exception("participant %s: on_report has failed", job.participant)
    return report
