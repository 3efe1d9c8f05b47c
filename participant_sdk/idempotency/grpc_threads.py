"""A keyed call that runs in a thread: received, begun or replayed, run, stored, answered; in this order."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from dataclasses import replace
from typing import Any

import grpc

from participant_sdk.errors import TricordError
from participant_sdk.idempotency.grpc_answers import REPLAYED, Ending, failure
from participant_sdk.idempotency.grpc_calls import CUT_OFF, Call, seconds_left
from participant_sdk.idempotency.grpc_context import KeyedContext
from participant_sdk.idempotency.grpc_policy import ServerStreaming
from participant_sdk.idempotency.grpc_received import Received
from participant_sdk.idempotency.grpc_spool import Spool
from participant_sdk.idempotency.grpc_status import GrpcCodes, Refusal
from participant_sdk.idempotency.idempotency import Idempotency
from participant_sdk.idempotency.quotas import Quotas
from participant_sdk.idempotency.record import State
from participant_sdk.idempotency.replay import Replay
from participant_sdk.idempotency.runs import Run


class ThreadDoor:
    """For the calls of a `grpc.server`, and those that a `grpc.aio.server` has a thread for."""

    def __init__(self, idempotency: Idempotency, codes: GrpcCodes, quotas: Quotas) -> None:
        self._idempotency = idempotency
        self._codes = codes
        self._quotas = quotas

    def unary(self, call: Call, key: str | None, source: Any, context: Any) -> bytes:
        """The response to a call that has one. `key` None: it is in a field. `source`: its message, or its stream."""
        with ExitStack() as stack:
            with self.refusing(context):
                received = stack.enter_context(Received(call))
                key = self._receive(call, key, received, source, context)
                met = None if key is None else self._begin(call, key, received, context)
                again = call.ending_of(met.answer, context) if isinstance(met, Replay) else None
            if met is None:
                return call.response(call.behavior(received.request(), context))
            if isinstance(met, Run):
                with self._running(context), met as run:
                    ending = self._run(call, run, received, context)
            elif again is not None:
                ending = again
            _say_first(context, ending, replayed=again is not None)
            _end(context, ending)
            return next(ending.responses, b"")

    def stream(self, call: Call, key: str | None, source: Any, context: Any) -> Iterator[bytes]:
        """The responses to a call that streams them."""
        with ExitStack() as stack:
            with self.refusing(context):
                received = stack.enter_context(Received(call))
                key = self._receive(call, key, received, source, context)
                met = None if key is None else self._begin(call, key, received, context)
                again = call.ending_of(met.answer, context) if isinstance(met, Replay) else None
            if again is not None:
                _say_first(context, again, replayed=True)
                yield from again.responses
                _end(context, again)
            elif not isinstance(met, Run):
                yield from map(call.response, call.behavior(received.request(), context))
            elif call.policy.server_streaming is ServerStreaming.SPOOL:
                yield from self._spooled(call, met, received, context)
            else:
                yield from self._live(call, met, received, context)

    @contextmanager
    def refusing(self, context: Any) -> Iterator[None]:
        """An error of ours in the block is the call's end."""
        try:
            yield
        except TricordError as error:
            _refuse(context, self._codes.refusal(error))

    @contextmanager
    def _running(self, context: Any) -> Iterator[None]:
        """The same for a run: its handler's own errors are left as they are."""
        try:
            yield
        except Exception as error:
            refusal = self._codes.of_run(error)
            if refusal is None:
                raise
            _refuse(context, refusal)

    def _receive(self, call: Call, key: str | None, received: Received, source: Any, context: Any) -> str | None:
        if not call.requests_streamed:
            received.add(source)
        else:
            for message in source:
                received.add(message)
            # A stream that is cut off looks as if it had ended; asking gRPC once more has it take note of which it was.
            next(source, None)
            if not context.is_active():
                context.abort(grpc.StatusCode.CANCELLED, CUT_OFF)
        if key is not None:
            return key
        key = received.field_key()
        if key is not None:
            call.check_streams()
        return key

    def _begin(self, call: Call, key: str, received: Received, context: Any) -> Replay | Run:
        request = received.keyed(key, context)
        with self._quotas.token(call.operation.name, request.tenant) as token:
            begun = self._idempotency.begin(call.operation, request, deadline_s=seconds_left(context))
            token.spent = isinstance(begun, Run)
        return begun

    def _run(self, call: Call, run: Run, received: Received, context: Any) -> Ending:
        inner, body = KeyedContext(context), b""
        with inner.noting():
            response = call.behavior(received.request(), inner)
            if inner.ending.code is grpc.StatusCode.OK:
                body = call.response(response)
        ending = replace(inner.ending, body=body)
        _settle(call, run, ending)
        return ending

    def _spooled(self, call: Call, met: Run, received: Received, context: Any) -> Iterator[bytes]:
        with Spool() as spool:
            with self._running(context), met as run:
                inner = KeyedContext(context)
                with inner.noting():
                    for response in call.behavior(received.request(), inner):
                        spool.put(call.response(response))
                ending = replace(inner.ending, body=call.stored_of(spool), streamed=True)
                _settle(call, run, ending)
            _say_first(context, ending)
            if call.state_of(ending) is not State.FAILED_RETRYABLE:
                yield from spool.messages()
        _end(context, ending)

    def _live(self, call: Call, met: Run, received: Received, context: Any) -> Iterator[bytes]:
        with self._running(context), met as run:
            inner = KeyedContext(context, holds=False)
            with inner.noting():
                yield from map(call.response, call.behavior(received.request(), inner))
            _settle(call, run, inner.ending)
        _end(context, inner.ending)


def in_own_context(make: Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
    """Run a generator in a context of its own: what it binds holds across its steps, and nobody else sees it."""
    own = copy_context()
    responses = own.run(make)
    try:
        while True:
            try:
                response = own.run(next, responses)
            except StopIteration:
                return
            yield response
    finally:
        if isinstance(responses, Generator):
            own.run(responses.close)


def _settle(call: Call, run: Run, ending: Ending) -> None:
    """Make what the handler has done and said durable. It may have done so itself."""
    if run.ended:
        return
    match call.state_of(ending):
        case State.SUCCEEDED:
            run.succeed(call.answer_of(ending))
        case State.FAILED_FINAL:
            run.fail_final(call.answer_of(ending))
        case _:
            run.fail_retryable(failure(ending))


def _refuse(context: Any, refusal: Refusal) -> None:
    context.set_trailing_metadata(refusal.trailing_metadata)
    context.abort(refusal.code, refusal.message)


def _say_first(context: Any, ending: Ending, *, replayed: bool = False) -> None:
    """Send the initial metadata."""
    if said := (REPLAYED if replayed else ()) + ending.initial_metadata:
        with suppress(ValueError, grpc.aio.UsageError):  # somebody has sent initial metadata: ours comes too late
            context.send_initial_metadata(said)


def _end(context: Any, ending: Ending) -> None:
    """Tell gRPC the status; for one other than OK this raises, as gRPC's own `abort` does."""
    if ending.trailing_metadata:
        context.set_trailing_metadata(ending.trailing_metadata)
    if ending.code is not grpc.StatusCode.OK:
        context.abort(ending.code, ending.message)
    elif ending.message:
        context.set_details(ending.message)
