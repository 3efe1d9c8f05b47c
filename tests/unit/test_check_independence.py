"""The history checker shares no code with what it judges: it needs the standard library alone."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROBE = """
import sys
sys.path.insert(0, sys.argv[1])
before = set(sys.modules)
import coordinator.check.judge, coordinator.check.reading
for name in sorted(set(sys.modules) - before):
    top = name.partition(".")[0]
    ours = name == "coordinator" or name == "coordinator.check" or name.startswith("coordinator.check.")
    if not ours and top not in sys.stdlib_module_names:
        print(name)
"""


def foreign(root: Path) -> list[str]:
    """What importing the checker found there has loaded of others, in an interpreter of its own."""
    ran = subprocess.run([sys.executable, "-I", "-c", PROBE, str(root)], capture_output=True, text=True, check=True)
    return ran.stdout.split()


def test_it_loads_the_standard_library_alone() -> None:
    assert foreign(ROOT) == []


@pytest.mark.parametrize("module", ["machine", "model", "flow"])
def test_another_part_of_the_coordinator_is_found(tmp_path: Path, module: str) -> None:
    shutil.copytree(ROOT / "coordinator", tmp_path / "coordinator", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "coordinator" / "check" / "evidence.py"
    path.write_text(path.read_text() + f"\nfrom .. import {module}\n")
    assert f"coordinator.{module}" in foreign(tmp_path)


@pytest.mark.parametrize("path", sorted((ROOT / "coordinator" / "check").glob("*.py")), ids=lambda path: path.stem)
def test_imports_inside_functions_count_too(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            top = (node.module or "").partition(".")[0]
            assert node.level == 1 or (node.level == 0 and top in sys.stdlib_module_names), ast.unparse(node)
        elif isinstance(node, ast.Import):
            assert {alias.name.partition(".")[0] for alias in node.names} <= sys.stdlib_module_names
