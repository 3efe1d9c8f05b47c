"""A participant's fence rows against the coordinator's record: orphans, contradictions, calls that ended halfway. Pure.

A row is read first and the record after it, so the record is the newer one: what a row says was decided before.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from .doctor import Finding, Limits, Severity, length
from .model import BranchStatus, Resolution, State, Transaction


class FenceStatus(IntEnum):
    """What a fence row says; the numbers are the contract's."""

    TRIED = 1
    COMMITTED = 2
    ROLLBACKED = 3
    SUSPENDED = 4


class FenceRow(NamedTuple):
    """One fence row of a participant."""

    xid: str
    branch_id: int
    action: str
    status: int
    finished: bool
    external: bool
    """An external Try that has not ended; Cancel settles it."""
    running: bool
    """It may still run."""
    age_ms: int
    """Since its last change."""


_KNOWN = frozenset(FenceStatus)
CONFIRMS = frozenset((State.CONFIRMING, State.CONFIRMED))
CANCELS = frozenset((State.CANCELLING, State.CANCELLED))


def is_suspect(row: FenceRow, state: int | None) -> bool:
    """Whether the whole record must be read: all that is needed for the many rows that fit."""
    if row.running:
        return False
    if _has_stopped_halfway(row) or state is None or row.status not in _KNOWN:
        return True
    if row.status == FenceStatus.TRIED:
        return State(state).finished
    if row.status == FenceStatus.COMMITTED:
        return state not in CONFIRMS
    return state not in CANCELS


def of_row(participant: str, row: FenceRow, tx: Transaction | None, limits: Limits) -> Finding | None:
    """What is wrong with a row that is older than the grace; None: nothing. ``tx`` None: there is no record."""
    found = (
        _strange(row)
        or _half_done(row)
        or (_unknown(row, limits) if tx is None else _against(participant, row, tx, limits))
    )
    if found is None:
        return None
    severity, code, problem, advice = found
    branch = f"branch {row.branch_id} ({row.action})"
    return Finding(severity, code, f"{branch} {problem}", advice, participant, row.xid, row.branch_id)


_Told = tuple[Severity, str, str, str]


def _strange(row: FenceRow) -> _Told | None:
    if row.status in _KNOWN:
        return None
    problem = "has a status that this version does not know"
    return Severity.INFO, "STATUS_UNKNOWN", problem, "examine with a coordinator of the participant's version"


def _has_stopped_halfway(row: FenceRow) -> bool:
    return not row.finished and not row.external


def _half_done(row: FenceRow) -> _Told | None:
    if not _has_stopped_halfway(row):
        return None
    return (
        Severity.ERROR,
        "HALF_DONE",
        f"is {_word(row)}, but its handler never ended: it committed by itself, and what came after is lost",
        "see by the business rows how far it came, and mend them by hand; handlers must leave COMMIT to the SDK",
    )


def _unknown(row: FenceRow, limits: Limits) -> _Told | None:
    if row.status == FenceStatus.TRIED:
        return (
            Severity.ERROR,
            "ORPHAN_UNKNOWN",
            f"has been TRIED for {length(row.age_ms)}, and the coordinator has no record of its transaction",
            "find out whose it is (another coordinator's store, a store that was restored to an earlier time); "
            "nobody will confirm or cancel it by itself",
        )
    born_ms = int(row.xid[:12], 16)
    if limits.retention_ms and limits.now_ms - born_ms > limits.retention_ms:
        return None  # finished and forgotten, as it should be
    return (
        Severity.WARNING,
        "RECORD_MISSING",
        f"is {_word(row)}, and the coordinator has no record of its transaction, though it would still keep it",
        "see whether another store has it, or this one was restored to an earlier time",
    )


def _against(participant: str, row: FenceRow, tx: Transaction, limits: Limits) -> _Told | None:
    index = row.branch_id - 1
    if index >= len(tx.steps) or tx.spec.branches[index][:2] != (participant, row.action):
        return (
            Severity.ERROR,
            "BRANCH_UNKNOWN",
            f"is {_word(row)}, and its transaction has no such branch",
            f"tricord show {row.xid}; the store or the fence was restored to an earlier time, or mixed with another",
        )
    asked, step, resolution = tx.state, tx.steps[index], tx.resolution_of(index)
    if row.status == FenceStatus.TRIED:
        if not asked.finished or limits.now_ms - tx.updated_ms <= limits.grace_ms:
            return None
        return (
            Severity.ERROR,
            "ORPHAN_FINISHED",
            f"is still TRIED, though its transaction has been {asked.name} for {length(limits.now_ms - tx.updated_ms)}",
            "the participant's upkeep settles it (participant.resolve does it now); if it stays, its database was "
            "restored to an earlier time",
        )
    if resolution is not None and row.status in _settled_as(resolution):
        return None  # somebody has recorded that by hand; if it was against the decision, the transaction is mixed
    if row.status == FenceStatus.COMMITTED:
        if asked in CONFIRMS:
            return None
        problem = f"is COMMITTED, though its transaction is {asked.name}"
        return Severity.ERROR, "CONFIRMED_AGAINST_RECORD", problem, _BY_HAND.format(xid=row.xid)
    if asked in CANCELS or step.status is BranchStatus.REFUSED:
        return None
    if asked is State.TRYING and row.status == FenceStatus.ROLLBACKED:
        return None  # its Try was refused, and that is on its way
    problem = f"is {_word(row)}, though its transaction is {asked.name}"
    return Severity.ERROR, "CANCELLED_AGAINST_RECORD", problem, _BY_HAND.format(xid=row.xid)


def _settled_as(resolution: Resolution) -> tuple[FenceStatus, FenceStatus]:
    """What Settle makes of a row: SUSPENDED of one that was not there."""
    return FenceStatus.COMMITTED if resolution.confirmed else FenceStatus.ROLLBACKED, FenceStatus.SUSPENDED


_BY_HAND = (
    "tricord show {xid}; compare with the business rows and mend these by hand: the record is what others went by"
)


def _word(row: FenceRow) -> str:
    return FenceStatus(row.status).name
