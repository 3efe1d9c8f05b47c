"""The store's words, for the statements of sweeping and inspection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from sqlalchemy import Dialect

from participant_sdk.databases.database import BY_THE_KEY, Script
from participant_sdk.idempotency.statements import SentStore
from participant_sdk.idempotency.stores import store_of
from participant_sdk.idempotency.tables import IdempotencyTables
from participant_sdk.steps import Send


@dataclass(frozen=True, slots=True)
class Words:
    """`sign`: of a parameter. `now_ms`: the clock as it is at that moment."""

    dialect: str
    table: str
    sign: str
    now_ms: str

    def signs(self, count: int) -> str:
        """So many parameters, for IN."""
        return ", ".join([self.sign] * count)

    def page_begun(self) -> Script[None]:
        """Before a read of one of many pages in the order of the key: see BY_THE_KEY."""
        if self.dialect == "postgresql":
            yield Send(BY_THE_KEY)


def words_of(dialect: Dialect, tables: IdempotencyTables) -> Words:
    """Those of a database. Raises ConfigurationError for one that cannot hold the records."""
    store = cast(SentStore, store_of(dialect, tables))
    name = "mariadb" if dialect.name == "mysql" else dialect.name
    return Words(name, store.table, store.SIGN, store.NOW_MS)
