"""The tries of one HTTP request, as far as they are the same for sync and async, and for httpx and httpx2."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from participant_sdk.idempotency.intents import checked_key, current_intent, first_sent_text, new_key
from participant_sdk.idempotency.retry_errors import retries_exhausted
from participant_sdk.idempotency.retry_rules import (
    SAFE_METHODS,
    Fault,
    RetryBudget,
    RetryPolicy,
    Tries,
    http_fault,
)

HEADER: Final = "Idempotency-Key"
KEYED_METHODS: Final = ("POST", "PATCH")
EXTENSION: Final = "idempotency_key"
ATTEMPTS_EXTENSION: Final = "tricord_attempts"
_LIBRARIES: Final = ("httpx", "httpx2")
_NOT_SENT_AGAIN: Final = ("LocalProtocolError", "UnsupportedProtocol", "ProxyError")
_ANSWER_BYTES_MAX: Final = 1 << 20
_REPLAYED: Final = ("idempotency-replayed", "idempotent-replayed")


class Setup:
    """What a transport was given: its policy, which requests get a key, and its clocks."""

    def __init__(
        self,
        inner: Any,
        policy: RetryPolicy | None,
        header: str,
        keyed_methods: Collection[str],
        clock: Callable[[], float],
        time_of_day: Callable[[], float],
        first_sent: str | None,
    ) -> None:
        self.inner = inner
        self.policy = policy or RetryPolicy()
        self.budget = RetryBudget(self.policy)
        self.header = header
        self.first_sent = first_sent
        self.keyed_methods = frozenset(method.upper() for method in keyed_methods)
        self.clock = clock
        self.time_of_day = time_of_day

    def give_key(self, request: Any) -> str:
        """The request's key, which it has from now on; "": it has none."""
        key = self._give_key(request)
        if key and self.first_sent is not None and self.first_sent not in request.headers:
            request.headers[self.first_sent] = first_sent_text(key, self.time_of_day())
        return key

    def _give_key(self, request: Any) -> str:
        given = request.headers.get(self.header)
        extensions: Mapping[str, Any] = request.extensions
        if given is not None:
            return str(given)  # the caller's own business, down to its form
        if EXTENSION in extensions:
            key = extensions[EXTENSION]
            if key is None:  # told not to
                return ""
            key = checked_key(key, f'extensions["{EXTENSION}"]')
        elif request.method.upper() in self.keyed_methods:
            key = current_intent() or new_key()
        else:
            return ""
        request.headers[self.header] = key
        return str(key)


class Sending:
    """The tries of one request, as far as they are the same for sync and async."""

    def __init__(self, request: Any, setup: Setup) -> None:
        self.key = setup.give_key(request)
        self._setup = setup
        self._request = request
        self._again = bool(self.key or request.method.upper() in SAFE_METHODS) and _replayable(request)
        self._began = setup.clock()
        self._tries = Tries(setup.policy, setup.budget, self._began)

    def after_answer(self, response: Any) -> float | None:
        """How long to wait before the next try; None: this is the answer."""
        headers = response.headers
        replayed = any(headers.get(name, "").strip().lower() in ("true", "?1") for name in _REPLAYED)
        retry_after = headers.get("retry-after")
        fault = http_fault(response.status_code, retry_after, replayed, self._setup.policy, self._setup.time_of_day)
        return self._wait_s(fault)

    def after_error(self, error: BaseException) -> float:
        """How long to wait before the next try. Raises the error, or RetriesExhausted, if there is none."""
        wait_s = self._wait_s(Fault(_may_pass(error)))
        if wait_s is not None:
            return wait_s
        if not self._again or not _may_pass(error):
            raise error
        raise retries_exhausted(error, self._tries.attempts, self._setup.clock() - self._began, self.key) from error

    def _wait_s(self, fault: Fault | None) -> float | None:
        if fault is None or not self._again:
            return None
        now = self._setup.clock()
        wait_s = self._tries.wait_s(now, fault)
        if wait_s is not None:  # the next try waits for its connection and its answer no longer than is left
            left_s = self._tries.left_s(now + wait_s)
            limits = self._request.extensions.get("timeout") or {}
            shorter = {name: left_s if limit is None else min(limit, left_s) for name, limit in limits.items()}
            self._request.extensions = {**self._request.extensions, "timeout": shorter}
        return wait_s

    def to_be_read(self, response: Any) -> bool:
        """Whether the answer is read here, so that a connection that breaks in the middle of it is seen here."""
        length = response.headers.get("content-length", "")
        small = length.isascii() and length.isdigit() and int(length) <= _ANSWER_BYTES_MAX
        return self._again and small and _library_of(response) is not None

    def answered(self, response: Any, body: bytes | None) -> Any:
        """The answer for the caller, who reads it as if it came from the network."""
        if body is not None:
            library = _library_of(response)
            response = library.Response(
                response.status_code,
                headers=response.headers,
                stream=library.ByteStream(body),
                extensions=response.extensions,
            )
        response.extensions[ATTEMPTS_EXTENSION] = self._tries.attempts
        return response


def _replayable(request: Any) -> bool:
    """Whether the body is in memory: only then is `content` there."""
    try:
        return request.content is not None
    except RuntimeError:  # httpx.RequestNotRead
        return False


def _library_of(response: Any) -> Any:
    """httpx or httpx2; None: neither."""
    modules = [sys.modules[name] for name in _LIBRARIES if name in sys.modules]
    return next((module for module in modules if isinstance(response, module.Response)), None)


def transport_errors() -> tuple[type[Exception], ...]:
    """What a transport raises when a request was not answered, of those libraries that are in use."""
    return tuple(sys.modules[name].TransportError for name in _LIBRARIES if name in sys.modules)


def _may_pass(error: BaseException) -> bool:
    """Whether it can be otherwise the next time; if not, the request itself or the set-up is wrong."""
    return not any(kind.__name__ in _NOT_SENT_AGAIN for kind in type(error).__mro__)
