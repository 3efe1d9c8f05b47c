"""Whether what a user has handed in is bound to the database that the store is in, asked of the databases themselves.

Two engines may name one database in two ways, and one name may lead to two databases. No rights are needed to ask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sqlalchemy import Dialect

from participant_sdk.databases.database import Script
from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.moves import Apart, Moves, On
from participant_sdk.steps import Rollback, Send

if TYPE_CHECKING:
    from participant_sdk.idempotency.lines import Line

_ASK: Final = {
    "postgresql": "SELECT extract(epoch FROM pg_postmaster_start_time()), oid FROM pg_database "
    "WHERE datname = current_database()",
    "mysql": "SELECT @@hostname, @@port, @@datadir, DATABASE()",
    "mariadb": "SELECT @@hostname, @@port, @@datadir, DATABASE()",
    "sqlite": "SELECT file FROM pragma_database_list WHERE name = 'main'",
}


def check_same(line: Line, store: Dialect, known: str | None) -> Moves[str]:
    """What names the store's database; `known`: what it was. Raises ConfigurationError if the line's is another."""
    ask = _ASK[store.name]
    mine = theirs = ""
    if _ASK.get(line.synchronous.dialect.name) == ask:
        theirs = yield On(line, _identity(ask, ends=False))
        mine = theirs if known == theirs else (yield Apart(_identity(ask, ends=True)))
    if mine != theirs or not mine.strip("/"):  # one in memory has no name
        raise ConfigurationError(
            "what was handed in is bound to another database than the idempotency store: the work and its record "
            "would not be one local transaction"
        )
    return mine


def _identity(ask: str, *, ends: bool) -> Script[str]:
    rows = (yield Send(ask)).rows
    if ends:
        yield Rollback()
    return "/".join(str(value or "") for value in rows[0])
