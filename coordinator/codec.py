"""A transaction as a row, and back.

``body`` is what never changes, ``progress`` what a save writes anew; both are MessagePack arrays, compact and quick
to make, and the same on every database. ``format`` says which version of this file wrote the row.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from .model import FORMAT, Attention, BranchSpec, Joined, Past, Resolution, Seen, Spec, State, Step, Transaction
from .store.rows import Row


class _Body(NamedTuple):
    """What never changes. Last fields are left out where they are empty: most rows have none."""

    timeout_ms: int
    branches: tuple[BranchSpec, ...]
    """Those that it began with."""
    metadata: tuple[tuple[str, str], ...] = ()
    flags: int = 0
    """Format 2."""
    labels: tuple[tuple[str, str], ...] = ()
    """Format 3."""


class _Progress(NamedTuple):
    decided_ms: int
    cancel_reason: str
    steps: tuple[Step, ...]
    # Format 2.
    sealed: bool = True
    renewed_ms: int = 0
    branches: tuple[BranchSpec, ...] = ()
    """Those that were added."""
    joined: tuple[Joined, ...] = ()
    seen: tuple[Seen, ...] = ()
    # Format 3.
    resolved: tuple[Resolution, ...] = ()
    past: tuple[Past, ...] = ()


_INTERACTIVE, _ORDERED = 1, 2

_encode = msgspec.msgpack.Encoder().encode
_decode_body = msgspec.msgpack.Decoder(_Body).decode
_decode_progress = msgspec.msgpack.Decoder(_Progress).decode


class UnreadableRow(Exception):
    """A stored row that this version of the coordinator cannot read."""


def format_of(tx: Transaction, highest: int = FORMAT) -> int:
    """The lowest format that holds this transaction: an older program reads what it can read (protocol G2).

    ``highest`` is the one that the store may be given. Its past alone can be left out, and is if that one is lower.
    """
    spec = tx.spec
    if spec.labels or tx.resolved or (tx.past and highest > 2):
        return 3
    return 2 if spec.interactive or spec.ordered or tx.joined or tx.renewed_ms else 1


def new_row(tx: Transaction) -> Row:
    """The whole row, for a transaction that is stored for the first time."""
    spec = tx.spec
    flags = _INTERACTIVE * spec.interactive + _ORDERED * spec.ordered
    body: tuple[object, ...] = (spec.timeout_ms, spec.branches)
    if spec.labels:
        body = (*body, spec.metadata, flags, spec.labels)
    elif flags:
        body = (*body, spec.metadata, flags)
    elif spec.metadata:
        body = (*body, spec.metadata)
    return _row(tx, FORMAT, spec.created_ms, spec.key, _encode(body), _participants(spec))


def saved_row(tx: Transaction, highest: int = FORMAT) -> Row:
    """The part of the row that a save writes; the rest is left empty. ``highest``: see ``format_of``."""
    return _row(tx, highest)


def _row(
    tx: Transaction, highest: int, created_ms: int = 0, key: bytes = b"", body: bytes = b"", participants: str = ""
) -> Row:
    row_format = format_of(tx, highest)
    steps = [_short(step) for step in tx.steps]
    progress: tuple[object, ...] = (tx.decided_ms, tx.cancel_reason, steps)
    if row_format > 1:
        progress = (*progress, tx.sealed, tx.renewed_ms, tx.spec.branches[tx.begun :], tx.joined, tx.seen)
        if tx.joined:
            participants = _participants(tx.spec)
    if row_format > 2:
        progress = (*progress, tx.resolved, tx.past) if tx.past else (*progress, tx.resolved)
    return Row(
        tx.spec.xid,
        created_ms,
        key,
        body,
        participants,
        row_format,
        tx.version,
        tx.save_id,
        int(tx.state),
        int(tx.attention),
        tx.wake_ms,
        tx.updated_ms,
        _encode(progress),
    )


def _short(step: Step) -> tuple[object, ...]:
    """Without its last fields where they are empty, as nearly always: they are as much as the rest."""
    if step.refusal is not None:
        return step
    return step[:5] if step.result is None else step[:6]


def transaction(row: Row) -> Transaction:
    """The transaction that a row holds. Raises UnreadableRow."""
    if not 1 <= row.format <= FORMAT:
        raise UnreadableRow(
            f"transaction {row.xid.hex()} has row format {row.format}, this program reads up to {FORMAT}"
        )
    try:
        body = _decode_body(row.body)
        progress = _decode_progress(row.progress)
        return Transaction(
            Spec(
                row.xid,
                row.key,
                row.created_ms,
                body.timeout_ms,
                body.branches + progress.branches if progress.branches else body.branches,
                body.metadata,
                bool(body.flags & _INTERACTIVE),
                bool(body.flags & _ORDERED),
                body.labels,
            ),
            State(row.state),
            progress.steps,
            row.version,
            row.save_id,
            row.wake_ms,
            Attention(row.attention),
            row.updated_ms,
            progress.decided_ms,
            progress.cancel_reason,
            progress.sealed,
            progress.renewed_ms,
            progress.joined,
            progress.seen,
            progress.resolved,
            progress.past,
        )
    except (msgspec.MsgspecError, ValueError) as error:
        raise UnreadableRow(f"transaction {row.xid.hex()} cannot be read: {error}") from error


def readable(row: Row) -> Transaction | None:
    """The transaction in a row; None if this program cannot read it."""
    try:
        return transaction(row)
    except UnreadableRow:
        return None


def _participants(spec: Spec) -> str:
    names = ",".join(sorted({branch.participant for branch in spec.branches}))
    return f",{names}," if names else ""
