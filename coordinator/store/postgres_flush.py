"""Flushes on PostgreSQL: the statements, their arrays, and the connection that has them prepared.

They go through libpq's own call for a prepared statement: all values are bytes already, and what psycopg does for a
statement beside that would take a lone transaction's flush longer by a quarter.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import psycopg
from psycopg.pq import DiagnosticField, ExecStatus
from psycopg.pq.abc import PGresult

from .postgres_arrays import bytes_array, integers_array, texts_array
from .rows import Batch, Labels, Row

_ARRAY_OF: Mapping[type, Callable[[Sequence[Any]], bytes]] = {bytes: bytes_array, str: texts_array}
_MAKERS = [_ARRAY_OF.get(type(Row._field_defaults.get(name, b"")), integers_array) for name in Row._fields]
"""What makes an array of each column of a ``Row``."""
_WAKE_MS = Row._fields.index("wake_ms")
_BINARY: Final = 1
_JSONB_HEAD: Final = b"\1"
"""What stands before the text in the binary form of jsonb: its version."""

_INSERT = """
    INSERT INTO tricord_transaction (xid, created_ms, key, body, participants, format,
                                     version, save_id, state, attention, wake_ms, updated_ms, progress)
    SELECT xid, created_ms, nullif(key, ''), body, participants, format,
           version, save_id, state, attention, nullif(wake_ms, 0), updated_ms, progress
    FROM unnest(?::bytea[], ?::bigint[], ?::bytea[], ?::bytea[], ?::text[], ?::bigint[], ?::bigint[],
                ?::bigint[], ?::bigint[], ?::bigint[], ?::bigint[], ?::bigint[], ?::bytea[])
         AS b(xid, created_ms, key, body, participants, format,
              version, save_id, state, attention, wake_ms, updated_ms, progress)
"""
# An insertion that settles conflicts by itself logs one record more for each row, so keys are looked for instead. What
# meets one all the same (a key that is taken at this very moment, a flush that is run again) is run again with that.
_UNLESS_THERE = "WHERE NOT EXISTS (SELECT FROM tricord_transaction t WHERE t.key = nullif(b.key, ''))"
_UNLESS_CONFLICT = "ON CONFLICT DO NOTHING"
# One JSON object by xid, looked into for each row that was really inserted: a join would compare all with all.
_INSERT_LABELS = """
    INSERT INTO tricord_label (name, value, xid)
    SELECT given.key, given.value, b.xid FROM b, jsonb_each_text(?::jsonb -> encode(b.xid, 'hex')) AS given
    ON CONFLICT DO NOTHING
"""
# The arrays are in the order of xids, and so planned (see ``Writer``) are its row locks: each row of the arrays is
# looked up in turn. To lock the rows by a statement of their own would be logged as well, row by row.
_UPDATE = """
    UPDATE tricord_transaction t
    SET participants = CASE s.participants WHEN '' THEN t.participants ELSE s.participants END, format = s.format,
        version = s.version, save_id = s.save_id, state = s.state, attention = s.attention,
        wake_ms = nullif(s.wake_ms, 0), updated_ms = s.updated_ms, progress = s.progress
    FROM unnest(?::bytea[], ?::text[], ?::bigint[], ?::bigint[], ?::bigint[], ?::bigint[], ?::bigint[],
                ?::bigint[], ?::bigint[], ?::bytea[])
         AS s(xid, participants, format, version, save_id, state, attention, wake_ms, updated_ms, progress)
    WHERE t.xid = s.xid AND t.version = s.version - 1
"""


class Kind(NamedTuple):
    """What a flush holds."""

    begins: bool
    labels: bool
    saves: bool
    conflicts: bool = False
    """Whether a begin's xid or key may be there by now."""


def _statement(kind: Kind) -> bytes:
    """One that tells how many rows it has written: as its only value, or, where it is but one command, by that."""
    insert = f"{_INSERT} {_UNLESS_CONFLICT if kind.conflicts else _UNLESS_THERE}"
    if kind == (True, False, False, kind.conflicts):
        statement = insert
    elif not kind.begins:
        statement = _UPDATE
    else:
        parts = {"b": f"{insert} RETURNING xid"}
        if kind.labels:
            parts["l"] = _INSERT_LABELS
        if kind.saves:
            parts["s"] = f"{_UPDATE} RETURNING t.xid"
        counts = " + ".join(f"(SELECT count(*) FROM {name})" for name in parts if name != "l")
        statement = f"WITH {', '.join(f'{name} AS ({part})' for name, part in parts.items())} SELECT {counts}"
    first, *rest = statement.split("?")
    return (first + "".join(f"${n}{text}" for n, text in enumerate(rest, 1))).encode()


FLUSHES: Final = {
    kind: _statement(kind)
    for kind in itertools.starmap(Kind, itertools.product((False, True), repeat=len(Kind._fields)))
    if kind.begins or (kind.saves and not kind.labels and not kind.conflicts)
}


class Writer:
    """A connection that flushes. It plans once, for index look-ups, and not for each flush anew."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        """The connection must not be in a local transaction, and commit by itself. Raises psycopg.Error."""
        self.connection = connection
        self._prepared: set[Kind] = set()
        connection.execute(
            "SELECT set_config(name, 'force_generic_plan', false) FROM pg_settings WHERE name = 'plan_cache_mode'"
        )

    def write(self, batch: Batch) -> int:
        """Write a batch and COMMIT; how many of its rows were written. Raises psycopg.Error, and what arrays raise."""
        begins = sorted(batch.begins, key=_by_key)
        saves = sorted(batch.saves, key=_by_xid)
        kind = Kind(bool(begins), bool(begins and batch.labels), bool(saves))
        values = [
            *(_begin_arrays(begins) if begins else ()),
            *(_labels(batch.labels) if kind.labels else ()),
            *(_save_arrays(saves) if saves else ()),
        ]
        try:
            return self._run(kind, values)
        except psycopg.errors.UniqueViolation:
            return self._run(kind._replace(conflicts=True), values)

    def _run(self, kind: Kind, values: Sequence[bytes]) -> int:
        pgconn = self.connection.pgconn
        name = b"tricord_flush_%d%d%d%d" % kind
        if kind not in self._prepared:
            _checked(pgconn.prepare(name, FLUSHES[kind]))
            self._prepared.add(kind)
        result = _checked(pgconn.exec_prepared(name, values, [_BINARY] * len(values), _BINARY))
        if result.status == ExecStatus.TUPLES_OK:  # psycopg gives a plain number
            return int.from_bytes(result.get_value(0, 0) or b"", "big")
        return result.command_tuples or 0


def _checked(result: PGresult) -> PGresult:
    """The result of a statement that went well. Raises psycopg.Error."""
    if result.status in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK):
        return result
    if not result.error_field(DiagnosticField.SQLSTATE):  # no server has said it: the connection is gone
        raise psycopg.OperationalError(result.get_error_message())
    raise psycopg.errors.error_from_result(result)


def _by_key(row: Row) -> tuple[bytes, bytes]:
    return row.key, row.xid


def _by_xid(row: Row) -> bytes:
    return row.xid


def _begin_arrays(rows: Sequence[Row]) -> list[bytes]:
    columns: Any = list(zip(*rows, strict=True))
    columns[_WAKE_MS] = [wake_ms or 0 for wake_ms in columns[_WAKE_MS]]
    return [make(column) for make, column in zip(_MAKERS, columns, strict=True)]


def _labels(labels: Labels) -> list[bytes]:
    """The value of ``_INSERT_LABELS``."""
    return [_JSONB_HEAD + json.dumps({xid.hex(): dict(pairs) for xid, pairs in labels.items()}).encode()]


def _save_arrays(rows: Sequence[Row]) -> list[bytes]:
    xids, _, _, _, *columns = _begin_arrays(rows)
    return [xids, *columns]
