"""The example's programs: `python -m examples.shop_api provider|serve|buy`."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from uuid import uuid4

import uvicorn

from .buyer import Buyer


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of them."""
    parser = argparse.ArgumentParser(prog="python -m examples.shop_api", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    provider = commands.add_parser("provider", help="the payment provider")
    provider.add_argument("--listen", default="127.0.0.1:8001")
    provider.add_argument("--database", default="provider.db", help="an SQLite file")
    provider.add_argument("--loses", type=float, default=0.0, help="the share of its answers that get lost, 0 to 1")
    serve = commands.add_parser("serve", help="the shop")
    serve.add_argument("--listen", default="127.0.0.1:8000")
    serve.add_argument("--database", default="sqlite+aiosqlite:///shop-api.db")
    serve.add_argument("--provider", default="http://127.0.0.1:8001")
    serve.add_argument("--workers", type=int, default=1, help="processes behind the address")
    buy = commands.add_parser("buy", help="a customer")
    buy.add_argument("--shop", default="http://127.0.0.1:8000")
    buy.add_argument("--customer", default="alice")
    buy.add_argument("--orders", type=int, default=1)
    given = parser.parse_args(arguments)
    match given.command:
        case "provider":
            os.environ |= {"PROVIDER_DATABASE": given.database, "PROVIDER_LOSES": str(given.loses)}
            _serve("examples.shop_api.provider:create_provider", given.listen, 1)
        case "serve":
            os.environ |= {"SHOP_API_DATABASE": given.database, "SHOP_API_PROVIDER": given.provider}
            _serve("examples.shop_api.app:create_app", given.listen, given.workers)
        case _:
            asyncio.run(_buy(given.shop, given.customer, given.orders))


def _serve(factory: str, listen: str, workers: int) -> None:
    host, _, port = listen.rpartition(":")
    uvicorn.run(factory, factory=True, host=host, port=int(port), workers=workers, access_log=False)


async def _buy(url: str, customer: str, orders: int) -> None:
    async with Buyer(url, customer) as buyer:
        for number in range(orders):
            bought = await buyer.buy(f"{customer}-{uuid4().hex[:8]}-{number}")
            print(f"order {bought.order} paid by {bought.charge}, label {bought.label}: sent {bought.sent} times")


if __name__ == "__main__":
    main()
