"""What all parts of the operators' service stand on."""

from __future__ import annotations

import asyncio
import time

from tricord.v1 import operator_pb2_grpc as pb_grpc

from .config import Settings
from .engine import Engine
from .participants import Participants


class OperatorBase(pb_grpc.OperatorServiceServicer):
    """The parts are mixed into one service; none of them has anything of its own."""

    def __init__(self, engine: Engine, participants: Participants, settings: Settings) -> None:
        self._engine = engine
        self._participants = participants
        self._settings = settings
        self._started_s = time.monotonic()
        self._examining = asyncio.Lock()
