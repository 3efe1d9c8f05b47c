"""The idempotent shop, or any application, served by a uvicorn in a thread, as its callers and its owner see it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import uvicorn
from sqlalchemy import Engine, create_engine, text

from tests.integration.idempotent_shop import SQL, WAIT_S, Seen, make_app, until
from tests.postgres import free_port


class Server(uvicorn.Server):
    """A uvicorn in a thread, on a free port."""

    def __init__(self, app: Any) -> None:
        super().__init__(uvicorn.Config(app, log_config=None, lifespan="on", timeout_keep_alive=600))
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Say when it listens."""
        await super().startup(sockets)
        self.ready.set()


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The application, served; its address."""
    with socket.create_server(("127.0.0.1", free_port())) as listening:
        server = Server(app)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            until(lambda: server.ready.is_set() or not thread.is_alive())
            assert server.ready.is_set(), "it has not started"
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(WAIT_S)


class Shop:
    """The shop as its callers and its owner see it."""

    def __init__(self, address: str, engine: Engine, seen: Seen) -> None:
        self.address = address
        self.engine = engine
        self.seen = seen
        self.client = httpx2.Client(base_url=address, timeout=WAIT_S, trust_env=False)

    def order(
        self, item: str, key: str | None = None, *, path: str = "/orders", method: str = "POST", account: str = "acme",
        headers: dict[str, str] | None = None, **do: Any,
    ) -> httpx2.Response:  # fmt: skip
        """One order; the key is the item unless it is given."""
        sent = {"X-Account": account, "Idempotency-Key": item if key is None else key, **(headers or {})}
        return self.client.request(method, path, json={"item": item, "do": do}, headers=sent)

    def placed(self, item: str) -> int:
        """The rows of an item."""
        with self.engine.connect() as connection:
            query = text("SELECT count(*) FROM placed WHERE item = :item")
            return int(connection.execute(query, {"item": item}).scalar_one())

    def records(self) -> int:
        """How many keys the store knows."""
        with self.engine.connect() as connection:
            return int(
                connection.execute(text("SELECT count(*) FROM tricord_idempotency WHERE operation <> ''")).scalar_one()
            )


@contextmanager
def opened(app_url: str, sync_url: str, **settings: Any) -> Iterator[Shop]:
    """A shop on an empty database."""
    engine = create_engine(sync_url)
    with engine.begin() as connection:
        connection.execute(text(SQL))
    seen = Seen()
    app = make_app(app_url, seen=seen, **settings)
    try:
        with serving(app) as address:
            shop = Shop(address, engine, seen)
            with shop.client:
                yield shop
    finally:
        engine.dispose()


def reason(answer: httpx2.Response) -> str:
    """Why a problem says no."""
    assert answer.headers["content-type"] == "application/problem+json"
    content = answer.json()
    assert content["status"] == answer.status_code
    return str(content["reason"])
