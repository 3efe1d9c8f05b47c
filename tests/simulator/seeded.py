"""What the product draws at random, drawn from the run's seed instead: substituted from outside."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import coordinator.engine
import coordinator.ids
import coordinator.journal
import coordinator.live

from .loop import World
from .sdk_clock import simulated_sdk


class Told:
    """A logger that keeps what the product tells as an error of its own: what it did not expect."""

    def __init__(self, world: World) -> None:
        self._world = world

    def exception(self, event: str, **facts: object) -> None:
        """Something happened that the product has no answer for."""
        self._world.unexpected.append(f"{event}: {sys.exception()!r}")

    def error(self, event: str, **facts: object) -> None:
        """Something that a person must see."""
        self._world.counts[f"log {event}"] += 1

    def warning(self, event: str, **facts: object) -> None:
        """Something that may be of interest."""

    info = debug = warning


def _secrets(source: random.Random) -> SimpleNamespace:
    return SimpleNamespace(randbits=source.getrandbits)


class _Os(SimpleNamespace):
    def __init__(self, source: random.Random) -> None:
        super().__init__(urandom=source.randbytes)


Substitution = tuple[Any, str, Any]
"""Where, under which name, and what stands there for the time of a run."""


@contextmanager
def seeded(world: World, clock_margin_ms: int, substitutions: tuple[Substitution, ...] = ()) -> Iterator[None]:
    """For the time of a run: randomness and logs of the product are the world's, and these hold as well."""
    source = random.Random(world.random.getrandbits(64))
    told = Told(world)
    with ExitStack() as stack:
        sdk = random.Random(world.random.getrandbits(64))
        stack.enter_context(simulated_sdk(sdk, clock_margin_ms=clock_margin_ms))
        for module in (coordinator.engine, coordinator.live, coordinator.journal):
            stack.enter_context(patch.object(module, "_log", told))
        for module in (coordinator.engine, coordinator.live):
            stack.enter_context(patch.object(module, "secrets", _secrets(source)))
        stack.enter_context(patch.object(coordinator.ids, "os", _Os(source)))
        for where, name, what in substitutions:
            stack.enter_context(patch.object(where, name, what))
        yield
