"""The core imports nothing that has a clock, a dice, a thread, a socket or a database in it.

Measured in an interpreter of its own: what a module imports by roundabout ways counts too.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PURE = ("model", "past", "machine", "orders", "flow", "doctor", "doctor_fence", "doctor_open")
FORBIDDEN = (
    "asyncio",
    "time",
    "datetime",
    "random",
    "logging",
    "grpc",
    "sqlalchemy",
    "psycopg",
    "sqlite3",
    "google.protobuf",
    "msgspec",
)
ALLOWED = {"__future__", "collections.abc", "enum", "typing"}
"""All that the core takes from the standard library."""

PROBE = """
import sys
root, pure, forbidden = sys.argv[1], sys.argv[2].split(), sys.argv[3].split()
for name in forbidden:
    sys.modules.pop(name, None)  # loaded by the interpreter itself: an import would bring it back
before = set(sys.modules)
sys.path.insert(0, root)
for name in pure:
    __import__(f"coordinator.{name}")
assert sys.modules["coordinator.model"].__file__.startswith(root)
print(*[name for name in forbidden if name in set(sys.modules) - before])
"""


def forbidden_imports(root: Path) -> list[str]:
    """What importing the core found there has loaded that it must not."""
    arguments = [str(root), " ".join(PURE), " ".join(FORBIDDEN)]
    ran = subprocess.run([sys.executable, "-I", "-S", "-c", PROBE, *arguments], capture_output=True, text=True)
    assert ran.returncode == 0, f"the core does not import by itself:\n{ran.stderr}"
    return ran.stdout.split()


def test_importing_the_core_loads_nothing_forbidden() -> None:
    assert forbidden_imports(ROOT) == []


@pytest.mark.parametrize("name", ["time", "random", "asyncio", "datetime", "logging"])
@pytest.mark.parametrize("module", PURE)
def test_a_forbidden_import_is_found(tmp_path: Path, name: str, module: str) -> None:
    root = copy(tmp_path)
    path = root / "coordinator" / f"{module}.py"
    path.write_text(path.read_text() + f"\nimport {name}\n")
    assert name in forbidden_imports(root)


def test_a_forbidden_import_is_found_behind_another_module(tmp_path: Path) -> None:
    root = copy(tmp_path)
    (root / "coordinator" / "dice.py").write_text("import random\n")
    path = root / "coordinator" / "machine.py"
    path.write_text(path.read_text() + "\nfrom . import dice\n")
    assert "random" in forbidden_imports(root)


def test_an_import_from_outside_the_standard_library_is_found(tmp_path: Path) -> None:
    root = copy(tmp_path)
    path = root / "coordinator" / "__init__.py"
    path.write_text(path.read_text() + "\nimport msgspec\n")
    with pytest.raises(AssertionError, match="msgspec"):
        forbidden_imports(root)


@pytest.mark.parametrize("module", PURE)
def test_imports_inside_functions_count_too(module: str) -> None:
    tree = ast.parse((ROOT / "coordinator" / f"{module}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= ALLOWED
        elif isinstance(node, ast.ImportFrom):
            assert node.module in (PURE if node.level else ALLOWED)
        elif isinstance(node, ast.Name):
            assert node.id not in {"__import__", "open", "eval", "exec"}


def copy(folder: Path) -> Path:
    root = folder.resolve()
    shutil.copytree(ROOT / "coordinator", root / "coordinator", ignore=shutil.ignore_patterns("__pycache__"))
    return root
