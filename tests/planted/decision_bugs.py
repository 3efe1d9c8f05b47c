"""Bugs in how a coordinator decides and saves."""

from __future__ import annotations

from .bugs import TOWN, Bug, Edit

MACHINE = "coordinator/machine.py"
FLOW = "coordinator/flow.py"
LIVE = "coordinator/live.py"
ORDERS = "coordinator/orders.py"

_AFTER_ALL_CONFIRMED = "    (State.CONFIRMING, Event.ALL_CONFIRMED): State.CONFIRMED,\n"
_CONFIRMING = """\
    if tx.state is _CONFIRMING:
        return Event.ALL_CONFIRMED"""

BUGS = (
    Bug(
        "a decision is sent before it is saved",
        "case 5: tcc-transaction#146, seata#3558 (the write of the decision fails, and its Confirms have left)",
        (
            Edit(
                FLOW,
                "            if await self._write(after, wake_ms):\n                self._owner = owner",
                "            if decides:\n"
                "                self._tx = after\n"
                "                self._send(due(after, now_ms, policy))\n"
                "            if await self._write(after, wake_ms):\n                self._owner = owner",
            ),
        ),
    ),
    Bug(
        "the decision is written asynchronously",
        "pitfall 14: hmily#40 (events of the log go into a queue in memory)",
        (
            Edit(
                LIVE,
                "tx.state.finished and before.state is not State.TRYING and not raises and not tx.resolved:",
                "tx.state is not State.TRYING and not raises:",
            ),
        ),
    ),
    Bug(
        "what is decided and finished at once is told before its COMMIT",
        "case 5, the same as above where there is no phase 2",
        (Edit(LIVE, "tx.state.finished and before.state is not State.TRYING and", "tx.state.finished and"),),
    ),
    Bug(
        "a decided transaction times out",
        "pitfall 26: mp-lra#231, narayana PR#2217 (the deadline fires while it confirms)",
        (
            Edit(
                MACHINE,
                _CONFIRMING,
                "    if tx.state is State.CONFIRMING and now_ms >= tx.deadline_ms:\n"
                "        return Event.DEADLINE\n" + _CONFIRMING,
            ),
            Edit(
                MACHINE,
                _AFTER_ALL_CONFIRMED,
                _AFTER_ALL_CONFIRMED + "    (State.CONFIRMING, Event.DEADLINE): State.CANCELLING,\n",
            ),
        ),
    ),
    Bug(
        "a Confirm that fails again and again becomes a Cancel",
        "case 24: dtm#545, #365, seata#6884; case 1: ByteTCC#146",
        (
            Edit(
                MACHINE,
                _CONFIRMING,
                "    if tx.state is State.CONFIRMING and any(step.attempts >= 2 for step in tx.steps):\n"
                "        return Event.REFUSED\n" + _CONFIRMING,
            ),
            Edit(
                MACHINE,
                _AFTER_ALL_CONFIRMED,
                _AFTER_ALL_CONFIRMED + "    (State.CONFIRMING, Event.REFUSED): State.CANCELLING,\n",
            ),
        ),
    ),
    Bug(
        "no transaction ever times out",
        "case 4: tcc-transaction#303, #305 (the initiator dies, and its transaction stays as it is)",
        (Edit(MACHINE, "        return Event.DEADLINE if now_ms >= tx.deadline_ms else None", "        return None"),),
    ),
    Bug(
        "a refused Try counts as tried",
        "case 18: ByteTCC#53 (a branch's error is swallowed, and the rest is confirmed)",
        (
            Edit(
                MACHINE,
                "step._replace(status=BranchStatus.REFUSED, refusal=refusal, fence_id=reply.fence_id)",
                "step._replace(status=BranchStatus.TRIED, fence_id=reply.fence_id)",
            ),
        ),
    ),
    Bug(
        "Cancel goes only to branches that were seen tried",
        "pitfall 11: EasyTransaction PR#151, case 3 (a Try whose answer was lost is left out)",
        (
            Edit(
                MACHINE,
                "Phase.CANCEL if status is not BranchStatus.CANCELLED else None",
                "Phase.CANCEL if status is BranchStatus.TRIED else None",
            ),
            Edit(
                MACHINE,
                "statuses.count(BranchStatus.CANCELLED) == len(statuses)",
                "BranchStatus.TRIED not in statuses",
            ),
        ),
    ),
    Bug(
        "a violation counts as done before",
        "pitfall 18: narayana LRA (410 Gone of a participant is taken for its end)",
        (
            Edit(
                MACHINE,
                "        if reply.outcome is _DONE:\n            reply = _checked(step, reply)",
                "        if reply.outcome is Outcome.VIOLATION and reply.phase is not Phase.TRY:\n"
                "            reply = reply._replace(outcome=Outcome.DONE)\n"
                "        if reply.outcome is _DONE:\n            reply = _checked(step, reply)",
            ),
        ),
    ),
    Bug(
        "an answer out of another fence database counts",
        "rule C3; pitfall 18 (a mis-routed call loses money)",
        (
            Edit(
                MACHINE,
                "    if reply.phase is Phase.TRY or not step.fence_id or reply.fence_id == step.fence_id:",
                "    if True:",
            ),
            Edit(
                MACHINE,
                "    if not registered or reply.fence_id == registered or",
                "    if registered or reply.fence_id == registered or",
            ),
        ),
    ),
    Bug(
        "a late answer overwrites a final one",
        "case 48: hiero-bot-py#75; rule A6",
        (
            Edit(
                MACHINE,
                "        if wanted(tx, reply.branch, step) is not reply.phase:",
                "        if wanted(tx, reply.branch, step) is not reply.phase and reply.outcome is Outcome.UNKNOWN:",
            ),
        ),
    ),
    Bug(
        "after some attempts nobody tries again",
        "pitfall 21: hmily (DEATH after 10), tcc-transaction (30)",
        (
            Edit(
                MACHINE,
                "    return _OWED[tx.state][step.status]",
                "    return None if step.attempts >= 3 else _OWED[tx.state][step.status]",
            ),
            Edit(
                MACHINE,
                "        times.append(tx.deadline_ms)\n    return max(now_ms, min(times))",
                "        times.append(tx.deadline_ms)\n    return max(now_ms, min(times, default=now_ms + 10**9))",
            ),
        ),
    ),
    Bug(
        "an open interactive transaction is confirmed as soon as all is tried",
        "case 18: ByteTCC#53; rule B1 (only its initiator seals it)",
        (Edit(MACHINE, "        if tx.sealed:\n", "        if tx.steps:\n"),),
    ),
    Bug(
        "a branch that its initiator has not seen tried is confirmed",
        "case 14: hmily#289, seata#3338 (a call that timed out at its caller goes on in the transaction); rule B3",
        (Edit(ORDERS, "        if missing:\n", "        if not self.tried:\n"),),
    ),
    Bug(
        "a branch is added to a decided transaction",
        "case 14: hmily#76 (a late enlistment is driven by nobody)",
        (
            Edit(
                ORDERS,
                '        _check_trying(tx, "takes no more branches")\n',
                "",
            ),
        ),
    ),
    Bug(
        "Cancel by the initiator turns a decided transaction",
        "case 20: dtm#562",
        (
            Edit(
                ORDERS,
                '        _check_trying(tx, "cannot be cancelled")\n        why = ',
                "        if tx.state is not State.CONFIRMING:\n"
                '            _check_trying(tx, "cannot be cancelled")\n'
                "        why = ",
            ),
            Edit(
                MACHINE,
                _AFTER_ALL_CONFIRMED,
                _AFTER_ALL_CONFIRMED + "    (State.CONFIRMING, Event.INITIATOR): State.CANCELLING,\n",
            ),
        ),
    ),
    Bug(
        "a branch that was resolved by hand is called on",
        "pitfall 47: heuristic ends (the participant is told the opposite of what a person has done)",
        (
            Edit(
                MACHINE,
                "    if tx.resolved and (resolution := tx.resolution_of(branch)) is not None:",
                "    if (resolution := None) is not None:",
            ),
        ),
        TOWN,
    ),
)
