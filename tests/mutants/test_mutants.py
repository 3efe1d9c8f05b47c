"""The faults that are made are those that are promised, and the list of the equivalent ones is true to the source."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from .equivalent import EQUIVALENT, unmatched
from .operators import Mutant, mutants
from .run import KILLERS, ROOT, all_mutants, planted_in_place

ENUMS = {"Colour": ("RED", "GREEN", "BLUE")}


def made(source: str) -> list[tuple[str, str]]:
    """Each fault that is made in some source text: what is changed, and to what."""
    return [(mutant.old, mutant.new) for mutant in mutants("m", ast.parse(source), ENUMS)]


@pytest.mark.parametrize(
    ("source", "old", "new"),
    [
        ("f(a < b)", "f(a < b)", ("f(a <= b)", "f(a >= b)")),
        ("f(a is b)", "f(a is b)", ("f(a is not b)",)),
        ("f(a and b)", "f(a and b)", ("f(a or b)", "f(a)", "f(b)")),
        ("f(not a)", "f(not a)", ("f(a)",)),
        ("f(7)", "f(7)", ("f(8)", "f(6)")),
        ("f(True)", "f(True)", ("f(False)",)),
        ("f(a + b)", "f(a + b)", ("f(a - b)",)),
        ("a += b", "a += b", ("a -= b", "pass")),
        ("f(Colour.RED)", "f(Colour.RED)", ("f(Colour.GREEN)", "f(Colour.BLUE)")),
        ("f(min(a))", "f(min(a))", ("f(max(a))",)),
        ("f(a=b)", "f(a=b)", ("f()",)),
        ("f(a[b:])", "f(a[b:])", ("f(a)",)),
        ("f(a if b else c)", "f(a if b else c)", ("f(a if True else c)", "f(a if False else c)")),
        ("a = (*b, c)", "a = (*b, c)", ("a = (c,)", "a = (*b,)")),
        ("def f():\n return a", "return a", ("return None",)),
        ("def f():\n raise a", "raise a", ("pass",)),
        ("if a:\n b", "if a:\n    b", ("if True:\n    b", "if False:\n    b")),
        ("f(a for a in b if c)", "f((a for a in b if c))", ("f((a for a in b if True))", "f((a for a in b if False))")),
        ("T = {a: b, c: d}", "{a: b}", ("{}", "{a: d}")),
    ],
)
def test_a_fault(source: str, old: str, new: tuple[str, ...]) -> None:
    assert set(new) <= {after for before, after in made(source) if before == old}


@pytest.mark.parametrize("source", ['"""Only words."""', "def f(a: int = b) -> (1, 2):\n    ...", "import a", "None"])
def test_what_does_nothing_is_left_alone(source: str) -> None:
    assert made(source) == []


def test_a_fault_is_planted_and_the_tree_stays_whole() -> None:
    tree = ast.parse("def f():\n    return 1\nT = {a: b, c: d}")
    before = ast.dump(tree)
    planted = [ast.unparse(mutant.planted(tree)) for mutant in mutants("m", tree, {})]
    assert "def f():\n    return 2\nT = {a: b, c: d}" in planted
    assert "def f():\n    return 1\nT = {c: d}" in planted
    assert len(set(planted)) == len(planted)
    assert ast.dump(tree) == before


def test_every_module_has_faults_of_every_kind() -> None:
    found = all_mutants()
    assert {mutant.module for mutant in found} == set(KILLERS)
    kinds = Counter(mutant.operator for mutant in found)
    assert len(kinds) == 16
    assert min(kinds.values()) >= 5


def test_the_killers_are_there() -> None:
    assert [path for paths in KILLERS.values() for path in paths if not (ROOT / path).exists()] == []


def test_a_body_that_makes_a_table_is_not_changed_in_place() -> None:
    tree = ast.parse((ROOT / "coordinator/machine.py").read_text())
    for name in ("", "Event", "_wanted"):
        mutant = Mutant("coordinator.machine", name, "constant", "1", "2", (), None)
        assert not planted_in_place(mutant, tree)


def test_every_entry_of_the_list_speaks_of_a_mutant_and_none_is_there_twice() -> None:
    assert unmatched(all_mutants()) == []
    assert [key for key, times in Counter(entry.key for entry in EQUIVALENT).items() if times > 1] == []


def test_every_entry_is_proved() -> None:
    assert [entry for entry in EQUIVALENT if len(entry.proof.split()) < 8] == []
