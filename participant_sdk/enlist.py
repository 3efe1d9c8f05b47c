"""Enlisting as a program asks for it: `held = debit.enlist(Debit("alice", 30))`, on threads and on asyncio.

The steps are in `client_enlisting`. What surrounds them is here: where the running code belongs, the participant's own
lanes, in which its Try runs beside those that the coordinator calls, and the connection to the coordinator at which
the participant is registered, so that Confirm or Cancel can reach it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final, TypeVar

from participant_sdk.branch_keys import enlisted_branch_key
from participant_sdk.call import IncomingCall, Reply
from participant_sdk.client_asking import Ask, Pause
from participant_sdk.client_enlist_connection import AsyncEnlistConnection, EnlistConnection
from participant_sdk.client_enlisting import Enlisted, RunTry, Wanted, enlisting
from participant_sdk.client_request import branch
from participant_sdk.context import current_scope, note_tried
from participant_sdk.enlist_errors import NotEnlisted
from participant_sdk.errors import ConfigurationError, InvalidRequest
from participant_sdk.lanes import TaskLanes, ThreadLanes
from participant_sdk.local_transaction import Fence
from participant_sdk.service_messages import STILL_RUNNING, TIMEOUT_MAX_SECONDS

ENLIST_SECONDS: Final = 10.0
"""The time for all of it, where neither the program nor the call that it serves says how long there is."""
LAST_REPORTS_SECONDS: Final = 2.0
BRANCH_KEY_LENGTH_MAX: Final = 255

Connection = TypeVar("Connection")


class ThreadEnlisting:
    """Enlists branches of one participant, from any thread."""

    def __init__(self, participant: str, fence: Fence, lanes: ThreadLanes) -> None:
        self._participant = participant
        self._fence = fence
        self._lanes = lanes
        self._connection: EnlistConnection | None = None
        self._running = 0
        self._changed = threading.Condition()

    def at(self, coordinator: str) -> None:
        """Branches are enlisted at that coordinator from now on."""
        with self._changed:
            before, self._connection = self._connection, EnlistConnection(coordinator)
        if before is not None:
            before.close()

    def close(self) -> None:
        """Enlist no more; those whose Try has run have a short time left to report it."""
        with self._changed:
            self._changed.wait_for(lambda: self._running == 0, LAST_REPORTS_SECONDS)
            connection = self._connection
        if connection is not None:
            connection.close()

    def enlist(self, action: str, payload: object, branch_key: str | None, timeout: float | None) -> Any:
        """See `ActionDefinition.enlist`."""
        connection = _connected(self._connection, self._participant)
        wanted = _wanted(self._participant, self._fence, action, payload, branch_key, timeout)
        steps = enlisting(wanted)
        answer: Any = None
        with self._counted():
            try:
                while True:
                    match steps.send(answer):
                        case Ask() as ask:
                            answer = connection.send(ask)
                        case RunTry(call):
                            answer = self._run(call)
                        case Pause(seconds):
                            time.sleep(seconds)
                            answer = None
            except StopIteration as stop:
                return _settled(self._fence, wanted, stop.value)

    def _run(self, call: IncomingCall) -> Reply:
        replied: Future[Reply] = Future()

        def settle(reply: Reply) -> None:
            with suppress(InvalidStateError):  # it comes too late
                replied.set_result(reply)

        self._lanes.submit(call, settle)
        try:
            return replied.result(max(0.0, call.seconds_left()))
        except FutureTimeoutError:
            replied.cancel()
            return STILL_RUNNING

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._changed:
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()


class TaskEnlisting:
    """Enlists branches of one participant, in its event loop."""

    def __init__(self, participant: str, fence: Fence, lanes: TaskLanes) -> None:
        self._participant = participant
        self._fence = fence
        self._lanes = lanes
        self._connection: AsyncEnlistConnection | None = None
        self._before: list[AsyncEnlistConnection] = []
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def at(self, coordinator: str) -> None:
        """As `ThreadEnlisting.at`; call it in the event loop."""
        if self._connection is not None:
            self._before.append(self._connection)
        self._connection = AsyncEnlistConnection(coordinator)

    async def close(self) -> None:
        """As `ThreadEnlisting.close`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), LAST_REPORTS_SECONDS)
        for connection in (*self._before, self._connection):
            if connection is not None:
                await connection.close()

    async def enlist(self, action: str, payload: object, branch_key: str | None, seconds: float | None) -> Any:
        """See `ActionDefinition.enlist`."""
        connection = _connected(self._connection, self._participant)
        wanted = _wanted(self._participant, self._fence, action, payload, branch_key, seconds)
        steps = enlisting(wanted)
        answer: Any = None
        async with self._counted():
            try:
                while True:
                    match steps.send(answer):
                        case Ask() as ask:
                            answer = await connection.send(ask)
                        case RunTry(call):
                            answer = await self._run(call)
                        case Pause(pause):
                            await asyncio.sleep(pause)
                            answer = None
            except StopIteration as stop:
                enlisted: Enlisted = stop.value
        return _settled(self._fence, wanted, enlisted)

    async def _run(self, call: IncomingCall) -> Reply:
        replied: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def settle(reply: Reply) -> None:
            if not replied.done():  # it may come too late
                replied.set_result(reply)

        self._lanes.submit(call, settle)
        try:
            return await asyncio.wait_for(replied, max(0.0, call.seconds_left()))
        except TimeoutError:
            return STILL_RUNNING

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self._idle.set()


def _connected(connection: Connection | None, participant: str) -> Connection:
    if connection is None:
        raise not_served(participant)
    return connection


def not_served(participant: str) -> ConfigurationError:
    """The error for a participant that no coordinator could call back."""
    return ConfigurationError(
        f"participant {participant!r} enlists at the coordinator that it is registered at, and there is none: serve or "
        "start it with coordinator='host:port', or call register on what add_to_server gives"
    )


def _wanted(
    participant: str, fence: Fence, action: str, payload: object, branch_key: str | None, timeout: float | None
) -> Wanted:
    """What is to be enlisted from where the running code belongs; raises NotEnlisted, InvalidRequest."""
    encoded = branch(participant, action, payload).payload
    scope = current_scope()
    if scope.xid is None:
        text = "there is no current xid: call it while a request is served that brought one, or in a `with bound(xid)`"
        raise NotEnlisted(text, "NO_XID")
    if branch_key is None and (branch_key := enlisted_branch_key(scope)) is None:
        text = (
            "the call brought no tricord-branch-key, without which a repeat of it would make a second branch: let the "
            "caller use XidClientInterceptor or outgoing_headers(), or give a branch_key= that a repeat has too"
        )
        raise NotEnlisted(text, "NO_BRANCH_KEY")
    if not isinstance(branch_key, str) or not 0 < len(branch_key) <= BRANCH_KEY_LENGTH_MAX:
        text = f"is not 1 to {BRANCH_KEY_LENGTH_MAX} characters"
        raise InvalidRequest(f"the branch_key {text}", {"branch_key": text})
    now = time.monotonic()
    if timeout is None:
        timeout = ENLIST_SECONDS if scope.expires_at is None else scope.expires_at - now
    return Wanted(
        xid=scope.xid,
        parent_branch_id=scope.branch_id or 0,
        branch_key=branch_key,
        participant=participant,
        action=action,
        payload=encoded,
        fence_id=fence.fence_id,
        expires_at=now + min(timeout, TIMEOUT_MAX_SECONDS),
    )


def _settled(fence: Fence, wanted: Wanted, enlisted: Enlisted) -> Any:
    """The result for the program; who called is told of the branch with the answer."""
    note_tried(wanted.xid, {enlisted.branch_id, *enlisted.tried_branch_ids})
    return fence.actions[wanted.action].decode_result(enlisted.result)
