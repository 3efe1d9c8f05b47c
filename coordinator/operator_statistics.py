"""What operators are told about the whole: how much is open in the store, and how this coordinator fares."""

from __future__ import annotations

import asyncio
import time

import structlog
from google.protobuf.duration_pb2 import Duration

from tricord.v1 import operator_pb2 as pb

from .engine import SILENT_S
from .model import Attention, State
from .operator_base import OperatorBase
from .rpc import Context, answering
from .store.open_rows import OpenRows
from .store.rows import StoreError
from .wire import timestamp

_log = structlog.get_logger(__name__)

STORE_S = 3.0
"""For so long the store is waited for; without it there still are this coordinator's own figures."""
_OPEN = (State.TRYING, State.CONFIRMING, State.CANCELLING)


class OperatorStatistics(OperatorBase):
    """GetStatistics."""

    @answering
    async def GetStatistics(self, request: pb.GetStatisticsRequest, context: Context) -> pb.GetStatisticsResponse:
        """The figures of this moment; this coordinator's own also while the store is away."""
        response = pb.GetStatisticsResponse()
        if self._serving():  # else those who ask again and again would pile up before the store
            try:
                async with asyncio.timeout(STORE_S):
                    response.open.CopyFrom(open_message(await self._engine.store.count_open()))
            except (StoreError, TimeoutError) as error:
                _log.warning("statistics.store_error", error=str(error) or f"no answer within {STORE_S} s")
        response.coordinator.CopyFrom(self._own())
        return response

    def _serving(self) -> bool:
        """Whether the store has answered lately; as ``health`` has it."""
        return time.monotonic() < self._engine.store.answered_s + SILENT_S

    def _own(self) -> pb.CoordinatorStatistics:
        engine, store = self._engine, self._engine.store
        uptime = Duration()
        uptime.FromMilliseconds(int((time.monotonic() - self._started_s) * 1000))
        return pb.CoordinatorStatistics(
            uptime=uptime,
            serving=self._serving(),
            live=engine.live,
            live_max=engine.live_max,
            begun=engine.counts["begun"],
            confirmed=engine.counts["confirmed"],
            cancelled=engine.counts["cancelled"],
            recovered=engine.counts["recovered"],
            flushes=store.flushes,
            store_id=store.store_id,
            store_format=store.format,
            schema_revision=store.revision,
        )


def open_message(opened: OpenRows) -> pb.OpenStatistics:
    """The open transactions' figures on the wire."""
    states: dict[int, pb.StateStatistics] = {state: pb.StateStatistics(state=int(state)) for state in _OPEN}  # type: ignore[arg-type]  # the same numbers
    message = pb.OpenStatistics(more_open=opened.cut)
    for group in opened.groups:
        known = states.get(group.state)
        if known is None:
            continue
        known.count += group.transactions
        known.attention_retrying += group.transactions if group.attention == Attention.RETRYING else 0
        known.attention_stuck += group.transactions if group.attention == Attention.STUCK else 0
        known.attention_violation += group.transactions if group.attention == Attention.VIOLATION else 0
        message.late += group.late
    message.states.extend(states.values())
    if opened.groups:
        message.oldest_create_time.CopyFrom(timestamp(min(group.oldest_ms for group in opened.groups)))
    return message
