"""A participant's connection to its coordinator, for `client_enlisting`: on grpc, and on grpc.aio."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from participant_sdk.client_asking import CLOSED, Closed
from participant_sdk.client_connection import AsyncCoordinatorConnection, CoordinatorConnection
from participant_sdk.client_enlisting import Send
from participant_sdk.coordinator_messages import Failure, read_failure
from tricord.v1 import coordinator_pb2


class EnlistConnection(CoordinatorConnection):
    """For threads; close it at the end."""

    def send(self, step: Send) -> Any:
        """Give the answer, a Failure, or Closed."""
        if self._closed:
            return Closed()
        try:
            if isinstance(step.request, coordinator_pb2.EnlistRequest):
                return self._stub.Enlist(step.request, timeout=step.seconds)
            return self._stub.Report(step.request, timeout=step.seconds)
        except grpc.RpcError as error:
            return read_failure(error)
        except ValueError:  # closed between the look and the call
            if not self._is_closed():
                raise
            return Closed()


class AsyncEnlistConnection(AsyncCoordinatorConnection):
    """For one event loop; close it at the end."""

    async def send(self, step: Send) -> Any:
        """As `EnlistConnection.send`."""
        if self._closed:
            return Closed()
        try:
            if isinstance(step.request, coordinator_pb2.EnlistRequest):
                return await self._stub.Enlist(step.request, timeout=step.seconds)
            return await self._stub.Report(step.request, timeout=step.seconds)
        except grpc.RpcError as error:
            return read_failure(error)
        except asyncio.CancelledError:  # see AsyncCoordinatorConnection
            task = asyncio.current_task()
            if not self._is_closed() or task is None or task.cancelling():
                raise
            return Failure(grpc.StatusCode.CANCELLED, CLOSED)
