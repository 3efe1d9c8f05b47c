"""The network: messages that are lost, late, doubled and overtaken; and a coordinator's delivery on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from coordinator.delivery_link import OnReply
from coordinator.delivery_messages import call_message, reply_of
from coordinator.model import Call, Outcome, Phase, Reply, Spec
from coordinator.store.rows import PutOff
from participant_sdk.call import IncomingCall
from participant_sdk.call import Reply as ParticipantReply
from participant_sdk.service_messages import read_call, write_reply
from tricord.v1 import participant_pb2 as pb

from .loop import SimLoop, World
from .ports import Participant

AWAY_AFTER = 5
"""So many time-outs in a row, and a participant counts as away, as behind a circuit breaker."""


class NetworkRates(NamedTuple):
    """How often what happens to a message."""

    loss: float = 0.0
    repeat: float = 0.0
    slow: float = 0.0
    """Late enough to be overtaken."""
    very_late: float = 0.0
    """Later than time-outs, leases and perhaps the whole transaction."""


class Network:
    """Carries messages between named processes."""

    def __init__(self, world: World, rates: NetworkRates) -> None:
        self._world = world
        self.rates = rates
        self.cut: set[tuple[str, str]] = set()
        """One-way: nothing comes from the first to the second."""

    def send(self, source: str, target: str, what: str, deliver: Callable[[], None]) -> None:
        """Have ``deliver`` called once, not at all or several times, some time."""
        world, rates = self._world, self.rates
        if self.cut and (source, target) in self.cut:
            world.counts["messages cut off"] += 1
            return
        copies = 1
        if world.chance(rates.loss):
            world.counts["messages lost"] += 1
            world.note(source, f"lost on its way to {target}: {what}")
            copies = 0
        if world.chance(rates.repeat):
            world.counts["messages repeated"] += 1
            copies += 1
        for _ in range(copies):
            world.at(self._delay_us(), deliver)

    def _delay_us(self) -> int:
        world, rates = self._world, self.rates
        source = world.random
        if world.chance(rates.very_late):
            world.counts["messages very late"] += 1
            return source.randint(500_000, 15_000_000)
        if world.chance(rates.slow):
            world.counts["messages slow"] += 1
            return source.randint(5_000, 1_000_000)
        return source.randint(200, 5_000)


class CallWatch(Protocol):
    """Who is told of calls."""

    def sent(self, sender: SimLoop, xid: str, spec: Spec, call: Call) -> None:
        """One leaves."""

    def replied(self, sender: SimLoop, xid: str, branch: int, phase: Phase) -> None:
        """One has its reply."""


class _Out:
    """A call that waits for its reply."""

    __slots__ = ("call", "on_reply", "participant", "timer", "xid")

    def __init__(self, xid: str, call: Call, participant: str, on_reply: OnReply, timer: Any) -> None:
        self.xid = xid
        self.participant = participant
        self.call = call
        self.on_reply = on_reply
        self.timer = timer


class SimDelivery:
    """What ``coordinator.delivery.Delivery`` offers the engine, for one process on the simulated network."""

    def __init__(
        self,
        network: Network,
        loop: SimLoop,
        participants: Mapping[str, Participant],
        watch: CallWatch,
    ) -> None:
        self._network = network
        self._loop = loop
        self._world = loop.world
        self._participants = participants
        self._watch = watch
        self._out: dict[int, _Out] = {}
        self._last = 0
        self._silent: dict[str, int] = {}

    def send(self, xid: str, spec: Spec, call: Call, on_reply: OnReply) -> None:
        """Start one call; ``on_reply`` is called once, never before this returns."""
        world, name = self._world, self._loop.name
        self._watch.sent(self._loop, xid, spec, call)
        message = call_message(xid, spec, call)
        self._last = message.call_id = call_id = self._last + 1
        timer = self._loop.call_later(call.timeout_ms / 1000, self._time_out, call_id)
        self._out[call_id] = _Out(xid, call, message.participant, on_reply, timer)
        target = self._participants[message.participant]
        world.note(name, f"sends {call.phase.name} {xid[-6:]}#{call.branch + 1} to {target.name}")

        def deliver() -> None:
            target.loop.arrive(self._take, target, message)

        self._network.send(name, target.name, call.phase.name, deliver)

    def _take(self, target: Participant, message: pb.Call) -> None:
        """In a turn of the participant's process."""
        answered = False
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
            self._network.send(
                target.name, self._loop.name, what, lambda: self._loop.arrive(self._answered, target.name, answer)
            )

        call = read_call(message, (target.name,))
        if isinstance(call, IncomingCall):
            target.receive(call, on_reply)
        else:
            on_reply(call)

    def _answered(self, participant: str, answer: pb.Reply) -> None:
        self._silent[participant] = 0
        out = self._out.pop(answer.call_id, None)
        if out is None:
            self._world.counts["replies too late or twice"] += 1
            return
        out.timer.cancel()
        self._watch.replied(self._loop, out.xid, out.call.branch, out.call.phase)
        reply = reply_of(out.call.branch, out.call.phase, answer, self._participants[participant].fence_id)
        out.on_reply(reply)

    def _time_out(self, call_id: int) -> None:
        out = self._out.pop(call_id)
        self._world.counts["calls timed out"] += 1
        self._silent[out.participant] = self._silent.get(out.participant, 0) + 1
        out.on_reply(Reply(out.call.branch, out.call.phase, Outcome.UNKNOWN, error="no answer in time"))

    # --- participants that are away ------------------------------------------------------------------------

    def put_off(self) -> PutOff | None:
        """Whose decided transactions had better be put off unread."""
        away = [name for name in self._participants if self._silent.get(name, 0) >= AWAY_AFTER]
        return PutOff(away, 5_000, 100, 2_000) if away else None

    def were_put_off(self, put_off: PutOff, count: int) -> None:
        """So many transactions were."""
        self._world.counts["claims put off"] += count

    def trust(self, participants: Iterable[str]) -> None:
        """These are to be called now."""
        for name in participants:
            self._silent[name] = 0
