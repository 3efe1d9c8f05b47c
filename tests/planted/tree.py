"""A copy of the product and its tests with a bug in it, for fresh interpreters to run.

Substituted text is all there is: nothing in the product knows of it. What runs in the copy, child processes too, finds
the copy's packages first (its folder is the working directory, and the first of PYTHONPATH).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .bugs import Edit

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("coordinator", "participant_sdk", "protos", "tests", "examples")
_FILES = ("pyproject.toml",)


class NoLongerApplies(Exception):
    """The product has changed where a bug was to be planted: plant it anew."""


def edited(edits: Sequence[Edit], root: Path = ROOT) -> dict[str, str]:
    """The text of each file that the edits change. Raises NoLongerApplies."""
    texts: dict[str, str] = {}
    for edit in edits:
        text = texts.get(edit.file) or (root / edit.file).read_text()
        found = text.count(edit.old)
        if found != 1:
            raise NoLongerApplies(f"{edit.file}: found {found} times, not once:\n{edit.old}")
        texts[edit.file] = text.replace(edit.old, edit.new)
    for file, text in texts.items():
        compile(text, file, "exec")
    return texts


@contextmanager
def planted(edits: Sequence[Edit]) -> Iterator[Path]:
    """The folder of a copy with these edits, for the time of the `with` block."""
    texts = edited(edits)
    folder = Path(tempfile.mkdtemp(prefix="tricord-planted-"))
    try:
        for name in COPIED:
            # With what Python has compiled: it goes by the time of a file, which is copied, too.
            shutil.copytree(ROOT / name, folder / name)
        for name in _FILES:
            shutil.copy2(ROOT / name, folder / name)
        for file, text in texts.items():
            (folder / file).write_text(text)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def command(*arguments: str) -> list[str]:
    """What runs a module of the copy."""
    return [sys.executable, "-m", *arguments]


def environment(folder: Path) -> dict[str, str]:
    """For whatever runs in the copy."""
    path = os.pathsep.join((str(folder), str(folder / "protos")))
    return {**os.environ, "PYTHONPATH": path}
