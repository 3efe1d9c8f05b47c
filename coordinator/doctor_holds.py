"""What a participant holds in its own tables against its TRIED branches, as it compared them itself. Pure.

Both sides are of one moment, so that nothing that is on its way can look wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .doctor import Finding, Severity, not_compared
from .doctor_fence import FenceStatus

LEAKED = "HOLD_LEAKED"
MISSING = "HOLD_MISSING"


class Mismatch(NamedTuple):
    """A hold without a TRIED branch (``leaked``), or a TRIED branch without a hold."""

    leaked: bool
    xid: str
    branch_id: int
    action: str
    status: int
    owner: str
    """Whose branch it is; empty: the fence has no such row."""
    amount: str = ""
    unit: str = ""


class HoldSum(NamedTuple):
    """Of one unit: in total, and of this under TRIED branches."""

    unit: str
    reserved: str
    tried: str


class HoldFacts(NamedTuple):
    """What became of one comparison. ``error``: why there was none; ``until``: later transactions were left out.

    ``is_query``: the error is that of the query that the participant declares. ``compared``: how much, in words.
    """

    error: str = ""
    is_query: bool = False
    compared: str = ""
    sums: Sequence[HoldSum] = ()
    leaked: int = 0
    missing: int = 0
    mismatches: Sequence[Mismatch] = ()
    until: str = ""


def of_holds(name: str, facts: HoldFacts) -> Iterator[Finding]:
    """What does not fit, the sums first."""
    if facts.error and not facts.is_query:
        yield not_compared(name, f"what it holds could not be compared: {facts.error}")
    elif facts.error:
        problem = f"what it holds could not be compared with its fence: {facts.error}"
        advice = "mend the query that the participant declares as holds(); until then nobody sees what it leaks"
        yield Finding(Severity.WARNING, "HOLDS_FAILED", problem, advice, name)
    for each in facts.sums:
        if each.reserved != each.tried:
            reserved, tried = _of_unit(each.reserved, each.unit), _of_unit(each.tried, each.unit)
            problem = f"{reserved} are reserved in its tables, only {tried} of this by branches that are TRIED"
            advice = f"see its {LEAKED} findings: the rest belongs to no branch that is still to be settled"
            yield Finding(Severity.ERROR, "HOLDS_DIFFER", problem, advice, name)
    for mismatch in facts.mismatches:
        yield _leaked(name, mismatch) if mismatch.leaked else _missing(name, mismatch)
    if facts.until:
        yield not_compared(name, f"only holds of transactions up to {facts.until} were compared with its fence")


def left_out(facts: HoldFacts) -> Iterator[tuple[str, int]]:
    """How many mismatches of which kind the participant has counted and not told."""
    told = sum(mismatch.leaked for mismatch in facts.mismatches)
    yield LEAKED, facts.leaked - told
    yield MISSING, facts.missing - (len(facts.mismatches) - told)


def _leaked(name: str, mismatch: Mismatch) -> Finding:
    branch = f"branch {mismatch.branch_id}" + (f" ({mismatch.action})" if mismatch.action else "")
    problem = f"{_of_unit(mismatch.amount, mismatch.unit)} are held for {branch}, which {_why(name, mismatch)}"
    if mismatch.owner not in ("", name):
        advice = f"let the query of holds() leave out what {mismatch.owner} holds, if they share the table"
    else:
        advice = f"tricord show {mismatch.xid}; then release it in the participant's tables by hand: nothing else will"
    return Finding(Severity.ERROR, LEAKED, problem, advice, name, mismatch.xid, mismatch.branch_id)


def _why(name: str, mismatch: Mismatch) -> str:
    if not mismatch.owner:
        return "its fence does not know"
    if mismatch.owner != name:
        return f"is {mismatch.owner}'s"
    word = FenceStatus(mismatch.status).name if mismatch.status in set(FenceStatus) else "of a status not known here"
    left = {int(FenceStatus.COMMITTED): "Confirm", int(FenceStatus.ROLLBACKED): "Cancel"}.get(mismatch.status)
    return f"is {word}" + (f": its {left} has left them" if left else "")


def _missing(name: str, mismatch: Mismatch) -> Finding:
    problem = f"branch {mismatch.branch_id} ({mismatch.action}) is TRIED, and nothing is held for it"
    advice = (
        "see what took or gave back its hold before Confirm or Cancel, such as a timer; leave an action that reserves "
        "nothing out of holds(...)"
    )
    return Finding(Severity.WARNING, MISSING, problem, advice, name, mismatch.xid, mismatch.branch_id)


def _of_unit(amount: str, unit: str) -> str:
    return f"{amount} {unit}" if unit else amount
