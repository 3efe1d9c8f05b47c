"""What is explored: the small ones always, all of them with ``--full``."""

from __future__ import annotations

from coordinator.model import BranchSpec, Joined
from coordinator.orders import AddBranch, Cancel, Confirm, Resolve
from tests.model.state import Setup
from tests.model.values import order_event, spec


def _added(branch: int) -> AddBranch:
    return AddBranch(BranchSpec(f"p{branch}", "a"), Joined(f"key {branch}"))


INITIATOR = (
    order_event(_added(1), "try p1"),
    order_event(_added(2), "try p2"),
    order_event(Confirm(frozenset({1})), "confirm 1"),
    order_event(Confirm(frozenset({1, 2})), "confirm 1 and 2"),
    order_event(Cancel(""), "cancel"),
)
OPERATOR = tuple(
    order_event(Resolve(branch, confirmed, "", ""), f"resolve {branch} as {'confirmed' if confirmed else 'cancelled'}")
    for branch in (1, 2)
    for confirmed in (True, False)
)

TWO_COORDINATORS_ONE_BRANCH = Setup("two coordinators, one branch", spec(1), 2, 1, lost=2, steps=True, together=True)
ONE_COORDINATOR = Setup("one coordinator, two branches", spec(2), 1, 2, steps=True)
ORDERED = Setup("ordered branches", spec(2, ordered=True), 2, 2)
TWO_COORDINATORS = Setup("two coordinators, two branches", spec(2), 2, 2)
INTERACTIVE = Setup("interactive", spec(2, interactive=True), 1, 2, events=INITIATOR)
RESTORED = Setup("a database set back", spec(2), 1, 2, forgets=True)
RESOLVED = Setup("resolved by hand", spec(1), 2, 1, events=OPERATOR[:2], resolved_max=1)

SMALL = (TWO_COORDINATORS_ONE_BRANCH, ONE_COORDINATOR, ORDERED, INTERACTIVE, RESTORED, RESOLVED, TWO_COORDINATORS)
FULL = (
    *SMALL,
    Setup("two coordinators, two branches, two COMMITs lost", spec(2), 2, 2, lost=2),
    Setup("interactive, two coordinators", spec(2, interactive=True), 2, 2, events=INITIATOR),
    Setup("two branches resolved by hand", spec(2), 1, 2, events=OPERATOR, resolved_max=2),
)
