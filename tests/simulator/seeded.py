"""What the product draws at random, drawn from the run's seed instead: substituted from outside."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import grpc.aio

import coordinator.delivery
import coordinator.delivery_breaker
import coordinator.delivery_link
import coordinator.engine
import coordinator.ids
import coordinator.journal
import coordinator.live
import coordinator.participants
import participant_sdk.branch_keys

from .deliveries import NoChannel
from .loop import World
from .sdk_clock import LoopTime, simulated_sdk


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
        """Something that may be of interest: so is what becomes of breakers."""
        if event.startswith("delivery.breaker"):
            self._world.counts[f"log {event}"] += 1

    info = debug = warning


def _secrets(source: random.Random) -> SimpleNamespace:
    return SimpleNamespace(
        randbits=source.getrandbits, token_hex=lambda size: f"{source.getrandbits(8 * size):0{2 * size}x}"
    )


class _Os(SimpleNamespace):
    def __init__(self, source: random.Random) -> None:
        super().__init__(urandom=source.randbytes)


SMALL_TOWN = {"RETURNS_PER_S": 2, "SILENT_MAX": 5}
"""Of the breaker: a town in which a handful is many."""

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
        delivery = (coordinator.delivery_breaker, coordinator.delivery_link, coordinator.participants)
        for module in (coordinator.engine, coordinator.live, coordinator.journal, *delivery):
            stack.enter_context(patch.object(module, "_log", told))
        for module in (coordinator.delivery, coordinator.delivery_breaker):
            stack.enter_context(patch.object(module, "random", source))
        stack.enter_context(patch.object(coordinator.participants, "time", LoopTime))
        stack.enter_context(patch.object(grpc.aio, "insecure_channel", NoChannel))
        stack.enter_context(patch.object(participant_sdk.branch_keys, "secrets", _secrets(source)))
        for name, value in SMALL_TOWN.items():
            stack.enter_context(patch.object(coordinator.delivery_breaker, name, value))
        stack.enter_context(patch.object(coordinator.engine, "secrets", _secrets(source)))
        stack.enter_context(patch.object(coordinator.ids, "os", _Os(source)))
        for where, name, what in substitutions:
            stack.enter_context(patch.object(where, name, what))
        yield
