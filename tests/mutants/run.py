"""Look for a test that fails with a mutant: each in a fork of one process that has the libraries loaded already."""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.abc
import importlib.machinery
import os
import resource
import select
import signal
import sys
import time
import traceback
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, NoReturn

import pytest

from .operators import Enums, Mutant, mutants

ROOT: Final = Path(__file__).resolve().parents[2]
KILLERS: Final[dict[str, tuple[str, ...]]] = {
    "coordinator.machine": (
        "tests/unit/test_machine.py",
        "tests/unit/test_machine_rules.py",
        "tests/unit/test_past.py",
        "tests/unit/test_flow.py",
        "tests/unit/test_state_diagram.py",
        "tests/stories",
    ),
    "participant_sdk.fence": ("tests/unit/test_fence_table.py",),
    "participant_sdk.idempotency.machine": ("tests/unit/idempotency/test_machine.py",),
}
"""The tests of each module, the likeliest first."""
QUIET: Final = (
    "-qq",
    "-x",
    "--noconftest",
    "--assert=plain",
    *(f"-pno:{name}" for name in ("randomly", "cacheprovider", "xdist", "hypothesispytest", "unraisableexception")),
)
PROCESSOR_S_MAX: Final = 10
"""Of one mutant: the whole set takes some two seconds, so that what needs more runs in circles."""
WALL_S_MAX: Final = 300.0
WORKERS: Final = 2
PASSED, FAILED, NOT_COLLECTED, BROKEN = 0, 1, 2, 99
PIPE_BYTES_MAX: Final = 4_000


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: who killed it, or nothing."""

    mutant: Mutant
    killer: str
    """A test, or why nothing could be run; empty: it survives."""


def source_of(module: str) -> Path:
    """The file of one of our modules."""
    return ROOT / (module.replace(".", "/") + ".py")


def enums_of(module: str) -> Enums:
    """The enumerations that a module names, with their members in order."""
    found = vars(importlib.import_module(module)).items()
    return {name: [*kind.__members__] for name, kind in found if isinstance(kind, type) and issubclass(kind, Enum)}


def all_mutants() -> list[Mutant]:
    """Every mutant of every module."""
    return [
        mutant
        for module in KILLERS
        for mutant in mutants(module, ast.parse(source_of(module).read_text()), enums_of(module))
    ]


class Planted(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives one module another body when it is imported."""

    def __init__(self, module: str, tree: ast.Module) -> None:
        self.module = module
        self.tree = tree

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """As its own, with this loader."""
        if fullname != self.module:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=str(source_of(fullname)))

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the mutated body."""
        exec(compile(self.tree, str(source_of(self.module)), "exec"), module.__dict__)


class Judge:
    """A plug-in of pytest: leaves random searches out, puts likely killers first, ends with the first failure."""

    def __init__(self, first: Sequence[str], write: int) -> None:
        self.first = first
        self.write = write

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Which tests, and in which order."""
        items[:] = in_order(items, self.first)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Say who failed, and leave at once: nothing that comes after it counts."""
        if report.failed:
            os.write(self.write, report.nodeid.encode())
            os._exit(FAILED)


def in_order(items: Sequence[pytest.Item], first: Sequence[str]) -> list[pytest.Item]:
    """The tests that count, the likeliest killers first."""
    places = {name: place for place, name in enumerate(first)}
    counting = [item for item in items if not hasattr(getattr(item, "function", None), "is_hypothesis_test")]
    return sorted(counting, key=lambda item: places.get(item.nodeid, len(places)))


def forget_ours() -> None:
    """Unload our own modules, so that a child imports them anew, with the mutant among them."""
    for name in list(sys.modules):
        if name.partition(".")[0] in {"coordinator", "participant_sdk"} or (
            name.startswith("tests.") and not name.startswith("tests.mutants")
        ):
            del sys.modules[name]


def planted_in_place(mutant: Mutant, tree: ast.Module) -> bool:
    """Give the function that is loaded the body that a mutant gives it; False if the module must be run anew.

    So it must where something else is changed, such as an enumeration or the default of an argument; but not where it
    is a cell of a table, nor the body of a function that has helped to make a table.
    """
    if not mutant.where:
        return _cell_planted(mutant, tree)
    used = _called_on_import(tree)
    if ("args", None) in mutant.path or mutant.where in used:
        return False
    found: object = importlib.import_module(mutant.module)
    for name in mutant.where.split("."):
        found = vars(found)[name]
    if isinstance(found, property):
        found = found.fget
    if not isinstance(found, types.FunctionType):
        return False
    body = _body(compile(mutant.planted(tree), str(source_of(mutant.module)), "exec"), mutant.where)
    if body.co_freevars != found.__code__.co_freevars:
        return False
    found.__code__ = body
    return True


def _cell_planted(mutant: Mutant, tree: ast.Module) -> bool:
    """The same for a dictionary of the module: it stays the one that others hold."""
    statement = tree.body[mutant.path[0][1] or 0] if mutant.path else None
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or not isinstance(statement.value, ast.Dict):
        return False
    changed = mutant.planted(tree).body[mutant.path[0][1] or 0]
    target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
    if not isinstance(changed, ast.Assign | ast.AnnAssign) or not isinstance(target, ast.Name):
        return False  # the whole statement is gone
    names = vars(importlib.import_module(mutant.module))
    table, cells = names[target.id], changed.value
    assert isinstance(cells, ast.Dict)
    new = eval(compile(ast.Expression(cells), "a mutant", "eval"), names)
    table.clear()
    table.update(new)
    return True


def _called_on_import(tree: ast.Module) -> set[str]:
    made = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    calls = [node.func for statement in made for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return {called.id for called in calls if isinstance(called, ast.Name)}


def _body(code: types.CodeType, name: str) -> types.CodeType:
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    for one in inner:
        if one.co_qualname == name:
            return one
        if name.startswith(f"{one.co_qualname}."):
            return _body(one, name)
    raise LookupError(name)


@dataclass
class _Running:
    mutant: Mutant | None
    pid: int
    read: int
    until: float


class Court:
    """Judges mutants, some at a time, and remembers who killed which of their neighbours."""

    def __init__(self) -> None:
        self.trees = {module: ast.parse(source_of(module).read_text()) for module in KILLERS}
        self.kills: dict[str, Counter[str]] = defaultdict(Counter)
        self.items: list[pytest.Item] = []
        self.judge = Judge((), -1)

    def verdicts(self, wanted: Sequence[Mutant], told: Callable[[Verdict], None]) -> None:
        """Tell what becomes of each mutant, module by module, as they end."""
        for module, tests in KILLERS.items():
            court = _Session(self, module, [mutant for mutant in wanted if mutant.module == module], told)
            code = pytest.main(["-s", *QUIET, *tests], plugins=[court, self.judge])
            if code != PASSED:
                raise RuntimeError(f"pytest ended with {code}")

    def judged(self, module: str, wanted: Sequence[Mutant], told: Callable[[Verdict], None]) -> None:
        """As `verdicts`, in a session of pytest that has collected the module's tests."""
        gc.collect()
        gc.freeze()  # what is loaded stays: no fork need look through it again
        code, failed = self._ended(self._started(None, module))
        if code != PASSED:
            raise RuntimeError(f"without any mutant of {module} there fails: {failed or f'exit code {code}'}")
        waiting = list(reversed(wanted))
        running: list[_Running] = []
        while waiting or running:
            while waiting and len(running) < WORKERS:
                running.append(self._started(waiting.pop(), module))
            left = min(one.until for one in running) - time.monotonic()
            ready = select.select([one.read for one in running], [], [], max(0.0, left))[0]
            for one in [one for one in running if one.read in ready or one.until <= time.monotonic()]:
                running.remove(one)
                assert one.mutant is not None
                told(self._verdict(one.mutant, *self._ended(one)))

    def _verdict(self, mutant: Mutant, code: int, failed: str) -> Verdict:
        if code == PASSED:
            return Verdict(mutant, "")
        if code == FAILED:
            if failed:
                self.kills[mutant.where][failed] += 1
            return Verdict(mutant, failed or "it cannot be imported")
        if code == NOT_COLLECTED:
            return Verdict(mutant, "it cannot be imported")
        if -code in (signal.SIGXCPU, signal.SIGKILL):
            return Verdict(mutant, "it does not end")
        raise RuntimeError(f"exit code {code} with {mutant}\n{failed}")

    def _started(self, mutant: Mutant | None, module: str) -> _Running:
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(read)
            self._child(mutant, module, write)
        os.close(write)
        return _Running(mutant, pid, read, time.monotonic() + WALL_S_MAX)

    def _child(self, mutant: Mutant | None, module: str, write: int) -> NoReturn:
        """In a fork: judge, say so, and leave without any clean-up of the parent's."""
        code = BROKEN
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_S_MAX, PROCESSOR_S_MAX + 1))
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            first = [name for name, _ in self.kills[mutant.where if mutant else ""].most_common(20)]
            self.judge.write = write
            tree = self.trees[module]
            if mutant is None or planted_in_place(mutant, tree):
                items = in_order(self.items, first)
                for item, after in zip(items, [*items[1:], None], strict=True):
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                code = PASSED
            else:
                forget_ours()
                sys.meta_path.insert(0, Planted(module, mutant.planted(tree)))
                code = int(pytest.main([*QUIET, *KILLERS[module]], plugins=[Judge(first, write)]))
        except BaseException:
            os.write(write, traceback.format_exc().encode()[-PIPE_BYTES_MAX:])
        finally:
            os._exit(code)

    def _ended(self, one: _Running) -> tuple[int, str]:
        if not select.select([one.read], [], [], max(0.0, one.until - time.monotonic()))[0]:
            os.kill(one.pid, signal.SIGKILL)
        with os.fdopen(one.read, "rb") as pipe:
            said = pipe.read().decode()
        return os.waitstatus_to_exitcode(os.waitpid(one.pid, 0)[1]), said


@dataclass
class _Session:
    """A plug-in of pytest that judges mutants where the tests would be run."""

    court: Court
    module: str
    wanted: Sequence[Mutant]
    told: Callable[[Verdict], None]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """In place of pytest's own."""
        self.court.items = session.items
        self.court.judged(self.module, self.wanted, self.told)
        return True
