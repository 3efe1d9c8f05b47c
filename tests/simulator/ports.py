"""Where the parts of the simulated town meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from participant_sdk.call import IncomingCall, Reply

from .loop import SimLoop


class Participant(Protocol):
    """One participant: a process on a ``SimLoop`` of its own, and a database that outlives it."""

    name: str

    @property
    def fence_id(self) -> str:
        """What is registered of it."""

    @property
    def answers_as(self) -> str:
        """The fence id that its present process names: another one if it was started on the wrong database."""

    @property
    def loop(self) -> SimLoop:
        """That of its present process; another one after ``start``."""

    def start(self) -> None:
        """Start its process, at first and after a crash (``loop.crash`` ends it; open local transactions roll back)."""

    def heal(self) -> None:
        """Nothing goes wrong in it any more."""

    def receive(self, call: IncomingCall, on_reply: Callable[[Reply], None]) -> None:
        """Take a call, in a turn of ``loop``; ``on_reply`` is called at most once, in a turn of ``loop``."""
