"""The registry service: where participants make themselves known, stay known, and leave."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration

from tricord.v1 import registry_pb2 as pb
from tricord.v1 import registry_pb2_grpc

from .errors import Conflict, NotAllowed
from .participants import Participants
from .rpc import Context, answering
from .store.registry import HEARTBEAT_MS, ActionsDiffer, FenceChanged, Refused
from .wire_registry import read_registration, read_withdrawal

ACTIONS_TOLD_MAX = 10
_ACTIONS_IN_TEXT_MAX = 2


class RegistryService(registry_pb2_grpc.RegistryServiceServicer):
    """Where participants make themselves known."""

    def __init__(self, participants: Participants, *, allowed: bool) -> None:
        self._participants = participants
        self._allowed = allowed

    @answering
    async def RegisterParticipant(
        self, request: pb.RegisterParticipantRequest, context: Context
    ) -> pb.RegisterParticipantResponse:
        """Store where an instance is, what it can do, and in which database it keeps its fence; or that it lives."""
        self._check_allowed()
        row = read_registration(request)
        refused = await self._participants.register(row, replace_fence=request.replace_fence)
        if refused is not None:
            raise _conflict(row.name, refused)
        return pb.RegisterParticipantResponse(heartbeat_interval=Duration(seconds=HEARTBEAT_MS // 1000))

    @answering
    async def WithdrawParticipant(
        self, request: pb.WithdrawParticipantRequest, context: Context
    ) -> pb.WithdrawParticipantResponse:
        """Have no more calls go to an address; it need not be known."""
        self._check_allowed()
        await self._participants.withdraw(*read_withdrawal(request))
        return pb.WithdrawParticipantResponse()

    def _check_allowed(self) -> None:
        if not self._allowed:
            raise NotAllowed("this coordinator takes no registrations: it was started without --allow-registration")


def _conflict(name: str, refused: Refused) -> Conflict:
    match refused:
        case FenceChanged(action, stored, given):
            text = (
                f"participant {name}, action {action}: registered with fence database {stored}, this instance has "
                f"{given}: two instances of a participant must share one database. If it was replaced on purpose, "
                "register once with replace_fence"
            )
            return Conflict(text, reason="FENCE_DATABASE_CHANGED", metadata={"stored": stored, "given": given})
        case ActionsDiffer(address, only_there, only_here):
            text = (
                f"participant {name} has another instance, at {address}, with other actions: "
                f"only that has {_told(only_there, _ACTIONS_IN_TEXT_MAX)}, "
                f"only this has {_told(only_here, _ACTIONS_IN_TEXT_MAX)}. Two services need two names; "
                "of one service first add actions, and remove others later"
            )
            metadata = {
                "address": address,
                "only_there": _told(only_there, ACTIONS_TOLD_MAX),
                "only_here": _told(only_here, ACTIONS_TOLD_MAX),
            }
            return Conflict(text, reason="ACTIONS_DIFFER", metadata=metadata)


def _told(actions: Sequence[str], count_max: int) -> str:
    told = ", ".join(actions[:count_max])
    return told if len(actions) <= count_max else f"{told} and {len(actions) - count_max} more"
