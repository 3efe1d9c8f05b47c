"""What an initiator asks for: the branches, their payloads, and the key under which asking again is safe.

Everything that can be wrong with a request is told as InvalidRequest before anything is sent.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, unique
from typing import Final

from participant_sdk.coordinator_messages import write_payload
from participant_sdk.errors import InvalidRequest, printable
from participant_sdk.initiator_metadata import metadata_faults
from participant_sdk.labels import label_faults
from participant_sdk.payload import Payload, encode
from tricord.v1 import coordinator_pb2

TIMEOUT_SECONDS_MAX: Final = 315_576_000_000.0
"""What a protobuf Duration can hold."""


@unique
class Wait(Enum):
    """What `execute` waits for."""

    DECIDED = coordinator_pb2.WAIT_DECIDED
    """The decision is durable; the branches are being confirmed."""
    FINISHED = coordinator_pb2.WAIT_FINISHED
    """Every branch has been confirmed or cancelled."""
    ACCEPTED = coordinator_pb2.WAIT_ACCEPTED
    """The transaction is begun, durably; nothing is decided yet."""


@dataclass(frozen=True, slots=True)
class BranchRequest:
    """One branch to run; made by `branch`."""

    participant: str
    action: str
    payload: Payload


def branch(participant: str, action: str, payload: object) -> BranchRequest:
    """A branch of a transaction: `action` of `participant` with a payload of any type that it may annotate.

    Raises InvalidRequest if the payload is of another type or cannot be encoded.
    """
    try:
        return BranchRequest(participant, action, encode(payload))
    except (TypeError, ValueError) as error:
        text = f"the payload of {participant}/{action} cannot be sent: {error}"
        raise InvalidRequest(text, {"payload": str(error)}) from None


def new_key() -> str:
    """A fresh idempotency key: a UUIDv7 (RFC 9562) in hexadecimal, so that keys sort by their time."""
    value = int.from_bytes(os.urandom(16), "big")
    value = (time.time_ns() // 1_000_000) << 80 | value & ((1 << 80) - 1)
    value = value & ~(0xF << 76) | 7 << 76
    value = value & ~(0b11 << 62) | 0b10 << 62
    return f"{value:032x}"


def request_of(
    branches: tuple[BranchRequest, ...],
    key: str,
    timeout: float | None,
    wait: Wait,
    metadata: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
) -> coordinator_pb2.ExecuteRequest:
    """The message of a request; raises InvalidRequest."""
    request = coordinator_pb2.ExecuteRequest(wait=wait.value)
    _fill(request, key, timeout, metadata, labels)
    for position, each in enumerate(branches):
        try:
            request.branches.add(participant=each.participant, action=each.action, payload=write_payload(each.payload))
        except (TypeError, ValueError) as error:
            text = f"branch {each.participant!r}/{each.action!r} cannot be sent: {error}"
            raise InvalidRequest(text, {f"branches[{position}]": str(error)}) from None
    return request


def begin_request(
    key: str, timeout: float | None, metadata: Mapping[str, str] | None, labels: Mapping[str, str] | None
) -> coordinator_pb2.BeginRequest:
    """The message that begins an interactive transaction; raises InvalidRequest."""
    request = coordinator_pb2.BeginRequest()
    _fill(request, key, timeout, metadata, labels)
    return request


def duration_faults(timeout: float) -> str:
    """What is wrong with a time-out in seconds; empty if it can be sent."""
    if not math.isfinite(timeout):
        return "is not a finite number of seconds"
    return "is longer than ten thousand years" if abs(timeout) > TIMEOUT_SECONDS_MAX else ""


def _fill(
    request: coordinator_pb2.ExecuteRequest | coordinator_pb2.BeginRequest,
    key: str,
    timeout: float | None,
    metadata: Mapping[str, str] | None,
    labels: Mapping[str, str] | None,
) -> None:
    """What every starting request has; raises InvalidRequest."""
    if not key:
        raise InvalidRequest("the idempotency key is empty", {"idempotency_key": "is empty"})
    if timeout is not None and (fault := duration_faults(timeout)):
        raise InvalidRequest(f"the timeout is {timeout}", {"timeout": fault})
    try:
        request.idempotency_key = key
    except (TypeError, ValueError) as error:  # not a string, or one that is not Unicode text
        text = f"the idempotency key cannot be sent: {error}"
        raise InvalidRequest(text, {"idempotency_key": str(error)}) from None
    if metadata is not None:
        _refuse("the metadata", metadata_faults(metadata))
        request.metadata.update(metadata)
    if labels is not None:
        _refuse("the labels", label_faults(labels))
        request.labels.update(labels)
    if timeout is not None:
        request.timeout.FromNanoseconds(round(timeout * 1e9))


def _refuse(what: str, faults: dict[str, str]) -> None:
    """Raises InvalidRequest if there are any."""
    if faults:
        text = "; ".join(f"{field}: {fault}" for field, fault in faults.items())
        raise InvalidRequest(f"{what} cannot be sent: {printable(text)}", faults)
