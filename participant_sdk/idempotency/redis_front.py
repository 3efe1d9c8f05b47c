"""Ended records in Redis, shared by the processes of a service. Needs the extra `redis`.

A record lies under `<prefix><key hash in hex>`: fence (8 bytes), epoch (16), then `front_codec`'s bytes. All entries of
another epoch than the one under `<prefix>epoch` are no entries: to flush, only the epoch is replaced. Where a record
was erased, an entry without bytes and with a higher fence keeps it from being put again by who has read it before. What
is left of a record is told by Redis, from when it expires there, so that no two clocks are compared.

Whatever Redis does, the caller gets an answer or a miss, and soon: every call has a short time-out, is not repeated,
and after a failure none is made for a while. Not for Redis Cluster.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Self

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.breaker import Breaker
from participant_sdk.idempotency.front_codec import decode, encode
from participant_sdk.idempotency.fronts import FrontCounts, holdable, later
from participant_sdk.idempotency.record import Record
from participant_sdk.idempotency.redis_client import NOT_INSTALLED, TIMEOUT_S, check_client, client_of

if TYPE_CHECKING:
    import redis
    import redis.asyncio

logger = logging.getLogger("tricord.idempotency")

PREFIX: Final = "tricord:idempotency:"
VALUE_BYTES_MAX: Final = 256 * 1024
AGE_MAX_S: Final = 86_400.0
_FENCE_BYTES: Final = 8
_EPOCH_BYTES: Final = 16
_HEAD_BYTES: Final = _FENCE_BYTES + _EPOCH_BYTES

_PUT: Final = """
local epoch = redis.call('GET', KEYS[2])
if not epoch or #epoch ~= 16 then
  epoch = ARGV[4]
  redis.call('SET', KEYS[2], epoch)
end
local held, new = redis.call('GETRANGE', KEYS[1], 0, 7), ARGV[1]
if #held == 8 then
  for i = 1, 8 do
    local a, b = string.byte(held, i), string.byte(new, i)
    if a > b then return 0 end
    if a < b then break end
  end
end
redis.call('SET', KEYS[1], new .. epoch .. ARGV[2], 'PX', ARGV[3])
return 1
"""
"""Keys: the record's, the epoch's. Arguments: fence, bytes, ms until it expires, an epoch should there be none."""


class _Shared:
    """What the two flavours have in common: everything but the calls."""

    def __init__(self, client: Any, *, prefix: str, value_bytes_max: int, age_max_s: float) -> None:
        check_client(client, type(self).__name__)
        if not prefix or len(prefix) > 100:
            raise ConfigurationError(f"{type(self).__name__}: prefix {prefix!r} is not 1 to 100 characters")
        if value_bytes_max <= 0:
            raise ConfigurationError(f"{type(self).__name__}: value_bytes_max {value_bytes_max} is not above 0")
        if not 0 < age_max_s <= 366 * 86_400:
            raise ConfigurationError(
                f"{type(self).__name__}: age_max_s {age_max_s} is not above 0 and at most 366 days"
            )
        self.client = client
        self._prefix = prefix.encode()
        self._epoch_key = self._prefix + b"epoch"
        self._value_bytes_max = value_bytes_max
        self._age_max_ms = int(age_max_s * 1000)
        self._put_script = client.register_script(_PUT)
        self._breaker = Breaker()
        self._hits = self._misses = self._stored = self._errors = self._skipped = 0

    @property
    def counts(self) -> FrontCounts:
        """What it has done so far; of calls at the same moment in several threads, one may not be counted."""
        return FrontCounts(self._hits, self._misses, self._stored, self._errors, self._skipped)

    def _key(self, key_hash: bytes) -> bytes:
        return self._prefix + key_hash.hex().encode()

    def _ticket(self) -> int | None:
        ticket = self._breaker.ticket()
        if ticket is None:
            self._skipped += 1
        return ticket

    def _failed(self, ticket: int, error: Exception) -> None:
        self._errors += 1
        if self._breaker.failed(ticket):
            logger.warning("Redis is left out for a while, the database is asked: %s: %s", type(error).__name__, error)

    def _answered(self, ticket: int) -> None:
        if self._breaker.succeeded(ticket):
            logger.info("Redis answers again")

    def _ask(self, pipeline: Any, key_hash: bytes) -> Any:
        """One round trip: the epoch and the entry, and how long the entry has still to live there, in ms."""
        key = self._key(key_hash)
        return pipeline.mget(self._epoch_key, key).pttl(key)

    def _record(self, key_hash: bytes, reply: Any) -> Record | None:
        (epoch, value), left_ms = reply
        record = None
        if epoch is not None and value is not None and left_ms > 0:
            record = self._read(key_hash, epoch, value, int(left_ms))
        if record is None:
            self._misses += 1
        else:
            self._hits += 1
        return record

    def _read(self, key_hash: bytes, epoch: bytes, value: bytes, left_ms: int) -> Record | None:
        if value[_FENCE_BYTES:_HEAD_BYTES] != epoch or len(value) == _HEAD_BYTES:
            return None
        read = decode(value[_HEAD_BYTES:])
        record, lives_ms = read if read is not None else (None, 0)
        if record is None or record.key_hash != key_hash or record.fence != int.from_bytes(value[:_FENCE_BYTES]):
            self._errors += 1
            return None
        record = later(record, max(0, lives_ms - left_ms))
        return record if holdable(record) else None

    def _put_arguments(self, record: Record) -> dict[str, Any] | None:
        """What the script is called with; None if the record is not one to be held."""
        if not holdable(record):
            return None
        lives_ms = min(record.expires_left_ms or 0, self._age_max_ms)
        try:
            value = encode(record, lives_ms)
        except Exception:
            logger.warning("a record of %r could not be written for Redis", record.operation, exc_info=True)
            return None
        if len(value) > self._value_bytes_max:
            return None
        return self._script_arguments(record.key_hash, record.fence, value, lives_ms)

    def _script_arguments(self, key_hash: bytes, fence: int, value: bytes, lives_ms: int) -> dict[str, Any]:
        keys = [self._key(key_hash), self._epoch_key]
        return {"keys": keys, "args": [fence.to_bytes(_FENCE_BYTES), value, lives_ms, _new_epoch()]}

    def _forgetting(self, fences: Mapping[bytes, int]) -> Any:
        """All of it in one round trip."""
        pipeline = self.client.pipeline(transaction=False)
        for key_hash, fence in fences.items():
            told = self._script_arguments(key_hash, fence + 1, b"", self._age_max_ms)
            pipeline.eval(_PUT, len(told["keys"]), *told["keys"], *told["args"])
        return pipeline


class RedisFront(_Shared):
    """A front for Idempotency on a `redis.Redis`, whose time-outs must be short: `connect` brings one that fits.

    `age_max_s`: how long an entry lives at most. `value_bytes_max`: the largest entry.
    Raises ConfigurationError for a client or a limit that will not do.
    """

    client: redis.Redis

    def __init__(
        self,
        client: redis.Redis,
        *,
        prefix: str = PREFIX,
        value_bytes_max: int = VALUE_BYTES_MAX,
        age_max_s: float = AGE_MAX_S,
    ) -> None:
        super().__init__(client, prefix=prefix, value_bytes_max=value_bytes_max, age_max_s=age_max_s)

    @classmethod
    def connect(cls, url: str, *, timeout_s: float = TIMEOUT_S, **settings: Any) -> Self:
        """On a client of its own: `timeout_s` to connect and for each answer, and no second try.

        `settings` are those of RedisFront. Raises ConfigurationError, also where the extra `redis` is not installed.
        """
        try:
            from redis import Redis
            from redis.retry import Retry
        except ImportError as error:
            raise ConfigurationError(NOT_INSTALLED) from error
        return cls(client_of(Redis, Retry, url, timeout_s), **settings)

    def get(self, key_hash: bytes) -> Record | None:
        """See Front."""
        ticket = self._ticket()
        if ticket is None:
            return None
        try:
            record = self._record(key_hash, self._ask(self.client.pipeline(transaction=False), key_hash).execute())
        except Exception as error:
            self._failed(ticket, error)
            return None
        self._answered(ticket)
        return record

    def put(self, record: Record) -> None:
        """See Front."""
        arguments = self._put_arguments(record)
        ticket = self._ticket() if arguments is not None else None
        if arguments is None or ticket is None:
            return
        try:
            self._stored += int(self._put_script(**arguments))
        except Exception as error:
            self._failed(ticket, error)
            return
        self._answered(ticket)

    def forget(self, fences: Mapping[bytes, int]) -> None:
        """See ErasingFront; in all processes at once. Raises what the client raises: it may not have been done."""
        self._forgetting(fences).execute()

    def flush(self) -> None:
        """Forget everything, in all processes at once. Raises what the client raises: it may not have been done."""
        self.client.set(self._epoch_key, _new_epoch())

    def close(self) -> None:
        """Close the client."""
        self.client.close()


class AsyncRedisFront(_Shared):
    """As `RedisFront`, for AsyncIdempotency, on a `redis.asyncio.Redis`."""

    client: redis.asyncio.Redis

    def __init__(
        self,
        client: redis.asyncio.Redis,
        *,
        prefix: str = PREFIX,
        value_bytes_max: int = VALUE_BYTES_MAX,
        age_max_s: float = AGE_MAX_S,
    ) -> None:
        super().__init__(client, prefix=prefix, value_bytes_max=value_bytes_max, age_max_s=age_max_s)

    @classmethod
    def connect(cls, url: str, *, timeout_s: float = TIMEOUT_S, **settings: Any) -> Self:
        """As `RedisFront.connect`."""
        try:
            from redis.asyncio import Redis
            from redis.asyncio.retry import Retry
        except ImportError as error:
            raise ConfigurationError(NOT_INSTALLED) from error
        return cls(client_of(Redis, Retry, url, timeout_s), **settings)

    async def get(self, key_hash: bytes) -> Record | None:
        """See Front."""
        ticket = self._ticket()
        if ticket is None:
            return None
        try:
            asked = self._ask(self.client.pipeline(transaction=False), key_hash)
            record = self._record(key_hash, await asked.execute())
        except Exception as error:
            self._failed(ticket, error)
            return None
        self._answered(ticket)
        return record

    async def put(self, record: Record) -> None:
        """See Front."""
        arguments = self._put_arguments(record)
        ticket = self._ticket() if arguments is not None else None
        if arguments is None or ticket is None:
            return
        try:
            self._stored += int(await self._put_script(**arguments))
        except Exception as error:
            self._failed(ticket, error)
            return
        self._answered(ticket)

    async def forget(self, fences: Mapping[bytes, int]) -> None:
        """As `RedisFront.forget`."""
        await self._forgetting(fences).execute()

    async def flush(self) -> None:
        """As `RedisFront.flush`."""
        await self.client.set(self._epoch_key, _new_epoch())

    async def close(self) -> None:
        """Close the client."""
        await self.client.aclose()


def _new_epoch() -> bytes:
    return secrets.token_hex(_EPOCH_BYTES // 2).encode()
