"""The public names of the idempotency package: all can be had, and type checkers see the same."""

import ast
from pathlib import Path

from participant_sdk import idempotency


def test_every_name_can_be_had() -> None:
    for name in idempotency.__all__:
        assert getattr(idempotency, name) is not None
    assert set(idempotency.__all__) <= set(dir(idempotency))


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(idempotency.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = [alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(seen) == sorted(idempotency.__all__)
