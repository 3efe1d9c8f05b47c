"""Small faults, made in a module's syntax tree: one at a time, each described by the text that it changes."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Enums = Mapping[str, Sequence[str]]
"""The members of each enumeration that a module names."""
Path = tuple[tuple[str, int | None], ...]
"""From the module to a node: the field, and the place in it if it is a list."""

COMPARED: Final[dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
REPLACED: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}
CALLED: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
UNTOUCHED: Final = {"annotation", "returns", "decorator_list", "type_params"}
"""Fields that say nothing about what a program does."""


@dataclass(frozen=True)
class Mutant:
    """One fault: `old` becomes `new` in `where`, a function or the module itself (empty)."""

    module: str
    where: str
    operator: str
    old: str
    new: str
    path: Path
    node: ast.AST | None
    """What stands at `path` instead; None: nothing."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What tells it from all others, but from one of equal text in the same function."""
        return self.module, self.where, self.old, self.new

    def __str__(self) -> str:
        place = f"{self.module}.{self.where}" if self.where else self.module
        return f"{place} [{self.operator}]\n    - {_indented(self.old)}\n    + {_indented(self.new)}"

    def planted(self, tree: ast.Module) -> ast.Module:
        """A tree with the fault in it; the given one stays whole."""
        tree = copy.deepcopy(tree)
        _put(tree, self.path, copy.deepcopy(self.node))
        return ast.fix_missing_locations(tree)


def plain(source: str) -> str:
    """Source text as all versions of Python write it, so that two can be compared."""
    return ast.unparse(ast.parse(source))


def mutants(module: str, tree: ast.Module, enums: Enums) -> Iterator[Mutant]:
    """Every fault that can be made in a module, in the order of its text."""
    known = set()  # in the tables, whose neighbouring cells often differ as the members of their enumeration do
    for path, node, where, fragment in _nodes(tree):
        for operator, at, other in _faults(node, enums):
            full = path + at
            if operator == "cell removed":
                yield Mutant(module, where, operator, _text(tree, full), "{}", full, None)
                continue
            shown = full if operator == "cells swapped" else fragment
            old = _text(tree, shown)
            before = _put(tree, full, other)
            try:
                new = _text(tree, shown)
            finally:
                _restore(tree, full, before, removed=other is None)
            if new != old and (where or (path[:1], old, new) not in known):
                known.add((path[:1], old, new))
                yield Mutant(module, where, operator, old, new, full, other)


def _nodes(tree: ast.Module) -> Iterator[tuple[Path, ast.AST, str, Path]]:
    """Every node that is run, with the function that it is in and the path of the fragment that describes it."""

    def visit(node: ast.AST, path: Path, where: str, fragment: Path) -> Iterator[tuple[Path, ast.AST, str, Path]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            where = f"{where}.{node.name}" if where else node.name
        if isinstance(node, ast.stmt) or (isinstance(node, ast.Dict) and not where):
            fragment = path
        if not (isinstance(node, ast.Tuple) and path[-1][0] == "keys"):  # a cell's key is changed, but stays one
            yield path, node, where, fragment
        for field, value in ast.iter_fields(node):
            if field in UNTOUCHED:
                continue
            children = enumerate(value) if isinstance(value, list) else ((None, value),)
            for index, child in children:
                if isinstance(child, ast.AST):
                    inner = fragment
                    if isinstance(node, ast.Dict) and not where and index is not None:
                        inner = (*path, ("values", index))  # a cell of a table is described by itself
                    yield from visit(child, (*path, (field, index)), where, inner)

    yield from visit(tree, (), "", ())


Fault = tuple[str, Path, ast.AST | None]


def _faults(node: ast.AST, enums: Enums) -> Iterator[Fault]:
    """What can be made wrong in one node: the operator, where below the node, and what to put there."""
    here: Path = ()
    match node:
        case ast.Compare(left, ops, comparators):
            for n, op in enumerate(ops):
                for other in COMPARED[type(op)]:
                    yield "comparison", here, ast.Compare(left, [*ops[:n], other(), *ops[n + 1 :]], comparators)
        case ast.BoolOp(op, values):
            yield "and/or", here, ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), values)
            for n in range(len(values)):
                rest = [*values[:n], *values[n + 1 :]]
                yield "operand dropped", here, ast.BoolOp(op, rest) if rest[1:] else rest[0]
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield "sign dropped", here, operand
        case ast.BinOp(left, op, right) if type(op) in REPLACED:
            yield "arithmetic", here, ast.BinOp(left, REPLACED[type(op)](), right)
        case ast.AugAssign(target, op, value) if type(op) in REPLACED:
            yield "arithmetic", here, ast.AugAssign(target, REPLACED[type(op)](), value)
        case ast.Constant(bool(value)):
            yield "constant", here, ast.Constant(not value)
        case ast.Constant(int(value)):
            yield "constant", here, ast.Constant(value + 1)
            yield "constant", here, ast.Constant(value - 1)
        case ast.Attribute(ast.Name(name), member) if name in enums and member in enums[name]:
            members = enums[name]
            place = members.index(member)
            for neighbour in dict.fromkeys((members[(place + 1) % len(members)], members[place - 1])):
                if neighbour != member:
                    yield "member", here, ast.Attribute(ast.Name(name, ast.Load()), neighbour, ast.Load())
        case ast.Call(ast.Name(name), args, keywords) if name in CALLED:
            yield "min/max", here, ast.Call(ast.Name(CALLED[name], ast.Load()), args, keywords)
        case ast.Call(func, args, keywords):
            for n in range(len(keywords)):
                yield "keyword dropped", here, ast.Call(func, args, [*keywords[:n], *keywords[n + 1 :]])
        case ast.Subscript(value, ast.Slice()):
            yield "slice dropped", here, value
        case ast.Tuple(elements, ast.Load()) | ast.Set(elements) | ast.List(elements, ast.Load()):
            for n in range(len(elements)):
                yield "element removed", (("elts", n),), None
        case ast.Dict(keys, values) if keys:
            yield from _of_table(keys, values)
        case ast.IfExp() | ast.If() | ast.While():
            for value in (True, False):
                yield "condition", (("test", None),), ast.Constant(value)
        case ast.comprehension(ifs=ifs):
            for n in range(len(ifs)):
                for value in (True, False):
                    yield "condition", (("ifs", n),), ast.Constant(value)
        case ast.Return(ast.expr()) if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield "return None", here, ast.Return(ast.Constant(None))
        case ast.Assign() | ast.AnnAssign(value=ast.expr()) | ast.Raise() | ast.Continue():
            yield "statement deleted", here, ast.Pass()
        case ast.Expr(value) if not isinstance(value, ast.Constant):
            yield "statement deleted", here, ast.Pass()
    if isinstance(node, ast.AugAssign):
        yield "statement deleted", here, ast.Pass()


def _of_table(keys: Sequence[ast.expr | None], values: Sequence[ast.expr]) -> Iterator[Fault]:
    """A cell removed, or with the next cell's value in it."""
    for n, key in enumerate(keys):
        yield "cell removed", (("values", n),), None
        other = values[(n + 1) % len(values)]
        if key is not None and ast.dump(other) != ast.dump(values[n]):
            yield "cells swapped", (("values", n),), other


def _get(tree: ast.AST, path: Path) -> Any:
    found: Any = tree
    for field, index in path:
        found = getattr(found, field)
        if index is not None:
            found = found[index]
    return found


def _put(tree: ast.AST, path: Path, node: ast.AST | None) -> Any:
    """Put a node in (None: take what is there out of its list) and return what was there."""
    parent, (field, index) = _get(tree, path[:-1]), path[-1]
    if index is None:
        before = getattr(parent, field)
        setattr(parent, field, node)
        return before
    line = getattr(parent, field)
    before = line[index]
    if node is None:
        if isinstance(parent, ast.Dict):
            del parent.keys[index]
        del line[index]
    else:
        line[index] = node
    return before


def _restore(tree: ast.AST, path: Path, before: Any, *, removed: bool) -> None:
    parent, (field, index) = _get(tree, path[:-1]), path[-1]
    if removed:
        getattr(parent, field).insert(index, before)
    elif index is None:
        setattr(parent, field, before)
    else:
        getattr(parent, field)[index] = before


def _text(tree: ast.Module, fragment: Path) -> str:
    """A fragment's text: a cell with its key, head and first line of a compound statement, else the whole of it."""
    node = _get(tree, fragment)
    if fragment and fragment[-1][0] == "values" and fragment[-1][1] is not None:
        table = _get(tree, fragment[:-1])
        if isinstance(table, ast.Dict):
            return ast.unparse(ast.Dict([table.keys[fragment[-1][1]]], [node]))
    if isinstance(node, ast.stmt) and hasattr(node, "body"):
        head = copy.copy(node)
        first = node.body[0]
        for field in ("body", "orelse", "decorator_list"):
            if hasattr(head, field):
                setattr(
                    head,
                    field,
                    [] if field != "body" else [ast.Expr(ast.Constant(...)) if hasattr(first, "body") else first],
                )
        node = head
    return ast.unparse(ast.fix_missing_locations(copy.deepcopy(node)))


def _indented(text: str) -> str:
    return text.replace("\n", "\n      ")
