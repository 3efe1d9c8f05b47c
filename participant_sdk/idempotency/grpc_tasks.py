"""A keyed call that runs in a task: as in `grpc_threads`, received, begun or replayed, run, stored, answered."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import grpc

from participant_sdk.errors import TricordError
from participant_sdk.idempotency.errors import LeaseLost
from participant_sdk.idempotency.grpc_answers import REPLAYED, Ending, failure
from participant_sdk.idempotency.grpc_calls import CUT_OFF, Call, seconds_left
from participant_sdk.idempotency.grpc_context import AsyncKeyedContext
from participant_sdk.idempotency.grpc_policy import ServerStreaming
from participant_sdk.idempotency.grpc_received import Received
from participant_sdk.idempotency.grpc_spool import Spool
from participant_sdk.idempotency.grpc_status import GrpcCodes, Refusal
from participant_sdk.idempotency.idempotency import AsyncIdempotency
from participant_sdk.idempotency.quotas import Quotas
from participant_sdk.idempotency.record import State
from participant_sdk.idempotency.replay import Replay
from participant_sdk.idempotency.runs import AsyncRun


class TaskDoor:
    """For the calls of a `grpc.aio.server` whose handlers are coroutines."""

    def __init__(self, idempotency: AsyncIdempotency, codes: GrpcCodes, quotas: Quotas) -> None:
        self._idempotency = idempotency
        self._codes = codes
        self._quotas = quotas

    async def answer(self, call: Call, key: str | None, source: Any, context: Any) -> bytes | None:
        """The response to a call; None for one that streams them, which are written then.

        `key` None: it is in a field. `source`: the call's message, or its stream.
        """
        with Received(call) as received, Spool() as spool:
            try:
                key = await _receive(call, key, received, source, context)
                met = None if key is None else await self._begin(call, key, received, context)
                again = await call.ending_of_async(met.answer, context) if isinstance(met, Replay) else None
            except TricordError as error:
                await self.refuse(context, error)
                return None
            if again is not None:
                await _say_first(context, again, replayed=True)
                return await _end(call, again, again.responses, context)
            if not isinstance(met, AsyncRun):
                ending = await _handled(call, received, None, context, holds=False)
                return await _end(call, ending, _unsent(call, ending, spool), context)
            try:
                ending = await _run(call, met, received, spool, context)
            except Exception as error:
                refusal = self._codes.of_run(error)
                if refusal is None:
                    raise
                await _refuse(context, refusal)
                return None
            await _say_first(context, ending)
            return await _end(call, ending, _unsent(call, ending, spool), context)

    async def refuse(self, context: Any, error: TricordError) -> None:
        """The call ends with what there is for that error."""
        await _refuse(context, self._codes.refusal(error))

    async def _begin(self, call: Call, key: str, received: Received, context: Any) -> Replay | AsyncRun:
        request = received.keyed(key, context)
        with self._quotas.token(call.operation.name, request.tenant) as token:
            begun = await self._idempotency.begin(call.operation, request, deadline_s=seconds_left(context))
            token.spent = isinstance(begun, AsyncRun)
        return begun


async def _receive(call: Call, key: str | None, received: Received, source: Any, context: Any) -> str | None:
    """All that the call sends; its key."""
    if not call.requests_streamed:
        received.add(source)
    else:
        async for message in source:
            received.add(message)
        # A stream that is cut off looks as if it had ended; asking gRPC once more has it take note of which it was.
        await context.read()
        if context.cancelled():
            await context.abort(grpc.StatusCode.CANCELLED, CUT_OFF)
    if key is None:
        key = received.field_key()
        if key is not None:
            call.check_streams()
    return key


async def _run(call: Call, met: AsyncRun, received: Received, spool: Spool, context: Any) -> Ending:
    """Run the handler and store how its call ends. If another run takes over meanwhile, the handler is cancelled."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def stop() -> None:
        loop.call_soon_threadsafe(_cancel, met, task)

    met.on_lost = stop
    spooled = spool if call.policy.server_streaming is ServerStreaming.SPOOL else None
    try:
        async with met as run:
            holds = spooled is not None or not call.responses_streamed
            ending = await _handled(call, received, spooled, context, holds=holds)
            met.on_lost = None
            await _settle(call, run, ending)
    except asyncio.CancelledError:
        if not met.lost or task.uncancel():  # by its client, too
            raise
        raise LeaseLost("another run of the same request has taken over") from None
    return ending


def _cancel(run: AsyncRun, task: asyncio.Task[Any]) -> None:
    if run.on_lost is not None:  # the handler is not over
        task.cancel()


async def _handled(call: Call, received: Received, spool: Spool | None, context: Any, *, holds: bool) -> Ending:
    """Run the handler: how it ends its call. The responses of a stream go into `spool`; without one, out.

    `holds`: its initial metadata waits as well.
    """

    async def sink(response: Any) -> None:
        message = call.response(response)
        if spool is None:
            await context.write(message)
        else:
            spool.put(message)

    request, body = received.request_async(), b""
    inner = AsyncKeyedContext(
        context, request if call.requests_streamed else None, sink if call.responses_streamed else None, holds=holds
    )
    with inner.noting():
        if inspect.isasyncgenfunction(call.behavior):
            async with aclosing(call.behavior(request, inner)) as responses:
                async for response in responses:
                    await sink(response)
        else:
            response = await call.behavior(request, inner)
            if not call.responses_streamed and inner.ending.code is grpc.StatusCode.OK:
                body = call.response(response)
    if not call.responses_streamed or spool is None:
        return replace(inner.ending, body=body)
    return replace(inner.ending, body=call.stored_of(spool), streamed=True)


def _unsent(call: Call, ending: Ending, spool: Spool) -> Iterable[bytes]:
    """What is still to be sent of a run's answer."""
    if not call.responses_streamed:
        return ending.responses
    if not ending.streamed or call.state_of(ending) is State.FAILED_RETRYABLE:
        return ()
    return spool.messages()


async def _settle(call: Call, run: AsyncRun, ending: Ending) -> None:
    """Make what the handler has done and said durable. It may have done so itself."""
    if run.ended:
        return
    match call.state_of(ending):
        case State.SUCCEEDED:
            await run.succeed(call.answer_of(ending))
        case State.FAILED_FINAL:
            await run.fail_final(call.answer_of(ending))
        case _:
            await run.fail_retryable(failure(ending))


async def _refuse(context: Any, refusal: Refusal) -> None:
    await context.abort(refusal.code, refusal.message, refusal.trailing_metadata)


async def _say_first(context: Any, ending: Ending, *, replayed: bool = False) -> None:
    """Send the initial metadata."""
    if said := (REPLAYED if replayed else ()) + ending.initial_metadata:
        with suppress(grpc.aio.UsageError):  # another interceptor has sent initial metadata: ours comes too late
            await context.send_initial_metadata(said)


async def _end(call: Call, ending: Ending, responses: Iterable[bytes], context: Any) -> bytes | None:
    """Send what there is; for a status other than OK this raises, as gRPC's own `abort` does."""
    body = None
    if call.responses_streamed:
        for response in responses:
            await context.write(response)
    else:
        body = next(iter(responses), b"")
    if ending.trailing_metadata:
        context.set_trailing_metadata(ending.trailing_metadata)
    if ending.code is not grpc.StatusCode.OK:
        await context.abort(ending.code, ending.message)
    elif ending.message:
        context.set_details(ending.message)
    return body
