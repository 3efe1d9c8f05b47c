"""The house's rules that a machine can check: sizes, names, and who may import what."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("coordinator", "participant_sdk", "tests", "examples", "benchmarks")
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 90
NAMES_THAT_SAY_NOTHING = {"utils", "helpers", "manager", "base", "common"}
STRANGERS = {"coordinator": "participant_sdk", "participant_sdk": "coordinator"}
"""Who never imports whom: both import only the contract."""
WIRE = {
    "coordinator": ("server", "operator", "registry", "rpc", "delivery", "wire", "cli"),
    "participant_sdk": ("service", "serve", "client", "coordinator_messages", "exchange", "registration"),
}
"""The modules (or folders) whose names begin so may know protobuf types."""


def modules(root: Path) -> list[Path]:
    """All our Python files; generated code lives elsewhere."""
    return sorted(
        path for folder in FOLDERS for path in (root / folder).rglob("*.py") if "__pycache__" not in path.parts
    )


def imports(tree: ast.Module) -> Iterator[str]:
    """Every module that is imported anywhere in a file, relative ones left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def faults(root: Path) -> list[str]:
    """Every breach of the rules, one on a line."""
    found = []
    for path in modules(root):
        where = path.relative_to(root)
        text = path.read_text()
        tree = ast.parse(text)
        if (lines := text.count("\n")) > FILE_LINES_MAX:
            found.append(f"{where}: {lines} lines, {FILE_LINES_MAX} are allowed")
        for part in {where.stem.strip("_"), *where.parent.parts} & NAMES_THAT_SAY_NOTHING:
            found.append(f"{where}: {part!r} says nothing about what is in it")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    found.append(f"{where}: {node.name} has {lines} lines, {FUNCTION_LINES_MAX} are allowed")
        found += [f"{where}: {fault}" for fault in import_faults(where, tree)]
    return found


def import_faults(where: Path, tree: ast.Module) -> Iterator[str]:
    side = where.parts[0]
    tops = {name.partition(".")[0] for name in imports(tree)}
    if STRANGERS.get(side) in tops:
        yield f"{side} must not import {STRANGERS[side]}"
    if side in WIRE and "tricord" in tops and not where.parts[1].startswith(WIRE[side]):
        yield "protobuf types stop at " + ", ".join(WIRE[side])


def test_the_house_is_in_order() -> None:
    assert faults(ROOT) == []


def test_it_is_our_house() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in modules(ROOT)}
    assert {"coordinator/flow.py", "tests/unit/test_style.py"} <= names


LONG_FUNCTION = "def f():\n" + "    pass\n" * FUNCTION_LINES_MAX


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("coordinator/engine.py", "x = 1\n" * 601, "601 lines"),
        ("tests/unit/test_x.py", LONG_FUNCTION, "f has 91 lines"),
        ("coordinator/engine.py", "class A:\n    async " + LONG_FUNCTION.replace("\n", "\n    "), "f has 91 lines"),
        ("coordinator/utils.py", "", "'utils' says nothing"),
        ("examples/common/bank.py", "", "'common' says nothing"),
        ("coordinator/engine.py", "import participant_sdk.fence\n", "must not import participant_sdk"),
        ("participant_sdk/fence.py", "def f():\n    from coordinator import model\n", "must not import coordinator"),
        ("coordinator/engine.py", "from tricord.v1 import types_pb2\n", "protobuf types stop at"),
        ("coordinator/store/rows.py", "import tricord.v1.types_pb2\n", "protobuf types stop at"),
        ("participant_sdk/fence.py", "from tricord.v1 import types_pb2\n", "protobuf types stop at"),
        ("participant_sdk/idempotency/wire.py", "from tricord import v1\n", "protobuf types stop at"),
    ],
)
def test_a_fault_is_found(tmp_path: Path, name: str, text: str, fault: str) -> None:
    write(tmp_path, name, text)
    (found,) = faults(tmp_path)
    assert found.startswith(name)
    assert fault in found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("coordinator/engine.py", "x = 1\n" * 600),
        ("coordinator/engine.py", LONG_FUNCTION.removesuffix("    pass\n")),
        ("coordinator/server.py", "from tricord.v1 import types_pb2\n"),
        ("coordinator/server_stream.py", "from tricord.v1 import types_pb2\n"),
        ("coordinator/cli/show.py", "from tricord.v1 import types_pb2\n"),
        ("participant_sdk/exchange.py", "from tricord.v1 import types_pb2\n"),
        ("examples/transfer/demo.py", "import coordinator, participant_sdk\nfrom tricord.v1 import types_pb2\n"),
        ("coordinator/engine.py", "from .model import State\n"),
    ],
)
def test_what_is_in_order_is_no_fault(tmp_path: Path, name: str, text: str) -> None:
    write(tmp_path, name, text)
    assert faults(tmp_path) == []


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
