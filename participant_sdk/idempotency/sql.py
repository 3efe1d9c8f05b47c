"""The store's SQL, which is the same on all three databases but for the clock and a few words (in braces).

Parameters have names here (:name), and become whatever a driver or a prepared statement wants. A new fence is one more
than the old one, or the database's clock in microseconds if that is later: it grows over a record that was swept,
too, without a sequence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from participant_sdk.idempotency.record import Record, State
from participant_sdk.idempotency.store import Claim, Held, Outcome
from participant_sdk.idempotency.stored import HINT_CHARS_MAX, clean, ended_values

_RUN: Final = (
    "state = 0, lease_until_ms = {now_ms} + :lease_ms, owner = :owner, completed_ms = NULL, expires_ms = NULL, "
    "reason = NULL, codec = NULL, status = NULL, headers = NULL, body = NULL"
)
_END: Final = (
    "state = :state, lease_until_ms = NULL, completed_ms = {now_ms}, expires_ms = {now_ms} + :ttl_ms, "
    "reason = :reason, codec = :codec, status = :status, headers = :headers, body = :body"
)
_NEXT: Final = "fence = {greatest}(fence + 1, {now_us})"
_ANEW: Final = (
    "tenant = :tenant, operation = :operation, key_hint = :key_hint, fingerprint_version = :version, "
    "fingerprint = :digest, created_ms = {now_ms}, attempt = 1, waiters = false, recovery_point = NULL, "
    "phase_data = NULL"
)
_WHO: Final = "key_hash, tenant, operation, key_hint, fingerprint_version, fingerprint, created_ms, fence, attempt"
_NEW: Final = ":key_hash, :tenant, :operation, :key_hint, :version, :digest, {now_ms}, {now_us}, 1"
_MINE: Final = "key_hash = :key_hash AND fence = :fence AND state"
_MET: Final = f"{_MINE} = :met_state"
_LEFT: Final = f"{_MET} AND (state = 3 OR state = 0 AND lease_until_ms <= {{now_ms}})"
_EXPIRED: Final = f"{_MET} AND state IN (1, 2, 3, 5) AND expires_ms <= {{now_ms}}"

READ: Final = "SELECT {columns} FROM {table} WHERE key_hash = :key_hash"
_CLAIM_COLUMNS: Final = f"{_WHO}, state, waiters, lease_until_ms, owner"
_CLAIM_VALUES: Final = f"{_NEW}, 0, false, {{now_ms}} + :lease_ms, :owner"
INSERT_CLAIM: Final = f"INSERT INTO {{table}} ({_CLAIM_COLUMNS}) VALUES ({_CLAIM_VALUES})"
INSERT_CLAIM_UNLESS_MET: Final = (
    f"INSERT INTO {{table}} ({_CLAIM_COLUMNS}) SELECT {_CLAIM_VALUES} WHERE NOT EXISTS (SELECT 1 FROM met)"
)
INSERT_ENDED: Final = (
    f"INSERT INTO {{table}} ({_WHO}, owner, state, waiters, completed_ms, expires_ms, reason, codec, status, headers, "
    f"body) VALUES ({_NEW}, :owner, :state, false, {{now_ms}}, {{now_ms}} + :ttl_ms, :reason, :codec, :status, "
    ":headers, :body)"
)
INSERT_IDENTITY: Final = (
    f"INSERT INTO {{table}} ({_WHO}, state, waiters) "
    "VALUES (:key_hash, '', '', '', 0, :digest, {now_ms}, {now_us}, 1, 5, false)"
)
TAKE_OVER: Final = f"UPDATE {{table}} SET {_NEXT}, attempt = attempt + 1, {_RUN} WHERE {_LEFT}"
REPLACE: Final = f"UPDATE {{table}} SET {_NEXT}, {_ANEW}, {_RUN} WHERE {_EXPIRED}"
WRITE_OVER: Final = f"UPDATE {{table}} SET {_NEXT}, attempt = attempt + 1, owner = :owner, {_END} WHERE {_LEFT}"
WRITE_ANEW: Final = f"UPDATE {{table}} SET {_NEXT}, {_ANEW}, owner = :owner, {_END} WHERE {_EXPIRED}"
COMPLETE: Final = f"UPDATE {{table}} SET {_END} WHERE {_MINE} = 0"
SETTLE: Final = f"UPDATE {{table}} SET {_END} WHERE {_MINE} IN (0, 4)"
GIVE_UP: Final = f"UPDATE {{table}} SET {_END} WHERE {_MET} AND lease_until_ms <= {{now_ms}}"
SEIZE: Final = f"UPDATE {{table}} SET {_NEXT}, {_END} WHERE {_MET}"
REACH: Final = (
    "UPDATE {table} SET recovery_point = :point, phase_data = :phase_data, "
    f"lease_until_ms = {{greatest}}(lease_until_ms, {{now_ms}} + :lease_ms) WHERE {_MINE} = 0"
)
LOCK: Final = f"SELECT 1 FROM {{table}} WHERE {_MET}{{skip_locked}}"
PIN: Final = f"SELECT 1 FROM {{table}} WHERE {_MINE} = 0 FOR UPDATE"
HELD: Final = "SELECT fence, attempt FROM {table} WHERE key_hash = :key_hash"

Values = Mapping[str, Any]

_NAME: Final = re.compile(r"(?<!:):([a-z_]+)")


@dataclass(frozen=True, slots=True)
class Sql:
    """A statement, and the names of its parameters: one for each sign, or for each number."""

    text: str
    names: tuple[str, ...]

    @classmethod
    def signed(cls, template: str, sign: str, words: Mapping[str, str]) -> Sql:
        """With the driver's sign for each parameter."""
        return cls(_NAME.sub(sign, template).format(**words), tuple(_NAME.findall(template)))

    @classmethod
    def numbered(cls, template: str, words: Mapping[str, str]) -> Sql:
        """With PostgreSQL's numbers ($1)."""
        names = tuple(dict.fromkeys(_NAME.findall(template)))
        return cls(_NAME.sub(lambda name: f"${names.index(name[1]) + 1}", template).format(**words), names)

    def values(self, values: Values) -> tuple[Any, ...]:
        """In the order of the parameters."""
        return tuple(values[name] for name in self.names)


def who(claim: Claim) -> dict[str, Any]:
    """What a record says of its request, and of who runs it."""
    return {
        "key_hash": claim.key_hash,
        "tenant": claim.tenant,
        "operation": claim.operation,
        "key_hint": clean(claim.key_hint, HINT_CHARS_MAX),
        "version": claim.fingerprint.version,
        "digest": claim.fingerprint.digest,
        "owner": claim.owner,
        "lease_ms": claim.lease_ms,
    }


def ended(outcome: Outcome) -> dict[str, Any]:
    """What a record says of how it has ended."""
    reason, codec, status, headers, body = ended_values(outcome)
    values = {"reason": reason, "codec": codec, "status": status, "headers": headers, "body": body}
    return {"state": int(outcome.state), "ttl_ms": outcome.ttl_ms, **values}


def this(met: Record | Held) -> dict[str, Any]:
    """Which record it is, and as what it was met."""
    state = met.state if isinstance(met, Record) else State.PROCESSING
    return {"key_hash": met.key_hash, "fence": met.fence, "met_state": int(state)}
