"""The SDK's modules with the world's clock and random numbers in place of the machine's, for as long as a run lasts."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from participant_sdk import (
    batch,
    call,
    client_asking,
    client_enlisting,
    engines,
    external,
    local_transaction,
    service_messages,
    upkeep_loops,
    upkeep_purge,
    upkeep_resolve,
    upkeep_sql,
    upkeep_steps,
)

_TIMED: Final = (
    call,
    client_enlisting,
    engines,
    external,
    service_messages,
    upkeep_loops,
    upkeep_purge,
    upkeep_resolve,
    upkeep_sql,
    upkeep_steps,
)
_LOGGER: Final = "tricord.participant"


class LoopTime:
    """What stands for the module ``time``: the clock of the process whose turn it is. Nobody may sleep in it."""

    @staticmethod
    def monotonic() -> float:
        """The running loop's."""
        return asyncio.get_running_loop().time()


@contextmanager
def simulated_sdk(rng: random.Random, *, clock_margin_ms: int | None = None, logs: bool = False) -> Iterator[None]:
    """Within it the SDK lives in simulated time. ``clock_margin_ms``: the purge's, None: as it is.

    The SDK's log is dropped unless ``logs``: writing it would cost more than all the rest.
    """
    put: list[tuple[Any, str, Any]] = [(module, "time", LoopTime) for module in _TIMED]
    put.append((local_transaction, "random", rng))
    put.append((client_asking, "random", rng))
    for module in (batch, external):
        put.append((module, "token_hex", lambda size: f"{rng.getrandbits(8 * size):0{2 * size}x}"))
    if clock_margin_ms is not None:
        put.append((upkeep_purge, "CLOCK_MARGIN_MS", clock_margin_ms))
    before = [(module, name, getattr(module, name)) for module, name, _ in put]
    logger = logging.getLogger(_LOGGER)
    disabled = logger.disabled
    for module, name, value in put:
        setattr(module, name, value)
    logger.disabled = not logs
    try:
        yield
    finally:
        logger.disabled = disabled
        for module, name, value in before:
            setattr(module, name, value)
