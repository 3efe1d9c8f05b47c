"""A bank in one database: one UPDATE by key, bare, under a fence written naively, and under the SDK's fence.

Whatever surrounds it, it is the same UPDATE through the same driver and pool, so what differs is the fence's cost.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    bindparam,
    event,
    func,
    insert,
    select,
    text,
)
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from coordinator.ids import new_xid
from participant_sdk import Call, Participant
from participant_sdk.call import IncomingCall, Outcome, Reply, fingerprint
from participant_sdk.engines import AsyncEngineFence, SyncEngineFence
from participant_sdk.fence import Phase, Status
from participant_sdk.fence_tables import DEFAULT
from participant_sdk.payload import Payload

ACCOUNTS: Final = 10_000
RETENTION_MS: Final = 7 * 24 * 3600 * 1000
CALL_SECONDS: Final = 60.0

BARE, NAIVE = "bare", "naive"
TRY, TRY_JSON, TRY_NONE, CONFIRM, CANCEL = "try", "try_json", "try_none", "confirm", "cancel"
"""With bytes, which cost nothing to read and write; with dataclasses as JSON; without a result."""
TRY_REPLAY, CONFIRM_REPLAY = "try_replay", "confirm_replay"
FIRST: Final = (TRY, TRY_JSON, TRY_NONE, CONFIRM, CANCEL)
REPLAYS: Final = (TRY_REPLAY, CONFIRM_REPLAY)
VARIANTS: Final = (BARE, NAIVE, *FIRST, *REPLAYS)

UPDATE: Final = text("UPDATE account SET balance = balance + 1 WHERE id = :id")
metadata: Final = MetaData()
account_table: Final = Table(
    "account",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("balance", BigInteger, nullable=False),
    mysql_engine="InnoDB",
)
naive_table: Final = Table(
    "naive_fence",
    metadata,
    Column("xid", String(32), primary_key=True),
    Column("branch_id", BigInteger, primary_key=True, autoincrement=False),
    Column("status", Integer, nullable=False),
    Column("result", LargeBinary(1000)),
    mysql_engine="InnoDB",
)


@dataclass
class Debit:
    """What Try gets."""

    account: int
    amount: int


@dataclass
class Held:
    """What Try returns."""

    account: int
    amount: int


class Job(NamedTuple):
    """One timed call. `call` is None where no fence of the SDK is involved."""

    variant: str
    xid: str
    account: int
    call: IncomingCall | None


def one_round() -> list[Job]:
    """A call of each variant, and a second bare one, in an order that is random as far as the fence allows."""
    first, second, third, fourth = (new_xid(time.time_ns() // 1_000_000).hex() for _ in range(4))
    waiting = [
        [job(TRY, first), job(TRY_REPLAY, first), job(CONFIRM, first), job(CONFIRM_REPLAY, first)],
        [job(TRY_NONE, second), job(CANCEL, second)],
        [job(NAIVE, third)],
        [job(TRY_JSON, fourth)],
        [job(BARE, "")],
        [job(BARE, "")],
    ]
    # Each list keeps its order; which of them is next is drawn.
    turns = random.sample([jobs for jobs in waiting for _ in jobs], sum(map(len, waiting)))
    return [jobs.pop(0) for jobs in turns]


def job(variant: str, xid: str) -> Job:
    """One call of `variant`. The account of a branch follows from its xid: a repeat must be the same call."""
    account = int(xid[-8:], 16) % ACCOUNTS + 1 if xid else random.randint(1, ACCOUNTS)
    if variant in (BARE, NAIVE):
        return Job(variant, xid, account, None)
    phase = {CONFIRM: Phase.CONFIRM, CONFIRM_REPLAY: Phase.CONFIRM, CANCEL: Phase.CANCEL}.get(variant, Phase.TRY)
    action = {TRY_JSON: "debit_json", TRY_NONE: "debit_none", CANCEL: "debit_none"}.get(variant, "debit")
    payload = Payload(b"%d" % account, "application/octet-stream")
    if variant == TRY_JSON:
        payload = Payload(b'{"account":%d,"amount":1}' % account, "application/json")
    attempt, expires_at = 2 if variant in REPLAYS else 1, time.monotonic() + CALL_SECONDS
    digest = fingerprint(action, payload)
    return Job(variant, xid, account, IncomingCall(phase, xid, 1, "bank", action, payload, attempt, expires_at, digest))


class Bank:
    """The bank on an Engine. `done` counts what was run, `connections` are the driver's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.done: Counter[str] = Counter()
        self.connections: list[Any] = []
        event.listen(engine, "connect", lambda connection, record: self.connections.append(connection))
        make_tables(engine)
        self._fence_engine = SyncEngineFence(engine, DEFAULT, RETENTION_MS)
        self._fence = self._fence_engine.prepare(_participant(engine).check(), 2)

    def run(self, job: Job) -> None:
        """One call to its end."""
        if job.call is not None:
            _check(job, self._fence_engine.execute(job.call, self._fence))
        elif job.variant == BARE:
            with self._engine.connect() as connection:
                connection.execute(UPDATE, {"id": job.account})
                connection.commit()
        else:
            with self._engine.connect() as connection:
                if connection.execute(_READ, _key(job)).first() is not None:
                    raise RuntimeError("the naive fence has met a row, which this benchmark has none of")
                connection.execute(_INSERT, _row(job))
                connection.execute(UPDATE, {"id": job.account})
                connection.commit()
        self.done[job.variant] += 1


class AsyncBank:
    """The bank on an AsyncEngine."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.done: Counter[str] = Counter()
        self._fence_engine = AsyncEngineFence(engine, DEFAULT, RETENTION_MS)

    async def prepare(self) -> None:
        """Make the tables."""
        async with self._engine.connect() as connection:
            await connection.run_sync(lambda synchronous: make_tables(synchronous.engine))
        self._fence = await self._fence_engine.prepare(_async_participant(self._engine).check(), 2)

    async def run(self, job: Job) -> None:
        """One call to its end."""
        if job.call is not None:
            _check(job, await self._fence_engine.execute(job.call, self._fence))
        elif job.variant == BARE:
            async with self._engine.connect() as connection:
                await connection.execute(UPDATE, {"id": job.account})
                await connection.commit()
        else:
            async with self._engine.connect() as connection:
                if (await connection.execute(_READ, _key(job))).first() is not None:
                    raise RuntimeError("the naive fence has met a row, which this benchmark has none of")
                await connection.execute(_INSERT, _row(job))
                await connection.execute(UPDATE, {"id": job.account})
                await connection.commit()
        self.done[job.variant] += 1


_READ: Final = select(naive_table.c.status, naive_table.c.result).where(
    naive_table.c.xid == bindparam("xid"), naive_table.c.branch_id == bindparam("branch_id")
)
_INSERT: Final = insert(naive_table)


def _key(job: Job) -> dict[str, Any]:
    return {"xid": job.xid, "branch_id": 1}


def _row(job: Job) -> dict[str, Any]:
    return {**_key(job), "status": 1, "result": b"%d" % job.account}


def _check(job: Job, reply: Reply) -> None:
    has_result = job.variant in (TRY, TRY_JSON, TRY_REPLAY)
    if reply.outcome is not Outcome.DONE or (reply.result is not None) is not has_result:
        raise RuntimeError(f"{job.variant} was answered {reply}")


def make_tables(engine: Engine) -> None:
    """The bank's tables, with the accounts."""
    metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(insert(account_table), [{"id": number, "balance": 0} for number in range(1, ACCOUNTS + 1)])


def verify(engine: Engine, done: Counter[str]) -> None:
    """Raises RuntimeError unless the database holds what was answered, and only that."""
    with engine.connect() as connection:
        log = DEFAULT.log
        found = connection.execute(select(log.c.status, func.count()).group_by(log.c.status)).all()
        rows = {Status(status).name: count for status, count in found}
        balance = connection.execute(select(func.sum(account_table.c.balance))).scalar_one()
        naive = connection.execute(select(func.count()).select_from(naive_table)).scalar_one()
    waiting = done[TRY] + done[TRY_JSON] + done[TRY_NONE] - done[CONFIRM] - done[CANCEL]
    wanted = Counter(COMMITTED=done[CONFIRM], ROLLBACKED=done[CANCEL], TRIED=waiting)
    changes = sum(done[variant] for variant in (BARE, NAIVE, *FIRST))
    if Counter(rows) != +wanted or int(balance) != changes or naive != done[NAIVE]:
        raise RuntimeError(
            f"answered: {dict(done)}; the database holds fence rows {rows}, accounts changed {balance} times "
            f"(wanted {changes}), {naive} rows of the naive fence"
        )


def _participant(engine: Engine) -> Participant:
    bank = Participant("bank", engine)

    @bank.action("debit")
    def debit(call: Call[bytes], db: Connection) -> bytes:
        db.execute(UPDATE, {"id": int(call.payload)})
        return call.payload

    @bank.action("debit_none")
    def debit_none(call: Call[bytes], db: Connection) -> None:
        db.execute(UPDATE, {"id": int(call.payload)})

    @bank.action("debit_json")
    def debit_json(call: Call[Debit], db: Connection) -> Held:
        db.execute(UPDATE, {"id": call.payload.account})
        return Held(call.payload.account, call.payload.amount)

    @debit_json.confirm
    @debit_json.cancel
    def settle_json(call: Call[Debit], db: Connection) -> None:
        db.execute(UPDATE, {"id": call.payload.account})

    @debit.confirm
    @debit.cancel
    @debit_none.confirm
    @debit_none.cancel
    def settle(call: Call[bytes], db: Connection) -> None:
        db.execute(UPDATE, {"id": int(call.payload)})

    return bank


def _async_participant(engine: AsyncEngine) -> Participant:
    bank = Participant("bank", engine)

    @bank.action("debit")
    async def debit(call: Call[bytes], db: AsyncConnection) -> bytes:
        await db.execute(UPDATE, {"id": int(call.payload)})
        return call.payload

    @bank.action("debit_none")
    async def debit_none(call: Call[bytes], db: AsyncConnection) -> None:
        await db.execute(UPDATE, {"id": int(call.payload)})

    @bank.action("debit_json")
    async def debit_json(call: Call[Debit], db: AsyncConnection) -> Held:
        await db.execute(UPDATE, {"id": call.payload.account})
        return Held(call.payload.account, call.payload.amount)

    @debit_json.confirm
    @debit_json.cancel
    async def settle_json(call: Call[Debit], db: AsyncConnection) -> None:
        await db.execute(UPDATE, {"id": call.payload.account})

    @debit.confirm
    @debit.cancel
    @debit_none.confirm
    @debit_none.cancel
    async def settle(call: Call[bytes], db: AsyncConnection) -> None:
        await db.execute(UPDATE, {"id": int(call.payload)})

    return bank


def jobs_of(variant: str, count: int) -> Iterator[tuple[list[Job], Job]]:
    """`count` times: what must have been run before, and a job of `variant`."""
    before: dict[str, Iterable[str]] = {
        TRY_REPLAY: [TRY],
        CONFIRM: [TRY],
        CANCEL: [TRY_NONE],
        CONFIRM_REPLAY: [TRY, CONFIRM],
    }
    for _ in range(count):
        xid = new_xid(time.time_ns() // 1_000_000).hex()
        yield [job(needed, xid) for needed in before.get(variant, ())], job(variant, xid)
