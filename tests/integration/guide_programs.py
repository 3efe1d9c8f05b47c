"""The guides' blocks of code as the files and commands that they are, and a caller for the participants in them.

A block of Python is the file that is named above it; a block of shell is commands, one a line. Read in the order of
the page, they are what somebody does who follows it.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from participant_sdk import Payload
from participant_sdk.payload import encode
from tests.contract.participant.world import CANCEL, CONFIRM, TRY
from tricord.v1 import participant_pb2, participant_pb2_grpc, types_pb2

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = (
    "participants.md",
    "patterns.md",
    "hot-rows.md",
    "initiators.md",
    "idempotency.md",
    "testing-idempotency.md",
)
TIMEOUT_S: Final = 100.0

_BLOCK: Final = re.compile(r"^(?:`(?P<file>\S+)`:\n\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block. `file` is empty unless the line above it names one."""

    language: str
    file: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The lines of a shell block, those that go on with a backslash joined."""
        return [line for line in self.text.replace("\\\n", "").splitlines() if line]


def blocks(page: str) -> list[Block]:
    """All fenced blocks of a page, in their order."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found = [Block(match["language"], match["file"] or "", match["text"]) for match in _BLOCK.finditer(text)]
    assert 2 * len(found) == len(re.findall(r"^```", text, re.MULTILINE))
    return found


def programs() -> dict[str, str]:
    """The text of every file of the guide."""
    return {block.file: block.text for page in PAGES for block in blocks(page) if block.file}


def save(folder: Path, file: str, text: str) -> None:
    """Save one file."""
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def run(command: str, folder: Path, **environment: str) -> str:
    """Run a command of the guide to its end, in the development environment; what it printed."""
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=plain_environment() | environment, text=True, capture_output=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def plain_environment() -> dict[str, str]:
    """This process's environment, with the programs of its Python, without what was meant for this process alone."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TRICORD_", "PYTEST_"))}
    return {**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


class Guide:
    """The guide's files in a folder of their own, to be imported from there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for file, text in programs().items():
            save(folder, file, text)

    def load(self, name: str) -> Any:
        """Import one of the files, as a module."""
        module = importlib.import_module(name)
        assert module.__file__ is not None
        assert Path(module.__file__).parent == self.folder, f"{name} is another module"
        return module

    async def close(self) -> None:
        """Forget the modules, and close their engines."""
        names = {file.removesuffix(".py") for file in programs()}
        for module in [sys.modules.pop(name) for name in names & sys.modules.keys()]:
            engine: Any = getattr(module, "engine", None)
            if hasattr(engine, "sync_engine"):
                await engine.dispose()
            elif engine is not None:
                engine.dispose()


class Caller:
    """Calls one action of a participant that serves, as a coordinator would."""

    def __init__(self, address: str, participant: str, action: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._stub: Any = participant_pb2_grpc.ParticipantServiceStub(self._channel)
        self._participant = participant
        self._action = action

    async def call(
        self, phase: Any, xid: str, payload: object, *, branch_id: int = 1, seconds: float = 20.0
    ) -> participant_pb2.Reply:
        """One call, which says that its reply is waited for so many seconds, and its reply."""
        sent: Payload = encode(payload)
        message = participant_pb2.Call(
            call_id=1,
            phase=phase,
            xid=xid,
            branch_id=branch_id,
            participant=self._participant,
            action=self._action,
            payload=types_pb2.Payload(data=sent.data, content_type=sent.content_type),
            attempt=1,
        )
        message.timeout.FromMilliseconds(int(seconds * 1000))
        requests = {
            TRY: (self._stub.Try, participant_pb2.TryRequest),
            CONFIRM: (self._stub.Confirm, participant_pb2.ConfirmRequest),
            CANCEL: (self._stub.Cancel, participant_pb2.CancelRequest),
        }
        method, request = requests[phase]
        reply: participant_pb2.Reply = (await method(request(call=message))).reply
        return reply

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()
