"""Every bug of the catalogue can still be planted; a few are, and are noticed. `make planted` plants them all."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .bugs import Bug, Edit, Seeds, Suite
from .catalogue import CATALOGUE
from .catch import Failed, catch, failing_test, violation
from .tree import COPIED, ROOT, NoLongerApplies, edited, environment, planted

QUICK = ("another request under a key gets the first one's answer", "a repeated Confirm runs again")
NAMED = {bug.name: bug for bug in CATALOGUE}


@pytest.mark.parametrize("bug", CATALOGUE, ids=[bug.name for bug in CATALOGUE])
def test_it_still_applies(bug: Bug) -> None:
    texts = edited(bug.edits)
    assert all(text != (ROOT / file).read_text() for file, text in texts.items())
    assert all(file.partition("/")[0] in ("coordinator", "participant_sdk") for file in texts)


def test_the_catalogue_is_large_and_names_each_bug_once() -> None:
    assert len(NAMED) == len(CATALOGUE) >= 28
    assert len({bug.edits for bug in CATALOGUE}) == len(CATALOGUE)


def test_the_files_of_the_suites_are_there() -> None:
    suites = {bug.catcher for bug in CATALOGUE if isinstance(bug.catcher, Suite)}
    assert all((ROOT / file).is_file() for suite in suites for file in suite.files)


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_bug_is_noticed(name: str) -> None:
    caught = catch(NAMED[name], 200)
    assert caught.by, f"{name}: not in {caught.seeds} seeds"
    with planted(()) as folder:
        catcher = NAMED[name].catcher
        assert isinstance(catcher, Seeds)
        assert violation(catcher, range(caught.seeds), folder) == ("", caught.seeds)


# --- its parts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "times"), [("one", 2), ("three", 0)])
def test_what_is_not_there_once_no_longer_applies(text: str, times: int, tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("one = 1\ntwo = one\n")
    with pytest.raises(NoLongerApplies, match=f"found {times} times"):
        edited((Edit("file.py", text, "four"),), tmp_path)


def test_edits_of_one_file_come_one_after_another(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("one = 1\n")
    edits = (Edit("file.py", "one", "two"), Edit("file.py", "two", "three"))
    assert edited(edits, tmp_path) == {"file.py": "three = 1\n"}


def test_what_is_no_program_is_no_bug(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("one = 1\n")
    with pytest.raises(SyntaxError):
        edited((Edit("file.py", "1", "("),), tmp_path)


def test_a_suite_without_tests_has_noticed_nothing() -> None:
    suite = Suite(("tests/planted/test_planted.py",), "nothing_has_this_name")
    with planted(()) as folder, pytest.raises(Failed):
        failing_test(suite, folder)


def test_the_copy_is_what_runs_and_is_gone_afterwards() -> None:
    with planted(()) as folder:
        assert {path.name for path in folder.iterdir()} == {*COPIED, "pyproject.toml"}
        code = "import tests.planted.seeds as s; print(s.coordinator.__file__)"
        command = [sys.executable, "-c", code]
        ran = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=True)
        assert Path(ran.stdout.strip()) == folder / "coordinator" / "__init__.py"
    assert not folder.exists()


def test_the_score_is_the_last_line() -> None:
    arguments = [sys.executable, "-m", "tests.planted", "--seeds", "1", "a late answer overwrites"]
    ran = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    found = re.fullmatch(r"planted: ([01])/1 caught", ran.stdout.splitlines()[-1])
    assert found is not None
    assert ran.returncode == 1 - int(found[1])
