"""The fence's tables with one cell broken on purpose, to see who notices.

As a plug-in of pytest (`-p tests.races.broken`) it breaks the cell that $TRICORD_BROKEN_CELL names, such as
`TABLE CONFIRM TRIED DONE`, for the whole session.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from participant_sdk import fence
from participant_sdk.fence import Phase, Progress, Status, Verdict

VARIABLE: Final = "TRICORD_BROKEN_CELL"
TABLES: Final[dict[str, dict[Any, Verdict]]] = {
    "TABLE": fence.TABLE,
    "UNFINISHED": fence.UNFINISHED,
    "EXTERNAL": fence.EXTERNAL,
}


@dataclass(frozen=True)
class Broken:
    """A cell, and the verdict that is put into it."""

    table: str
    phase: Phase
    column: Status | Progress | None
    verdict: Verdict

    def __str__(self) -> str:
        column = "NONE" if self.column is None else self.column.name
        return f"{self.table} {self.phase.name} {column} {self.verdict.name}"


def broken_named(text: str) -> Broken:
    """What `str` gave."""
    table, phase, column, verdict = text.split()
    kind: type[Status] | type[Progress] = Progress if table == "EXTERNAL" else Status
    return Broken(table, Phase[phase], None if column == "NONE" else kind[column], Verdict[verdict])


WORST: Final = tuple(
    broken_named(text)
    for text in (
        "TABLE TRY NONE SUSPEND",
        "TABLE TRY TRIED REPLAY_REFUSAL",
        "TABLE TRY COMMITTED REFUSE_SUSPENDED",
        "TABLE TRY ROLLBACKED REPLAY_RESULT",
        "TABLE TRY SUSPENDED DONE",
        "TABLE CONFIRM NONE DONE",
        "TABLE CONFIRM TRIED DONE",
        "TABLE CONFIRM COMMITTED RUN_CONFIRM",
        "TABLE CONFIRM ROLLBACKED DONE",
        "TABLE CONFIRM SUSPENDED DONE",
        "TABLE CANCEL NONE DONE",
        "TABLE CANCEL TRIED DONE",
        "TABLE CANCEL COMMITTED RUN_CANCEL",
        "TABLE CANCEL ROLLBACKED RUN_CANCEL",
        "TABLE CANCEL SUSPENDED RUN_CANCEL",
        "UNFINISHED TRY TRIED REPLAY_RESULT",
        "UNFINISHED CONFIRM TRIED RUN_CONFIRM",
        "UNFINISHED CANCEL TRIED DONE",
        "UNFINISHED CONFIRM COMMITTED DONE",
        "UNFINISHED CANCEL ROLLBACKED DONE",
        "EXTERNAL TRY LEASED RUN_TRY_AGAIN",
        "EXTERNAL TRY LAPSED REPLAY_RESULT",
        "EXTERNAL CONFIRM LEASED RUN_CONFIRM",
        "EXTERNAL CONFIRM LAPSED RUN_CONFIRM",
        "EXTERNAL CANCEL LEASED RUN_CANCEL",
        "EXTERNAL CANCEL LAPSED DONE",
    )
)
"""For each cell the likeliest mistake, or the most expensive one."""

SAME: Final = frozenset(
    map(
        broken_named,
        (
            "TABLE TRY SUSPENDED REPLAY_REFUSAL",  # there is none, so it is answered as suspended
            "TABLE CANCEL SUSPENDED REPLAY_RESULT",  # there is none, so it is just done
        ),
    )
)
"""Verdicts that differ by name only: what is done and answered is the same."""


def others() -> Iterator[Broken]:
    """Every cell with every verdict that is not its own."""
    for name, table in TABLES.items():
        for (phase, column), right in table.items():
            for verdict in Verdict:
                if verdict is not right:
                    yield Broken(name, phase, column, verdict)


@contextmanager
def breaking(broken: Broken) -> Iterator[None]:
    """In the `with` block the cell is broken."""
    table, key = TABLES[broken.table], (broken.phase, broken.column)
    right = table[key]
    table[key] = broken.verdict
    try:
        yield
    finally:
        table[key] = right


def pytest_configure() -> None:
    """Break the cell that the environment names."""
    broken = broken_named(os.environ[VARIABLE])
    TABLES[broken.table][broken.phase, broken.column] = broken.verdict
