"""The rows of a flush on SQLite, many with one statement.

Python's ``sqlite3`` gives the interpreter lock away for each statement that it runs, and the event loop may keep it for
a millisecond: one statement for each row would cost the flush more than what it writes.
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable, Sequence
from itertools import chain

from .rows import Batch, Row, read_row

_COLUMNS = ", ".join(Row._fields)
_FIELDS = {name: f"?{number}" for number, name in enumerate(Row._fields, 1)}
"""Of the one row that a statement is given."""
_INSERT = f"INSERT INTO tricord_transaction ({_COLUMNS}) VALUES"
_INSERTED = ", ".join("nullif(?, x'')" if name == "key" else "?" for name in Row._fields)
_UPDATE = (
    "UPDATE tricord_transaction SET participants = coalesce(nullif({participants}, ''), participants), "
    "format = {format}, version = {version}, save_id = {save_id}, state = {state}, attention = {attention}, "
    "wake_ms = {wake_ms}, updated_ms = {updated_ms}, progress = {progress}"
)
_EXPECTED = "WHERE xid = {xid} AND version = {version} - 1"
_UPDATED = ", ".join("?" * len(Row._fields))
_LABEL = "INSERT INTO tricord_label (name, value, xid) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
_BY_XID = f"SELECT {_COLUMNS} FROM tricord_transaction WHERE xid = ?"
_BY_KEY = f"SELECT {_COLUMNS} FROM tricord_transaction WHERE key = ?"
_AT_ONCE = (64, 8, 1)
"""So many rows with one statement: older SQLites take no more than 999 values."""
_UPDATES_FROM = sqlite3.sqlite_version_info >= (3, 33)


@functools.cache
def _insert(count: int) -> str:
    """A statement that inserts so many rows; those whose xid or key is there it leaves out."""
    return f"{_INSERT} {', '.join([f'({_INSERTED})'] * count)} ON CONFLICT DO NOTHING"


@functools.cache
def _update(count: int) -> str:
    """A statement that saves so many rows; those of which another version stands it leaves out."""
    if count == 1:
        return f"{_UPDATE} {_EXPECTED}".format_map(_FIELDS)
    columns = {name: f"s.column{number}" for number, name in enumerate(Row._fields, 1)}
    rows = ", ".join([f"({_UPDATED})"] * count)
    return f"{_UPDATE} FROM (VALUES {rows}) AS s {_EXPECTED}".format_map(columns)


def write(connection: sqlite3.Connection, batch: Batch) -> list[Row | None]:
    """Write and COMMIT; what stands in the place of each row, begins first, None where it is itself.

    Raises sqlite3.Error, and may leave a transaction open then.
    """
    connection.execute("BEGIN IMMEDIATE")
    standing = _write_all(connection, batch)
    if standing is None:
        connection.execute("ROLLBACK")
        connection.execute("BEGIN IMMEDIATE")
        standing = _write_each(connection, batch)
    connection.execute("COMMIT")
    return standing


def _write_all(connection: sqlite3.Connection, batch: Batch) -> list[Row | None] | None:
    """As ``write``; None, and only some are written, if something stands in the way of one."""
    updates = _AT_ONCE if _UPDATES_FROM else (1,)
    written = _write_many(connection, batch.begins, _insert, _AT_ONCE)
    written += _write_many(connection, batch.saves, _update, updates)
    if written != len(batch.begins) + len(batch.saves):
        return None
    for xid, labels in batch.labels.items():
        connection.executemany(_LABEL, [(*label, xid) for label in labels])
    return [None] * written


def _write_many(
    connection: sqlite3.Connection, rows: Sequence[Row], statement: Callable[[int], str], sizes: Sequence[int]
) -> int:
    """How many of them were written."""
    first = written = 0
    for size in sizes:
        while len(rows) - first >= size:
            values = tuple(chain.from_iterable(rows[first : first + size]))
            written += connection.execute(statement(size), values).rowcount
            first += size
    return written


def _write_each(connection: sqlite3.Connection, batch: Batch) -> list[Row | None]:
    """As ``write``, one row after another."""
    standing: list[Row | None] = []
    for row in batch.begins:
        stored = connection.execute(_insert(1), row).rowcount
        if stored and row.xid in batch.labels:
            connection.executemany(_LABEL, [(*label, row.xid) for label in batch.labels[row.xid]])
        standing.append(None if stored else _holder(connection, row))
    for row in batch.saves:
        stored = connection.execute(_update(1), row).rowcount
        standing.append(None if stored else _holder(connection, row))
    return standing


def _holder(connection: sqlite3.Connection, mine: Row) -> Row | None:
    """The row that stands in place of mine; None if it is mine after all, from a run whose end was not seen."""
    values = connection.execute(_BY_XID, (mine.xid,)).fetchone()
    if values is None and mine.key:
        values = connection.execute(_BY_KEY, (mine.key,)).fetchone()
    row = Row(mine.xid) if values is None else read_row(values)
    return None if row.save_id == mine.save_id and row.xid == mine.xid else row
