"""Where the parts of the simulated town meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from participant_sdk.call import IncomingCall, Reply

from .loop import SimLoop


class Connected(Protocol):
    """Who has a stream to an instance."""

    def ended(self) -> None:
        """The instance's process has ended."""


class Instance(Protocol):
    """One instance of a participant: a process on a ``SimLoop`` of its own, which is started again and again."""

    name: str
    """Its address."""
    participant: str
    """Whose it is."""
    connected: dict[Connected, None]
    """Those that its process's end is told to."""

    @property
    def answers_as(self) -> str:
        """The fence id that its present process names: another one if it was started on the wrong database."""

    @property
    def loop(self) -> SimLoop:
        """That of its present process; another one after ``start``."""

    @property
    def refuses(self) -> bool:
        """Whether connections to it are refused while it is down; else nothing answers."""

    def start(self) -> None:
        """Start its process, at first and after a crash (``loop.crash`` ends it; open local transactions roll back)."""

    def receive(self, call: IncomingCall, on_reply: Callable[[Reply], None]) -> None:
        """Take a call, in a turn of ``loop``; ``on_reply`` is called at most once, in a turn of ``loop``."""
