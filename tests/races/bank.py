"""The participant of the races: one database, two instances of the same service, and what can be seen of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import OperationalError

from participant_sdk import Participant
from participant_sdk.engines import SyncEngineFence
from participant_sdk.fence import Status
from participant_sdk.fence_tables import DEFAULT
from tests.races.actor import ACTOR, Actor
from tests.races.faults import Killed
from tests.races.handlers import Handlers, Provider, define

LEVELS: Final[Mapping[str, Sequence[str]]] = {
    "postgres": ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"),
    "mariadb": ("READ COMMITTED", "REPEATABLE READ", "SNAPSHOT"),
    "sqlite": ("WAL",),
}
"""SNAPSHOT is REPEATABLE READ with `innodb_snapshot_isolation`, the default since MariaDB 11.8."""
INSTANCES: Final = 2
CONNECTIONS: Final = 8
ACCOUNTS: Final = (1, 2)
OPENING: Final = 10**12
LAPSE_RUNS_MAX: Final = 10
RETENTION_MS: Final = 7 * 24 * 3_600_000

_LOUD: Final = ("tricord.participant", "sqlalchemy.pool.impl.QueuePool", "sqlalchemy.pool.impl.AsyncAdaptedQueuePool")
"""Loggers that would tell of every cut connection."""

_LAPSE = text("UPDATE tcc_fence_log SET lease_until_ms = 0 WHERE xid = :xid AND intent IS NOT NULL")
_LOOK = text(
    "SELECT 'fence', branch_id, status, CASE WHEN finished_at IS NULL THEN 0 ELSE 1 END, 0, '' FROM tcc_fence_log "
    "WHERE xid = :xid UNION ALL SELECT 'effect', branch_id, 0, 0, 0, what FROM effects WHERE xid = :xid "
    "UNION ALL SELECT 'account', id, available, held, spent, '' FROM accounts"
)


@dataclass(frozen=True)
class Account:
    """What an account has."""

    available: int
    held: int
    spent: int

    @property
    def total(self) -> int:
        """Conserved."""
        return self.available + self.held + self.spent


@dataclass(frozen=True)
class Sight:
    """What is committed about one transaction, read at one moment. Rows: branch id to status and "finished"."""

    rows: dict[int, tuple[Status, bool]]
    effects: dict[int, list[str]]
    accounts: dict[int, Account]


class Bank:
    """The service on one database; `url` is SQLAlchemy's. One race at a time. `tables`: they are to be made first."""

    def __init__(
        self,
        database: str,
        level: str,
        url: str,
        *,
        tables: bool = True,
        instances: int = INSTANCES,
        connections: int = CONNECTIONS,
    ) -> None:
        self.database = database
        self.level = level
        self.is_file = database == "sqlite"
        self.url = url
        self.instances = instances
        self.connections = connections
        self._tables = tables
        self._loud = [name for name in _LOUD if not logging.getLogger(name).disabled]
        self.auditor = create_engine(url, isolation_level="AUTOCOMMIT", **self._options())
        self._threads = ThreadPoolExecutor(8, "race")
        self.provider = Provider()

    def __enter__(self) -> Self:
        for name in self._loud:
            logging.getLogger(name).disabled = True
        if self._tables:
            self._create_tables()
        self._eyes = self.auditor.connect()
        self._prepare()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown()
        self._eyes.close()
        self.auditor.dispose()
        self._dispose()
        for name in self._loud:
            logging.getLogger(name).disabled = False

    # --- the service ---

    def _prepare(self) -> None:
        self._engines = [create_engine(self.url, **self._engine_options()) for _ in range(self.instances)]
        self._fences = []
        for engine in self._engines:
            self._listen(engine)
            participant = Participant("bank", engine)
            define(participant, Handlers(self))
            engine_fence = SyncEngineFence(engine, DEFAULT, RETENTION_MS)
            self._fences.append((engine_fence, engine_fence.prepare(participant.check(), self.connections)))

    def _dispose(self) -> None:
        for engine in self._engines:
            engine.dispose()

    def _engine_options(self) -> dict[str, Any]:
        level = {"WAL": None, "SNAPSHOT": "REPEATABLE READ"}.get(self.level, self.level)
        pool = {"pool_size": self.connections, "pool_use_lifo": True}
        return {**self._options(), **pool, **({"isolation_level": level} if level else {})}

    def _options(self) -> dict[str, Any]:
        if self.database == "postgres":  # a deadlock is looked for soon; nobody pulls the plug here
            return {"connect_args": {"options": "-c deadlock_timeout=10ms -c synchronous_commit=off"}}
        if self.database == "mariadb":  # making a TLS context costs more than all the rest of a round
            return {"connect_args": {"ssl_disabled": True}}
        return {}

    def _listen(self, engine: Engine) -> None:
        @event.listens_for(engine, "connect")
        def prepare(raw: Any, record: Any) -> None:
            cursor = raw.cursor()
            if self.is_file:
                cursor.execute("PRAGMA synchronous = OFF")
            elif self.level == "SNAPSHOT":
                cursor.execute("SET SESSION innodb_snapshot_isolation = ON")
            cursor.close()

    def start(self, actor: Actor) -> Future[None]:
        """Run the actor's call beside others."""
        return self._threads.submit(self.run, actor)

    def start_beside(self, function: Callable[[], None]) -> Future[None]:
        """Run anything beside the calls."""
        return self._threads.submit(function)

    def let_leases_lapse(self, xid: str) -> None:
        """As if so much time had passed."""
        with self.auditor.connect() as db:
            for _ in range(LAPSE_RUNS_MAX):
                with suppress(OperationalError):  # a deadlock with the calls in the race
                    db.execute(_LAPSE, {"xid": xid})
                    return
        raise AssertionError("the leases cannot be made to lapse")

    def run(self, actor: Actor) -> None:
        """Run the actor's call to its end, whichever that is."""
        engine_fence, fence = self._fences[actor.instance]
        token = ACTOR.set(actor)
        try:
            actor.point("arrives")
            actor.invoked = actor.number()
            actor.ended(engine_fence.execute(actor.call, fence))
        except Killed:
            actor.gone()
        except BaseException as error:
            actor.crashed = error
        finally:
            ACTOR.reset(token)
            if actor.schedule is not None:
                actor.schedule.end(actor.runner)

    # --- what is in the database ---

    def look(self, xid: str) -> Sight:
        """What everybody can see now."""
        return _sight(self._eyes, xid)

    def look_beside(self, xid: str) -> Sight:
        """The same, from another thread."""
        with self.auditor.connect() as db:
            return _sight(db, xid)

    def _create_tables(self) -> None:
        with self.auditor.connect() as db:
            if self.is_file:
                db.exec_driver_sql("PRAGMA journal_mode = WAL")
            db.execute(text("CREATE TABLE effects (xid varchar(32), branch_id bigint, what varchar(80))"))
            db.execute(text("CREATE INDEX effects_xid ON effects (xid)"))
            db.execute(text("CREATE TABLE accounts (id int PRIMARY KEY, available bigint, held bigint, spent bigint)"))
            for account in ACCOUNTS:
                db.execute(text(f"INSERT INTO accounts VALUES ({account}, {OPENING}, 0, 0)"))


def _sight(db: Connection, xid: str) -> Sight:
    sight = Sight({}, {}, {})
    for what, number, first, second, third, effect in db.execute(_LOOK, {"xid": xid}):
        if what == "fence":
            sight.rows[number] = (Status(first), bool(second))
        elif what == "effect":
            sight.effects.setdefault(number, []).append(effect)
        else:
            sight.accounts[number] = Account(first, second, third)
    return sight
