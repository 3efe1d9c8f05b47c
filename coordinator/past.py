"""What the branches of a transaction went through, once an attempt has failed: bounded, and kept in its row.

Equal failures of one call, one after another, are one run. Of many runs the first ones tell how it began and the last
ones how it stands: those between are dropped and only counted. A transaction of which no attempt fails has no past.

Pure, as ``machine`` is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .model import Dropped, End, Past, Phase, Run, Step, Transaction

RUNS_MAX = 8
"""Of one branch."""
RUNS_OF_ALL_MAX = 128
"""Of all branches together, but two of each are kept: a row is written anew with every save."""


class Failure(NamedTuple):
    """One attempt that failed."""

    branch: int
    """Index into the branches, from 0."""
    phase: Phase
    attempt: int
    """0: that of a Try whose answer came after the decision, when its attempts were not counted any more."""
    error: str
    attention: bool
    """Whether a person should look because of this one alone."""


def remember(tx: Transaction, steps: Sequence[Step], failures: Sequence[Failure], now_ms: int) -> tuple[Past, ...]:
    """What the branches went through, after these failures, and after what ``steps`` has ended."""
    pasts = {past.branch_id: past for past in tx.past}
    runs_max = max(2, min(RUNS_MAX, RUNS_OF_ALL_MAX // len(steps)))
    for failure in failures:
        branch_id = failure.branch + 1
        pasts[branch_id] = _after(pasts.get(branch_id, Past(branch_id)), failure, now_ms, runs_max)
    for branch_id, (before, step) in enumerate(zip(tx.steps, steps, strict=True), 1):
        if step.status is not before.status:
            past = pasts.get(branch_id, Past(branch_id))
            pasts[branch_id] = past._replace(ends=(*past.ends, End(step.status, now_ms)))
    return tuple(pasts[branch_id] for branch_id in sorted(pasts))


def _after(past: Past, failure: Failure, now_ms: int, runs_max: int) -> Past:
    _, phase, attempt, error, attention = failure
    runs = past.runs
    attempt = attempt or 1 + max((run.last_attempt for run in runs if run.phase is phase), default=0)
    if runs:
        last = runs[-1]
        if last[:3] == (phase, error, attention) and last.last_attempt + 1 == attempt:
            return past._replace(runs=(*runs[:-1], last._replace(last_attempt=attempt, last_ms=now_ms)))
    runs = (*runs, Run(phase, error, attention, attempt, attempt, now_ms, now_ms))
    dropped = past.dropped
    while len(runs) > runs_max:
        run = runs[runs_max // 2]
        runs = (*runs[: runs_max // 2], *runs[runs_max // 2 + 1 :])
        dropped = _with(dropped or Dropped(0, 0, run.first_ms, run.last_ms), run)
    return past._replace(runs=runs, dropped=dropped)


def _with(dropped: Dropped, run: Run) -> Dropped:
    return Dropped(
        dropped.runs + 1,
        dropped.attempts + run.attempts,
        min(dropped.first_ms, run.first_ms),  # more branches, fewer runs of each: older ones may follow
        max(dropped.last_ms, run.last_ms),
    )
