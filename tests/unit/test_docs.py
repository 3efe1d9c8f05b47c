"""docs/protocol.md knows every rule that the code names, and names only what there is."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")


def test_every_rule_that_the_code_names_is_on_the_page() -> None:
    explained = set(re.findall(r"^\| ([A-G][0-9]+) \|", PAGE, re.MULTILINE))
    for folder in ("coordinator", "participant_sdk"):
        for path in (ROOT / folder).rglob("*.py"):
            named = re.findall(r"(?:protocol |\()([A-G][0-9]{1,2})\b", path.read_text(encoding="utf-8"))
            assert set(named) <= explained, path


def test_every_test_that_the_page_names_exists() -> None:
    tests = {path.name for path in (ROOT / "tests").rglob("*.py")}
    named = set(re.findall(r"`(test_\w+\.py)`", PAGE))
    assert named
    assert named <= tests
    stories = {path.stem for path in (ROOT / "tests" / "stories").glob("*.txt")}
    for line in re.findall(r"(?:story|stories) ((?:`[\w*]+`(?:, )?)+)", PAGE):
        for name in re.findall(r"`([\w*]+)`", line):
            assert any(story.startswith(name.rstrip("*")) for story in stories), name
