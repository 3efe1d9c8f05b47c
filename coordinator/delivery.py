"""Calls to participants, by name.

There is one ``Link`` per address, however many names stand there. Calls of an action go to the instances that have
it, in turn; to those whose breaker is closed, and that have room. Where none has, a call is answered at once UNKNOWN,
with the time before which it need not come again: nothing piles up here.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .delivery_breaker import OPEN_MS_MAX, OPEN_MS_MIN, BreakerState
from .delivery_link import Link
from .delivery_link import OnReply as OnReply
from .model import BranchSpec, Call, Outcome, Phase, Reply, Spec
from .participants import Participants
from .store.registry import KnownParticipant
from .store.rows import PutOff

FULL_RETRY_MS_MIN, FULL_RETRY_MS_MAX = 200, 1_000
PUT_OFF_MS_MIN, PUT_OFF_MS_MAX = 1_000, 60_000


class AddressHealth(NamedTuple):
    """How it stands with one address."""

    state: BreakerState
    failures: int
    """Failed connections and streams, and calls that timed out, since the last answer."""
    in_flight: int
    """Calls that wait to be sent or answered."""
    last_error: str
    """Kept after later success."""
    since_ms: int
    """When its breaker last opened or closed, by this machine's clock."""


class _Route:
    """Where the calls of one action go."""

    __slots__ = ("_turn", "fence_id", "links")

    def __init__(self, links: tuple[Link, ...], fence_id: str) -> None:
        self.fence_id = fence_id
        self.links = links
        self._turn = random.randrange(len(links)) if links else 0

    def next(self) -> Link | None:
        """The link whose turn it is; None if none takes a call now."""
        links = self.links
        for _ in links:
            self._turn = turn = (self._turn + 1) % len(links)
            if links[turn].takes():
                return links[turn]
        return None

    def crowded(self) -> bool:
        """Whether too many calls wait for an address to come back, and none can go anywhere else."""
        return bool(self.links) and all(link.breaker.crowded() for link in self.links)

    def longest_ms(self) -> float:
        """When the last of those should come that are put off."""
        return max(link.breaker.longest_ms(PUT_OFF_MS_MAX) for link in self.links)

    def nearest(self) -> Link | None:
        """The link that is likely to take a call first, when none does now."""
        return min(self.links, key=lambda link: (not link.breaker.closed, link.breaker.probe_at_s), default=None)


class Delivery:
    """Sends calls to participants by name."""

    def __init__(self, participants: Participants, *, pause_ms_max: int = OPEN_MS_MAX) -> None:
        """``pause_ms_max``: for so long an address that fails is left alone at the most."""
        self._participants = participants
        self._pause_ms_max = pause_ms_max
        self._generation = -1
        self._routes: dict[tuple[str, str], _Route] = {}
        self._links: dict[str, Link] = {}
        self._retired: set[Link] = set()
        self._nowhere_s: dict[str, float] = {}

    def send(self, xid: str, spec: Spec, call: Call, on_reply: OnReply) -> None:
        """Start one call. ``on_reply`` is called exactly once, never before this returns."""
        branch = spec.branches[call.branch]
        known = self._participants.find(branch.participant)
        if self._generation != self._participants.generation:
            self._follow()
        route = self._routes.get((branch.participant, branch.action))
        if route is None:
            if known is None:
                # Perhaps only not heard of yet here, after a take-over: nothing to alarm a person with at once.
                _later(on_reply, call, f"participant {branch.participant} is not registered", 0)
                return
            route = self._plan(known, branch)
        link = route.next()
        if link is None:
            self._refuse(route, branch, call, on_reply)
        else:
            link.send(xid, spec, call, on_reply, route.fence_id)

    def put_off(self) -> PutOff | None:
        """Whose decided transactions had better be put off unread: those of participants that cannot be reached."""
        if all(link.breaker.closed for link in self._links.values()):
            return None
        away: dict[str, float] = {}
        reachable = set()
        for (name, _), route in self._routes.items():
            if route.crowded():
                away[name] = max(away.get(name, 0.0), route.longest_ms())
            else:
                reachable.add(name)
        names = [name for name in away if name not in reachable]
        if not names:
            return None
        most_ms = int(max(away[name] for name in names))
        return PutOff(names, max(OPEN_MS_MAX, most_ms), PUT_OFF_MS_MIN, most_ms)

    def were_put_off(self, put_off: PutOff, count: int) -> None:
        """So many transactions were."""
        routes = [route for (name, _), route in self._routes.items() if name in put_off.participants]
        for link in {link for route in routes for link in route.links}:
            link.breaker.book(count)

    def trust(self, participants: Iterable[str]) -> None:
        """An operator wants these to be called now: their breakers hold no call back until one fails."""
        for name in participants:
            known = self._participants.find(name)
            for instance in known.instances if known is not None else ():
                if (link := self._links.get(instance.address)) is not None:
                    link.breaker.trust()

    def health(self) -> Mapping[str, AddressHealth]:
        """How it stands with each address that was called and still is one, as this coordinator sees it."""
        return {
            address: AddressHealth(
                link.breaker.state,
                link.breaker.failures + link.breaker.silent,
                link.in_flight,
                link.breaker.last_error,
                link.breaker.since_ms,
            )
            for address, link in self._links.items()
        }

    async def close(self) -> None:
        """End all streams; calls that are still out become UNKNOWN."""
        await asyncio.gather(*(link.close() for link in [*self._links.values(), *self._retired]))

    def _follow(self) -> None:
        """Take note of where participants are now, and let go of addresses that none has any more.

        Those are closed once their last calls are answered.
        """
        self._generation = self._participants.generation
        self._routes.clear()
        addresses = self._participants.addresses()
        for address in [address for address in self._links if address not in addresses]:
            link = self._links.pop(address)
            self._retired.add(link)
            link.retire().add_done_callback(functools.partial(self._forget, link))

    def _forget(self, link: Link, _task: asyncio.Task[None]) -> None:
        self._retired.discard(link)

    def _plan(self, known: KnownParticipant, branch: BranchSpec) -> _Route:
        links = []
        for address in known.addresses(branch.action):
            link = self._links.get(address)
            if link is None:
                link = self._links[address] = Link(address, self._pause_ms_max)
            links.append(link)
        if links:
            self._nowhere_s.pop(known.name, None)
        route = self._routes[known.name, branch.action] = _Route(tuple(links), known.fence_id(branch.action))
        return route

    def _refuse(self, route: _Route, branch: BranchSpec, call: Call, on_reply: OnReply) -> None:
        self._participants.doubt()
        link = route.nearest()
        if link is None:
            error = f"no instance of participant {branch.participant} is registered any more"
            _later(on_reply, call, error, self._nowhere_retry_ms(branch.participant, call.phase))
        elif link.breaker.closed:
            _later(on_reply, call, link.hindrance(), random.randint(FULL_RETRY_MS_MIN, FULL_RETRY_MS_MAX))
        else:
            _later(on_reply, call, link.hindrance(), link.breaker.retry_ms(call.phase))

    def _nowhere_retry_ms(self, participant: str, phase: Phase) -> int:
        """As a breaker's: the longer nobody is there, the longer Confirm and Cancel wait."""
        now_s = asyncio.get_running_loop().time()
        since_s = self._nowhere_s.setdefault(participant, now_s)
        longest_ms = OPEN_MS_MIN if phase is Phase.TRY else (now_s - since_s) * 1000 + OPEN_MS_MIN
        return int(random.uniform(0, min(longest_ms, self._pause_ms_max)))


def _later(on_reply: OnReply, call: Call, error: str, retry_ms: int) -> None:
    reply = Reply(call.branch, call.phase, Outcome.UNKNOWN, error=error, retry_ms=retry_ms)
    asyncio.get_running_loop().call_soon(on_reply, reply)
