"""The network: messages that are lost, late, doubled and overtaken."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .loop import World


class NetworkRates(NamedTuple):
    """How often what happens to a message."""

    loss: float = 0.0
    repeat: float = 0.0
    slow: float = 0.0
    """Late enough to be overtaken."""
    very_late: float = 0.0
    """Later than time-outs, leases and perhaps the whole transaction."""


class Network:
    """Carries messages between named processes."""

    def __init__(self, world: World, rates: NetworkRates) -> None:
        self._world = world
        self.rates = rates
        self.cut: set[tuple[str, str]] = set()
        """One-way: nothing comes from the first to the second."""

    def send(self, source: str, target: str, what: str, deliver: Callable[[], None]) -> None:
        """Have ``deliver`` called once, not at all or several times, some time."""
        world, rates = self._world, self.rates
        if self.cut and (source, target) in self.cut:
            world.counts["messages cut off"] += 1
            return
        copies = 1
        if world.chance(rates.loss):
            world.counts["messages lost"] += 1
            world.note(source, f"lost on its way to {target}: {what}")
            copies = 0
        if world.chance(rates.repeat):
            world.counts["messages repeated"] += 1
            copies += 1
        for _ in range(copies):
            world.at(self._delay_us(), deliver)

    def _delay_us(self) -> int:
        world, rates = self._world, self.rates
        source = world.random
        if world.chance(rates.very_late):
            world.counts["messages very late"] += 1
            return source.randint(500_000, 15_000_000)
        if world.chance(rates.slow):
            world.counts["messages slow"] += 1
            return source.randint(5_000, 1_000_000)
        return source.randint(200, 5_000)
