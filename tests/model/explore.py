"""Breadth first through every reachable state, so that what is found wrong has the shortest trace."""

from __future__ import annotations

import gc
import time
from array import array
from typing import NamedTuple

from tests.model.invariants import Invariants
from tests.model.state import Setup, State
from tests.model.trace import told
from tests.model.values import PRODUCT, Rules
from tests.model.world import World

TRAP = "from each reachable state an end can be reached"


class Found(NamedTuple):
    """What an exploration has found."""

    setup: Setup
    states: int
    transitions: int
    depth: int
    seconds: float
    violation: str
    """The rule that does not hold, or empty."""
    trace: tuple[str, ...] = ()


class _Exploration:
    def __init__(self, setup: Setup, rules: Rules) -> None:
        self.setup = setup
        self.world = World(setup, rules)
        self.invariants = Invariants(self.world)
        self.states: list[State] = []
        self.numbers: dict[State, int] = {}
        self.parents = array("l")
        self.next = array("l")
        """The numbers of all successors, state after state."""
        self.ends = array("l")
        """Where each state's successors end in ``next``."""
        self.depth = 0

    def run(self) -> tuple[str, int, State | None]:
        """The rule that does not hold, the number of the state before, and the state where it does not."""
        world, numbers, states = self.world, self.numbers, self.states
        first = canonical(world.first())
        self._add(first, -1)
        number, layer = 0, 1
        while number < len(states):
            if number == layer:
                self.depth += 1
                layer = len(states)
            before = states[number]
            for label, after in world.steps(before):
                after = canonical(after)
                wrong = self.invariants.broken(before, label, after)
                if wrong:
                    return wrong, number, after
                known = numbers.get(after)
                if known is None:
                    known = len(states)
                    self._add(after, number)
                self.next.append(known)
            self.ends.append(len(self.next))
            number += 1
        trapped = self._trapped()
        if trapped is not None:
            return TRAP, trapped, None
        return "", -1, None

    def _add(self, state: State, parent: int) -> None:
        self.numbers[state] = len(self.states)
        self.states.append(state)
        self.parents.append(parent)

    def _trapped(self) -> int | None:
        """The first state from which no end can be reached: found by going backwards from all ends."""
        reaches = bytearray(map(self.world.ended, self.states))
        changed = True
        while changed:
            changed = False
            for number in range(len(self.states) - 1, -1, -1):
                if not reaches[number]:
                    start = self.ends[number - 1] if number else 0
                    if any(reaches[after] for after in self.next[start : self.ends[number]]):
                        reaches[number] = changed = True
        found = reaches.find(0)
        return None if found < 0 else found

    def path(self, number: int, last: State | None) -> list[State]:
        """The states from the first one to this one, and the one after it."""
        found = [] if last is None else [last]
        while number >= 0:
            found.append(self.states[number])
            number = self.parents[number]
        return found[::-1]


def canonical(state: State) -> State:
    """The state that stands for all that differ only in which coordinator is which."""
    known = state.coordinators
    if len(known) == 2 and known[0] > known[1]:
        return state._replace(coordinators=(known[1], known[0]))
    return state


def explore(setup: Setup, rules: Rules = PRODUCT) -> Found:
    """Everything that a setup can come to, by these rules; ends at the first violation."""
    started = time.monotonic()
    exploration = _Exploration(setup, rules)
    collecting = gc.isenabled()
    gc.disable()  # millions of tuples, and no circle among them
    try:
        wrong, number, last = exploration.run()
    finally:
        if collecting:
            gc.enable()
    trace = told(exploration.world, exploration.path(number, last), canonical) if wrong else ()
    seconds = time.monotonic() - started
    return Found(setup, len(exploration.states), len(exploration.next), exploration.depth, seconds, wrong, tuple(trace))
