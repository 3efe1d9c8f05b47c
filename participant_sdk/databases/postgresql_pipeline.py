"""How a script travels to PostgreSQL through libpq, past psycopg's cursors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

import psycopg
from psycopg import generators
from psycopg.pq import ExecStatus
from psycopg.waiting import Wait

if TYPE_CHECKING:
    from psycopg.abc import PQGen
    from psycopg.pq.abc import PGconn, PGresult

Command: TypeAlias = tuple[bytes | None, bytes, Sequence[bytes | None] | None, Sequence[int]]
"""The name that a statement is prepared under, if it is; its text; its arguments, and their types.

Without arguments (None) it is prepared, and not run.
"""

_WELL: Final = frozenset({ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK, ExecStatus.EMPTY_QUERY})


def send_pipeline(pgconn: PGconn, commands: Sequence[Command], names: Mapping[bytes, bytes]) -> PQGen[list[PGresult]]:
    """Send `commands`, of which the server runs none after an error; what is returned gives their results.

    A lone one goes without a pipeline. `names`: under which short statements that come without a name are prepared.
    """
    if len(commands) == 1:
        _send(pgconn, commands[0], names)
        return _results(pgconn)
    pgconn.enter_pipeline_mode()
    for command in commands:
        _send(pgconn, command, names)
    pgconn.pipeline_sync()
    return _results_of_pipeline(pgconn, len(commands))


def send_simple(pgconn: PGconn, script: bytes) -> PQGen[list[PGresult]]:
    """Send statements as one simple query; what is returned gives their results."""
    pgconn.send_query(script)
    return _results(pgconn)


def _send(pgconn: PGconn, command: Command, names: Mapping[bytes, bytes]) -> None:
    name, text, arguments, types = command
    known = name if name is not None else names.get(text)
    if arguments is None:
        pgconn.send_prepare(name or b"", text, types)
    elif known is not None:
        pgconn.send_query_prepared(known, arguments)
    else:
        pgconn.send_query_params(text, arguments, param_types=types)


def _results(pgconn: PGconn) -> PQGen[list[PGresult]]:
    """One of each statement, up to the first error. If it is interrupted, psycopg cancels, and has it go on.

    psycopg's own generators let go of the interpreter's lock several times for each result, which costs a switch of
    threads each where there are many.
    """
    results: list[PGresult] = []
    try:
        yield from _sent(pgconn)
        while True:
            while pgconn.is_busy():
                yield Wait.R
                pgconn.consume_input()
            if (result := pgconn.get_result()) is None:
                return results
            results.append(result)
    except psycopg.OperationalError:
        if _up_to_error(results) is None:  # else it is what ended the connection
            raise
    return results


def _results_of_pipeline(pgconn: PGconn, count: int) -> PQGen[list[PGresult]]:
    """As `_results`, of so many commands, each of which libpq ends with a None."""
    results: list[PGresult] = []
    ended = True
    try:
        yield from _sent(pgconn)
        while len(results) <= count:  # the last one is that of the pipeline itself
            while ended and pgconn.is_busy():
                yield Wait.R
                pgconn.consume_input()
            if (result := pgconn.get_result()) is not None:
                results.append(result)
                ended = False
            elif ended:  # nothing is between one command's end and the next one's, unless the connection is lost
                break
            else:
                ended = True
    except psycopg.OperationalError:
        if _up_to_error(results) is None:
            raise
    if len(results) > count:
        pgconn.exit_pipeline_mode()
        del results[count]
        if results[-1].status in _WELL:
            return results
    if (failed := _up_to_error(results)) is None:
        raise psycopg.OperationalError("the connection was lost while a pipeline was under way")
    return failed


def _sent(pgconn: PGconn) -> PQGen[None]:
    """All has been sent, and something may have come."""
    if pgconn.flush():
        yield from generators.send(pgconn)  # which takes in what comes meanwhile
    else:
        yield Wait.R
        pgconn.consume_input()


def _up_to_error(results: Sequence[PGresult]) -> list[PGresult] | None:
    """None if there is no error among them."""
    for number, result in enumerate(results, 1):
        if result.status == ExecStatus.FATAL_ERROR:
            return list(results[:number])
    return None
