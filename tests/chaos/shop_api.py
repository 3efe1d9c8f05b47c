"""Customers who double-click and retry, while the shop's processes and PostgreSQL are killed.

    python -m tests.chaos.shop_api --clients 200 --orders 5 --faults 12

Each client sends each of its requests twice at once, with one key, until it is answered. At the end there must be
exactly one order, one charge, one payment and one label for each intent, the two answers of each double-click must have
been the same, and whoever asks again after everything must be told the same once more.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import ssl
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from examples.shop_api.buyer import Bought, Buyer
from examples.transfer.processes import ProcessFailed
from participant_sdk.idempotency.record import State
from tests.chaos.shop_town import Books, ShopTown, tea_at_first
from tests.postgres import PostgresServer, PostgresUnavailable

REQUESTS_PER_ORDER = 6
TEA_PER_ORDER = 2
POSTGRES_EVERY = 3
"""Of so many faults one hits PostgreSQL, the others a worker."""


class Options(NamedTuple):
    """What a run is asked for. `orders`: of each client; times in seconds."""

    clients: int = 200
    orders: int = 5
    faults: int = 12
    pause_s: float = 2.0
    workers: int = 3
    seed: int = 0


class Outcome(NamedTuple):
    """What was seen, and what did not hold."""

    bought: list[Bought]
    kills: Counter[str]
    violations: list[str]


async def play(town: ShopTown, server: PostgresServer, options: Options) -> Outcome:
    """All clients, with faults as long as there are any left and anybody still buys; then the verdict."""
    context = ssl.create_default_context()  # nothing here is encrypted; made once, for it takes long
    over = asyncio.Event()
    faults = asyncio.create_task(_faults(town, server, options, over))
    clients = [_buy(town.url, f"c{number}", options.orders, context) for number in range(options.clients)]
    buying = asyncio.gather(*clients, return_exceptions=True)
    both: set[asyncio.Future[Any]] = {buying, faults}
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    over.set()
    if not buying.done():
        buying.cancel()
    kills = await faults  # or what it has raised
    results = await buying
    bought = [one for result in results if isinstance(result, list) for one in result]
    found = [f"a client got no answer: {result!r}" for result in results if isinstance(result, BaseException)]
    again = await asyncio.gather(*(_buy(town.url, f"c{n}", options.orders, context) for n in range(options.clients)))
    if {_told(one) for one in bought} != {_told(one) for result in again for one in result}:
        found.append("whoever asks again is told something else")
    return Outcome(bought, kills, found + verdict(town.books(), bought, options.clients * options.orders))


def verdict(books: Books, bought: list[Bought], intents: int) -> list[str]:
    """What does not hold."""
    told: dict[str, tuple[list[Any], list[Any]]] = {
        "orders": (books.orders, sorted((one.reference, one.order) for one in bought)),
        "payments": (books.payments, sorted((one.order, one.charge) for one in bought)),
        "labels": (books.labels, sorted((one.order, one.label) for one in bought)),
        "charges": (books.charges, sorted(one.charge for one in bought)),
    }
    found = [f"{what}: {len(is_)} are stored, {len(was)} were told" for what, (is_, was) in told.items() if is_ != was]
    if len(books.orders) != intents:
        found.append(f"{len(books.orders)} orders for {intents} intents")
    if books.tea_left != tea_at_first() - TEA_PER_ORDER * len(books.orders):
        found.append(f"{books.tea_left} of tea are left after {len(books.orders)} orders")
    if books.records != {State.SUCCEEDED: 3 * intents}:
        found.append(f"records by state: {books.records}")
    return found


def _told(one: Bought) -> tuple[str, str, str, str]:
    return one.reference, one.order, one.charge, one.label


async def _buy(url: str, customer: str, orders: int, context: ssl.SSLContext) -> list[Bought]:
    async with Buyer(url, customer, verify=context) as buyer:
        return [await buyer.buy(f"{customer}-{number}") for number in range(orders)]


async def _faults(town: ShopTown, server: PostgresServer, options: Options, over: asyncio.Event) -> Counter[str]:
    """Kill somebody every `pause_s`, so many times as wanted, until it is over; how often who.

    Raises ProcessFailed if the shop's own parent process has ended: then there is nobody to be answered by.
    """
    draw = random.Random(options.seed)
    kills: Counter[str] = Counter()
    while True:
        try:
            async with asyncio.timeout(draw.uniform(0.5, 1.5) * options.pause_s):
                await over.wait()
                return kills
        except TimeoutError:
            pass
        if town.shop.pid is None:
            raise ProcessFailed(f"the shop has ended by itself:\n{town.shop.tail(40)}")
        if (number := kills.total()) >= options.faults:
            continue
        if number % POSTGRES_EVERY == POSTGRES_EVERY - 1:
            await asyncio.to_thread(_power_cut, server)
            kills["PostgreSQL"] += 1
        elif (workers := town.workers()) and town.kill_worker(draw.choice(workers)):
            kills["worker"] += 1


def _power_cut(server: PostgresServer) -> None:
    server.kill()
    server.start()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 if anything did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.shop_api", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--clients", type=int, default=Options().clients)
    parser.add_argument("--orders", type=int, default=Options().orders, help="of each client")
    parser.add_argument("--faults", type=int, default=Options().faults, help="processes to kill at the most")
    parser.add_argument("--pause", type=float, default=Options().pause_s, help="seconds between two, about")
    parser.add_argument("--workers", type=int, default=Options().workers)
    parser.add_argument("--seed", type=int, default=None, help="repeat a run's draws")
    given = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1_000_000) if given.seed is None else given.seed
    options = Options(given.clients, given.orders, given.faults, given.pause, given.workers, seed)
    folder = Path(tempfile.mkdtemp(prefix="tricord-shop-"))
    began_s = time.monotonic()
    try:
        with PostgresServer() as server, ShopTown(folder, asyncio_dsn(server), options.workers) as town:
            town.start()
            outcome = asyncio.run(play(town, server, options))
    except (ProcessFailed, TimeoutError, PostgresUnavailable) as error:
        print(f"shop: VIOLATED: it did not come to its end: {error}; logs are kept in {folder}", flush=True)
        return 1
    sent = sum(one.sent for one in outcome.bought)
    print(
        f"shop: {options.clients} clients, {3 * len(outcome.bought)} intents answered, {sent} requests sent, "
        f"{sent - REQUESTS_PER_ORDER * len(outcome.bought)} of them retries, "
        f"{', '.join(f'{who} killed {times} times' for who, times in outcome.kills.items()) or 'nobody killed'}, "
        f"{time.monotonic() - began_s:.0f} s"
    )
    for violation in outcome.violations:
        print(f"shop: VIOLATED: {violation}")
    if outcome.violations:
        print(f"shop: failed with seed {seed}; logs are kept in {folder}", flush=True)
        return 1
    shutil.rmtree(folder)
    print(
        "shop: one order, charge, payment and label for each intent, and everybody was told the same twice", flush=True
    )
    return 0


def asyncio_dsn(server: PostgresServer) -> str:
    """A new database, as the shop's engine takes it."""
    return server.create_database().replace("postgresql:", "postgresql+psycopg:", 1)


if __name__ == "__main__":
    sys.exit(main())
