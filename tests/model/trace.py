"""How a state was come to, for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.model.fences import Branch
from tests.model.state import Label, State
from tests.model.world import World


def told(world: World, path: Sequence[State], canonical: Callable[[State], State]) -> list[str]:
    """The steps along a path, one a line. Each coordinator keeps its name, though the path sorts them."""
    state = world.first()
    assert canonical(state) == path[0]
    lines = [f"   0  c{len(state.coordinators) - 1} begins the transaction"]
    for number, wanted in enumerate(path[1:], 1):
        label, after = next(step for step in world.steps(state) if canonical(step[1]) == wanted)
        lines.append(f"{number:4}  {_text(world, label)}{_changes(world, state, after)}")
        state = after
    return lines


def _text(world: World, label: Label) -> str:
    who = "" if label.place is None else f"c{label.place} "
    return who + label.text + (f" [{world.values.text(label.value)}]" if label.value else "")


def _changes(world: World, before: State, after: State) -> str:
    parts = []
    if after.row != before.row:
        parts.append(f"row: {world.values.text(after.row)}")
    for n, (a, b) in enumerate(zip(before.branches, after.branches, strict=True), 1):
        if a != b:
            parts.append(f"fence {n}: {_fence(world.branch(b))}")
    return "".join(f"\n        {part}" for part in parts)


def _fence(branch: Branch) -> str:
    status = "no row" if branch.status is None else branch.status.name
    effects = f"effects of Try {branch.tries}, Confirm {branch.confirms}, Cancel {branch.cancels}"
    return f"{status}, {effects}" + (
        f"; open: {branch.open.phase.name} {branch.open.stage.value}" if branch.open else ""
    )
