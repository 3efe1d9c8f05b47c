"""A coordinator's database whose coordinator is gone, and the participants that are left."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.postgres import PostgresServer

from .processes import Process, start_coordinator

LIVE, DEAD = ("noop-1", "noop-2"), "noop-3"


class Scene:
    """A fresh database with registered participants, some of them gone, and no coordinator yet."""

    def __init__(self, server: PostgresServer, folder: Path, stack: ExitStack, gone: Sequence[str] = ()) -> None:
        self.dsn = server.create_database()
        stack.callback(server.drop_database, self.dsn)
        self.folder = folder
        with ExitStack() as first:
            _, address = start_coordinator(first, folder, self.dsn)  # makes the schema, and hears who takes part
            for name in (*LIVE, DEAD):
                process = Process("benchmarks.noop_participant", [name, address], folder / f"{name}.log")
                (first if name in gone else stack).enter_context(process)

    def start(self, stack: ExitStack) -> tuple[Process, str]:
        """A coordinator, which takes over what it finds; and its address."""
        return start_coordinator(stack, self.folder, self.dsn)
