"""Who waits for whose lock in a simulated server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from psycopg import errors

from tests.simulator.transactions import LocalTransaction, lost

if TYPE_CHECKING:
    from tests.simulator.database_server import DatabaseServer, Request


class LockQueue:
    """Requests that wait, by the local transaction that they wait for."""

    def __init__(self, server: DatabaseServer) -> None:
        self._server = server
        self._waiting: dict[LocalTransaction, list[Request]] = {}

    def wait(self, request: Request, owner: LocalTransaction) -> None:
        """It is blocked: have it look again when ``owner`` ends, or fail by a deadlock or its lock time-out."""
        server, session = self._server, request.session
        mine, now_us = session.begun(), server.world.now_us
        if _waits_for(owner, mine):
            self._fail(request, "deadlock", errors.DeadlockDetected("deadlock detected"))
            return
        if request.give_up_us is None:
            request.give_up_us = now_us + session.lock_ms * 1000
            server.world.at(session.lock_ms * 1000, self._give_up, request)
        elif now_us >= request.give_up_us:
            self._time_out(request)
            return
        server.count("lock_wait")
        mine.waits_for = owner
        self._waiting.setdefault(owner, []).append(request)
        holder = server.holder(owner)
        if holder is not None and holder.idle_ms is not None:
            since_us = holder.idle_since_us if holder.idle_since_us is not None else now_us
            server.world.at(since_us + holder.idle_ms * 1000 - now_us, server.end_if_idle, holder)

    def free(self, owner: LocalTransaction) -> None:
        """Who has waited for ``owner`` looks again."""
        for request in self._waiting.pop(owner, ()):
            if request.session.local is not None:
                request.session.local.waits_for = None
            self._server.world.at(self._server.rng.randint(0, 50), self._server.work, request)

    def _give_up(self, request: Request) -> None:
        for waiting in self._waiting.values():
            if request in waiting:
                waiting.remove(request)
                if request.session.alive:
                    self._time_out(request)
                else:
                    self._server.answer(request, None, lost("closed by the server"))
                return

    def _time_out(self, request: Request) -> None:
        self._fail(request, "lock_timeout", errors.LockNotAvailable("canceling statement due to lock timeout"))

    def _fail(self, request: Request, what: str, error: Exception) -> None:
        self._server.count(what)
        request.session.begun().waits_for = None
        self._server.fail(request.session)
        self._server.answer(request, None, error)


def _waits_for(one: LocalTransaction | None, other: LocalTransaction) -> bool:
    while one is not None:
        if one is other:
            return True
        one = one.waits_for
    return False
