"""Keeping the fence in order: purging what is over, and resolving what has waited too long. Settings and reports.

A fence row may go only when no message for it can still arrive, and a TRIED row may be settled only as a stored record
of the coordinator says. Both need the coordinator, so both run where there is one: in the background beside a
participant that serves, or when the program asks for them. What they did, and what they could not do, is a value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Final, TypeAlias

from participant_sdk.coordinator_messages import LOOK_UP_XIDS_MAX
from participant_sdk.errors import ConfigurationError

EVERY_MIN: Final = timedelta(seconds=1)
EVERY_MAX: Final = timedelta(days=7)
RESOLVE_AFTER_MAX: Final = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class PurgeReport:
    """What one purge did with the participant's rows older than its retention; the counts are rows.

    What needs a person is also logged, a line each: `kept_unknown`, `kept_tried`, `kept_contrary`, `kept_half_done`.
    """

    participant: str
    purged: int = 0
    """Deleted: whole, and of a finished transaction."""
    kept_unfinished: int = 0
    """Their transaction is not finished: Confirm or Cancel may still come."""
    kept_unknown: int = 0
    """The coordinator has no record of their transaction, which proves nothing."""
    kept_tried: int = 0
    """Still TRIED, although their transaction is finished."""
    kept_contrary: int = 0
    """Confirmed here and cancelled by the coordinator's record, or the other way round: evidence."""
    kept_half_done: int = 0
    """Their handler committed by itself and never ended, or their status is of a newer version of the SDK."""
    kept_busy: int = 0
    """Could not be deleted for now: locked, changed meanwhile, or gone already. The next purge looks again."""
    seconds: float = 0.0
    error: str = ""
    """Why it ended early; empty if it did not."""

    @property
    def did_something(self) -> bool:
        """Whether anything was changed."""
        return self.purged > 0

    def __str__(self) -> str:
        return _told(self, [each.name for each in fields(self) if each.name.startswith(("purged", "kept_"))])


@dataclass(frozen=True, slots=True)
class ResolveReport:
    """What one round did about branches that have been TRIED for too long; the counts are branches.

    What needs a person is also logged, a line each: `unknown`, `failed`.
    """

    participant: str
    confirmed: int = 0
    """Confirm has run, because the coordinator's record says so."""
    cancelled: int = 0
    """Cancel has run, because the coordinator's record says so."""
    undecided: int = 0
    """Their transaction is still TRYING."""
    left: int = 0
    """Decided only lately, or their external Try may be running: the coordinator will come."""
    unknown: int = 0
    """The coordinator has no record of them: nothing was done, and nothing will be until a person decides."""
    failed: int = 0
    """Confirm or Cancel did not end well; it is tried again in the next round."""
    seconds: float = 0.0
    error: str = ""
    """Why it ended early; empty if it did not."""

    @property
    def did_something(self) -> bool:
        """Whether anything was changed."""
        return self.confirmed + self.cancelled > 0

    def __str__(self) -> str:
        return _told(self, ("confirmed", "cancelled", "undecided", "left", "unknown", "failed"))


Report: TypeAlias = PurgeReport | ResolveReport


def _told(report: Report, names: Sequence[str]) -> str:
    counts = ", ".join(f"{name} {count}" for name in names if (count := getattr(report, name)))
    return f"{counts or 'nothing to do'} ({report.seconds:.1f} s)"


@dataclass(frozen=True, slots=True)
class Upkeep:
    """How a participant keeps its fence in order, in the background, wherever it knows a coordinator.

    `purge_every`: how often rows are deleted that are older than the participant's retention and whose transaction is
    finished. `resolve_every`: how often the coordinator is asked about branches that have been TRIED for longer than
    `resolve_after`, to confirm or cancel them as its record says. None: never. `batch`: how many rows are read, and
    transactions asked about, at a time. `on_report` is called after each round, in the thread or event loop of the
    upkeep. Raises ConfigurationError.
    """

    purge_every: timedelta | None = timedelta(hours=1)
    resolve_every: timedelta | None = timedelta(minutes=1)
    resolve_after: timedelta = timedelta(minutes=5)
    batch: int = 500
    on_report: Callable[[Report], object] | None = None

    def __post_init__(self) -> None:
        for name, every in (("purge_every", self.purge_every), ("resolve_every", self.resolve_every)):
            if every is not None and not EVERY_MIN <= every <= EVERY_MAX:
                raise ConfigurationError(f"{name} is {every}, but must be {EVERY_MIN} to {EVERY_MAX}, or None: never")
        if not timedelta(0) <= self.resolve_after <= RESOLVE_AFTER_MAX:
            raise ConfigurationError(f"resolve_after is {self.resolve_after}, but must be 0 to {RESOLVE_AFTER_MAX}")
        if not 1 <= self.batch <= LOOK_UP_XIDS_MAX:
            raise ConfigurationError(f"batch is {self.batch}, but must be 1 to {LOOK_UP_XIDS_MAX}")
        if inspect.iscoroutinefunction(self.on_report):
            raise ConfigurationError("on_report is a coroutine function, but must be a plain one")

    @property
    def is_off(self) -> bool:
        """Whether nothing is done in the background."""
        return self.purge_every is None and self.resolve_every is None


DEFAULT: Final = Upkeep()


@dataclass(frozen=True, slots=True)
class UpkeepState:
    """What the upkeep of a serving participant has done since its start, and its last reports; None: no round yet."""

    last_purge: PurgeReport | None = None
    last_resolve: ResolveReport | None = None
    purge_rounds: int = 0
    resolve_rounds: int = 0
    failed_rounds: int = 0
    """Those whose report has an error."""
    purged: int = 0
    confirmed: int = 0
    cancelled: int = 0

    def after(self, report: Report) -> UpkeepState:
        """The state when one more round has ended."""
        failed = self.failed_rounds + bool(report.error)
        if isinstance(report, PurgeReport):
            return replace(
                self,
                last_purge=report,
                purge_rounds=self.purge_rounds + 1,
                purged=self.purged + report.purged,
                failed_rounds=failed,
            )
        return replace(
            self,
            last_resolve=report,
            resolve_rounds=self.resolve_rounds + 1,
            confirmed=self.confirmed + report.confirmed,
            cancelled=self.cancelled + report.cancelled,
            failed_rounds=failed,
        )
