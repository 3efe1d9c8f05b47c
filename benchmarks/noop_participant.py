"""A participant that does nothing but answer, by the published contract: what is left is the coordinator's cost.

``python -m benchmarks.noop_participant NAME COORDINATOR`` serves ``Exchange`` on a free loopback port and registers.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from tricord.v1 import participant_pb2, participant_pb2_grpc, registry_pb2, registry_pb2_grpc

from .processes import run_fast

FENCE_ID = "noop"


def done(call: participant_pb2.Call) -> participant_pb2.Reply:
    """The answer to every call."""
    return participant_pb2.Reply(call_id=call.call_id, outcome=participant_pb2.OUTCOME_DONE, fence_id=FENCE_ID)


class Noop(participant_pb2_grpc.ParticipantServiceServicer):
    """Answers every call with DONE at once."""

    async def Exchange(
        self, request_iterator: AsyncIterator[participant_pb2.ExchangeRequest], context: Any
    ) -> AsyncIterator[participant_pb2.ExchangeResponse]:
        """One response for each batch."""
        async for request in request_iterator:
            yield participant_pb2.ExchangeResponse(replies=[done(call) for call in request.calls])

    async def Try(self, request: participant_pb2.TryRequest, context: Any) -> participant_pb2.TryResponse:
        """The same, one call at a time."""
        return participant_pb2.TryResponse(reply=done(request.call))

    async def Confirm(self, request: participant_pb2.ConfirmRequest, context: Any) -> participant_pb2.ConfirmResponse:
        """The same, one call at a time."""
        return participant_pb2.ConfirmResponse(reply=done(request.call))

    async def Cancel(self, request: participant_pb2.CancelRequest, context: Any) -> participant_pb2.CancelResponse:
        """The same, one call at a time."""
        return participant_pb2.CancelResponse(reply=done(request.call))

    async def Settle(self, request: participant_pb2.SettleRequest, context: Any) -> participant_pb2.SettleResponse:
        """The same, one call at a time."""
        return participant_pb2.SettleResponse(reply=done(request.call))

    async def GetFence(
        self, request: participant_pb2.GetFenceRequest, context: Any
    ) -> participant_pb2.GetFenceResponse:
        """It has none."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no fence here")
        raise AssertionError("unreachable")

    async def ListBranches(
        self, request: participant_pb2.ListBranchesRequest, context: Any
    ) -> participant_pb2.ListBranchesResponse:
        """It has none."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no fence here")
        raise AssertionError("unreachable")

    async def GetBranch(
        self, request: participant_pb2.GetBranchRequest, context: Any
    ) -> participant_pb2.GetBranchResponse:
        """It has none."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no fence here")
        raise AssertionError("unreachable")

    async def CompareHolds(
        self, request: participant_pb2.CompareHoldsRequest, context: Any
    ) -> participant_pb2.CompareHoldsResponse:
        """It has none."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no fence here")
        raise AssertionError("unreachable")


async def main(service: Callable[[], Noop], name: str, coordinator: str) -> None:
    """Serve until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    participant_pb2_grpc.add_ParticipantServiceServicer_to_server(service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(coordinator) as channel:
        action = registry_pb2.ActionRegistration(name="noop", fence_id=FENCE_ID)
        request = registry_pb2.RegisterParticipantRequest(
            participant=name, address=f"127.0.0.1:{port}", actions=[action], replace_fence=True
        )
        await registry_pb2_grpc.RegistryServiceStub(channel).RegisterParticipant(request, timeout=10)
    print("ready", flush=True)
    await stop.wait()
    await server.stop(1)


def run(service: Callable[[], Noop], name: str, coordinator: str) -> None:
    """``main`` as a process."""
    run_fast(main(service, name, coordinator))


if __name__ == "__main__":
    run(Noop, *sys.argv[1:])
