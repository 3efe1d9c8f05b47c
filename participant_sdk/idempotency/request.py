"""A request with a key, as every door hands it to the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from participant_sdk.idempotency.record import Fingerprint


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """A request of `tenant` with `key`. `fingerprint` is the current algorithm's; `again(version)` an older one's.

    `tenant` comes from the authenticated principal, "" only where the program has one tenant. `again` gives None for a
    version that the program does not know.
    """

    key: str
    fingerprint: Fingerprint
    again: Callable[[int], bytes | None]
    tenant: str = ""

    def matches(self, stored: Fingerprint) -> bool | None:
        """Whether `stored` is of the same request; None if that cannot be told."""
        if stored.version == self.fingerprint.version:
            return stored.digest == self.fingerprint.digest
        digest = self.again(stored.version)
        return None if digest is None else digest == stored.digest
