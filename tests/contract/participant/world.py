"""A bank on a real database behind a real gRPC server, in every flavour that the SDK has.

The handlers do what the payload's `mode` says and leave a row in `effects` for everything that they do. That table
has no unique key, so an effect that happens twice is seen twice.
"""

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
from sqlalchemy import Connection, Engine, text
from sqlalchemy.ext.asyncio import AsyncConnection

from participant_sdk import Call, Participant, Payload, Refused
from participant_sdk.payload import encode
from tests.engines import async_engine, sync_engine
from tricord.v1 import participant_pb2, participant_pb2_grpc, types_pb2

TRY, CONFIRM, CANCEL = participant_pb2.PHASE_TRY, participant_pb2.PHASE_CONFIRM, participant_pb2.PHASE_CANCEL
SETTLE_CONFIRMED = participant_pb2.PHASE_SETTLE_CONFIRMED
SETTLE_CANCELLED = participant_pb2.PHASE_SETTLE_CANCELLED
DONE, REFUSED = participant_pb2.OUTCOME_DONE, participant_pb2.OUTCOME_REFUSED
UNKNOWN, VIOLATION = participant_pb2.OUTCOME_UNKNOWN, participant_pb2.OUTCOME_VIOLATION

FLAVOURS = (
    "sqlite-sync",
    "sqlite-async",
    "postgres-sync",
    "postgres-async",
    "postgres-sync-repeatable_read",
    "postgres-async-serializable",
    "mariadb-sync",
    "mariadb-async",
    "mariadb-sync-read_committed",
)
"""Database, stack, and isolation level if it is not the database's own default."""
WAIT_SECONDS = 20.0


@dataclass(frozen=True)
class Debit:
    """The payload of every action of the bank."""

    account: str = "alice"
    amount: int = 10
    mode: str = "plain"


@dataclass(frozen=True)
class Held:
    """What Try returns."""

    hold: str


@dataclass
class Gate:
    """Where a handler waits until the test lets it go on."""

    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)
    count: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def pass_through(self) -> None:
        with self.lock:
            self.count += 1
        self.reached.set()
        assert self.opened.wait(WAIT_SECONDS)

    async def wait_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, WAIT_SECONDS)


def effect(db: Connection, call: Call[Debit], what: str) -> None:
    values = {"xid": call.xid, "branch_id": call.branch_id, "what": what}
    db.execute(text("INSERT INTO effects (xid, branch_id, what) VALUES (:xid, :branch_id, :what)"), values)


def _swallow(db: Connection, statement: str) -> None:
    try:
        db.execute(text(statement))
    except Exception:
        return
    raise AssertionError("the statement should have failed")


def _commit_in_the_driver(db: Connection) -> None:
    """Where the SDK cannot see it."""
    db.connection.dbapi_connection.commit()  # type: ignore[union-attr]


_COPIED = "result, result_content_type, refusal_reason, refusal_message, created_at, modified_at, finished_at"
_COPY = (
    f"INSERT INTO tcc_fence_log (xid, branch_id, participant, action, status, {_COPIED}) "
    f"SELECT :xid, branch_id, participant, action, status, {_COPIED} FROM tcc_fence_log WHERE xid = :other"
)


def do_try(db: Connection, call: Call[Debit]) -> Any:
    """Try's work, for both flavours."""
    mode = call.payload.mode
    effect(db, call, "try")
    match mode:
        case "refuse":
            raise Refused("insufficient_funds", "alice\nhas too little")
        case "swallow_error" | "swallow_error_and_return_nothing":
            if db.dialect.name == "sqlite":
                _swallow(db, "INSERT OR ROLLBACK INTO things VALUES (1)")
                effect(db, call, "went on")
            elif db.dialect.name == "postgresql":
                _swallow(db, "INSERT INTO things VALUES (1)")
            else:  # what InnoDB does at a deadlock
                db.connection.dbapi_connection.rollback()  # type: ignore[union-attr]
                effect(db, call, "went on")
            return Held("went on") if mode == "swallow_error" else None
        case "refuse_after_error":
            try:
                db.execute(text("INSERT INTO things VALUES (1)"))
            except Exception as error:
                raise Refused("duplicate") from error
        case "commit":
            db.commit()
        case "commit_swallowed":
            try:
                db.commit()
            except Exception:
                return Held("swallowed")
        case "rollback":
            db.rollback()
        case "close":
            db.close()
        case "raw_commit":
            db.exec_driver_sql("COMMIT")
        case "driver_commit":
            _commit_in_the_driver(db)
            effect(db, call, "step 2")
        case "driver_commit_and_refuse":
            _commit_in_the_driver(db)
            raise Refused("no")
        case "refuse_too_late":  # another call for the branch has come to its end meanwhile, as that of the account
            db.connection.dbapi_connection.rollback()  # type: ignore[union-attr]
            db.execute(text(_COPY), {"xid": call.xid, "other": call.payload.account})
            _commit_in_the_driver(db)
            raise Refused("no")
        case "refuse_when_locked":
            try:
                db.execute(text("SELECT n FROM counters WHERE name = 'hot' FOR UPDATE NOWAIT"))
            except Exception as error:
                raise Refused("busy") from error
        case "begin":
            with db.begin():
                pass
        case "nested":
            nested = db.begin_nested()
            effect(db, call, "inside")
            nested.rollback()
        case "raise":
            raise ValueError("bad\x00 luck\n" + "x" * 100_000)
        case "exit":
            raise SystemExit(3)
        case "deferred":
            db.execute(text("INSERT INTO children VALUES (99)"))
        case "deferred_refused":
            db.execute(text("INSERT INTO children VALUES (99)"))
            raise Refused("no")
        case "nothing":
            return None
        case "large" | "largest":
            return b"x" * (65_536 + (mode == "large"))
        case "odd_content_type":
            return Payload(b"x", "\ud800")
        case "refuse_oddly":
            raise Refused("no\ud800", "\x00\ud800" + "x" * 17_000_000)
        case "raise_oddly":
            raise ValueError("\ud800" + "x" * 17_000_000)
        case "unstorable":
            return {1, 2}
        case "other_account":
            row = db.execute(text("SELECT n FROM counters WHERE name = 'hot' FOR UPDATE")).one()
            db.execute(text("UPDATE counters SET n = :n WHERE name = 'hot'"), {"n": row.n + 1})
    return Held(f"{call.xid}#{call.branch_id}")


def do_phase2(db: Connection, call: Call[Debit], what: str) -> None:
    """Confirm's or Cancel's work, for both flavours."""
    effect(db, call, f"{what} {call.result.hold if call.result else None}")
    if call.payload.mode == f"{what}_refuses":
        raise Refused("too_late")
    if call.payload.mode == f"{what}_refuses_oddly":
        raise Refused("no\ud800", "\x00\ud800" + "x" * 17_000_000)
    if call.payload.mode == f"{what}_commits":
        _commit_in_the_driver(db)
        effect(db, call, f"{what} step 2")
    if call.payload.mode == f"{what}_raises":
        raise RuntimeError("not now")


class World:
    """One participant, served, and what a coordinator and an auditor need to look at it."""

    def __init__(self, flavour: str, url: str, name: str = "bank", **settings: Any) -> None:
        self.flavour = flavour
        database, stack, *level = flavour.split("-")
        self.is_sqlite = database == "sqlite"
        self.is_postgres = database == "postgres"
        self.is_async = stack == "async"
        self.isolation = {"isolation_level": level[0].replace("_", " ").upper()} if level else {}
        self.url = url
        self.name = name
        self.settings = settings
        self.gates: dict[str, Gate] = {}
        self.engine = self.make_engine()
        self.auditor: Engine = sync_engine(sync_url(url))
        self.participant = self.make_participant()
        self.serving: Any = None

    def make_engine(self, **options: Any) -> Any:
        options = {**self.isolation, **options}
        if self.is_async:
            return async_engine(self.url, **options)
        return sync_engine(self.url, **options)

    def gate(self, account: str) -> Gate:
        """Handlers for this account will wait at the gate (mode "slow")."""
        return self.gates.setdefault(account, Gate())

    def make_participant(self) -> Participant:
        bank = Participant(self.name, self.engine, **self.settings)
        (_define_async if self.is_async else _define_sync)(bank, self.gates)
        return bank

    async def start(self, **options: Any) -> None:
        """Serve, with these options of `Participant.start`."""
        await asyncio.to_thread(self.create_business_tables)
        if self.is_async:
            self.serving = await self.participant.start_async("127.0.0.1:0", **options)
        else:
            self.serving = await asyncio.to_thread(self.participant.start, "127.0.0.1:0", **options)
        self.channel = grpc.aio.insecure_channel(self.serving.address)
        self.stub: Any = participant_pb2_grpc.ParticipantServiceStub(self.channel)

    async def stop(self, grace: float = 5.0) -> bool:
        ended: bool
        if self.is_async:
            ended = await self.serving.stop(grace)
        else:
            ended = await asyncio.to_thread(self.serving.stop, grace)
        return ended

    async def close(self) -> None:
        for gate in self.gates.values():
            gate.opened.set()
        if self.serving is not None:
            await self.channel.close()
            await self.stop()
        await self.dispose(self.engine)
        self.auditor.dispose()

    async def dispose(self, engine: Any) -> None:
        if self.is_async:
            await engine.dispose()
        else:
            engine.dispose()

    def create_business_tables(self) -> None:
        deferred = "REFERENCES things DEFERRABLE INITIALLY DEFERRED" if self.is_postgres else ""
        ignore = "ON CONFLICT DO NOTHING" if self.is_sqlite or self.is_postgres else "ON DUPLICATE KEY UPDATE {0} = {0}"
        with self.auditor.begin() as db:
            if db.dialect.name == "sqlite":
                db.exec_driver_sql("PRAGMA journal_mode = WAL")
            db.execute(text("CREATE TABLE IF NOT EXISTS effects (xid text, branch_id bigint, what text)"))
            db.execute(text("CREATE TABLE IF NOT EXISTS things (id int PRIMARY KEY)"))
            db.execute(text(f"CREATE TABLE IF NOT EXISTS children (thing int {deferred})"))
            db.execute(text("CREATE TABLE IF NOT EXISTS counters (name varchar(50) PRIMARY KEY, n int)"))
            db.execute(text(f"INSERT INTO things VALUES (1) {ignore.format('id')}"))
            db.execute(text(f"INSERT INTO counters VALUES ('hot', 0) {ignore.format('n')}"))

    def query(self, sql: str, **values: Any) -> list[tuple[Any, ...]]:
        with self.auditor.connect() as db:
            return [tuple(row) for row in db.execute(text(sql), values)]

    def effects(self, xid: str) -> list[str]:
        return [what for (what,) in self.query("SELECT what FROM effects WHERE xid = :xid", xid=xid)]

    def status(self, xid: str, branch_id: int = 1) -> int | None:
        """The fence row's status."""
        rows = self.query("SELECT status FROM tcc_fence_log WHERE xid = :xid AND branch_id = :b", xid=xid, b=branch_id)
        return int(rows[0][0]) if rows else None

    def message(self, phase: Any, xid: str, mode: str = "plain", **changes: Any) -> participant_pb2.Call:
        payload = changes.pop("payload", None)
        if payload is None:
            payload = encode(Debit(account=changes.pop("account", "alice"), mode=mode))
        message = participant_pb2.Call(
            call_id=changes.pop("call_id", 7),
            phase=phase,
            xid=xid,
            branch_id=changes.pop("branch_id", 1),
            participant=changes.pop("participant", self.name),
            action=changes.pop("action", "debit"),
            payload=types_pb2.Payload(data=payload.data, content_type=payload.content_type),
            attempt=changes.pop("attempt", 1),
        )
        message.timeout.FromMilliseconds(int(changes.pop("timeout", 10.0) * 1000))
        assert not changes, changes
        return message

    async def call(self, phase: Any, xid: str, mode: str = "plain", **changes: Any) -> participant_pb2.Reply:
        """One unary call."""
        message = self.message(phase, xid, mode, **changes)
        reply: participant_pb2.Reply
        if phase == TRY:
            reply = (await self.stub.Try(participant_pb2.TryRequest(call=message))).reply
        elif phase == CONFIRM:
            reply = (await self.stub.Confirm(participant_pb2.ConfirmRequest(call=message))).reply
        elif phase in (SETTLE_CONFIRMED, SETTLE_CANCELLED):
            reply = (await self.stub.Settle(participant_pb2.SettleRequest(call=message))).reply
        else:
            reply = (await self.stub.Cancel(participant_pb2.CancelRequest(call=message))).reply
        assert reply.call_id == message.call_id
        assert reply.fence_id == self.serving.fence_id
        return reply

    async def exchange(self, *batches: Iterable[participant_pb2.Call]) -> dict[int, participant_pb2.Reply]:
        """All batches on one stream, which is then half-closed; the replies by call id."""

        async def requests() -> AsyncIterator[participant_pb2.ExchangeRequest]:
            for batch in batches:
                yield participant_pb2.ExchangeRequest(calls=batch)

        replies: dict[int, participant_pb2.Reply] = {}
        async for response in self.stub.Exchange(requests()):
            for reply in response.replies:
                assert reply.call_id not in replies
                replies[reply.call_id] = reply
        return replies


def _define_sync(bank: Participant, gates: dict[str, Gate]) -> None:
    @bank.action("debit")
    def debit(call: Call[Debit], db: Connection) -> Held:
        if (gate := gates.get(call.payload.account)) is not None:
            gate.pass_through()
        return do_try(db, call)  # type: ignore[no-any-return]

    @debit.confirm
    def confirm_debit(call: Call[Debit], db: Connection) -> None:
        do_phase2(db, call, "confirm")

    @debit.cancel
    def cancel_debit(call: Call[Debit], db: Connection) -> None:
        do_phase2(db, call, "cancel")


def _define_async(bank: Participant, gates: dict[str, Gate]) -> None:
    @bank.action("debit")
    async def debit(call: Call[Debit], db: AsyncConnection) -> Held:
        if (gate := gates.get(call.payload.account)) is not None:
            await asyncio.to_thread(gate.pass_through)
        return await db.run_sync(do_try, call)

    @debit.confirm
    async def confirm_debit(call: Call[Debit], db: AsyncConnection) -> None:
        await db.run_sync(do_phase2, call, "confirm")

    @debit.cancel
    async def cancel_debit(call: Call[Debit], db: AsyncConnection) -> None:
        await db.run_sync(do_phase2, call, "cancel")


def sqlite_url(directory: Path, *, asynchronous: bool = False) -> str:
    return f"sqlite{'+aiosqlite' if asynchronous else ''}:///{directory / 'bank.db'}"


def postgres_url(dsn: str) -> str:
    return dsn.replace("postgresql://", "postgresql+psycopg://", 1)


def sync_url(url: str) -> str:
    return url.replace("sqlite+aiosqlite:", "sqlite:").replace("mysql+asyncmy:", "mysql+pymysql:")


def new_xid() -> str:
    """A UUIDv7, as a coordinator makes them."""
    return f"{int(time.time() * 1000):012x}7{secrets.token_hex(2)[1:]}8{secrets.token_hex(8)[1:]}"


def payload_of(**fields: Any) -> Any:
    """A payload with fields that need not fit."""
    return encode({**asdict(Debit()), **fields})


W = TypeVar("W", bound=World)


@asynccontextmanager
async def opened(world: W) -> AsyncIterator[W]:
    """A world that serves."""
    try:
        await world.start()
        yield world
    finally:
        await world.close()
