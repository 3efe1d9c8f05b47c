"""A participant's connection to its coordinator, for `client_enlisting`: on grpc, and on grpc.aio."""

from __future__ import annotations

from participant_sdk.client_asking import Answer, Ask
from participant_sdk.client_connection import AsyncCoordinatorConnection, CoordinatorConnection


class EnlistConnection(CoordinatorConnection):
    """For threads; close it at the end."""

    def send(self, ask: Ask) -> Answer:
        """Give the answer, a Failure, or Closed."""
        return self._ask(ask)


class AsyncEnlistConnection(AsyncCoordinatorConnection):
    """For one event loop; close it at the end."""

    async def send(self, ask: Ask) -> Answer:
        """As `EnlistConnection.send`."""
        return await self._ask(ask)
