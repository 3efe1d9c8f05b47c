"""The points at which a process acts on the world, and what kills it there; put into the simulator from outside.

A point is named by who comes to it, whether it is before or after, what is done, and the how many-eth time it is:
``c1 after save CONFIRMING``, ``p2 before commit TRY 2 #3``. What is done before a point is done, and what comes after
it never leaves: the process's code may go on until its next await, but a dead process reaches nobody.

    write   a flush of a coordinator: after is after its COMMIT, before its answer arrives
    claim   the same of a claim that finds something
    send    a call that leaves a coordinator, or an answer to its initiator
    commit  a COMMIT of a participant's local transaction: after is before its answer arrives
    reply   a participant's reply to a call
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final

from coordinator.model import Phase, State
from coordinator.store.rows import Batch, Row
from participant_sdk.call import IncomingCall, Reply
from tests.simulator.coordinators import CoordinatorNode, Work
from tests.simulator.database_client import SimConnection
from tests.simulator.database_server import DatabaseServer, Session, Statement
from tests.simulator.deliveries import SimLink
from tests.simulator.loop import SimLoop, World
from tests.simulator.participants import ParticipantNode
from tests.simulator.ports import Instance
from tests.simulator.seeded import Substitution
from tests.simulator.store import SimStore
from tests.simulator.store_rows import Database
from tricord.v1 import participant_pb2 as pb

KINDS: Final = ("write", "claim", "send", "commit", "reply")
_KIND_OF: Final = {"begin": "write", "save": "write", "claim": "claim", "send": "send", "answer": "send"}
_CALL: ContextVar[IncomingCall] = ContextVar("_CALL")
"""The call that a participant's task is at."""


def kind_of(point: str) -> str:
    """The kind of a point, one of KINDS."""
    what = point.split()[2]
    return _KIND_OF.get(what, what)


class Points:
    """Notes the points that are passed, and kills at some of them, one after another."""

    def __init__(self, world: World, kills: Sequence[str], away_us: Mapping[str, int]) -> None:
        self.passed: list[str] = []
        self.left = list(kills)
        """Where somebody is still to be killed, the next one first."""
        self.after_kill = 0
        """So many points had been passed at the last kill, with its own."""
        self.nodes: dict[str, CoordinatorNode | Instance] = {}
        self._world = world
        self._away_us = away_us
        self._times: Counter[str] = Counter()
        self._committing: dict[Session, tuple[SimLoop, str]] = {}

    def come(self, loop: SimLoop, what: str) -> bool:
        """A process comes to a point; whether it lives on."""
        if not loop.alive:
            return False
        name = f"{loop.name} {what}"
        self._times[name] += 1
        if self._times[name] > 1:
            name += f" #{self._times[name]}"
        self.passed.append(name)
        if self._world.lines is not None:
            self._world.note(loop.name, f". {name.partition(' ')[2]}")
        if not self.left or self.left[0] != name:
            return True
        del self.left[0]
        self.after_kill = len(self.passed)
        self._world.note(loop.name, "is killed there")
        node = self.nodes[loop.name]
        if isinstance(node, CoordinatorNode):
            node.crash()
        else:
            loop.crash()
        self._world.at(self._away_us[loop.name[0]], self._start, node)
        return False

    def _start(self, node: CoordinatorNode | Instance) -> None:
        self._world.note(node.name, "is started again")
        node.start()

    def substitutions(self) -> tuple[Substitution, ...]:
        """What stands in the simulator, so that the points are come to."""
        return (
            (SimStore, "_statement", self._flush(SimStore._statement)),
            (Database, "commit", self._committed(Database.commit)),
            (SimStore, "_ask", self._claim(SimStore._ask)),
            (SimLink, "_transmit", self._send(SimLink._transmit)),
            (CoordinatorNode, "serve", self._serve(CoordinatorNode.serve)),
            (ParticipantNode, "receive", self._receive(ParticipantNode.receive)),
            (ParticipantNode, "_execute", _named(ParticipantNode._execute)),
            (SimConnection, "ask", self._commit(SimConnection.ask)),
            (DatabaseServer, "commit", self._locally_committed(DatabaseServer.commit)),
        )

    # --- coordinators --------------------------------------------------------------------------------------

    def _flush(self, real: Callable[..., asyncio.Future[Any]]) -> Callable[..., asyncio.Future[Any]]:
        def statement(store: SimStore, batch: Batch) -> asyncio.Future[Any]:
            return (
                real(store, batch) if self.come(store._loop, f"before {_named_flush(batch)}") else _never(store._loop)
            )

        return statement

    def _committed(self, real: Callable[..., list[Row | None]]) -> Callable[..., list[Row | None]]:
        def commit(database: Database, batch: Batch, writer: SimLoop) -> list[Row | None]:
            standing = real(database, batch, writer)
            self.come(writer, f"after {_named_flush(batch)}")
            return standing

        return commit

    def _claim(self, real: Callable[..., Any]) -> Callable[..., Any]:
        async def ask(store: SimStore, read: Callable[[], Any], what: str) -> Any:
            loop, database = store._loop, store._database

            def claim() -> Any:
                now_ms = database.now_ms()
                if any(row.wake_ms is not None and row.wake_ms <= now_ms for row in database.rows.values()):
                    if not self.come(loop, "before claim"):
                        return None
                    claimed = read()
                    if claimed.rows:
                        self.come(loop, "after claim")
                    return claimed
                return read()

            if not loop.alive:
                await _never(loop)
            return await real(store, claim if what == "claim" else read, what)

        return ask

    def _send(self, real: Callable[..., None]) -> Callable[..., None]:
        def transmit(link: SimLink, message: pb.Call) -> None:
            loop, what = link._sim_loop, f"send {Phase(message.phase).name} {message.branch_id}"
            if self.come(loop, f"before {what}"):
                real(link, message)
                self.come(loop, f"after {what}")

        return transmit

    def _serve(self, real: Callable[..., None]) -> Callable[..., None]:
        def serve(node: CoordinatorNode, work: Work, answer: Callable[[Any], None]) -> None:
            loop = node.loop

            def answers(end: Any) -> None:
                if self.come(loop, "before answer"):
                    answer(end)
                    self.come(loop, "after answer")

            real(node, work, answers)

        return serve

    # --- participants --------------------------------------------------------------------------------------

    def _receive(self, real: Callable[..., None]) -> Callable[..., None]:
        def receive(node: ParticipantNode, call: IncomingCall, on_reply: Callable[[Reply], None]) -> None:
            what = f"reply {call.phase.name} {call.branch_id}"

            def replies(reply: Reply) -> None:
                if self.come(node.loop, f"before {what}"):
                    on_reply(reply)
                    self.come(node.loop, f"after {what}")

            real(node, call, replies)

        return receive

    def _commit(self, real: Callable[..., Any]) -> Callable[..., Any]:
        async def ask(connection: SimConnection, *script: Statement, commits: bool = False) -> list[Any]:
            loop = connection._engine.loop
            assert isinstance(loop, SimLoop)
            if commits:
                call = _CALL.get()
                what = f"commit {call.phase.name} {call.branch_id}"
                self.come(loop, f"before {what}")
                self._committing[connection.session] = (loop, f"after {what}")
            if not loop.alive:
                await _never(loop)
            answer: list[Any] = await real(connection, *script, commits=commits)
            return answer

        return ask

    def _locally_committed(self, real: Callable[..., None]) -> Callable[..., None]:
        def commit(server: DatabaseServer, session: Session) -> None:
            real(server, session)
            committed = self._committing.pop(session, None)
            if committed is not None:
                self.come(*committed)

        return commit


def _named(real: Callable[..., Any]) -> Callable[..., Any]:
    """The task of a call knows its call."""

    async def execute(node: ParticipantNode, call: IncomingCall) -> Any:
        _CALL.set(call)
        return await real(node, call)

    return execute


def _named_flush(batch: Batch) -> str:
    """What a flush is called: there is one transaction, begun anew by each asking, which finds it by its key."""
    return " and ".join(["begin" for _ in batch.begins] + [f"save {State(row.state).name}" for row in batch.saves])


def _never(loop: SimLoop) -> asyncio.Future[Any]:
    return loop.create_future()
