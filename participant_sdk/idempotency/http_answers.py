"""What an HTTP door makes of the answer of a handler: what becomes of its run, what is stored, what is sent. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from participant_sdk.idempotency.http_headers import Headers, kept, length_header, said
from participant_sdk.idempotency.http_policy import HttpOperation
from participant_sdk.idempotency.http_spool import Spool
from participant_sdk.idempotency.http_statuses import Ending
from participant_sdk.idempotency.record import Answer, Codec, answer_given

EXECUTED: Final = "executed"
"""It has run now, and its answer is kept."""
REPLAYED: Final = "replayed"
"""It has run before."""
RETRYABLE: Final = "retryable"
"""It has run now and left nothing: a repeat runs again."""
NOT_KEPT: Final = "answer-not-stored"
"""It has run now, and a repeat will be told so, but not given the answer."""
BYPASSED: Final = "bypassed"
"""It has run now, unprotected: the store was down. A repeat may run again. Also its mark in a scope's `state`."""


class AnswerWithheld(Exception):
    """Raised in a handler that answers: its answer was not given, because what it says did not become durable."""


@dataclass(frozen=True, slots=True)
class Decision:
    """How a run ends: DONE and FINAL with `answer`, AGAIN with `reason`. `told`: what its client is told of it."""

    ending: Ending
    told: str
    answer: Answer
    reason: str = ""


_NOTHING: Final = Answer(Codec.HTTP, 0, (), b"")


def decide(
    operation: HttpOperation,
    method: str,
    status: int,
    headers: Iterable[tuple[bytes, bytes]],
    body: Spool,
    *,
    whole: bool,
) -> Decision:
    """What becomes of a run that was answered so. `whole`: the body is all there. Raises what `redact` raises."""
    headers = tuple(headers)
    ending = operation.statuses.ending(status, said(headers))
    answer = _answer(operation, method, status, headers, body) if whole and ending is not Ending.AGAIN else None
    if ending is Ending.DONE:
        return (
            Decision(ending, NOT_KEPT, _too_large(operation, status))
            if answer is None
            else (Decision(ending, EXECUTED, answer))
        )
    if ending is Ending.FINAL and answer is not None:
        return Decision(ending, EXECUTED, answer)
    # Also a final one that cannot be kept: nothing was done.
    return Decision(Ending.AGAIN, RETRYABLE, _NOTHING, f"HTTP status {status}")


def _answer(operation: HttpOperation, method: str, status: int, headers: Headers, body: Spool) -> Answer | None:
    """What is stored; None if it is too large for it."""
    most = operation.operation.answer_bytes_max
    if body.size > most:
        return None
    stored = kept(headers, operation.kept_headers)
    if method == "HEAD":
        stored += length_header("HEAD", status, headers, 0)
    answer = Answer(Codec.HTTP, status, stored, body.whole())
    if operation.redact is not None:
        answer = answer_given("redact", operation.redact(answer))
    return answer if answer.bytes_held <= most else None


def _too_large(operation: HttpOperation, status: int) -> Answer:
    """An answer that leaves a tombstone."""
    return Answer(Codec.HTTP, status, (), bytes(operation.operation.answer_bytes_max + 1))
