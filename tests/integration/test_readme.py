"""README's commands and code, run as a reader would run them, only with other ports and in a folder of their own."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from examples.transfer.processes import free_address

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent
# Run by .ci/run (below), or only meant for a shell.
ELSEWHERE = {"make setup", "make demo", "make test", ". .venv/bin/activate"}
SERVERS = {"tricord serve --store first.db": "tricord: listening on", "python stock.py": "registered at"}
TIMEOUT_S = 60.0


def blocks(language: str) -> list[str]:
    """The contents of README's fenced blocks of that language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Every line of README's shell blocks."""
    return [line for block in blocks("sh") for line in block.splitlines() if line]


class Reader:
    """Somebody who follows the README in one folder."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        coordinator, participant = free_address(), free_address()
        self._ports = {"127.0.0.1:7800": coordinator, "127.0.0.1:7801": participant}
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TRICORD_")},
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "TRICORD_LISTEN": coordinator,
            "TRICORD_ENDPOINT": coordinator,
        }

    def save(self, name: str, text: str) -> None:
        """Save a file that the README shows."""
        for printed, used in self._ports.items():
            text = text.replace(printed, used)
        (self._folder / name).write_text(text, encoding="utf-8")

    def run(self, command: str) -> str:
        """Run a command to its end; what it printed."""
        done = subprocess.run(
            shlex.split(command), cwd=self._folder, env=self._environment, text=True, capture_output=True,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, command: str, ready: str) -> None:
        """Start a server, and wait until it says that it is ready; it is ended with the test."""
        process = subprocess.Popen(
            shlex.split(command), cwd=self._folder, env=self._environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._stack.callback(self._end, process)
        assert process.stdout is not None
        seen = ""
        for line in process.stdout:
            seen += line
            if ready in line:
                return
        raise AssertionError(f"{command} ended before it was ready: {seen}")

    def _end(self, process: subprocess.Popen[str]) -> None:
        process.terminate()
        process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    with ExitStack() as stack:
        yield Reader(tmp_path, stack)


def test_the_first_participant_works_as_printed(reader: Reader) -> None:
    stock, order = blocks("python")
    reader.save("stock.py", stock)
    reader.save("order.py", order)
    printed: dict[str, list[str]] = {}
    for command in commands():
        if command in SERVERS:
            reader.start(command, SERVERS[command])
        elif command not in ELSEWHERE:
            printed.setdefault(command, []).append(reader.run(command))
    first, second = printed.pop("python order.py mug 1")
    assert first.startswith("CONFIRMED ")
    assert second.startswith("CANCELLED ")
    assert "out_of_stock" in second
    xid = second.split()[1]
    assert xid in printed["tricord list"][0]
    assert xid in printed["tricord list --state cancelled -o json"][0]
    assert "out_of_stock" in reader.run(f"tricord show {xid}")


def test_the_commands_that_are_not_run_here_are_run_by_ci() -> None:
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in ELSEWHERE - {". .venv/bin/activate"}:
        assert command in commands()
        assert f"step {command}\n" in ci


def test_the_folders_and_files_that_are_named_exist() -> None:
    named = set(re.findall(r"\]\(([^)]+)\)", README)) | set(re.findall(r"`((?:examples|protos)/[^`]+)`", README))
    assert named
    for name in named:
        assert (ROOT / name).exists(), name
