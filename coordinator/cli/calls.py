"""Calls to a running coordinator; what goes wrong ends the command, with a message and an exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from .exits import CONFLICT, ERROR, NOT_FOUND, UNAVAILABLE, USAGE, fail

if TYPE_CHECKING:
    import grpc

ENDPOINT_DEFAULT = "127.0.0.1:7800"
CALL_TIMEOUT_S = 10.0

_Command = TypeVar("_Command", bound=Callable[..., Any])


def endpoint_option(command: _Command) -> _Command:
    """Add ``--endpoint``."""
    return click.option(
        "--endpoint", envvar="TRICORD_ENDPOINT", default=ENDPOINT_DEFAULT, show_default=True, metavar="HOST:PORT",
        help="The coordinator's address (or TRICORD_ENDPOINT).",
    )(command)  # fmt: skip


@contextmanager
def connected(endpoint: str) -> Iterator[grpc.Channel]:
    """A channel to the coordinator."""
    import grpc

    with grpc.insecure_channel(endpoint, options=[("grpc.max_receive_message_length", -1)]) as channel:
        yield channel


def call(endpoint: str, method: str, request: Any) -> Any:
    """Call the operator service; end the command if that fails."""
    with connected(endpoint) as channel:
        return call_on(channel, endpoint, method, request)


def call_on(channel: grpc.Channel, endpoint: str, method: str, request: Any) -> Any:
    """Likewise on a channel, for commands that call again and again."""
    import grpc

    try:
        return ask(channel, method, request)
    except grpc.RpcError as error:
        code, details = error.code(), error.details()
    end_for(endpoint, code, details)


def ask(channel: grpc.Channel, method: str, request: Any) -> Any:
    """Call the operator service. Raises grpc.RpcError."""
    from tricord.v1 import operator_pb2_grpc

    return getattr(operator_pb2_grpc.OperatorServiceStub(channel), method)(request, timeout=CALL_TIMEOUT_S)


def end_for(endpoint: str, code: grpc.StatusCode, details: str | None) -> NoReturn:
    """End the command as a call has ended."""
    import grpc

    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        hint = "is it running? name its address with --endpoint or TRICORD_ENDPOINT"
        fail(f"the coordinator at {endpoint} did not answer: {details}; {hint}", UNAVAILABLE)
    exits = {
        grpc.StatusCode.INVALID_ARGUMENT: USAGE,
        grpc.StatusCode.NOT_FOUND: NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION: CONFLICT,
    }
    fail(str(details), exits.get(code, ERROR))


def time_text(message: Any, field: str) -> str:
    """A message's time as ISO 8601 in UTC; empty if it has none."""
    if not message.HasField(field):
        return ""
    when: datetime = getattr(message, field).ToDatetime()
    return when.isoformat(timespec="milliseconds") + "Z"
