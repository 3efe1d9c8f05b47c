"""Idempotency and AsyncIdempotency behind one face, so that each test says once what has to hold of both."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, cast

from sqlalchemy import Connection, text

from participant_sdk.idempotency.idempotency import AsyncIdempotency, Idempotency
from participant_sdk.idempotency.keys import key_hash
from participant_sdk.idempotency.operation import Mode, Operation
from participant_sdk.idempotency.record import Answer, Codec, Fingerprint, Record
from participant_sdk.idempotency.replay import Replay
from participant_sdk.idempotency.request import KeyedRequest
from tests.contract.idempotency.world import World

ATOMIC = Operation(name="orders.create")
LEASED = Operation(name="orders.create", mode=Mode.LEASED)
PHASED = Operation(name="orders.create", mode=Mode.PHASED)
MODES = (ATOMIC, LEASED)
ANSWER = Answer(Codec.HTTP, 201, ((b"content-type", b"text/plain"),), b"done\x00\xff")
NO = Answer(Codec.HTTP, 422, (), b"no")

THREADS = 100
"""One for each request, as a server would have: the loop's own are too few for all that wait in a test."""


def request_of(key: str = "k1", payload: bytes = b"a request", tenant: str = "shop") -> KeyedRequest:
    """A request with a key."""
    return KeyedRequest(key, Fingerprint(1, hashlib.sha256(payload).digest()), lambda version: None, tenant)


class Working:
    """A run, whichever flavour it is of."""

    def __init__(self, desk: "Desk", run: Any) -> None:
        self.desk = desk
        self.run = run

    async def __aenter__(self) -> "Working":
        if self.desk.world.is_async:
            await self.run.__aenter__()
        else:
            self.run.__enter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        if self.desk.world.is_async:
            await self.run.__aexit__(*raised)
        else:
            self.run.__exit__(*raised)

    async def do(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the run."""
        return await self.desk.call(getattr(self.run, method), *arguments, **named)

    async def work(self, what: str = "order") -> None:
        """The business, in the run's local transaction: one row."""
        connection = await self.do("connect")
        await self.desk.on(connection, insert(what))

    async def succeed(self, answer: Answer = ANSWER) -> None:
        """With this answer."""
        await self.do("succeed", answer)


class Desk:
    """An Idempotency of a world."""

    def __init__(self, world: World, engine: Any, options: dict[str, Any]) -> None:
        self.world = world
        self.engine = engine
        self.idempotency: Any = (AsyncIdempotency if world.is_async else Idempotency)(
            engine, tables=world.tables, **options
        )

    async def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """A coroutine function, or a function that may block."""
        if self.world.is_async:
            given = function(*arguments, **named)
            return await given if asyncio.iscoroutine(given) else given
        return await asyncio.to_thread(function, *arguments, **named)

    async def on(self, connection: Any, function: Callable[[Connection], Any]) -> Any:
        """A function of a Connection."""
        if self.world.is_async:
            return await connection.run_sync(function)
        return await asyncio.to_thread(function, connection)

    async def begin(self, operation: Operation, request: KeyedRequest | None = None, **named: Any) -> Working | Replay:
        """A run, or the stored answer."""
        found = await self.call(self.idempotency.begin, operation, request or request_of(), **named)
        return found if isinstance(found, Replay) else Working(self, found)

    async def begun(self, operation: Operation, request: KeyedRequest | None = None, **named: Any) -> Working:
        """A run that nothing stands in the way of."""
        found = await self.begin(operation, request, **named)
        assert isinstance(found, Working), found
        return found

    async def replayed(self, operation: Operation, request: KeyedRequest | None = None, **named: Any) -> Answer:
        """The stored answer, which is there."""
        found = await self.begin(operation, request, **named)
        assert isinstance(found, Replay), found
        return found.answer

    async def record(self, operation: Operation = ATOMIC, key: str = "k1", tenant: str = "shop") -> Record | None:
        """The record of a key."""
        return cast("Record | None", await self.call(self.idempotency.look_up, operation, key, tenant))

    def lapse(self, key: str = "k1") -> None:
        """The time of the lease goes by."""
        self.world.lapse(key_hash("default", "shop", ATOMIC.name, key))


@asynccontextmanager
async def desk_of(world: World, *, engine: Any = None, **options: Any) -> AsyncIterator[Desk]:
    """Another program, on the world's engine if it has none of its own. It sweeps only where a test says so."""
    options.setdefault("sweep", None)
    desk = Desk(world, engine or world.engine, options)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
    await desk.call(desk.idempotency.start)
    try:
        yield desk
    finally:
        await desk.call(desk.idempotency.close)
        if engine is not None:
            await world.dispose(engine)


def insert(what: str) -> Callable[[Connection], Any]:
    """The business: one row."""
    return lambda db: db.execute(text("INSERT INTO effects (what) VALUES (:what)"), {"what": what})


async def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """What other threads and tasks do, which gives no sign."""
    ends_at = time.monotonic() + seconds
    while not (seen := await asyncio.to_thread(condition)):
        assert time.monotonic() < ends_at
        await asyncio.sleep(0.01)
    return seen
