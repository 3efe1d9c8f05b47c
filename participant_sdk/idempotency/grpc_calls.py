"""A call of a listed method as the store sees it: its key, whose it is, how its messages are read."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import isawaitable
from typing import Any, Final

import grpc

from participant_sdk.context_headers import XID_HEADER
from participant_sdk.errors import InvalidRequest, TricordError, printable
from participant_sdk.idempotency.errors import IdempotencyError, KeyMissing, ScopeMissing, StoreUnavailable
from participant_sdk.idempotency.grpc_answers import Ending, answer_of, ending_of, state_of
from participant_sdk.idempotency.grpc_policy import GrpcOperation, ServerStreaming
from participant_sdk.idempotency.grpc_spool import Spool
from participant_sdk.idempotency.keys import parse_key_lines
from participant_sdk.idempotency.operation import TENANT_BYTES_MAX, Operation
from participant_sdk.idempotency.record import Answer, State, answer_given
from participant_sdk.idempotency.request_parts import RequestParts
from participant_sdk.interceptors import KINDS

logger = logging.getLogger(__name__)

CUT_OFF: Final = "the call was cancelled while its requests arrived"
_WAIT_SECONDS_MAX: Final = 7 * 86_400.0
"""A call that waits for longer has no deadline: gRPC then says that there are some ten thousand years left."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call. `metadata`: what it was sent with. `handler`: what serves it, of whichever of the four kinds."""

    policy: GrpcOperation
    metadata: Sequence[tuple[str, str | bytes]]
    handler: grpc.RpcMethodHandler[Any, Any]

    @property
    def requests_streamed(self) -> bool:
        """Whether the client streams."""
        return bool(self.handler.request_streaming)

    @property
    def responses_streamed(self) -> bool:
        """Whether the server does."""
        return bool(self.handler.response_streaming)

    @property
    def behavior(self) -> Callable[..., Any]:
        """The handler's function."""
        return getattr(self.handler, self._kind[0])  # type: ignore[no-any-return]

    def rebuilt(self, behavior: Callable[..., Any]) -> grpc.RpcMethodHandler[Any, Any]:
        """A handler of the same kind that gets its requests as bytes, and gives its responses so."""
        return self._kind[1](behavior, None, None)  # type: ignore[no-any-return]

    @property
    def _kind(self) -> tuple[str, Callable[..., Any]]:
        return KINDS[self.requests_streamed, self.responses_streamed]

    @property
    def operation(self) -> Operation:
        """What the store is to do with it. A stream that is not kept leaves a TOMBSTONE: any answer is too large."""
        operation = self.policy.operation
        if self.responses_streamed and self.policy.server_streaming is ServerStreaming.TOMBSTONE:
            return replace(operation, answer_bytes_max=0)
        return operation

    def state_of(self, ending: Ending) -> State:
        """What its run has come to if it ends so. A final "no" that is too large to be stored may be asked again."""
        state = state_of(ending, self.policy.stored_codes)
        if state is State.FAILED_FINAL and self.answer_of(ending).bytes_held > self.operation.answer_bytes_max:
            return State.FAILED_RETRYABLE
        return state

    def answer_of(self, ending: Ending) -> Answer:
        """What is stored of its end. Raises IdempotencyError if `redact` fails."""
        answer = answer_of(ending, self.policy.kept_metadata)
        if self.policy.redact is None:
            return answer
        try:
            return answer_given("redact", self.policy.redact(answer))
        except Exception as error:
            logger.exception("%s: an answer could not be made fit to be stored", self.policy.method)
            raise IdempotencyError("the answer could not be made fit to be stored") from error

    def ending_of(self, answer: Answer, context: Any) -> Ending:
        """How a repeat of it ends. Raises StoreUnavailable if `restore` or `current` fails."""
        with self._reading():
            return ending_of(self._current(self._restored(answer), context))

    async def ending_of_async(self, answer: Answer, context: Any) -> Ending:
        """As `ending_of`, where `current` may have to be waited for."""
        with self._reading():
            found = self._current(self._restored(answer), context)
            return ending_of(answer_given("current", await found) if isawaitable(found) else found)

    def _restored(self, answer: Answer) -> Answer:
        return answer if self.policy.restore is None else answer_given("restore", self.policy.restore(answer))

    def _current(self, answer: Answer, context: Any) -> Any:
        if self.policy.current is None:
            return answer
        found = self.policy.current(context, answer)
        return found if isawaitable(found) else answer_given("current", found)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            logger.exception("%s: what is said to a repeat could not be told", self.policy.method)
            raise StoreUnavailable("the stored answer could not be read") from error

    def stored_of(self, spool: Spool) -> bytes:
        """What is stored of a stream's responses; one byte too many is enough for a TOMBSTONE."""
        return spool.data(self.policy.operation.answer_bytes_max + 1)

    def early_key(self) -> str | None:
        """The key, if that is known before the request is. Raises KeyMissing, KeyMalformed and InvalidRequest."""
        both = self.requests_streamed and self.responses_streamed
        key = None if self.policy.key_field else self.metadata_key()
        if key is not None or (both and self.policy.key_field):
            self.check_streams()
        return key

    def metadata_key(self) -> str | None:
        """The key in the metadata; None if there is none, and none is needed. Raises KeyMissing and KeyMalformed."""
        lines = [value for name, value in self.metadata if name == self.policy.key_metadata]
        key = parse_key_lines(lines, self.policy.key_rules)
        if key is None:
            self._need_key()
        return key

    def field_key(self, request: Any) -> str | None:
        """The same, of the key in a request's field."""
        value = request
        for name in self.policy.key_field.split("."):
            value = getattr(value, name, None)
        if value is None or value == "":
            self._need_key()
            return None
        if not isinstance(value, str):
            raise self.policy.key_rules.malformed("is not text")
        return self.policy.key_rules.check(value)

    def _need_key(self) -> None:
        if self.policy.required:
            raise KeyMissing(f"{self.policy.method} needs an idempotency key: {self.policy.key_rules.field}")

    def request(self, message: bytes) -> Any:
        """A message as its handler gets it. Raises InvalidRequest if it is none."""
        parse = self.handler.request_deserializer
        try:
            return message if parse is None else parse(message)
        except Exception as error:  # whatever the method's own decoder raises
            what = printable(f"{type(error).__name__}: {error}")
            raise InvalidRequest(f"the request is no message of {self.policy.method}: {what}") from None

    def response(self, response: Any) -> bytes:
        """A response as it is sent."""
        write = self.handler.response_serializer
        written = response if write is None else write(response)
        if not isinstance(written, bytes):
            raise TypeError(f"{self.policy.method} has answered with {type(written).__name__}, not with its message")
        return written

    def check_streams(self) -> None:
        """Raises InvalidRequest if a call of this kind cannot have a key."""
        if self.responses_streamed and (
            self.requests_streamed or self.policy.server_streaming is ServerStreaming.REJECT
        ):
            raise InvalidRequest(f"{self.policy.method} streams its responses, and takes no idempotency key")

    def parts(self) -> RequestParts:
        """What its fingerprint is made of, but for the message."""
        xid = [_bytes(value) for name, value in self.metadata if name == XID_HEADER]
        headers = [(name.encode(), _bytes(value)) for name, value in self.metadata]
        return RequestParts(route=(self.policy.method, *xid), headers=headers)

    def check_first_sent(self) -> None:
        """Raises FirstSentMalformed and IntentTooOld."""
        if (first_sent := self.policy.first_sent) is not None:
            lines = [value for name, value in self.metadata if name == first_sent.name.lower()]
            first_sent.check(self.policy.operation, lines, time.time())

    def tenant(self, context: Any) -> str:
        """Whose call it is. Raises ScopeMissing."""
        return "" if self.policy.tenant is None else tenant_of(self.policy.tenant, context)


def seconds_left(context: Any) -> float | None:
    """How long a call's client waits; None: it has not said."""
    seconds = context.time_remaining()
    return None if seconds is None or seconds > _WAIT_SECONDS_MAX else seconds


def tenant_of(tenant: Callable[[Any], str | None], context: Any) -> str:
    """Whose call it is. Raises ScopeMissing where that is not told: then nothing is looked up, and nothing runs."""
    try:
        found = tenant(context)
    except TricordError:
        raise
    except Exception as error:
        logger.exception("the tenant of a call could not be told")
        raise ScopeMissing("whose request it is could not be told") from error
    if not isinstance(found, str) or not found:
        raise ScopeMissing("whose request it is is not known")
    if "\0" in found or len(found.encode("utf-8", "replace")) > TENANT_BYTES_MAX:
        raise ScopeMissing(f"the tenant is longer than {TENANT_BYTES_MAX} bytes, or holds a zero")
    return found


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
