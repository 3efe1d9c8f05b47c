"""What a keyed request has to pass before the store is asked: its age, and how many keys its tenant brings."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from threading import Lock

from participant_sdk.asgi import Scope
from participant_sdk.idempotency.http_headers import values
from participant_sdk.idempotency.http_policy import HttpOperation
from participant_sdk.idempotency.quotas import Quotas, Token

_log = logging.getLogger(__name__)


class Gate:
    """Of one door. Operations of one name share their tenants' keys."""

    def __init__(self, operations: Iterable[HttpOperation]) -> None:
        self.ran_unprotected = 0
        self._lock = Lock()
        self._quotas = Quotas((operation.operation.name, operation.quota) for operation in operations)

    def entry(self, operation: HttpOperation, tenant: str, scope: Scope) -> Token:
        """For a `with` block in which the store is asked, and which says what has come of it.

        Raises FirstSentMalformed and IntentTooOld, the block TooManyKeys: then nothing is looked up, nothing runs.
        """
        if operation.first_sent is not None:
            name = operation.first_sent.name.lower().encode()
            operation.first_sent.check(operation.operation, values(scope["headers"], name), time.time())
        return self._quotas.token(operation.operation.name, tenant)

    def note_unprotected(self, operation: HttpOperation) -> None:
        """Count it, and log it for an alarm: a request runs of which nothing will be on record."""
        with self._lock:
            self.ran_unprotected += 1
        _log.warning("ran_unprotected: a request of %s, while the store is down", operation.operation.name)
