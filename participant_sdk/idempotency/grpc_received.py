"""What a call has sent, whole and checked, before anything is asked of the store."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

from participant_sdk.idempotency.errors import RequestTooLarge
from participant_sdk.idempotency.grpc_calls import Call
from participant_sdk.idempotency.grpc_spool import Spool
from participant_sdk.idempotency.record import Fingerprint
from participant_sdk.idempotency.request import KeyedRequest
from participant_sdk.idempotency.request_parts import RequestParts


class Received:
    """The messages of one call; a `with` block frees them.

    A client's stream is kept in memory, and beyond some size in a file: its key is answered for all of it or not at
    all, so it has to end before its handler begins.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._spool = Spool() if call.requests_streamed else None
        self._message = b""
        self._size = 0
        self._first: Any = None

    def __enter__(self) -> Received:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._spool is not None:
            self._spool.close()

    def add(self, message: bytes) -> None:
        """One more message. Raises RequestTooLarge, and InvalidRequest if it is none of this method."""
        self._size += len(message)
        if self._size > self._call.policy.request_bytes_max:
            raise RequestTooLarge(self._call.policy.request_bytes_max)
        request = self._call.request(message)
        if self._first is None:
            self._first = request
        if self._spool is None:
            self._message = message
        else:
            self._spool.put(message)

    def field_key(self) -> str | None:
        """The key in the first message. Raises KeyMissing and KeyMalformed."""
        return self._call.field_key(self._first)

    def request(self) -> Any:
        """What a handler in a thread gets."""
        return self._first if self._spool is None else map(self._call.request, self._spool.messages())

    def request_async(self) -> Any:
        """What a coroutine gets."""
        return self._first if self._spool is None else self._each()

    async def _each(self) -> AsyncIterator[Any]:
        assert self._spool is not None
        for message in self._spool.messages():
            yield self._call.request(message)

    def keyed(self, key: str, context: Any) -> KeyedRequest:
        """What the store is asked with. Raises ScopeMissing, FirstSentMalformed and IntentTooOld.

        The fingerprint of a stream is that of its messages' fingerprints, in their order.
        """
        self._call.check_first_sent()
        tenant, parts, fingerprinter = self._call.tenant(context), self._call.parts(), self._call.policy.fingerprint
        if self._spool is None:
            parts = replace(parts, body=self._message)
            return KeyedRequest(key, fingerprinter.current(parts), partial(fingerprinter.again, parts), tenant)
        spool = self._spool

        def each() -> Iterator[RequestParts]:
            yield parts  # so that a stream of no messages has a fingerprint too
            for message in spool.messages():
                yield replace(parts, body=message)

        def again(version: int) -> bytes | None:
            return _whole(fingerprinter.again(one, version) for one in each())

        digest = _whole(fingerprinter.current(one).digest for one in each())
        assert digest is not None
        return KeyedRequest(key, Fingerprint(fingerprinter.current(parts).version, digest), again, tenant)


def _whole(digests: Iterable[bytes | None]) -> bytes | None:
    whole = hashlib.sha256(b"tricord stream")
    for digest in digests:
        if digest is None:
            return None
        whole.update(digest)
    return whole.digest()
