"""What `tests.forks` starts behaves as what Python starts: the same arguments, streams, exit codes and signals."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.store.schema import REVISION
from tests import forks
from tests.coordinators import CoordinatorProcess, environment, tricord
from tests.postgres import free_port

PROBE = '''"""Tell what a program can know of itself."""
import json, os, sys
told = {
    "arguments": sys.argv[1:], "name": __name__, "package": __package__, "file": __file__,
    "main": vars(sys.modules["__main__"]) is globals(), "folder": os.getcwd(), "path": sys.path[0],
    "variable": os.environ.get("TRICORD_PROBE"), "leader": os.getsid(0) == os.getpid(), "input": sys.stdin.read(),
    "terminals": [os.isatty(n) for n in range(3)], "opened": len(os.listdir("/proc/self/fd")),
}
print(json.dumps(told))
print("said on standard error", file=sys.stderr)
sys.exit(7)
'''
SLEEPER = "import time\nprint('asleep', flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "forked_probe.py").write_text(PROBE)
    (tmp_path / "forked_sleeper.py").write_text(SLEEPER)
    return tmp_path


def usual(arguments: list[str | bytes], **how: Any) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-m", *arguments], text=True, **how)


Start = Callable[..., Any]
BOTH = pytest.mark.parametrize("start", [usual, forks.start])


def told(start: Start, folder: Path, *arguments: str | bytes, **how: Any) -> tuple[str, str, int]:
    env = {**environment(), "TRICORD_PROBE": "seen"}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
    with start(["forked_probe", *arguments], env=env, cwd=folder, **pipes) as process:
        return process.stdout.read(), process.stderr.read(), process.wait(60)


@pytest.mark.parametrize("session", [False, True])
def test_it_sees_what_it_would_see(folder: Path, session: bool) -> None:
    arguments = ("--flag", "ä b", b"\xff", "")
    wanted = told(usual, folder, *arguments, start_new_session=session)
    assert told(forks.start, folder, *arguments, start_new_session=session) == wanted
    assert wanted[1:] == ("said on standard error\n", 7)


@BOTH
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_can_be_ended(folder: Path, start: Start, number: signal.Signals) -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with start(["forked_sleeper"], env=environment(), cwd=folder, stdin=subprocess.DEVNULL, **pipes) as process:
        assert process.stdout.readline() == "asleep\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(number)
        assert process.wait(60) == -number
        assert process.poll() == process.returncode == -number
        process.send_signal(number)  # nobody is there any more


def test_a_run_that_takes_too_long_is_ended(folder: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        forks.run(["forked_sleeper"], env=environment(), cwd=folder, timeout_s=0.5)


def test_a_terminal_is_one() -> None:
    ours, theirs = pty.openpty()
    try:
        with forks.start(["coordinator", "--version"], env=environment(), stdin=theirs, stdout=theirs) as process:
            assert process.wait(60) == 0
        assert os.read(ours, 100).startswith(b"tricord ")
    finally:
        os.close(ours)
        os.close(theirs)


def test_both_streams_in_their_order() -> None:
    ran = tricord("list", "--endpoint", f"127.0.0.1:{free_port()}", "--nothing", merged=True)
    assert ran.returncode == 2
    assert not ran.stderr
    assert "--nothing" in ran.stdout


@pytest.mark.parametrize("variables", [{"PYTHONHASHSEED": "7"}, {"LC_ALL": "C"}, {"TRICORD_PROBE": "x" * 200_000}])
def test_what_cannot_be_forked_is_started(variables: dict[str, str]) -> None:
    if "TRICORD_PROBE" in variables:
        variables = {f"TRICORD_PROBE_{n}": "x" * 50_000 for n in range(4)}
    with forks.start(["coordinator", "--version"], env={**environment(), **variables}) as process:
        assert isinstance(process, subprocess.Popen)
        assert process.wait(60) == 0


def test_many_at_once_keep_their_own_streams(tmp_path: Path) -> None:
    """None holds a pipe of another one open, and each has its own end."""
    with (
        CoordinatorProcess(store=tmp_path / "one.db") as one,
        CoordinatorProcess(store=tmp_path / "other.db") as other,
    ):
        assert other.kill() == -signal.SIGKILL
        assert one.stop() == 0
        assert REVISION in str(tricord("migrate", "--store", str(tmp_path / "one.db")))
