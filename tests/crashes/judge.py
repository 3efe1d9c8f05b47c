"""What must hold after a run, whatever the point at which its coordinator died."""

from __future__ import annotations

from collections import Counter

from coordinator.model import Attention, State
from examples.transfer.databases import Account, Stored
from participant_sdk.fence import Status
from tests.crashes.banks import OPEN
from tests.crashes.stage import ASKED_AGAIN, Seen

PHASE_2 = {"PHASE_CONFIRM": (State.CONFIRMING, State.CONFIRMED), "PHASE_CANCEL": (State.CANCELLING, State.CANCELLED)}
FENCES = {State.CONFIRMED: {Status.COMMITTED}, State.CANCELLED: {Status.ROLLBACKED, Status.SUSPENDED}}


def violations(seen: Seen) -> list[str]:
    """What does not hold, for people; empty when all is well."""
    if len(seen.stored) != 1:
        return [f"{len(seen.stored)} transactions have the initiator's key"]
    (end,) = seen.stored
    return [*_point(seen), *_state(seen, end), *_banks(seen, end), *_calls(seen, end), *_told(seen, end)]


def _point(seen: Seen) -> list[str]:
    if seen.missing:
        return [f"{', '.join(seen.missing)} never came, only {', '.join(seen.reached)}"]
    if not seen.came:
        return ["its coordinator died" if seen.died else "its coordinator lives"]
    return [line for line in seen.reached if line.startswith("lost")]


def _state(seen: Seen, end: Stored) -> list[str]:
    may = seen.scenario.may_end(seen.at_death)
    wrong = [] if end.state.finished else [f"it never ends: it is {end.state.name}"]
    if end.state.finished and end.state not in may:
        at_death = "nothing" if seen.at_death is None else seen.at_death.name
        wrong.append(f"it ended {end.state.name}, with {at_death} stored when its coordinator died")
    if end.attention is Attention.VIOLATION:
        wrong.append("a participant contradicted the protocol")
    return wrong


def _banks(seen: Seen, end: Stored) -> list[str]:
    """Effects exactly once or not at all, nothing reserved, every fence of the decision's mind."""
    allowed = FENCES.get(end.state, set())
    wrong = [
        f"the fence of {name} says {'nothing' if status is None else status.name}"
        for name, status in seen.fences.items()
        if status not in allowed
    ]
    changes = seen.scenario.changes() if end.state is State.CONFIRMED else {}
    expected = dict(seen.before)
    for name, change in changes.items():
        account = f"{OPEN}@{name}"
        expected[account] = Account(expected[account].balance + change)
    return wrong + [
        f"{name} holds {account}, must hold {expected[name]}"
        for name, account in seen.after.items()
        if account != expected[name]
    ]


def _calls(seen: Seen, end: Stored) -> list[str]:
    """Calls that promise a decision leave only when it is stored, and none leaves for another one, or for nobody's."""
    at_death = "nothing" if seen.at_death is None else seen.at_death.name
    wrong = [
        f"{called.phase} of branch {called.branch_id} has left, with {at_death} stored"
        for called in seen.called_by_a
        if called.phase in PHASE_2 and seen.at_death not in PHASE_2[called.phase]
    ]
    strange = {called.xid for called in seen.calls} - {end.xid}
    if strange:
        wrong.append(f"participants were called for {', '.join(strange)}, which is not stored")
    phases = {called.phase for called in seen.calls}
    if phases.issuperset(PHASE_2):
        wrong.append("participants were called for both ends")
    return wrong


def _told(seen: Seen, end: Stored) -> list[str]:
    wrong = [f"told {told}, stored {end}" for told in seen.told if (told.xid, told.state) != (end.xid, end.state)]
    return wrong if len(seen.told) >= ASKED_AGAIN else [*wrong, "its initiator was never told"]


def called(seen: Seen) -> str:
    """How often each phase was called for, for people."""
    counts: Counter[str] = Counter()
    for each, times in seen.calls.items():
        counts[each.phase.removeprefix("PHASE_").capitalize()] += times
    return " ".join(f"{phase} {counts[phase]}" for phase in ("Try", "Confirm", "Cancel") if counts[phase])


def took_over(seen: Seen) -> str:
    """Who carried the transaction to its end, for people."""
    if not seen.died:
        return "A"
    if seen.at_death is None:
        return "B, asked again"
    return "A" if seen.at_death.finished else "B, lease over"
