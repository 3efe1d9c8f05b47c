"""The demo as its users start it: it ends well, it ends when it is told to, and it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from examples.transfer.databases import eventually
from examples.transfer.processes import ROOT
from tests.postgres import PostgresServer

needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="this system has no /proc")


@contextmanager
def demo(temporary: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """The demo as a process, with a folder for its temporary files; killed at the end if it still runs."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("TRICORD_", "DEMO_"))}
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.transfer.demo"],
        cwd=ROOT,
        env={**variables, "TMPDIR": str(temporary), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def running(temporary: Path) -> list[str]:
    """The command lines of all processes that a demo with this folder has started: they inherit its environment."""
    mark = f"TMPDIR={temporary}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has ended, or is somebody else's
            continue
    return found


def test_ends_well_and_leaves_nothing(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output
    assert output.splitlines()[-1] == "demo: all good"
    assert running(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_keeps_its_files_where_it_is_told_to(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    for _ in range(2):  # the second run takes the place of the first
        with demo(tmp_path, DEMO_DIR=str(kept)) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("2. "):
                    break
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=60)
        assert process.returncode == 130, output
        assert {path.name for path in kept.iterdir()} >= {
            "coordinator.db",
            "bank-a.db",
            "coordinator.log",
            "bank-b.log",
        }
    assert list(tmp_path.iterdir()) == [kept]


def test_spares_a_folder_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "bank-a.db").write_text("somebody's")
    with demo(tmp_path, DEMO_DIR=str(tmp_path)) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "holds other files" in output
    assert (tmp_path / "bank-a.db").read_text() == "somebody's"


@needs_proc
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_leaves_nothing_running_when_it_is_interrupted(tmp_path: Path, end: signal.Signals) -> None:
    with demo(tmp_path) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "kill -9" in line:  # a bank is dead, a client waits, a handler is held
                break
        assert len(running(tmp_path)) >= 3
        process.send_signal(end)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == (130 if end is signal.SIGINT else -signal.SIGKILL), output
    eventually("nothing runs", lambda: running(tmp_path) == [])


def test_leaves_nothing_on_a_server(tmp_path: Path, postgres_server: PostgresServer) -> None:
    with demo(tmp_path, TRICORD_STORE=postgres_server.dsn()) as process:
        output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output
    assert output.splitlines()[-1] == "demo: all good"
    with psycopg.connect(postgres_server.dsn()) as connection:
        left = connection.execute("SELECT datname FROM pg_database WHERE datname LIKE 'tricord_demo_%'").fetchall()
    assert left == []
