"""What operators are told about participants: what the store knows, and what this coordinator sees of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tricord.v1 import operator_pb2 as pb

from .delivery import AddressHealth
from .delivery_breaker import BreakerState
from .errors import InvalidRequest, NotFound, Violation
from .operator_base import OperatorBase
from .rpc import Context, answering
from .store.open_rows import OpenRows
from .store.registry import Instance, KnownParticipant
from .store.rows import names_of
from .wire import check_name, timestamp

PAGE_SIZE_DEFAULT = 100
PAGE_SIZE_MAX = 1_000
PAGE_BYTES_MAX = 4 * 1024 * 1024
"""A page ends after the participant with which it gets larger."""

_BREAKERS = {
    BreakerState.CLOSED: pb.BREAKER_STATE_CLOSED,
    BreakerState.OPEN: pb.BREAKER_STATE_OPEN,
    BreakerState.HALF_OPEN: pb.BREAKER_STATE_HALF_OPEN,
}


class Backlog(NamedTuple):
    """The open transactions of one participant."""

    transactions: int
    oldest_ms: int


class OperatorParticipants(OperatorBase):
    """ListParticipants."""

    @answering
    async def ListParticipants(
        self, request: pb.ListParticipantsRequest, context: Context
    ) -> pb.ListParticipantsResponse:
        """A page of participants, by name."""
        if request.page_size > PAGE_SIZE_MAX:
            raise InvalidRequest(Violation("page_size", f"is {request.page_size}; the limit is {PAGE_SIZE_MAX}"))
        if request.participant:
            check_name("participant", request.participant)
        if request.page_token:
            check_name("page_token", request.page_token)
        await self._participants.refresh()
        heard = await self._engine.store.heard()
        opened = await self._engine.store.count_open()
        backlogs = backlogs_of(opened)
        known = self._participants.known
        names = sorted(name for name in {*known, *backlogs} if name > request.page_token)
        if request.participant:
            names = [name for name in names if name == request.participant]
            if not names:
                text = f"no participant {request.participant} is configured or registered"
                raise NotFound(text, reason="PARTICIPANT_NOT_FOUND")
        health = self._engine.delivery.health()
        response = pb.ListParticipantsResponse()
        size = 0
        for name in names:
            if len(response.participants) == (request.page_size or PAGE_SIZE_DEFAULT) or size > PAGE_BYTES_MAX:
                response.next_page_token = response.participants[-1].name
                break
            status = self._status(known.get(name) or KnownParticipant(name, {}, {}, ()), heard, health)
            backlog = backlogs.get(name)
            if backlog is not None:
                status.open_transactions = backlog.transactions
                status.oldest_create_time.CopyFrom(timestamp(backlog.oldest_ms))
            status.more_open = opened.cut
            response.participants.append(status)
            size += status.ByteSize()
        return response

    def _status(
        self,
        known: KnownParticipant,
        heard: Mapping[tuple[str, str], int],
        health: Mapping[str, AddressHealth],
    ) -> pb.ParticipantStatus:
        return pb.ParticipantStatus(
            name=known.name,
            actions=sorted(known.actions),
            withdrawn_actions=sorted(known.withdrawn),
            addresses=[
                self._address(known, instance, heard.get((known.name, instance.address)), health.get(instance.address))
                for instance in sorted(known.instances, key=lambda instance: instance.address)
            ],
        )

    def _address(
        self, known: KnownParticipant, instance: Instance, seen_ms: int | None, health: AddressHealth | None
    ) -> pb.ParticipantAddress:
        configured = self._participants.is_configured(known.name, instance.address)
        return pb.ParticipantAddress(
            address=instance.address,
            configured=configured,
            registered=seen_ms is not None or not configured,
            seen_time=None if seen_ms is None else timestamp(seen_ms),
            missing_actions=sorted(known.actions.keys() - instance.actions.keys()),
            health=None if health is None else _health_message(health),
        )


def backlogs_of(opened: OpenRows) -> Mapping[str, Backlog]:
    """How many of the open transactions have each participant."""
    backlogs: dict[str, Backlog] = {}
    for group in opened.groups:
        for name in names_of(group.participants):
            before = backlogs.get(name) or Backlog(0, group.oldest_ms)
            backlogs[name] = Backlog(before.transactions + group.transactions, min(before.oldest_ms, group.oldest_ms))
    return backlogs


def _health_message(health: AddressHealth) -> pb.AddressHealth:
    return pb.AddressHealth(
        breaker=_BREAKERS[health.state],
        since_time=timestamp(health.since_ms),
        failures=health.failures,
        in_flight=health.in_flight,
        last_error=health.last_error,
    )
