"""The RPCs about the fence, for grpc and for grpc.aio. A participant's program may serve several participants."""

from __future__ import annotations

from typing import Any, TypeVar

import grpc

from participant_sdk.inspection_errors import InspectionFailed
from participant_sdk.service_inspection import TaskInspection, ThreadInspection
from tricord.v1 import participant_pb2, participant_pb2_grpc

AnyInspection = TypeVar("AnyInspection", ThreadInspection, TaskInspection)


class ThreadInspections(participant_pb2_grpc.ParticipantServiceServicer):
    """GetFence, ListBranches, GetBranch and CompareHolds on a `grpc.server`."""

    def __init__(self) -> None:
        self.inspections: dict[str, ThreadInspection] = {}

    def GetFence(self, request: participant_pb2.GetFenceRequest, context: Any) -> participant_pb2.GetFenceResponse:
        """See the contract."""
        try:
            asked = _of_participant(request.participant, self.inspections)
            return asked.look(asked.inspection.fence())
        except InspectionFailed as error:
            context.abort(error.code, str(error))
            raise AssertionError("unreachable") from error

    def ListBranches(
        self, request: participant_pb2.ListBranchesRequest, context: Any
    ) -> participant_pb2.ListBranchesResponse:
        """See the contract."""
        try:
            asked = _of_participant(request.participant, self.inspections)
            return asked.look(asked.inspection.branches(request))
        except InspectionFailed as error:
            context.abort(error.code, str(error))
            raise AssertionError("unreachable") from error

    def GetBranch(self, request: participant_pb2.GetBranchRequest, context: Any) -> participant_pb2.GetBranchResponse:
        """See the contract."""
        try:
            asked = _of_participant(request.participant, self.inspections)
            return asked.look_at_one(asked.inspection.branch(request))
        except InspectionFailed as error:
            context.abort(error.code, str(error))
            raise AssertionError("unreachable") from error

    def CompareHolds(
        self, request: participant_pb2.CompareHoldsRequest, context: Any
    ) -> participant_pb2.CompareHoldsResponse:
        """See the contract."""
        try:
            asked = _of_participant(request.participant, self.inspections)
            return asked.compare_holds(request, context.time_remaining())
        except InspectionFailed as error:
            context.abort(error.code, str(error))
            raise AssertionError("unreachable") from error


class TaskInspections(participant_pb2_grpc.ParticipantServiceServicer):
    """GetFence, ListBranches, GetBranch and CompareHolds on a `grpc.aio.server`."""

    def __init__(self) -> None:
        self.inspections: dict[str, TaskInspection] = {}

    async def GetFence(
        self, request: participant_pb2.GetFenceRequest, context: Any
    ) -> participant_pb2.GetFenceResponse:
        """See the contract."""
        try:
            asked = _of_participant(request.participant, self.inspections)
            return await asked.look(asked.inspection.fence())
        except InspectionFailed as error:
            await context.abort(error.code, str(error))
            raise AssertionError("unreachable") from error

    async def ListBranches(
        self, request: participant_pb2.ListBranchesRequest, context: Any
    ) -> participant_pb2.ListBranchesResponse:
        """See the contract."""
        try:
            asked = _of_participant(request.participant, self.inspections)
            return await asked.look(asked.inspection.branches(request))
        except InspectionFailed as error:
            await context.abort(error.code, str(error))
            raise AssertionError("unreachable") from error

    async def GetBranch(
        self, request: participant_pb2.GetBranchRequest, context: Any
    ) -> participant_pb2.GetBranchResponse:
        """See the contract."""
        try:
            asked = _of_participant(request.participant, self.inspections)
            return await asked.look_at_one(asked.inspection.branch(request))
        except InspectionFailed as error:
            await context.abort(error.code, str(error))
            raise AssertionError("unreachable") from error

    async def CompareHolds(
        self, request: participant_pb2.CompareHoldsRequest, context: Any
    ) -> participant_pb2.CompareHoldsResponse:
        """See the contract."""
        try:
            asked = _of_participant(request.participant, self.inspections)
            return await asked.compare_holds(request, context.time_remaining())
        except InspectionFailed as error:
            await context.abort(error.code, str(error))
            raise AssertionError("unreachable") from error


def _of_participant(name: str, inspections: dict[str, AnyInspection]) -> AnyInspection:
    """Whose fence is asked about; raises InspectionFailed if it is not served here."""
    found = inspections.get(name)
    if found is None:
        here = " and ".join(repr(each) for each in sorted(inspections))
        raise InspectionFailed(grpc.StatusCode.NOT_FOUND, f"this is participant {here}, not {name!r}")
    return found
