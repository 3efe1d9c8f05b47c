"""Completion in real shells, and what the command imports before it needs it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import IN_CI
from tests.coordinators import environment, tricord
from tests.postgres import free_port

HEAVY = (
    "sqlalchemy",
    "alembic",
    "psycopg",
    "pydantic",
    "pydantic_settings",
    "structlog",
    "grpc",
    "google.protobuf",
    "rich",
    "urllib3",
)
FOR_CALLS = ("grpc", "google.protobuf")
"""What a command needs that asks a coordinator."""


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH on which ``tricord`` is this one."""
    script = tmp_path / "tricord"
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom coordinator.cli import main\nmain(prog_name='tricord')\n")
    script.chmod(0o755)
    return f"{tmp_path}{os.pathsep}{os.environ['PATH']}"


def shell(name: str, script: str, path: str) -> list[str]:
    """The words that a shell's script prints; the test is skipped where there is no such shell, but fails in CI."""
    if shutil.which(name) is None and not IN_CI:
        pytest.skip(f"there is no {name}")
    ran = subprocess.run(
        [name, "-c", script],
        env={**environment(), "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
    return ran.stdout.split()


def completed_by_bash(line: str, path: str) -> list[str]:
    """What bash offers at the end of a line."""
    words = line.split(" ")
    listed = " ".join(f"'{word}'" for word in words)
    script = (
        'eval "$(tricord completion bash)"; '
        f"COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; "
        'complete -p tricord >/dev/null || exit 1; _tricord_completion tricord; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    return shell("bash", script, path)


def test_bash(path: str) -> None:
    commands = completed_by_bash("tricord ", path)
    known = (
        "audit cancel check completion config doctor fence idempotency list migrate participants resolve retry serve "
        "show stats watch"
    )
    assert {*known.split()} == {*commands}
    assert completed_by_bash("tricord pa", path) == ["participants"]
    assert completed_by_bash("tricord participants -o ", path) == ["table", "wide", "json", "jsonl"]
    assert completed_by_bash("tricord check -o ", path) == ["table", "json", "jsonl"]
    assert completed_by_bash("tricord watch --co", path) == ["--count"]
    offered = completed_by_bash("tricord resolve --", path)
    assert {"--as", "--force", "--lost", "--dry-run", "--reason", "--yes", "--actor"} <= {*offered}
    assert {"--filter", "--label", "--older-than", "--dry-run"} <= {*completed_by_bash("tricord cancel --", path)}
    assert completed_by_bash("tricord resolve --as ", path) == ["confirmed", "cancelled"]
    assert [state.upper() for state in completed_by_bash("tricord list --state TR", path)] == ["TRYING"]


def test_zsh(path: str) -> None:
    """What its function would hand to zsh's own, which only an interactive one has."""
    script = (
        "compdef() { }; _describe() { for each in ${(P)argv[3]}; do print -r -- ${each%%:*}; done }; "
        'eval "$(tricord completion zsh)"; '
        "offer() { words=($argv); CURRENT=$#argv; _tricord_completion }; "
    )
    assert shell("zsh", script + "offer tricord pa", path) == ["participants"]
    assert shell("zsh", script + "offer tricord resolve --lo", path) == ["--lost"]


def test_fish(path: str) -> None:
    script = "tricord completion fish | source; complete -C '{}' | string split -f 1 \\t"
    assert shell("fish", script.format("tricord pa"), path) == ["participants"]
    assert shell("fish", script.format("tricord resolve --lo"), path) == ["--lost"]


@pytest.mark.parametrize(
    ("name", "words"), [("bash", "complete -o"), ("zsh", "compdef"), ("fish", "complete --no-files")]
)
def test_the_script_is_printed(name: str, words: str) -> None:
    run = tricord("completion", name)
    assert (run.returncode, run.stderr) == (0, "")
    assert words in run.stdout
    assert "_TRICORD_COMPLETE" in run.stdout


def test_an_unknown_shell() -> None:
    run = tricord("completion", "csh")
    assert (run.returncode, run.stdout) == (2, "")
    assert "csh" in run.stderr


def imported(*arguments: str, complete: str = "") -> set[str]:
    """What of the heavy ones a command has imported when it ends."""
    code = (
        "import sys\n"
        "from coordinator.cli import main\n"
        f"try:\n    main({arguments!r}, prog_name='tricord')\nexcept SystemExit:\n    pass\n"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules], file=sys.__stderr__)\n"
    )
    completing = {"COMP_WORDS": complete, "COMP_CWORD": "1", "_TRICORD_COMPLETE": "bash_complete"} if complete else {}
    ran = subprocess.run(
        [sys.executable, "-c", code], env={**environment(), **completing}, capture_output=True, text=True, timeout=60,
        check=True,
    )  # fmt: skip
    return set(ran.stderr.splitlines()[-1].split())


NOBODY = ("--endpoint", f"127.0.0.1:{free_port()}")


def test_nothing_heavy_before_it_is_needed() -> None:
    assert imported("--help") == set()
    assert imported(complete="tricord l") == set()
    assert imported("completion", "bash") == set()
    for command in ("check", "list", "show", "participants", "stats", "watch"):
        assert imported(command, "--help") == set(), command
    for command in ("list", "resolve"):
        assert imported("idempotency", command, "--help") == set(), command
        assert imported(command, "--nonsense") == set(), command


@pytest.mark.parametrize("arguments", [["list"], ["show", "0" * 32], ["participants"], ["stats"], ["watch"]])
def test_who_only_asks_needs_no_store_and_no_settings(arguments: list[str]) -> None:
    assert imported(*arguments, *NOBODY) == set(FOR_CALLS)
