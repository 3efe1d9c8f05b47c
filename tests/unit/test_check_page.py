"""docs/histories.md has every kind of event, every field and every invariant, and its example holds."""

from __future__ import annotations

import io
import re
from pathlib import Path

from coordinator.check.events import KINDS
from coordinator.check.invariants import INVARIANTS, Violation
from coordinator.check.judge import judge
from coordinator.check.reading import events

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "histories.md").read_text(encoding="utf-8")


def test_every_kind_with_its_fields() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", PAGE, re.MULTILINE)
    shown = {name: re.findall(r"`([\w?]+)`", fields) for name, fields in rows}
    assert shown == {
        name: [field + "?" * (field in kind._field_defaults) for field in kind._fields if field != "at"]
        for name, kind in KINDS.items()
    }


def test_every_invariant() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (.*?) ?\|$", PAGE, re.MULTILINE)
    assert [(int(number), words, needs) for number, words, needs in rows] == [
        (number, words, needs) for number, (words, needs) in INVARIANTS.items()
    ]


def test_the_example_holds_and_its_violation_is_found() -> None:
    (example,) = re.findall(r"```jsonl\n(.*?)```", PAGE, re.DOTALL)
    (told,) = re.findall(r"VIOLATED: (invariant 2.*)", PAGE)
    found: list[Violation] = []
    verdict = judge(events(io.BytesIO(example.encode())), found.append)
    assert found == []
    assert {each.number for each in verdict.invariants if each.judged} == {1, 2, 3, 5, 7, 9, 11}
    broken = re.sub(r'"bank-b","what":"confirm","changes":.*', '"bank-b","what":"cancel"}', example)
    judge(events(io.BytesIO(broken.encode())), found.append)
    assert told in [violation.text for violation in found]
