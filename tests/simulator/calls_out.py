"""Direct calls: an initiator's, and those of a participant's handler, whose Try has another participant's in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from coordinator.model import BranchSpec, Payload
from participant_sdk.branch_keys import outgoing_branch_key
from participant_sdk.call import Call
from participant_sdk.client_enlisting import Enlisted
from participant_sdk.context import current_branch_id, note_tried
from participant_sdk.enlist_errors import NotEnlisted
from participant_sdk.errors import Refused
from participant_sdk.payload import BYTES

from .handlers import BusinessError, read_below
from .network import Network

if TYPE_CHECKING:
    from .instances import SimInstance
    from .invariants import Watch
    from .loop import SimLoop
    from .town import SimParticipant

TIMES_MAX: Final = 3
"""So often a call is made, with one branch key."""
WITHIN_S: Final = 0.15
"""How long a handler waits for an answer before it calls again."""
LEFT_S: Final = 0.05
"""With less time than that it calls nobody."""


class CallsOut:
    """The direct calls of one process."""

    def __init__(
        self, loop: SimLoop, network: Network, participants: Mapping[str, SimParticipant], watch: Watch
    ) -> None:
        self._loop = loop
        self._network = network
        self._participants = participants
        self._watch = watch

    async def call(self, xid: str, parent: int, key: str, branch: BranchSpec, seconds: float) -> Any:
        """Call some instance once; an Enlisted, the error that was answered, or None if there was no answer."""
        network, loop = self._network, self._loop
        target = loop.world.random.choice(self._participants[branch.participant].instances)
        answered: asyncio.Future[Any] = loop.create_future()

        def reply(end: Any) -> None:
            network.send(target.name, loop.name, "answer", lambda: loop.arrive(partial(_settle, answered), end))

        call = partial(target.call_directly, xid, parent, key, branch, seconds, reply)
        loop.world.note(loop.name, f"calls {target.name} directly")
        network.send(loop.name, target.name, "direct call", partial(_arrive, target, call))
        await asyncio.wait([answered], timeout=seconds)
        return answered.result() if answered.done() else None

    async def call_below(self, call: Call[bytes]) -> None:
        """What a Try handler does whose payload says whom it is to call. Raises Refused, BusinessError."""
        below = read_below(call.payload)
        parent = current_branch_id()
        if below is None or parent is None:
            return
        counts = self._loop.world.counts
        participant, action, payload = below
        branch = BranchSpec(participant, action, Payload(payload, BYTES))
        key = f"{outgoing_branch_key(participant)}.1"
        for _ in range(TIMES_MAX):
            left_s = call.expires_at - self._loop.time()
            if left_s < LEFT_S:
                break
            end = await self.call(call.xid, parent, key, branch, min(left_s, WITHIN_S))
            if isinstance(end, Enlisted):
                counts["nested branches enlisted and tried"] += 1
                counts["calls nested in nested ones"] += bool(end.tried_branch_ids)
                note_tried(call.xid, {end.branch_id, *end.tried_branch_ids})
                self._watch.saw(call.xid, parent, {end.branch_id, *end.tried_branch_ids})
                return
            if isinstance(end, Refused | NotEnlisted):
                counts["nested calls refused"] += 1
                raise Refused("not_below")
        counts["nested calls given up"] += 1
        raise BusinessError("the participant below did not answer")


def _settle(answered: asyncio.Future[Any], end: Any) -> None:
    if not answered.done():
        answered.set_result(end)


def _arrive(target: SimInstance, call: Callable[[], None]) -> None:
    target.loop.arrive(call)  # that of its process at this moment
