"""A transaction as a row, and back.

``body`` is what never changes, ``progress`` what a save writes anew; both are MessagePack arrays, compact and quick
to make, and the same on every database. ``format`` says which version of this file wrote the row.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from .model import FORMAT, Attention, BranchSpec, Spec, State, Step, Transaction
from .store.rows import Row


class _Body(NamedTuple):
    """What never changes. The last field is left out where it is empty: most rows have none, and older ones none yet.

    A row that has it cannot be read by a program that does not know it: nothing is ever sent without its metadata.
    """

    timeout_ms: int
    branches: tuple[BranchSpec, ...]
    metadata: tuple[tuple[str, str], ...] = ()


_encode = msgspec.msgpack.Encoder().encode
_decode_body = msgspec.msgpack.Decoder(_Body).decode
_decode_progress = msgspec.msgpack.Decoder(tuple[int, str, tuple[Step, ...]]).decode


class UnreadableRow(Exception):
    """A stored row that this version of the coordinator cannot read."""


def new_row(tx: Transaction) -> Row:
    """The whole row, for a transaction that is stored for the first time."""
    spec = tx.spec
    names = ",".join(sorted({branch.participant for branch in spec.branches}))
    row = saved_row(tx)
    body = (spec.timeout_ms, spec.branches)
    return row._replace(
        created_ms=spec.created_ms,
        key=spec.key,
        body=_encode((*body, spec.metadata) if spec.metadata else body),
        participants=f",{names},",
    )


def saved_row(tx: Transaction) -> Row:
    """The part of the row that a save writes; the rest is left empty."""
    return Row(
        tx.spec.xid,
        version=tx.version,
        save_id=tx.save_id,
        state=int(tx.state),
        attention=int(tx.attention),
        wake_ms=tx.wake_ms,
        updated_ms=tx.updated_ms,
        progress=_encode((tx.decided_ms, tx.cancel_reason, tx.steps)),
    )


def transaction(row: Row) -> Transaction:
    """The transaction that a row holds. Raises UnreadableRow."""
    if row.format != FORMAT:
        raise UnreadableRow(f"transaction {row.xid.hex()} has row format {row.format}, this program reads {FORMAT}")
    try:
        body = _decode_body(row.body)
        decided_ms, cancel_reason, steps = _decode_progress(row.progress)
        return Transaction(
            Spec(row.xid, row.key, row.created_ms, *body),
            State(row.state),
            steps,
            row.version,
            row.save_id,
            row.wake_ms,
            Attention(row.attention),
            row.updated_ms,
            decided_ms,
            cancel_reason,
        )
    except (msgspec.MsgspecError, ValueError) as error:
        raise UnreadableRow(f"transaction {row.xid.hex()} cannot be read: {error}") from error
