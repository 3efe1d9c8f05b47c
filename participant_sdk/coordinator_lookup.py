"""What a participant asks the coordinator about the transactions that its fence rows belong to.

    with CoordinatorLookup("127.0.0.1:7800") as coordinator:
        answer = coordinator.look_up(xids)

An answer holds only what is stored durably. What is not in it is unknown, and never "cancelled": a store that has no
record of a transaction whose Try has arrived was restored, or is another one. Each question is asked once, within its
timeout: whoever settles or purges comes again anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

from participant_sdk.client_asking import fetching, looking_up
from participant_sdk.client_connection import AsyncCoordinatorConnection, CoordinatorConnection
from participant_sdk.coordinator_messages import LOOK_UP_XIDS_MAX as LOOK_UP_XIDS_MAX
from participant_sdk.transaction import LookedUp as LookedUp
from participant_sdk.transaction import Transaction

TIMEOUT_SECONDS = 5.0


class CoordinatorLookup(CoordinatorConnection):
    """Asks the coordinator at `endpoint` ("host:port"). Safe for threads; close it at the end."""

    def look_up(self, xids: Sequence[str], timeout: float = TIMEOUT_SECONDS) -> LookedUp:
        """How far 1 to 1,000 transactions have come; those without a stored record are not in the answer.

        Raises OutcomeUnknown (no answer within `timeout` seconds; the only one that asking again can change),
        InvalidRequest, RequestFailed, ConfigurationError (no coordinator answers there, or this is closed).
        """
        return self._run(looking_up(xids, timeout))

    def fetch(self, xid: str, timeout: float = TIMEOUT_SECONDS) -> Transaction | None:
        """One whole transaction, None if there is no stored record of it. Raises as `look_up` does."""
        return self._run(fetching(xid, timeout))


class AsyncCoordinatorLookup(AsyncCoordinatorConnection):
    """As `CoordinatorLookup`, on asyncio. Make and use it in one event loop."""

    async def look_up(self, xids: Sequence[str], timeout: float = TIMEOUT_SECONDS) -> LookedUp:  # noqa: ASYNC109
        """See `CoordinatorLookup.look_up`."""
        return await self._run(looking_up(xids, timeout))

    async def fetch(self, xid: str, timeout: float = TIMEOUT_SECONDS) -> Transaction | None:  # noqa: ASYNC109
        """See `CoordinatorLookup.fetch`."""
        return await self._run(fetching(xid, timeout))
