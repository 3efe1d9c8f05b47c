"""The state diagram in ARCHITECTURE is the transition table, not a memory of it."""

from __future__ import annotations

import re
from pathlib import Path

from coordinator.machine import state_diagram

ARCHITECTURE = Path(__file__).resolve().parents[2] / "ARCHITECTURE.md"


def expected() -> str:
    return f"<!-- state diagram -->\n```mermaid\n{state_diagram()}\n```\n<!-- /state diagram -->"


def test_the_diagram_in_architecture_is_the_table() -> None:
    found: list[str] = re.findall(
        r"<!-- state diagram -->.*?<!-- /state diagram -->", ARCHITECTURE.read_text(), re.DOTALL
    )
    assert [re.sub(r"\n\s*\n", "\n", text) for text in found] == [expected()]
