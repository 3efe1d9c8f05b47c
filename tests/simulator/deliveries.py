"""A coordinator's delivery on the simulated network: the product's own routes, links and breakers, without gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import grpc

from coordinator.delivery import Delivery
from coordinator.delivery_link import ACCIDENTS_MAX, Link, OnReply
from coordinator.model import BranchSpec, Call, Phase, Reply, Spec
from coordinator.participants import Participants
from coordinator.store.registry import KnownParticipant
from coordinator.store.rows import PutOff
from participant_sdk.call import IncomingCall
from participant_sdk.call import Reply as ParticipantReply
from participant_sdk.service_messages import read_call, write_reply
from tricord.v1 import participant_pb2 as pb

from .loop import SimLoop
from .network import Network
from .ports import Instance


class CallWatch(Protocol):
    """Who is told of calls."""

    def sent(self, sender: SimLoop, xid: str, spec: Spec, call: Call) -> None:
        """One leaves."""

    def replied(self, sender: SimLoop, xid: str, branch: int, phase: Phase) -> None:
        """One has its reply."""

    def wrong(self, number: int, text: str) -> None:
        """An invariant is broken."""


class NoChannel:
    """Stands for gRPC's channel, which nobody asks for anything."""

    def __init__(self, *_arguments: Any, **_named: Any) -> None:
        self.unary_unary = self.stream_stream = lambda *_arguments, **_named: None

    async def close(self) -> None:
        """Nothing is open."""


class SimLink(Link):
    """The product's ``Link``, whose calls travel on the simulated network, each for itself."""

    def __init__(self, network: Network, target: Instance, pause_ms_max: int, loop: SimLoop) -> None:
        self._network = network
        self._target = target
        self._world = loop.world
        self._sim_loop = loop
        super().__init__(target.name, pause_ms_max)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            for message in self._take_batch().calls:
                self._transmit(message)

    async def _send_alone(self, pending: Any) -> None:
        if pending.call_id in self._pending:
            self._world.counts["calls sent alone"] += 1
            pending.sent = True
            message = pb.Call()
            pending.write(message)
            self._transmit(message)

    def _transmit(self, message: pb.Call) -> None:
        source, target, phase = self._sim_loop.name, self._target.name, Phase(message.phase).name
        self._world.note(source, f"sends {phase} {message.xid[-6:]}#{message.branch_id} to {target}")
        self._network.send(source, target, phase, lambda: self._arrive(message))

    # --- at the participant --------------------------------------------------------------------------------

    def _arrive(self, message: pb.Call) -> None:
        target = self._target
        if target.loop.alive:
            target.connected[self] = None
            target.loop.arrive(self._take, message)
        elif target.refuses:
            self._network.send(target.name, self._sim_loop.name, "refusal", lambda: self._back(self._refused, message))

    def _take(self, message: pb.Call) -> None:
        """In a turn of the participant's process."""
        target, answered = self._target, False
        fence_id = target.answers_as

        def on_reply(reply: ParticipantReply) -> None:
            nonlocal answered
            assert not answered, "a participant answered a call twice"
            answered = True
            answer = write_reply(message.call_id, reply, fence_id)
            outcome, phase = pb.Outcome.Name(answer.outcome)[8:], Phase(message.phase).name
            branch = f"{message.xid[-6:]}#{message.branch_id}"
            self._world.note(target.name, f"answers {outcome} to {phase} {branch} {reply.error}")
            what = f"answer to {branch}"
            self._network.send(target.name, self._sim_loop.name, what, lambda: self._back(self._answered, answer))

        call = read_call(message, (target.participant,))
        if isinstance(call, IncomingCall):
            target.receive(call, on_reply)
        else:
            on_reply(call)

    def ended(self) -> None:
        """The participant's process has ended, and its machine says so."""
        self._network.send(self._target.name, self._sim_loop.name, "end of the stream", lambda: self._back(self._cut))

    # --- back at the coordinator ---------------------------------------------------------------------------

    def _back(self, take: Any, *arguments: Any) -> None:
        self._sim_loop.arrive(take, *arguments)

    def _refused(self, message: pb.Call) -> None:
        if message.call_id in self._pending:
            self._world.counts["connections refused"] += 1
            self.breaker.failed(self._away())
            self._fail([pending for pending in self._pending.values() if pending.sent], self._away())

    def _cut(self) -> None:
        self._world.counts["streams broken"] += 1
        why = "the stream broke"
        self._broken(grpc.StatusCode.UNAVAILABLE, why)
        alone = [pending for pending in self._pending.values() if pending.sent]
        if alone:
            self.breaker.failed(why)
            self._fail(alone, why)

    def _answered(self, reply: pb.Reply) -> None:
        pending = self._pending.get(reply.call_id)
        if pending is None:
            self._world.counts["replies too late or twice"] += 1
        elif not pending.aboard and self._suspects.get(pending.suspect_key, 0) < ACCIDENTS_MAX:
            self._suspects.pop(pending.suspect_key, None)
        self._answer(reply)

    def _time_out(self, call_id: int) -> None:
        self._world.counts["calls timed out"] += call_id in self._pending
        super()._time_out(call_id)


class SimDelivery(Delivery):
    """The product's ``Delivery`` for one process on the simulated network."""

    def __init__(
        self,
        network: Network,
        loop: SimLoop,
        instances: Mapping[str, Instance],
        watch: CallWatch,
        participants: Participants,
        pause_ms_max: int,
    ) -> None:
        super().__init__(participants, pause_ms_max=pause_ms_max)
        self._network = network
        self._loop = loop
        self._world = loop.world
        self._instances = instances
        self._watch = watch

    def send(self, xid: str, spec: Spec, call: Call, on_reply: OnReply) -> None:
        """See Delivery."""
        self._watch.sent(self._loop, xid, spec, call)

        def replied(reply: Reply) -> None:
            self._watch.replied(self._loop, xid, call.branch, call.phase)
            on_reply(reply)

        super().send(xid, spec, call, replied)

    def put_off(self) -> PutOff | None:
        """See Delivery."""
        put_off = super().put_off()
        for (name, _), route in self._routes.items():
            if put_off is not None and name in put_off.participants and any(x.breaker.closed for x in route.links):
                self._watch.wrong(12, f"{self._loop.name} puts off what {name} is owed, and could call it")
        return put_off

    def were_put_off(self, put_off: PutOff, count: int) -> None:
        """See Delivery."""
        self._world.counts["claims put off"] += count
        super().were_put_off(put_off, count)

    def _plan(self, known: KnownParticipant, branch: BranchSpec) -> Any:
        for address in known.addresses(branch.action):
            if address not in self._links:
                self._links[address] = SimLink(self._network, self._instances[address], self._pause_ms_max, self._loop)
        return super()._plan(known, branch)

    def _refuse(self, route: Any, branch: BranchSpec, call: Call, on_reply: OnReply) -> None:
        nearest = route.nearest()
        what = "nowhere to send it" if nearest is None else "held back by a breaker"
        self._world.counts[f"calls answered at once: {what}"] += 1
        super()._refuse(route, branch, call, on_reply)
