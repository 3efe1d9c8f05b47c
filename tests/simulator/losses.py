"""What a restored store has lost, and what participants have read of its records.

A store that is restored to an earlier time has forgotten transactions, and decisions. What follows from that cannot be
undone, and is not held against anybody here: calls of the lost history arrive, and what was decided may be decided the
other way round. What must hold all the same: see ``Watch``.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from coordinator.model import State, Transaction

from .loop import World

READ_US = 12_000_000
"""A COMMIT may land so long after its purge has read the record that lets a row go."""


class Losses:
    """The transactions of which a restore has taken something, and the records that participants have read."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.lost: dict[str, Transaction] = {}
        """By xid: as they stood when the store was restored."""
        self._finished: dict[tuple[str, str], int] = {}
        """By participant and xid: when it has last read on record that the transaction is finished."""
        self._fetched: dict[tuple[str, str], Transaction] = {}

    def __contains__(self, xid: str) -> bool:
        return xid in self.lost

    def restored(
        self, before: Mapping[str, Transaction], after: Mapping[str, Transaction], flagged: Container[str]
    ) -> None:
        """The store has gone back."""
        counts = self._world.counts
        for xid, tx in before.items():
            stands = after.get(xid)
            if stands is None:
                counts["transactions lost by a restore"] += 1
            elif stands.version - (xid in flagged) == tx.version:
                continue
            else:
                counts["transactions set back by a restore"] += 1
            self.lost[xid] = tx

    # --- what participants read ----------------------------------------------------------------------------

    def looked_up(self, participant: str, states: Mapping[str, State]) -> None:
        """A participant has read how far these have come."""
        for xid, state in states.items():
            if state.finished:
                self._finished[participant, xid] = self._world.now_us

    def fetched(self, participant: str, xid: str, tx: Transaction | None) -> None:
        """A participant has read a whole record, or that there is none."""
        if tx is not None:
            self._fetched[participant, xid] = tx

    def may_go(self, participant: str, xid: str) -> bool:
        """Whether a participant has read lately that this transaction is finished."""
        read_us = self._finished.get((participant, xid))
        return read_us is not None and self._world.now_us - read_us <= READ_US

    def record(self, participant: str, xid: str) -> Transaction | None:
        """What a participant has last read of a transaction."""
        return self._fetched.get((participant, xid))
