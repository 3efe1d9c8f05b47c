"""The hot path on PostgreSQL: any number of coordinators on one database.

A flush is one statement in one implicit transaction, so no pause of this process ever lies between a row's lock and
its COMMIT (protocol A3). Rows are sorted and locked in one order, so two coordinators' flushes cannot deadlock (A4).
Arrays go over in binary, and planning is held to index look-ups: a plan made while the table was empty would be a
sequential scan, and would stay.

Nothing here needs more than a PostgreSQL-compatible engine gives: no advisory locks, sequences, triggers, LISTEN.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
import sqlalchemy as sa
import structlog
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.numeric import Int8BinaryDumper

from ..model import FORMAT, Attention, State
from .postgres_flush import Writer
from .rows import (
    ALONE_MS_MAX,
    CLAIMS_MAX,
    Batch,
    Claim,
    Fault,
    PutOff,
    Row,
    StoreError,
    StoreUnreachable,
    read_row,
)
from .schema import APPLICATION_NAME, UNKNOWN_INCARNATION

_log = structlog.get_logger(__name__)

_COLUMNS = ", ".join(Row._fields)
_T_COLUMNS = ", ".join(f"t.{name}" for name in Row._fields)
_M_COLUMNS = ", ".join(f"m.{name}" for name in Row._fields)
_NOW_MS = "(extract(epoch from statement_timestamp()) * 1000)::bigint"

# Locking, so that it waits for whoever is still writing these rows: a plain read would prove nothing (protocol A1).
_STANDING = f"SELECT {_COLUMNS} FROM tricord_transaction WHERE xid = ANY(%b::bytea[]) ORDER BY xid FOR SHARE"
_HOLDERS = f"SELECT {_COLUMNS} FROM tricord_transaction WHERE key = ANY(%b::bytea[]) ORDER BY xid"
# Rows that a newer program has written are its own to drive (protocol G2).
_READABLE = f"format <= {FORMAT}"
_PEEK = (
    f"SELECT {_NOW_MS}, (SELECT wake_ms FROM tricord_transaction WHERE wake_ms IS NOT NULL AND {_READABLE} "
    "ORDER BY wake_ms LIMIT 1)"
)
_STATES = "SELECT xid, state FROM tricord_transaction WHERE xid = ANY(%b::bytea[])"
# Not the control file's: that one goes on telling the old timeline until the first checkpoint after a failover.
_TIMELINE = "SELECT substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)"
# statement_timestamp() is an index condition; the volatile clock_timestamp() would be a filter over all (A8).
_DUE = f"wake_ms <= {_NOW_MS} AND {_READABLE}"
# Claimed so often without a save that it is claimed alone (A7).
_IN_VAIN = f"(claimed_version = version AND claims >= {CLAIMS_MAX})"
_COUNTED = "claims = CASE WHEN t.claimed_version = t.version THEN t.claims + 1 ELSE 1 END, claimed_version = t.version"
_CLAIM = f"""
    WITH due AS (SELECT xid FROM tricord_transaction WHERE {_DUE} AND NOT {_IN_VAIN}
                 ORDER BY wake_ms LIMIT %s FOR UPDATE SKIP LOCKED)
    UPDATE tricord_transaction t SET wake_ms = {_NOW_MS} + %s, {_COUNTED} FROM due WHERE t.xid = due.xid
    RETURNING {_T_COLUMNS}
"""
_CLAIM_ALONE = f"""
    WITH due AS (SELECT xid FROM tricord_transaction WHERE {_DUE} AND {_IN_VAIN}
                 ORDER BY claims, wake_ms LIMIT 1 FOR UPDATE SKIP LOCKED)
    UPDATE tricord_transaction t
    SET wake_ms = {_NOW_MS} + least(%s * power(2, t.claims - {CLAIMS_MAX - 1}), {ALONE_MS_MAX})::bigint,
        claims = least(t.claims + 1, {CLAIMS_MAX} + 30),
        attention = CASE t.attention WHEN {Attention.NONE:d} THEN %s ELSE t.attention END
    FROM due WHERE t.xid = due.xid
    RETURNING t.claims, {_T_COLUMNS}
"""
# The same beside rows that are put off; one row with an xid of NULL tells how many if nothing is left.
_CLAIM_REST = f"""
    WITH due AS (SELECT xid, state IN ({State.CONFIRMING:d}, {State.CANCELLING:d}) AND updated_ms > {_NOW_MS} - %s
                        AND string_to_array(trim(BOTH ',' FROM participants), ',') <@ %s::text[] AS off
                 FROM tricord_transaction WHERE {_DUE} AND NOT {_IN_VAIN}
                 ORDER BY wake_ms LIMIT %s FOR UPDATE SKIP LOCKED),
         moved AS (UPDATE tricord_transaction t
                   SET wake_ms = {_NOW_MS} + CASE WHEN due.off THEN %s + (random() * %s)::bigint ELSE %s END,
                       claims = CASE WHEN due.off THEN t.claims WHEN t.claimed_version = t.version THEN t.claims + 1
                                     ELSE 1 END,
                       claimed_version = CASE WHEN due.off THEN t.claimed_version ELSE t.version END
                   FROM due WHERE t.xid = due.xid RETURNING {_T_COLUMNS}, due.off)
    SELECT n.off, {_M_COLUMNS} FROM (SELECT count(*) FILTER (WHERE off) AS off FROM moved) n
    LEFT JOIN moved m ON NOT m.off
"""


class PostgresBackend:
    """One PostgreSQL database as a store.

    ``dsn`` is a ``postgresql://`` URL; ``lease_ms`` bounds how long a coordinator that was stopped can hold a row.
    """

    def __init__(self, dsn: str, lease_ms: int) -> None:
        self.dsn = dsn
        self._arguments: dict[str, Any] = {
            "options": f"{_options_of(dsn)} {_options(lease_ms)}".strip(),
            "application_name": APPLICATION_NAME,
            "connect_timeout": 5,
            "keepalives_idle": 5,
            "keepalives_interval": 2,
            "keepalives_count": 3,
            "tcp_user_timeout": lease_ms,  # a host that has vanished acknowledges nothing
        }
        self._others: weakref.WeakSet[psycopg.Connection[Any]] = weakref.WeakSet()  # SQLAlchemy's
        self._writer: Writer | None = None
        self._reader: psycopg.Connection[Any] | None = None
        self._may_ask_timeline = True

    def engine(self) -> sa.Engine:
        url = sa.make_url(self.dsn).set(drivername="postgresql+psycopg")
        engine = sa.create_engine(
            url, pool_size=2, max_overflow=2, pool_timeout=5, pool_pre_ping=True, connect_args=self._arguments
        )
        sa.event.listen(engine, "connect", self._opened)
        return engine

    def _opened(self, connection: psycopg.Connection[Any], _record: object) -> None:
        self._others.add(connection)
        _be_durable(connection)

    def reading_engine(self) -> sa.Engine:
        try:
            self._connect().close()
        except psycopg.Error as error:
            raise StoreUnreachable(f"the store cannot be reached: {_text(error)}") from error
        return self.engine()

    def prepare(self) -> None:
        try:
            with self._connect() as connection:
                settings = dict(
                    connection.execute(
                        "SELECT name, setting FROM pg_settings WHERE name IN "
                        "('fsync', 'full_page_writes', 'synchronous_standby_names', 'synchronous_commit')"
                    ).fetchall()
                )
                (standbys,) = connection.execute("SELECT count(*) FROM pg_stat_replication").fetchone() or (0,)
        except psycopg.Error as error:
            raise StoreUnreachable(f"the store cannot be reached: {_text(error)}") from error
        if settings.get("fsync") != "on":
            raise StoreError(
                "the store's PostgreSQL runs with fsync=off: a crash of its machine could lose decisions of which "
                "calls have left; set fsync=on"
            )
        if settings.get("full_page_writes") != "on":
            _log.warning("store.full_page_writes_off", hint="safe only on a file system that cannot tear pages")
        if standbys and not settings.get("synchronous_standby_names"):
            _log.warning(
                "store.asynchronous_replication", hint="a failover may lose decisions; use a synchronous standby"
            )

    def incarnation(self) -> str:
        with self._connect() as connection:
            try:
                row = connection.execute(
                    f"SELECT (SELECT system_identifier FROM pg_control_system())::text || '-' || ({_TIMELINE})"
                ).fetchone()
            except psycopg.Error as error:
                _log.warning("store.incarnation_unknown", error=_text(error))
                self._may_ask_timeline = _may_ask(connection, _TIMELINE)
                return UNKNOWN_INCARNATION
        return str(row[0]) if row else UNKNOWN_INCARNATION

    def flush(self, batch: Batch) -> list[Row | None]:
        writer = self._writer = self._writer or Writer(self._connect(plan_for_arrays=True))
        count = len(batch.begins) + len(batch.saves)
        if writer.write(batch) == count:
            return [None] * count
        return self._standing(writer.connection, batch)

    def claim(
        self, limit: int, lease_ms: int, put_off: PutOff | None = None, *, alone: bool = True, flags: bool = True
    ) -> Claim:
        connection = self._reader = self._reader or self._connect(plan_for_arrays=True)
        now_ms, next_ms = connection.execute(_PEEK, prepare=True).fetchone() or (0, None)
        if next_ms is None or next_ms > now_ms or limit < 1:
            return Claim((), now_ms, next_ms)
        if put_off is None:
            found = connection.execute(_CLAIM, (limit, lease_ms), prepare=True, binary=True).fetchall()
            off = 0
        else:
            names, saved_within_ms, least_ms, most_ms = put_off
            values = (saved_within_ms, list(names), limit, least_ms, max(0, most_ms - least_ms), lease_ms)
            rest = connection.execute(_CLAIM_REST, values, prepare=True, binary=True).fetchall()
            off = rest[0][0]
            found = [values[1:] for values in rest if values[1] is not None]
        claims = 0
        if alone and not found and not off:  # something is due that was not to be had so
            stuck = Attention.STUCK if flags else Attention.NONE
            one = connection.execute(_CLAIM_ALONE, (lease_ms, stuck), prepare=True, binary=True).fetchall()
            claims, found = (one[0][0], [one[0][1:]]) if one else (0, [])
        now_ms, next_ms = connection.execute(_PEEK, prepare=True).fetchone() or (now_ms, None)
        return Claim([read_row(values) for values in found], now_ms, next_ms, off, claims)

    def states(self, connection: sa.Connection, xids: Sequence[bytes]) -> Mapping[bytes, int]:
        # A plan made while the table was small would be kept; it holds for this local transaction only.
        connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
        return {row.xid: row.state for row in connection.exec_driver_sql(_STATES, (list(xids),))}

    def timeline(self, connection: sa.Connection) -> int:
        # A server in recovery refuses: what a standby has heard of so far says nothing of what is missing there.
        return int(connection.exec_driver_sql(_TIMELINE).scalar_one(), 16) if self._may_ask_timeline else 0

    def fault(self, error: Exception) -> Fault:
        if isinstance(error, MemoryError):
            return Fault.AGAIN
        if not isinstance(error, psycopg.Error):
            return Fault.REJECTED
        if not error.sqlstate and not isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            return Fault.REJECTED  # the driver itself could not send the values
        state = error.sqlstate or ""
        # 40xxx: serialization failure, deadlock; 55P03: lock time-out; 57014: statement time-out.
        if state[:2] == "40" or state in ("55P03", "57014"):
            return Fault.AGAIN
        if not state or state[:2] in ("08", "57", "53", "58", "25") or state in ("XX000",):
            return Fault.LOST
        if state[:2] in ("22", "23", "54"):  # a value, a constraint or a size that will never be accepted
            return Fault.REJECTED
        return Fault.LOST  # the table is gone, rights are missing, …: not this row's fault, and it may be mended

    def interrupt(self) -> None:
        # Nothing else wakes a thread that waits for a server which is frozen, or cut off, and keeps its connections.
        writing = None if self._writer is None else self._writer.connection
        for connection in [writing, self._reader, *self._others]:
            if connection is not None and not connection.closed:
                with (
                    contextlib.suppress(OSError, psycopg.Error),
                    socket.socket(fileno=os.dup(connection.fileno())) as s,
                ):
                    s.shutdown(socket.SHUT_RDWR)

    def close_writer(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(psycopg.Error):
                self._writer.connection.close()
            self._writer = None

    def close_reader(self) -> None:
        if self._reader is not None:
            with contextlib.suppress(psycopg.Error):
                self._reader.close()
            self._reader = None

    def release(self) -> None:
        pass  # nothing is held alone

    def _connect(self, *, plan_for_arrays: bool = False) -> psycopg.Connection[Any]:
        connection = psycopg.connect(self.dsn, autocommit=True, **self._arguments)
        connection.adapters.register_dumper(int, Int8BinaryDumper)
        _be_durable(connection)
        if plan_for_arrays:
            connection.execute("SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off")
        return connection

    def _standing(self, connection: psycopg.Connection[Any], batch: Batch) -> list[Row | None]:
        """Which rows stand, after a flush that met at least one conflict. It has been committed by now."""
        rows = [*batch.begins, *batch.saves]
        found = connection.execute(_STANDING, ([row.xid for row in rows],), binary=True).fetchall()
        by_xid = {row.xid: row for row in map(read_row, found)}
        keys = [row.key for row in batch.begins if row.key and row.xid not in by_xid]
        by_key: dict[bytes, Row] = {}
        if keys:
            found = connection.execute(_HOLDERS, (keys,), binary=True).fetchall()
            by_key = {row.key: row for row in map(read_row, found)}
        standing: list[Row | None] = []
        for row in rows:
            other = by_xid.get(row.xid) or by_key.get(row.key) or Row(row.xid)
            standing.append(None if other.save_id == row.save_id and other.xid == row.xid else other)
        return standing


def _may_ask(connection: psycopg.Connection[Any], query: str) -> bool:
    """Whether the database knows the functions of a query, and lets this role call them."""
    try:
        connection.execute(query)
    except psycopg.Error as error:
        return (error.sqlstate or "")[:2] != "42"
    return True


def _be_durable(connection: psycopg.Connection[Any]) -> None:
    """Set what the server's own default may be too weak for, and leave what is stronger (remote_apply)."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT set_config('synchronous_commit', 'on', false) "
            "WHERE current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')"
        )
    if not connection.autocommit:
        connection.commit()


def _options(lease_ms: int) -> str:
    """What every connection of the coordinator sets, whatever the server's defaults (protocol A3, A10)."""
    settings = {
        "default_transaction_isolation": "read\\ committed",
        "idle_in_transaction_session_timeout": lease_ms,
        "lock_timeout": max(1, lease_ms // 2),
        "statement_timeout": lease_ms,
        "jit": "off",
    }
    return " ".join(f"-c {name}={value}" for name, value in settings.items())


def _options_of(dsn: str) -> str:
    """The options that the DSN itself sets, such as a search_path; ours come after them and win."""
    try:
        return str(conninfo_to_dict(dsn).get("options") or "")
    except psycopg.Error as error:
        raise StoreError(f"store: not a PostgreSQL address: {_text(error)}") from error


def _text(error: Exception) -> str:
    return " ".join(str(error).split())
