"""The step that sends a script of prepared statements, past SQLAlchemy and psycopg's cursors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast

import psycopg
from psycopg.pq import ExecStatus, TransactionStatus
from sqlalchemy import Connection

from participant_sdk.databases.database import known_to_sqlalchemy, noted
from participant_sdk.databases.postgresql_pipeline import Command, send_pipeline, send_simple
from participant_sdk.steps import RunAgain, drop_if_lost

if TYPE_CHECKING:
    from psycopg.abc import PQGen
    from psycopg.pq.abc import PGresult
    from sqlalchemy.ext.asyncio import AsyncConnection

READY: Final = "tricord.ready"
"""In the connection's `info`: whose statements are prepared on it."""
PREPARED_AS: Final = "tricord.prepared_as"
"""In the connection's `info`: the names of what is prepared on it of the short statements between the others."""
_IN_FULL: Final = "tricord.in_full"
_SENT: Final = "tricord.sent"

_DIVISION_BY_ZERO: Final = "22012"
_NOT_PREPARED: Final = "26000"
_PLAN_OUTDATED: Final = "0A000"


class NotPrepared(RunAgain):
    """The prepared statements were gone. psycopg deallocates all that there are when it has rolled back."""

    def __init__(self) -> None:
        super().__init__("the SDK's prepared statements were gone")


class Changed(RunAgain):
    """A row that was met is not as it was."""

    def __init__(self) -> None:
        super().__init__("the fence row was changed meanwhile")


@dataclass(slots=True)
class Prepared:
    """A statement with its arguments, as text; or, without arguments, to be prepared.

    `types`: the arguments' types, by their numbers in PostgreSQL.
    """

    name: bytes
    sql: bytes
    types: Sequence[int]
    arguments: Sequence[str | None] | None


@dataclass(slots=True)
class PgScript:
    """The step that sends a script, `prepared` between `before` and `after`; gives the result of each statement.

    With something prepared in it, it travels as a pipeline of the extended query protocol, where the server parses
    nothing, which gives the shortest latency; or `as_text`, as one simple query, which costs the client less: what
    counts with many threads. A server logs the text of a statement that fails, so that nothing of the user's may stand
    in it. Without anything prepared it is a simple query. Either way what follows an error is not run.

    `lead` goes before all that, each prepared part of it with its own end. `missed` is raised when the statement number
    `counted` (from 0; None: any), one that must hit a row, has hit none. A script `of` a fence, or of
    whoever else has statements prepared, begins a local transaction; on a connection that is not ready for this owner
    it gives None instead. `begin`: how it begins, if not as the engine does; None: it does not. Without an owner, it
    begins if `begin` says how. None begins where something has begun already, but one that begins `anew`, which rolls
    that back; `begun` counts the statements of the beginning.

    With `later` nobody waits for its results: they are looked at before the connection is asked for anything else, and
    an error among them is raised by the next script. It must be one that leaves the local transaction failed.
    """

    before: str
    prepared: Prepared | None = None
    after: str = ""
    missed: type[Exception] | None = None
    counted: int | None = 0
    of: tuple[str, str] | None = None
    begin: str | None = ""
    lead: Sequence[str | Prepared] = ()
    later: bool = False
    anew: bool = False
    as_text: bool = False
    begun: int = 0

    def perform(self, connection: Connection) -> Sequence[PGresult] | None:
        """See Step."""
        fairy = connection.connection
        raw: psycopg.Connection[Any] = fairy.dbapi_connection  # type: ignore[assignment]
        if self.of is not None:
            if self.of not in fairy.info.get(READY, ()):
                return None
            if self.begin is not None:
                known_to_sqlalchemy(connection)
        try:
            if (sent := fairy.info.get(_SENT)) is not None:
                sent.collect()
                sent.check(self)
                del fairy.info[_SENT]
            coming = self._send(fairy.info, raw)
            if self.later:
                fairy.info[_SENT] = _Sent(self, raw, coming)
                return None
            results: Sequence[PGresult] = raw.wait(coming)
            if results[-1].status == ExecStatus.FATAL_ERROR:
                raise self.error_in(results, raw)
        except psycopg.Error as error:
            drop_if_lost(connection, error)
            raise self._told(error, connection) from error
        return results

    async def perform_async(self, connection: AsyncConnection) -> Sequence[PGresult] | None:
        """See Step."""
        synchronous = cast(Connection, connection.sync_connection)
        if synchronous.invalidated:  # it is made anew by whoever asks for it
            await connection.run_sync(lambda lost: lost.connection)
        fairy = synchronous.connection
        raw: psycopg.AsyncConnection[Any] = fairy.driver_connection  # type: ignore[assignment]
        if self.of is not None:
            if self.of not in fairy.info.get(READY, ()):
                return None
            if self.begin is not None:
                await connection.run_sync(known_to_sqlalchemy)  # a listener of the engine may execute something
        try:
            if (sent := fairy.info.get(_SENT)) is not None:
                await sent.collect()
                sent.check(self)
                del fairy.info[_SENT]
            coming = self._send(fairy.info, raw)
            if self.later:
                fairy.info[_SENT] = _SentAsync(self, raw, coming)
                return None
            results: Sequence[PGresult] = await raw.wait(coming)
            if results[-1].status == ExecStatus.FATAL_ERROR:
                raise self.error_in(results, raw)
        except psycopg.Error as error:
            await connection.run_sync(drop_if_lost, error)  # closing what is lost needs a greenlet
            raise self._told(error, synchronous) from error
        return results

    def _send(self, info: dict[Any, Any], raw: Any) -> PQGen[list[PGresult]]:
        """The results are to be waited for."""
        # It has begun if the engine has a listener that executes something at every beginning.
        begins = self.begin if self.of is None else self.begin is not None
        begin = ""
        if self.anew or (begins and raw.pgconn.transaction_status == TransactionStatus.IDLE):
            begin = f"{'ROLLBACK;' if self.anew else ''}{self.begin or BEGIN[raw.isolation_level]}"
        self.begun = begin.count(";")
        if self.prepared is None and not self.lead:
            return send_simple(raw.pgconn, f"{begin}{self.before}{self.after}".encode())
        in_full = raw.prepare_threshold is None or (self.of is None and _IN_FULL in info)
        if self.as_text and not in_full:
            lead = "".join(part if isinstance(part, str) else f"{_text(part)};" for part in self.lead)
            last = "" if self.prepared is None else _text(self.prepared)
            script = f"{begin}{self.before}{lead}{last}{self.after}"
            return send_simple(raw.pgconn, _encoded(script, raw))
        commands = [*_commands(begin), *_commands(self.before)]
        for part in self.lead:
            commands += _commands(part) if isinstance(part, str) else (_command(part, in_full, raw),)
        if self.prepared is not None:
            commands.append(_command(self.prepared, in_full, raw))
        commands += _commands(self.after)
        return send_pipeline(raw.pgconn, commands, {} if in_full else info.get(PREPARED_AS, {}))

    def error_in(self, results: Sequence[PGresult], raw: Any) -> Exception:
        """What the last of the results says, which is an error."""
        error = psycopg.errors.error_from_result(results[-1], encoding=raw.info.encoding)
        where_counted = self.counted is None or len(results) == self.counted + 1 + self.begun
        if self.missed is not None and where_counted and error.sqlstate == _DIVISION_BY_ZERO:
            return self.missed()
        return error

    def _told(self, error: psycopg.Error, connection: Connection) -> Exception:
        """What `error` means."""
        if error.sqlstate == _NOT_PREPARED or (error.sqlstate == _PLAN_OUTDATED and "cached plan" in str(error)):
            connection.info.pop(READY, None)
            connection.info.pop(PREPARED_AS, None)
            if self.of is None:  # it happened since the beginning, and may happen each time
                connection.info[_IN_FULL] = True
            return NotPrepared()
        return error


class _Sent:
    """A script that was sent and not waited for. Whatever psycopg is asked next passes by `wait`, and so by here."""

    def __init__(self, script: PgScript, raw: Any, coming: PQGen[list[PGresult]]) -> None:
        self._script = script
        self._raw = raw
        self._coming = coming
        self._error: Exception | None = None
        self._raw.wait = self.wait

    def wait(self, generator: Any, *more: Any, **named: Any) -> Any:
        """In place of the connection's own."""
        self.collect()
        return self._raw.wait(generator, *more, **named)

    def collect(self) -> None:
        """Look at the results, unless it was done."""
        if "wait" in vars(self._raw):
            del self._raw.wait
            try:
                self._note(self._raw.wait(self._coming))
            except psycopg.Error as error:
                self._error = error

    @property
    def failed(self) -> bool:
        """Whether its results say so; once they have been looked at."""
        return self._error is not None

    def check(self, following: PgScript) -> None:
        """Raises what went wrong; not for a script that begins anew."""
        if self._error is not None and following.of is None:
            raise self._error

    def _note(self, results: Sequence[PGresult]) -> None:
        if results[-1].status == ExecStatus.FATAL_ERROR:
            self._error = self._script.error_in(results, self._raw)


@dataclass(frozen=True, slots=True)
class PgSettle:
    """The step that looks at the results of a script that was not waited for; gives whether it went well."""

    def perform(self, connection: Connection) -> bool:
        """See Step."""
        if (sent := noted(connection, _SENT)) is None:
            return True
        sent.collect()
        return not sent.failed

    async def perform_async(self, connection: AsyncConnection) -> bool:
        """See Step."""
        if (sent := noted(cast(Connection, connection.sync_connection), _SENT)) is None:
            return True
        await sent.collect()
        return not sent.failed


class _SentAsync(_Sent):
    """As `_Sent`, on an AsyncConnection."""

    async def wait(self, generator: Any, *more: Any, **named: Any) -> Any:
        """In place of the connection's own."""
        await self.collect()
        return await self._raw.wait(generator, *more, **named)

    async def collect(self) -> None:  # type: ignore[override]
        """Look at the results, unless it was done."""
        if "wait" in vars(self._raw):
            del self._raw.wait
            try:
                self._note(await self._raw.wait(self._coming))
            except psycopg.Error as error:
                self._error = error


BEGIN: Final = {None: "BEGIN;"} | {
    level: f"BEGIN ISOLATION LEVEL {level.name.replace('_', ' ')};" for level in psycopg.IsolationLevel
}
"""As the driver would say it, which leaves the engine's isolation level to that statement."""


@lru_cache(maxsize=256)
def _commands(text: str) -> tuple[Command, ...]:
    """Short statements, one after another, none of which has a semicolon in it."""
    return tuple((None, part.encode(), (), ()) for part in text.split(";") if part)


def _text(prepared: Prepared) -> str:
    """What runs it."""
    return f"EXECUTE {prepared.name.decode()}({','.join(map(_literal, prepared.arguments or ()))})"


def _literal(argument: str | None) -> str:
    """Means the same whatever the server's settings."""
    if argument is None:
        return "NULL"
    return "E'" + argument.replace("\\", "\\\\").replace("'", "''") + "'"


def _command(prepared: Prepared, in_full: bool, raw: Any) -> Command:
    if prepared.arguments is None:
        return prepared.name, prepared.sql, None, prepared.types
    arguments = [None if argument is None else _encoded(argument, raw) for argument in prepared.arguments]
    return None if in_full else prepared.name, prepared.sql, arguments, prepared.types


def _encoded(text: str, raw: Any) -> bytes:
    """As the server expects it. One that takes anything is given UTF-8, as by psycopg."""
    if text.isascii():
        return text.encode()
    name: str = raw.info.encoding
    return text.encode("utf-8" if name == "ascii" else name)
