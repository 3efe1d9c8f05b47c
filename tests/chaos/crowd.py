"""Many clients in one event loop, which transfer and buy through whichever coordinator answers.

A client whose coordinator does not answer asks another one, with the same idempotency key: every coordinator must know
the one answer. Some ask for all at once (`execute`), some add one branch after another in a block, and enter it again
when its outcome is not known.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Any, NamedTuple, TypeVar

from coordinator.check.events import Event
from coordinator.model import State
from examples.transfer.bank import Credit, Debit
from participant_sdk import (
    AlreadyDecided,
    AsyncTricordClient,
    OutcomeUnknown,
    Transaction,
    TransactionCancelled,
    TransactionState,
    TricordError,
    branch,
)
from tests.chaos.load import MORE_THAN_THERE_IS, PATIENCE_S, REFUSED_IN, Part, Told, asked_event, told_event
from tests.chaos.shop import Reserve
from tests.chaos.town import BANKS, SHOP, accounts_of, items

ASK_S = 6.0
"""After that a client asks another coordinator."""
TIMEOUTS_S = (3.0, 15.0)
"""A transaction's time-outs: with the short one, some faults make the deadline decide."""
BUYS_IN = 3
"""One order of so many is a purchase."""
BLOCKS_IN = 4
"""One of so many is asked for in a block."""

T = TypeVar("T")


class Order(NamedTuple):
    """What a client asks for: a transfer between two banks, or a purchase at the shop that is paid by a transfer."""

    parts: Sequence[Part]
    in_a_block: bool = False
    """Asked for one branch after another."""

    def requests(self) -> list[Any]:
        """Its branches."""
        return [_request(part) for part in self.parts]


def _request(part: Part) -> Any:
    if part.participant == SHOP:
        return branch(SHOP, "reserve", Reserve(part.name, -part.change))
    if part.change < 0:
        return branch(part.participant, "debit", Debit(part.name, -part.change))
    return branch(part.participant, "credit", Credit(part.name, part.change))


def make_order(rng: random.Random) -> Order:
    """Draw one. Some ask for more than there is, and must be refused."""
    payer, payee = rng.sample(BANKS, 2)
    buys, greedy = rng.randrange(BUYS_IN) == 0, rng.randrange(REFUSED_IN) == 0
    cents, units = rng.randrange(1, 2_000), rng.randrange(1, 5)
    if greedy and buys:
        units = MORE_THAN_THERE_IS
    elif greedy:
        cents = MORE_THAN_THERE_IS
    names = [rng.choice(accounts_of(bank)).partition("@")[0] for bank in (payer, payee)]
    parts = [Part(payer, names[0], -cents), Part(payee, names[1], cents)]
    if buys:
        parts.append(Part(SHOP, rng.choice(items()), -units))
    return Order(parts, rng.randrange(BLOCKS_IN) == 0)


class Crowd:
    """Clients that remember what they asked and what they were told. It has a thread of its own; ``close`` ends it."""

    def __init__(self, endpoints: Sequence[str], seed: int) -> None:
        self.started: dict[str, Order] = {}
        self.told: dict[str, Told] = {}
        self.events: list[Event] = []
        """What was asked and told, for the history; also what was asked again."""
        self._endpoints = endpoints
        self._seed = seed
        self._stopping = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="crowd")
        self._thread.start()
        self._clients: list[AsyncTricordClient] = []
        self._wandering: list[AsyncTricordClient] = []
        """Each asks the next coordinator by itself, also in the middle of a block."""
        self._stack = AsyncExitStack()
        self._call(self._open())

    def run(self, name: str, in_flight: int, count: int | None = None) -> Future[None]:
        """Ask for ``count`` orders, or until ``stop``, so many at once; keys begin with ``name``.

        The future is done when all are answered.
        """
        self._stopping = False
        return asyncio.run_coroutine_threadsafe(self._run(name, in_flight, count), self._loop)

    def stop(self) -> None:
        """Start no more orders."""
        self._stopping = True

    def ask_again(self, keys: Iterable[str]) -> dict[str, Told]:
        """What clients are told now under keys that were answered before, by another coordinator than then."""

        async def ask() -> dict[str, Told]:
            return {key: await self._ask(number + 1, key, self.started[key], 30.0) for number, key in enumerate(keys)}

        return self._call(ask())

    def close(self) -> None:
        """Start no more, let go of what is unanswered, and end the thread."""
        self._stopping = True
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self) -> None:
        for first in range(len(self._endpoints)):
            endpoints = [*self._endpoints[first:], *self._endpoints[:first]]
            alone, together = AsyncTricordClient(endpoints[0]), AsyncTricordClient(",".join(endpoints))
            self._clients.append(await self._stack.enter_async_context(alone))
            self._wandering.append(await self._stack.enter_async_context(together))

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._stack.aclose()

    async def _run(self, name: str, in_flight: int, count: int | None) -> None:
        numbers = itertools.count() if count is None else iter(range(count))
        rng = random.Random(f"{self._seed}-{name}")

        async def client() -> None:
            for number in numbers:
                if self._stopping:
                    return
                key = f"{name}-{number}"
                order = self.started[key] = make_order(rng)
                self.told[key] = await self._ask(number, key, order, rng.choice(TIMEOUTS_S))

        await asyncio.gather(*(client() for _ in range(in_flight)))

    async def _ask(self, number: int, key: str, order: Order, timeout_s: float) -> Told:
        """Ask, and write down what was asked and told."""
        self.events.append(asked_event(key, order.parts))
        told = await self._answer(number, key, order, timeout_s)
        self.events.append(told_event(key, order.parts, told))
        return told

    async def _answer(self, number: int, key: str, order: Order, timeout_s: float) -> Told:
        gives_up_s = time.monotonic() + PATIENCE_S
        for attempt in itertools.count(number):
            client = (self._wandering if order.in_a_block else self._clients)[attempt % len(self._clients)]
            try:
                tx = await (_in_a_block if order.in_a_block else _at_once)(client, key, order, timeout_s)
            except TransactionCancelled as cancelled:
                return Told(State.CANCELLED, cancelled.transaction.xid)
            except AlreadyDecided as decided:
                confirmed = decided.state in (TransactionState.CONFIRMING, TransactionState.CONFIRMED)
                return Told(State.CONFIRMED if confirmed else State.CANCELLED, decided.transaction.xid)
            except OutcomeUnknown as error:
                if time.monotonic() > gives_up_s:
                    return Told(None, error=f"OutcomeUnknown: {error}")
            except TricordError as error:
                return Told(None, error=f"{type(error).__name__}: {error}")
            else:
                return Told(State.CONFIRMED, tx.xid)
        raise AssertionError("unreachable")


async def _at_once(client: AsyncTricordClient, key: str, order: Order, timeout_s: float) -> Transaction:
    return await client.execute(*order.requests(), idempotency_key=key, timeout=timeout_s, patience=ASK_S)


async def _in_a_block(client: AsyncTricordClient, key: str, order: Order, timeout_s: float) -> Transaction:
    async with client.transaction(idempotency_key=key, timeout=timeout_s, patience=ASK_S) as tx:
        for number, request in enumerate(order.requests(), 1):
            await tx.try_(request, branch_key=f"part-{number}")
    if tx.ended is None:
        raise AssertionError(f"the block of {key} has ended, and does not say how")
    return tx.ended
