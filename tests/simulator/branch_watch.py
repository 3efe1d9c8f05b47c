"""What must hold of one participant's database, whatever happens: seen at each COMMIT and each answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from participant_sdk.call import IncomingCall, Outcome, Refusal, Reply
from participant_sdk.fence import SETTLES, Phase, Status
from participant_sdk.local_transaction import SUSPENDED, TOO_OLD
from tests.simulator.database_server import Committed
from tests.simulator.handlers import CHARGE, DATABASE_ERROR
from tests.simulator.participants import Answered
from tests.simulator.transactions import Change, StoredRow

Branch = tuple[str, int]

FORWARD: Final = frozenset(
    {
        (None, Status.TRIED),
        (None, Status.ROLLBACKED),  # refused
        (None, Status.SUSPENDED),
        (Status.TRIED, Status.TRIED),  # an external Try, and its end
        (Status.TRIED, Status.COMMITTED),
        (Status.TRIED, Status.ROLLBACKED),
        (Status.ROLLBACKED, Status.ROLLBACKED),  # Cancel once more, after an external Try that came too late
    }
)
"""From where to where a fence row goes in one COMMIT."""
_CANCELLED: Final = (Status.ROLLBACKED, Status.SUSPENDED)


class Broken(AssertionError):
    """A rule was broken."""


class BranchWatch:
    """``broken`` is the first rule that was broken.

    ``may_purge``: whether a transaction is finished. ``by_hand``: whether an operator has resolved its branch.
    """

    def __init__(self, may_purge: Callable[[str], bool], by_hand: Callable[[str], bool]) -> None:
        self._may_purge = may_purge
        self._by_hand = by_hand
        self.broken: Broken | None = None
        self.cancelled: set[Branch] = set()
        """Whose Cancel has been marked, ever."""
        self.purged: set[Branch] = set()
        self.external: set[Branch] = set()
        self._refused: dict[Branch, Refusal] = {}
        self._ran: set[tuple[Branch, Phase]] = set()
        self.settled: set[Branch] = set()
        """Ended by no handler: a person has told that it was done by hand."""
        self._ended: set[Branch] = set()
        self._answers: dict[tuple[Branch, Phase], Reply] = {}

    def committed(self, committed: Committed) -> None:
        """For a server's ``on_commit``."""
        ran = {change.key[1:3] for change in committed.changes if change.key[0] == "effect"}
        for change in committed.changes:
            if change.key[0] == "fence":
                self._fence(change)
                self._end(change, change.key[1:] in ran)
        for change in committed.changes:
            if change.key[0] == "effect":
                self._effect(change)

    def answered(self, answered: Answered) -> None:
        """For a service's ``on_answer``."""
        call, reply = answered.call, answered.true
        if reply.outcome in (Outcome.DONE, Outcome.REFUSED):
            self._check_true(call, reply)
            self._check_same(call, reply)

    def broke(self, broken: Broken) -> None:
        """Somebody else has seen it."""
        self.broken = self.broken or broken

    def _break(self, what: str) -> None:
        self.broke(Broken(what))

    def _end(self, change: Change, ran: bool) -> None:
        """Confirmed or cancelled, after Try: by its handler, or by hand."""
        new: StoredRow | None = change.new
        branch: Branch = change.key[1:]
        if new is None or new.refusal is not None or new.status == Status.TRIED:
            return
        self._ended.add(branch)
        if new.status == Status.SUSPENDED or ran:
            return
        if not self._by_hand(branch[0]):
            self._break(f"a fence row became {Status(new.status).name}, and no handler had run: {branch}")
        self.settled.add(branch)

    def _fence(self, change: Change) -> None:
        branch: Branch = change.key[1:]
        old: StoredRow | None = change.old
        new: StoredRow | None = change.new
        if new is None:
            if old is None or old.status == Status.TRIED or not self._may_purge(branch[0]):
                self._break(f"purged too early: {branch}, {old}")
            self.purged.add(branch)
            return
        move = None if old is None else Status(old.status), Status(new.status)
        if move not in FORWARD:
            self._break(f"a fence row went from {move[0]} to {move[1]}: {branch}")
        if new.action == CHARGE:
            self.external.add(branch)
            if new.status == Status.TRIED and new.finished:
                self._ran.add((branch, Phase.TRY))  # its effect is not in the database
        if new.refusal is not None:
            self._refused[branch] = new.refusal
            if new.refusal.reason == DATABASE_ERROR:
                self._break(f"a transient error was stored as a refusal: {branch}")
        elif new.status in _CANCELLED:
            self.cancelled.add(branch)
        elif branch in self.cancelled:
            self._break(f"a cancelled branch became {move[1].name}: {branch}")
        elif new.status == Status.TRIED and branch in self.purged:
            self._break(f"a Try ran after its row was purged: {branch}")

    def _effect(self, change: Change) -> None:
        _, xid, branch_id, name = change.key
        branch, phase = (xid, branch_id), Phase[name]
        self._ran.add((branch, phase))
        if phase is Phase.TRY and branch in self.cancelled:
            self._break(f"a Try had its effect after the mark of Cancel: {branch}")
        # After an external Try that came too late Cancel runs once more, and that is told.
        allowed = 2 if phase is Phase.CANCEL and branch in self.external else 1
        if change.new > allowed:
            self._break(f"{name} had its effect {change.new} times: {branch}")

    def _check_true(self, call: IncomingCall, reply: Reply) -> None:
        """What is answered is durable."""
        if reply.outcome is Outcome.REFUSED:
            if reply.refusal == SUSPENDED:
                true = call.key in self.cancelled
            else:
                stored = reply.refusal == self._refused.get(call.key)
                true = stored or (reply.refusal is not None and reply.refusal.reason == TOO_OLD)
        elif call.phase is Phase.CANCEL:
            true = call.key in self.cancelled or call.key in self._refused
        elif call.phase in SETTLES:
            true = call.key in self._ended or call.key in self._refused
        else:
            true = (call.key, call.phase) in self._ran or (call.phase is Phase.CONFIRM and call.key in self.settled)
        if not true:
            self._break(f"{call} was answered {reply.outcome.name}, which is not what is stored")

    def _check_same(self, call: IncomingCall, reply: Reply) -> None:
        key = call.key, call.phase
        before = self._answers.setdefault(key, reply)
        if _said(before) == _said(reply):
            return
        if before.refusal is not None and before.refusal.reason == TOO_OLD:
            self._answers[key] = reply  # nothing was stored, and the database's clock was set back since
            return
        # What was tried and then cancelled, or is forgotten, is refused: its caller has known better for long.
        over = call.key in self.cancelled or call.key in self.purged
        if not over or reply.refusal is None or (reply.refusal != SUSPENDED and reply.refusal.reason != TOO_OLD):
            self._break(f"{call} was answered {before}, and then {reply}")
        self._answers[key] = reply


def _said(reply: Reply) -> tuple[Any, ...]:
    return reply.outcome, reply.result, reply.refusal
