"""A coordinator with the records that a test wants: real store, real engine, real gRPC, in this process.

It drives nothing by itself, as none of its records is due. `old_xid` is of a time long past retention.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from sqlalchemy import text

from coordinator.codec import new_row
from coordinator.delivery import Delivery
from coordinator.engine import Engine
from coordinator.model import BranchSpec, BranchStatus, Payload, Policy, Resolution, Spec, State, Step, Transaction
from coordinator.participants import Participants
from coordinator.server import CoordinatorService
from coordinator.store.rows import Batch
from coordinator.store.store import Store, backend_for
from participant_sdk.fence_tables import DEFAULT
from participant_sdk.payload import encode
from participant_sdk.upkeep import PurgeReport, ResolveReport, Upkeep
from tests.contract.participant.world import CANCEL, CONFIRM, DONE, TRY, Debit, World, new_xid
from tricord.v1 import coordinator_pb2_grpc

LEASE_MS = 3_600_000
NOT_DUE_MS = 4_102_444_800_000
OLD_DAYS = 30

TRYING, CONFIRMING, CONFIRMED = State.TRYING, State.CONFIRMING, State.CONFIRMED
CANCELLING, CANCELLED = State.CANCELLING, State.CANCELLED
TRIED, COMMITTED, ROLLBACKED, SUSPENDED = 1, 2, 3, 4


class Records:
    """A coordinator at `endpoint`."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "tricord.db"
        self.endpoint = ""
        self.store = Store(backend_for(str(self.path), LEASE_MS))
        self._parts = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self.store.open()
        self._parts.push_async_callback(self.store.close)
        participants = Participants(self.store)
        delivery = Delivery(participants)
        engine = Engine(self.store, delivery, Policy(lease_ms=LEASE_MS))
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        service = CoordinatorService(engine, participants, "", LEASE_MS)
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(service, server)
        self.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self._parts.push_async_callback(delivery.close)
        self._parts.push_async_callback(engine.stop, 0.0)
        self._parts.push_async_callback(server.stop, 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._parts.aclose()

    async def put(
        self,
        xid: str,
        state: State,
        branches: Sequence[Debit] = (Debit(),),
        *,
        participant: str = "bank",
        action: str = "debit",
        decided_ms: int = 1,
        metadata: tuple[tuple[str, str], ...] = (),
        resolved: tuple[Resolution, ...] = (),
    ) -> str:
        """Store a transaction of debits; its xid."""
        payloads = [encode(branch) for branch in branches]
        specs = tuple(BranchSpec(participant, action, Payload(each.data, each.content_type)) for each in payloads)
        decided_ms = 0 if state is TRYING else decided_ms
        tx = Transaction(
            Spec(bytes.fromhex(xid), b"", xid_ms(xid), 30_000, specs, metadata),
            state,
            tuple(Step(BranchStatus.TRIED) for _ in specs),
            save_id=secrets.randbits(62),
            wake_ms=None if state.finished else NOT_DUE_MS,
            decided_ms=decided_ms,
            resolved=resolved,
        )
        assert await self.store.flush(Batch((new_row(tx),), ())) == [None]
        return xid


def old_xid(days: float = OLD_DAYS) -> str:
    """A UUIDv7 of so many days ago."""
    return xid_of(int((time.time() - days * 86_400) * 1000))


def xid_of(milliseconds: int) -> str:
    return f"{milliseconds:012x}{new_xid()[12:]}"


def xid_ms(xid: str) -> int:
    return int(xid[:12], 16)


CALLS: dict[int, tuple[Any, ...]] = {
    TRIED: (TRY,),
    COMMITTED: (TRY, CONFIRM),
    ROLLBACKED: (TRY, CANCEL),
    SUSPENDED: (CANCEL,),
}


async def branch(world: World, status: int, xid: str, branch_id: int = 1, mode: str = "plain") -> str:
    """A fence row with that status, made by calls of today and dated back afterwards; its xid."""
    today = new_xid()
    for phase in CALLS[status]:
        reply = await world.call(phase, today, mode, branch_id=branch_id)
        assert reply.outcome == DONE or mode == "refuse"
    await asyncio.to_thread(_date_back, world, today, xid)
    assert world.status(xid, branch_id) == status
    return xid


def _date_back(world: World, today: str, xid: str) -> None:
    ago = {
        "sqlite": "strftime('%Y-%m-%d %H:%M:%f', 'now', '-1 hour')",
        "postgresql": "now() - interval '1 hour'",
        "mysql": "UTC_TIMESTAMP(6) - INTERVAL 1 HOUR",
    }[world.auditor.dialect.name]
    with world.auditor.begin() as db:
        values = {"xid": xid, "today": today}
        db.execute(text(f"UPDATE tcc_fence_log SET xid = :xid, modified_at = {ago} WHERE xid = :today"), values)
        db.execute(text("UPDATE effects SET xid = :xid WHERE xid = :today"), values)


def change(world: World, xid: str, sets: str) -> None:
    """Change a fence row as no call would."""
    with world.auditor.begin() as db:
        assert db.execute(text(f"UPDATE tcc_fence_log SET {sets} WHERE xid = :xid"), {"xid": xid}).rowcount == 1


async def copies(world: World, template: str, xids: Sequence[str], branch_ids: Sequence[int] = (1,)) -> None:
    """Rows as that of `template`, for other branches."""
    columns = ", ".join(column.name for column in DEFAULT.log.columns if column.name not in ("xid", "branch_id"))
    statement = text(
        f"INSERT INTO tcc_fence_log (xid, branch_id, {columns}) "
        f"SELECT :xid, :branch_id, {columns} FROM tcc_fence_log WHERE xid = :template AND branch_id = 1"
    )
    rows = [{"xid": xid, "branch_id": number, "template": template} for xid in xids for number in branch_ids]

    def insert() -> None:
        with world.auditor.begin() as db:
            db.execute(statement, rows)

    await asyncio.to_thread(insert)


def stored(world: World) -> set[tuple[str, int]]:
    """The keys of all fence rows."""
    return {(xid, branch_id) for xid, branch_id in world.query("SELECT xid, branch_id FROM tcc_fence_log")}


async def once(world: World, what: str, endpoint: str, **settings: Any) -> Any:
    """`purge` or `resolve` by call, in the world's flavour."""
    upkeep = Upkeep(**settings)
    if world.is_async:
        return await getattr(world.participant, f"{what}_async")(endpoint, upkeep)
    return await asyncio.to_thread(getattr(world.participant, what), endpoint, upkeep)


async def purge(world: World, endpoint: str, **settings: Any) -> PurgeReport:
    report: PurgeReport = await once(world, "purge", endpoint, **settings)
    return report


async def resolve(world: World, endpoint: str, **settings: Any) -> ResolveReport:
    report: ResolveReport = await once(world, "resolve", endpoint, **settings)
    return report


def counts(report: PurgeReport | ResolveReport) -> dict[str, Any]:
    """What a report tells, but for what is nothing, the time it took, and whose it is."""
    told = {name: value for name, value in asdict(report).items() if value}
    assert report.seconds > 0
    return {name: value for name, value in told.items() if name not in ("participant", "seconds")}
