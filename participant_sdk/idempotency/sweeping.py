"""Deleting the records that have expired: settings, reports, and a round of it as moves.

A round walks through the whole table once. In the background one process at a time does so: it has the turn, which is a
lease of its own and ends by itself. Any number may do so all the same, such as by call: each deletes what the others
have left. What is PROCESSING or UNKNOWN is counted and stays.
"""

from __future__ import annotations

import logging
import math
import random
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Final, TypeVar

from participant_sdk.background import Do, Moves, Rest
from participant_sdk.databases.database import Script
from participant_sdk.errors import ConfigurationError
from participant_sdk.handling import told
from participant_sdk.idempotency.sweeping_sql import FIRST, SweepingSql, SweptPage

logger = logging.getLogger("tricord.idempotency")

R = TypeVar("R")

EVERY_S_MAX: Final = 7 * 86_400.0
FIRST_S_MAX: Final = 60.0
BACKOFF_S_MAX: Final = 600.0
RUNS_MAX: Final = 3
MUCH_PAGES: Final = 20
LITTLE: Final = 100
"""One record in so many."""
IDLE_MAX: Final = 4
PAUSE_S: Final = 0.1
TURN_S: Final = 60.0
"""How long the turn lasts, at the least, if it is not renewed; that is done after a third of it."""


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What one round has done and seen. What it has seen is of the moment at which it was there."""

    looked_at: int = 0
    """Records."""
    deleted: int = 0
    left_busy: int = 0
    """Expired, and locked or changed by somebody else: the next round looks again."""
    processing: int = 0
    lapsed: int = 0
    """Of these, with a lease that has ended: whoever ran it has died or hangs, and nobody has repeated the request."""
    oldest_processing_ms: int = 0
    unknown: int = 0
    """They wait for a person's word: `tricord idempotency resolve`."""
    oldest_unknown_ms: int = 0
    seconds: float = 0.0
    error: str = ""
    """Why it ended early; empty if it did not."""

    def __str__(self) -> str:
        counts = {each.name: getattr(self, each.name) for each in fields(self)[:7]}
        return ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "nothing to do"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """How records that have expired are deleted. Raises ConfigurationError for settings that cannot work."""

    every_s: float = 300.0
    """From the end of one round to the beginning of the next, about, in seconds, whichever process it is that sweeps a
    table in the background; up to 16 times that while rounds look at much and find little."""
    page: int = 500
    """Records that one statement looks at."""
    batch: int = 100
    """Records that one local transaction deletes."""
    rows_per_s: float = 5_000.0
    """Records looked at in a second, at most; at least half of the time it rests anyway."""
    on_report: Callable[[SweepReport], None] | None = None
    """Called after each round, in the process that it ran in; for counters of your own."""

    def __post_init__(self) -> None:
        limits: tuple[tuple[str, float, float, float], ...] = (
            ("every_s", self.every_s, 0.1, EVERY_S_MAX),
            ("page", self.page, 1, 10_000),
            ("batch", self.batch, 1, 1_000),
            ("rows_per_s", self.rows_per_s, 1, 10_000_000),
        )
        for name, value, least, most in limits:
            if not (math.isfinite(value) and least <= value <= most):
                raise ConfigurationError(f"Sweep: {name} {value} is not {least} to {most:g}")


DEFAULT_SWEEP: Final = Sweep()


@dataclass(frozen=True, slots=True)
class SweepState:
    """What a sweeper in the background has done since it began. `last`: the last round."""

    rounds: int = 0
    deleted: int = 0
    failed: int = 0
    """Rounds that ended early."""
    last: SweepReport | None = None

    def after(self, report: SweepReport) -> SweepState:
        """With one more round."""
        failed = self.failed + bool(report.error)
        return SweepState(self.rounds + 1, self.deleted + report.deleted, failed, report)


def sweeping(
    sql: SweepingSql, settings: Sweep, *, rests: bool = True, turn: SweepTurn | None = None
) -> Moves[SweepReport]:
    """One round. `rests`: at the pace of the settings, else as fast as it goes. Never raises for what fails in it.

    `turn`: which it has, and which is renewed; the round ends where another one has got it.
    """
    report, began_at = SweepReport(), time.monotonic()
    try:
        after: bytes | None = FIRST
        while after is not None:
            page_at = time.monotonic()
            page: SweptPage = yield from _again(partial(sql.page, after, settings.page))
            report = _seen(report, page)
            for start in range(0, len(page.expired), settings.batch):
                keys = page.expired[start : start + settings.batch]
                deleted: int = yield from _again(partial(sql.delete, keys), writes=True)
                busy = report.left_busy + len(keys) - deleted
                report = replace(report, deleted=report.deleted + deleted, left_busy=busy)
            after = page.end
            if rests and after is not None:
                worked = time.monotonic() - page_at
                yield Rest(max(worked, page.rows / settings.rows_per_s - worked))
            if turn is not None and after is not None and not (yield from turn.kept()):
                break
    except Exception as error:
        report = replace(report, error=told(error))
    return replace(report, seconds=time.monotonic() - began_at)


def rounds(sql: SweepingSql, settings: Sweep, take: Callable[[SweepReport], None]) -> Moves[None]:
    """Rounds for ever. The first comes soon, at a time of its own: many processes may have started at once."""
    yield Rest(random.uniform(0.1, 1.0) * min(settings.every_s, FIRST_S_MAX))
    pace, error_before, turn = Pace(settings), "", SweepTurn(sql, settings)
    while True:
        pause_s = settings.every_s
        try:
            mine = yield from turn.taken()
            report = (yield from sweeping(sql, settings, turn=turn)) if mine else None
        except Exception as error:
            report = SweepReport(error=told(error))
        if report is not None:
            take(report)
            tell(report, settings, error_before)
            error_before, pause_s = report.error, pace.after(report)
            yield from turn.passed_on(pause_s)
        yield Rest(random.uniform(0.9, 1.1) * pause_s)


class SweepTurn:
    """Whose turn it is to sweep: for one process at a time, and after each round for none for a while."""

    def __init__(self, sql: SweepingSql, settings: Sweep) -> None:
        self._sql = sql
        self._name = secrets.token_hex(8)
        # Not shorter than some pages take at that pace.
        self._turn_s = max(TURN_S, 3 * settings.page / settings.rows_per_s)
        self._renew_at = 0.0

    def taken(self) -> Moves[bool]:
        """Whether it is this process's now. Raises what the database does."""
        mine: bool = yield from _again(lambda: self._sql.take_turn(self._name, self._ms(self._turn_s)), writes=True)
        self._renew_at = time.monotonic() + self._turn_s / 3
        return mine

    def kept(self) -> Moves[bool]:
        """Renew it when that is due; whether it is still this process's. Raises what the database does."""
        if time.monotonic() < self._renew_at:
            return True
        self._renew_at = time.monotonic() + self._turn_s / 3
        return (yield from _again(lambda: self._sql.keep_turn(self._name, self._ms(self._turn_s)), writes=True))

    def passed_on(self, pause_s: float) -> Moves[None]:
        """It is nobody's for a little less than the pause. Never raises: then it ends by itself."""
        with suppress(Exception):
            yield from _again(lambda: self._sql.keep_turn(self._name, self._ms(0.8 * pause_s)), writes=True)

    @staticmethod
    def _ms(seconds: float) -> int:
        return int(seconds * 1000)


class Pace:
    """How long to rest between rounds: longer while they fail, and while they find little for what they cost."""

    def __init__(self, settings: Sweep) -> None:
        self._settings = settings
        self._failed = 0
        self._idle = 0

    def after(self, report: SweepReport) -> float:
        """In seconds."""
        every_s, much = self._settings.every_s, MUCH_PAGES * self._settings.page
        if report.error:
            self._failed += 1
            return min(max(every_s, BACKOFF_S_MAX), every_s * 2.0 ** min(self._failed, 10))
        little = report.looked_at >= much and report.deleted * LITTLE < report.looked_at
        self._failed, self._idle = 0, min(self._idle + 1, IDLE_MAX) if little else 0
        return every_s * 2.0**self._idle


def tell(report: SweepReport, settings: Sweep, error_before: str = "") -> None:
    """Tell what a round has done: to the log, its error only if it is news, and to `on_report`."""
    if report.deleted:
        logger.info("idempotency records: %s", report)
    if report.error and report.error != error_before:
        logger.warning("sweeping idempotency records ended early: %s", report.error)
    if settings.on_report is not None:
        try:
            settings.on_report(report)
        except Exception:
            logger.exception("on_report has failed")


def _again(script: Callable[[], Script[R]], *, writes: bool = False) -> Moves[R]:
    """Run a script, and once more if it fails: its connection may have been lost long before."""
    for runs_left in reversed(range(RUNS_MAX)):
        try:
            return (yield Do(script(), writes))  # type: ignore[no-any-return]
        except Exception:
            if not runs_left:
                raise
        yield Rest(PAUSE_S)
    raise AssertionError("unreachable")


def _seen(report: SweepReport, page: SweptPage) -> SweepReport:
    return replace(
        report,
        looked_at=report.looked_at + page.rows,
        processing=report.processing + page.processing,
        lapsed=report.lapsed + page.lapsed,
        oldest_processing_ms=max(report.oldest_processing_ms, page.oldest_processing_ms),
        unknown=report.unknown + page.unknown,
        oldest_unknown_ms=max(report.oldest_unknown_ms, page.oldest_unknown_ms),
    )
