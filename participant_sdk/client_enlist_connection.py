"""A participant's connection to its coordinator, for `client_enlisting`: on grpc, and on grpc.aio."""

from __future__ import annotations

from participant_sdk.client_asking import Answer, Ask
from participant_sdk.client_connection import AsyncCoordinatorConnection, CoordinatorConnection
from participant_sdk.client_enlisting import Send


class EnlistConnection(CoordinatorConnection):
    """For threads; close it at the end."""

    def send(self, step: Send) -> Answer:
        """Give the answer, a Failure, or Closed."""
        return self._ask(Ask(step.request, step.seconds))


class AsyncEnlistConnection(AsyncCoordinatorConnection):
    """For one event loop; close it at the end."""

    async def send(self, step: Send) -> Answer:
        """As `EnlistConnection.send`."""
        return await self._ask(Ask(step.request, step.seconds))
