"""How a client is told that its retries have come to nothing."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from participant_sdk.idempotency.errors import IdempotencyError


class RetriesExhausted(IdempotencyError):
    """No try was answered. Whether the server has done it is not known: send the same request with the same `key`.

    It is of the last error's class, too: `except httpx.ConnectError`, `except grpc.RpcError` and its `code()` go on
    working. `attempts` tells how often it was sent, `last_error` what came last, `seconds` how long it took.
    """

    reason = "IDEMPOTENCY_RETRIES_EXHAUSTED"
    retryable: ClassVar[bool] = True

    attempts: int
    last_error: BaseException
    key: str
    seconds: float

    def __str__(self) -> str:
        sent = "once" if self.attempts == 1 else f"{self.attempts} times"
        return f"sent {sent} in {self.seconds:.3f} s without an answer; the last error: {_said(self.last_error)}"

    __repr__ = __str__


def _said(error: BaseException) -> str:
    """In one line, with what gRPC's own text hides between others."""
    code, details = getattr(error, "code", None), getattr(error, "details", None)
    if callable(code) and callable(details):
        return f"{getattr(code(), 'name', code())}: {details()}"
    return f"{type(error).__name__}: {error}"


def retries_exhausted(error: BaseException, attempts: int, seconds: float, key: str) -> RetriesExhausted:
    """The error to raise after the last of some tries."""
    kind: Any = type(error)
    made: Any = Exception.__new__(_also(kind))
    made.__dict__.update(vars(error))  # what the last error's own methods read
    made.args = error.args
    made.attempts, made.last_error, made.seconds, made.key = attempts, error, seconds, key
    made.__cause__ = error
    found: RetriesExhausted = made
    return found


@functools.cache
def _also(kind: Any) -> type[RetriesExhausted]:
    return type("RetriesExhausted", (RetriesExhausted, kind), {"__module__": __name__, "__doc__": ""})
