"""Participants that initiators call directly: they make their Try a branch by the SDK's own steps."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from coordinator.engine import Engine, FormatNotReady, UnknownXid
from coordinator.orders import Denied, Report
from coordinator.wire import branch_message
from coordinator.wire_open import read_enlist, read_report
from participant_sdk.client_asking import Ask, Pause
from participant_sdk.client_enlisting import Enlisted, RunTry, Wanted, enlisting
from participant_sdk.coordinator_messages import Failure
from tricord.v1 import coordinator_pb2 as pb

from .coordinators import SERVED, Client, Unanswered
from .participants import ParticipantNode

_NO = grpc.StatusCode.FAILED_PRECONDITION


async def enlist(node: ParticipantNode, client: Client, wanted: Wanted) -> Enlisted:
    """Enlist, Try, Report, as ``participant_sdk.enlist`` does it. Raises as ``client_enlisting.enlisting`` does."""
    steps = enlisting(wanted)
    answer: Any = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as stop:
            enlisted: Enlisted = stop.value
            return enlisted
        match step:
            case Ask(request, seconds):
                answer = await _ask(client, request, seconds)
            case RunTry(call):
                replied = node.loop.create_future()
                node.receive(call, replied.set_result)
                answer = await replied
            case Pause(seconds):
                await asyncio.sleep(seconds)
                answer = None


async def _ask(client: Client, request: Any, seconds: float) -> Any:
    """What the coordinator's services make of a request, and what gRPC makes of their errors."""

    async def work(engine: Engine) -> Any:
        if isinstance(request, pb.EnlistRequest):
            xid, order = read_enlist(request)
            tx = await engine.order(xid, order)
            index = order.find(tx)
            assert index is not None
            return pb.EnlistResponse(branch=branch_message(tx, index))
        xid, reply = read_report(request)
        tx = await engine.order(xid, Report(reply))
        return pb.ReportResponse(state=int(tx.state))  # type: ignore[arg-type]  # the same numbers

    what = type(request).__name__.removesuffix("Request")
    try:
        return await client.ask(client.any(), what, work, min(seconds, 1.0))
    except Denied as denied:
        return Failure(_NO, str(denied), denied.reason)
    except FormatNotReady as error:
        return Failure(_NO, str(error), "FORMAT_NOT_READY")
    except UnknownXid as error:
        return Failure(grpc.StatusCode.NOT_FOUND, str(error), "TRANSACTION_NOT_FOUND")
    except Unanswered as error:
        return Failure(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
    except SERVED as error:
        return Failure(grpc.StatusCode.UNAVAILABLE, str(error))
