"""A call's end as a stored answer, and back: the serialized message, the status, and the listed trailing metadata.

An `Answer` of the codec GRPC holds the code as `status` and the serialized response as `body`. Its headers are the
trailing metadata; others, whose names no metadata can have, are the initial metadata, and tell the status message, and
that the body is a stream's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import grpc
from google.protobuf.message import Message

from participant_sdk.errors import printable
from participant_sdk.idempotency.grpc_spool import split
from participant_sdk.idempotency.grpc_status import DETAILS_KEY
from participant_sdk.idempotency.record import Answer, Codec, State

Pairs: TypeAlias = tuple[tuple[str, str | bytes], ...]

REPLAYED_KEY: Final = "idempotency-replayed"
REPLAYED: Final = ((REPLAYED_KEY, "true"),)
"""What the initial metadata of a replay begin with."""

_MESSAGE: Final = b":message"
_STREAM: Final = b":stream"
_INITIAL: Final = b":initial:"
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(frozen=True, slots=True)
class Ending:
    """How a call ends. `body`: the response of a call that is OK and has one."""

    code: grpc.StatusCode
    message: str = ""
    trailing_metadata: Pairs = ()
    body: bytes = b""
    streamed: bool = False
    """Whether `body` holds the responses of a stream (see `Spool.data`)."""
    initial_metadata: Pairs = ()

    @property
    def responses(self) -> Iterator[bytes]:
        """What is sent before the status."""
        if self.streamed:
            yield from split(self.body)
        elif self.code is grpc.StatusCode.OK:
            yield self.body


def answer_of(ending: Ending, kept: Collection[str]) -> Answer:
    """What is stored of it; `kept`: the names of the metadata that are part of the answer."""
    headers: list[tuple[bytes, bytes]] = []
    if ending.message:
        headers.append((_MESSAGE, ending.message.encode("utf-8", "replace")))
    if ending.streamed:
        headers.append((_STREAM, b""))
    headers.extend(
        (_INITIAL + name.encode("ascii"), _bytes(value)) for name, value in ending.initial_metadata if name in kept
    )
    headers.extend(
        (name.encode("ascii"), _bytes(value))
        for name, value in ending.trailing_metadata
        if name == DETAILS_KEY or name in kept
    )
    return Answer(Codec.GRPC, ending.code.value[0], tuple(headers), ending.body)


def grpc_answer(
    response: Message | bytes = b"",
    *,
    code: grpc.StatusCode = grpc.StatusCode.OK,
    message: str = "",
    trailing_metadata: Pairs = (),
    initial_metadata: Pairs = (),
) -> Answer:
    """An answer for a handler that ends its run itself, such as by `run.complete`. All of the metadata is kept."""
    body = response if isinstance(response, bytes) else response.SerializeToString()
    ending = Ending(code, message, trailing_metadata, body, initial_metadata=initial_metadata)
    return answer_of(ending, {name for name, _ in (*trailing_metadata, *initial_metadata)})


def ending_of(answer: Answer) -> Ending:
    """The same ending again."""
    message, streamed, trailing, initial = "", False, list[tuple[str, str | bytes]](), list[tuple[str, str | bytes]]()
    for name, value in answer.headers:
        if name == _MESSAGE:
            message = value.decode("utf-8", "replace")
        elif name == _STREAM:
            streamed = True
        elif name.startswith(_INITIAL):
            initial.append(_pair(name.removeprefix(_INITIAL).decode("ascii"), value))
        else:
            trailing.append(_pair(name.decode("ascii"), value))
    code = _CODES.get(answer.status, grpc.StatusCode.UNKNOWN)
    return Ending(code, message, tuple(trailing), answer.body, streamed, tuple(initial))


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8")


def _pair(name: str, value: bytes) -> tuple[str, str | bytes]:
    return name, value if name.endswith("-bin") else value.decode("utf-8")


def state_of(ending: Ending, stored_codes: Collection[grpc.StatusCode]) -> State:
    """What a run has come to whose call ends so."""
    if ending.code is grpc.StatusCode.OK:
        return State.SUCCEEDED
    return State.FAILED_FINAL if ending.code in stored_codes else State.FAILED_RETRYABLE


def failure(ending: Ending) -> str:
    """For people, why a run that may run again has come to nothing."""
    return printable(f"{ending.code.name}: {ending.message}" if ending.message else ending.code.name)
