"""How a run ends when its request is broken off, its handler cancelled, its lease lost, or its COMMIT refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from participant_sdk.asgi import Message, Receive, Scope, Send
from participant_sdk.idempotency.asgi import IdempotencyMiddleware
from participant_sdk.idempotency.current import current_run
from participant_sdk.idempotency.http_policy import ONE_TENANT, HttpOperation
from participant_sdk.idempotency.idempotency import AsyncIdempotency
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.runs import AsyncRun
from tests.contract.participant.world import postgres_url, sqlite_url
from tests.integration.idempotent_shop import SQL, WAIT_S, until
from tests.integration.served_shop import Shop, opened


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(sqlite_url(tmp_path, asynchronous=True))
    async with engine.begin() as connection:
        await connection.execute(text(SQL))
    yield engine
    await engine.dispose()


@pytest.fixture
async def store(engine: AsyncEngine) -> AsyncIterator[AsyncIdempotency]:
    async with AsyncIdempotency(engine) as store:
        yield store


async def placed(engine: AsyncEngine) -> int:
    async with engine.connect() as connection:
        return int((await connection.execute(text("SELECT count(*) FROM placed"))).scalar_one())


class Door:
    """The middleware around an application that stops where the test says so."""

    def __init__(self, store: AsyncIdempotency) -> None:
        self.at_work, self.go_on, self.over = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.calls = 0
        self.raised: BaseException | None = None
        self.heard: list[Message] = []
        operation = HttpOperation(operation=Operation(name="orders", wait_s=5), path="/orders", tenant=ONE_TENANT)
        self._app = IdempotencyMiddleware(self._application, store, [operation])

    async def _application(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.calls += 1
        run = current_run()
        assert isinstance(run, AsyncRun)
        try:
            await run.connection.execute(text("INSERT INTO placed VALUES ('tea')"))
            await receive()
            listening = asyncio.ensure_future(receive())  # as frameworks do that want to stop for a client that leaves
            await asyncio.sleep(0)
            assert not listening.done()
            if self.calls == 1:
                self.at_work.set()
                await self.go_on.wait()
            await send({"type": "http.response.start", "status": 201, "headers": [(b"x-call", b"%d" % self.calls)]})
            await send({"type": "http.response.body", "body": b"done"})
            self.heard.append(await listening)
        except BaseException as error:
            self.raised = error
            raise
        finally:
            self.over.set()

    async def ask(self, *, leaves: bool = False) -> list[Message]:
        """One request; what it is answered. `leaves`: its client has gone after the request."""
        messages: list[Message] = [{"type": "http.request", "body": b"{}", "more_body": False}]
        sent: list[Message] = []

        async def receive() -> Message:
            if messages:
                return messages.pop()
            if not leaves:
                await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/orders"}
        await self._app({**scope, "headers": [(b"idempotency-key", b"k")]}, receive, send)
        return sent


def replayed(sent: list[Message]) -> bool:
    assert (sent[0]["status"], sent[1]["body"]) == (201, b"done")
    return (b"idempotency-replayed", b"true") in sent[0]["headers"]


async def test_a_request_that_is_broken_off_is_still_carried_out(store: AsyncIdempotency, engine: AsyncEngine) -> None:
    door = Door(store)
    asked = asyncio.create_task(door.ask())
    await door.at_work.wait()
    asked.cancel()  # as some servers do when their client has gone
    with pytest.raises(asyncio.CancelledError):
        await asked
    door.go_on.set()
    assert replayed(await door.ask())
    assert (door.calls, door.raised, await placed(engine)) == (1, None, 1)


async def test_a_handler_is_not_told_that_its_client_has_gone_before_it_has_answered(
    store: AsyncIdempotency, engine: AsyncEngine
) -> None:
    door = Door(store)
    door.go_on.set()
    async with asyncio.timeout(WAIT_S):
        assert not replayed(await door.ask(leaves=True))
    assert (door.heard, await placed(engine)) == ([{"type": "http.disconnect"}], 1)


async def test_a_handler_that_is_cancelled_has_left_nothing(store: AsyncIdempotency, engine: AsyncEngine) -> None:
    door = Door(store)
    tasks = asyncio.all_tasks()
    asked = asyncio.create_task(door.ask())
    await door.at_work.wait()
    for task in asyncio.all_tasks() - tasks - {asked}:
        task.cancel()  # as a loop does that ends
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert isinstance(door.raised, asyncio.CancelledError)
    assert await placed(engine) == 0
    assert not replayed(await door.ask())
    assert (door.calls, await placed(engine)) == (2, 1)


@pytest.fixture(scope="module")
def shop(request: pytest.FixtureRequest) -> Iterator[Shop]:
    server = request.getfixturevalue("postgres_server")
    with server.lent_database() as dsn, opened(postgres_url(dsn), postgres_url(dsn)) as found:
        yield found


@pytest.mark.database
def test_case_39_a_handler_that_has_lost_its_lease_is_cancelled(shop: Shop) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(shop.order, "lost", path="/beating", wait="for ever")
        shop.seen.await_begun("lost")
        with shop.engine.begin() as connection:  # as another process would that has taken over
            connection.execute(text("UPDATE tricord_idempotency SET fence = fence + 1, attempt = attempt + 1"))
        answer = asked.result()
    assert (answer.status_code, answer.json()["reason"]) == (409, "IDEMPOTENCY_LEASE_LOST")
    assert shop.placed("lost") == 0
    shop.seen.gate("for ever").set()


@pytest.mark.database
def test_work_that_has_lost_a_race_runs_once_more(shop: Shop) -> None:
    assert shop.order("race", races=1).status_code == 201
    assert (shop.placed("race"), shop.seen.begun["race"]) == (1, 2)
    assert shop.order("races", races=2, headers={"connection": "close"}).status_code == 500
    assert (shop.placed("races"), shop.seen.begun["races"]) == (0, 2)
    assert shop.order("races", races=2).status_code == 201
    assert (shop.placed("races"), shop.seen.begun["races"]) == (1, 3)


@pytest.mark.database
def test_an_answer_is_withheld_whose_work_cannot_be_committed(shop: Shop) -> None:
    with shop.engine.begin() as connection:
        once = "ALTER TABLE placed ADD CONSTRAINT once EXCLUDE (item WITH =) WHERE (item = 'late')"
        connection.execute(text(f"{once} DEFERRABLE INITIALLY DEFERRED"))
    closing = {"connection": "close"}
    assert shop.order("late", "first", background=True).status_code == 201
    until(lambda: shop.seen.background["late"] == 1)
    again = shop.order("late", "second", background=True, headers=closing)  # its handler says 201 as well
    assert again.status_code >= 409
    assert shop.placed("late") == 1
    assert shop.order("late", "second", background=True, headers=closing).status_code >= 409
    assert (shop.seen.begun["late"], shop.seen.background["late"]) == (3, 1)  # nothing comes after it either
