"""Each story in this folder is told anew and compared, line by line, with what its file says.

``TRICORD_REWRITE_STORIES=1`` writes what happens now into the files instead; look at the difference before you keep it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .script import parse, tell

FOLDER = Path(__file__).parent
STORIES = sorted(FOLDER.glob("*.txt"))


def check(path: Path, environment: dict[str, str]) -> None:
    """Compare a story with its file, or rewrite the file if the environment asks for it."""
    text = path.read_text()
    told = tell(parse(text))
    if environment.get("TRICORD_REWRITE_STORIES") == "1":
        assert environment.get("CI", "").lower() not in {"1", "true", "yes"}, "stories are not rewritten in CI"
        path.write_text(told)
        return
    assert told == text


@pytest.mark.parametrize("path", STORIES, ids=[path.stem for path in STORIES])
def test_story(path: Path) -> None:
    check(path, dict(os.environ))


def test_there_are_stories() -> None:
    assert len(STORIES) >= 20


A_STORY = """# Nothing happens.
begin timeout 1s a.b
----
"""


def test_another_outcome_fails(tmp_path: Path) -> None:
    path = tmp_path / "story.txt"
    path.write_text(A_STORY)
    with pytest.raises(AssertionError):
        check(path, {})


def test_rewriting_writes_what_happens(tmp_path: Path) -> None:
    path = tmp_path / "story.txt"
    path.write_text(A_STORY)
    check(path, {"TRICORD_REWRITE_STORIES": "1"})
    assert "begin v1 TRYING" in path.read_text()
    check(path, {})


def test_rewriting_is_refused_in_ci(tmp_path: Path) -> None:
    path = tmp_path / "story.txt"
    path.write_text(A_STORY)
    with pytest.raises(AssertionError, match="not rewritten in CI"):
        check(path, {"TRICORD_REWRITE_STORIES": "1", "CI": "true"})
    assert path.read_text() == A_STORY


@pytest.mark.parametrize("text", ["c0 dances\n----\n", "run forever\n----\n", "run\n"])
def test_a_command_that_is_not_one_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"no such command|not a time|no line ----"):
        tell(parse(text))
