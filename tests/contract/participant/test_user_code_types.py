"""Users' programs are checked by mypy --strict: what is right passes as it stands, and what is wrong is found."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

RIGHT = """
    import asyncio
    from dataclasses import dataclass
    from datetime import timedelta

    import grpc
    import msgspec
    from google.protobuf.wrappers_pb2 import Int64Value
    from pydantic import BaseModel
    from sqlalchemy import Connection, MetaData, create_engine, text
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
    from sqlalchemy.orm import Session

    from participant_sdk import (
        AsyncTricordClient,
        Call,
        FenceTables,
        OutcomeUnknown,
        Participant,
        Refused,
        TransactionCancelled,
        TricordClient,
        Wait,
        bound,
        branch,
        current_branch_id,
        current_xid,
        in_context,
        metadata,
    )

    @dataclass(frozen=True)
    class Order:
        sku: str
        pieces: int

    @dataclass(frozen=True)
    class Held:
        hold: str

    class Charge(BaseModel):
        card: str
        cents: int

    class Seat(msgspec.Struct):
        number: int

    class ShopSession(Session): ...

    own = MetaData()
    tables = FenceTables("shop_fence", "shop_fence_info", schema="shop", metadata=own)
    both: list[MetaData] = [own, metadata]
    engine = create_engine("sqlite:///shop.db")
    shop = Participant("shop", engine, try_workers=4, retention=timedelta(days=30), tables=tables)

    @shop.action("order")
    def order(call: Call[Order], db: Connection) -> Held:
        taken = db.execute(text("UPDATE stock SET free = free - :n"), {"n": call.payload.pieces}).rowcount
        if not taken or call.deadline < 1 or call.metadata.get("tenant") == "nobody":
            raise Refused("sold_out", f"no {call.payload.sku}")
        return Held(f"{call.xid}#{call.branch_id}")

    @order.confirm
    def confirm_order(call: Call[Order], db: ShopSession) -> None:
        db.execute(text("DELETE FROM holds WHERE id = :id"), {"id": call.result.hold})

    @order.cancel
    def cancel_order(call: Call[Order], db: Session) -> None: ...

    @shop.action("charge", external=True, lease=timedelta(seconds=30))
    def charge(call: Call[Charge], db: Session) -> Int64Value:
        return Int64Value(value=call.payload.cents)

    @charge.confirm
    def _(call: Call[Charge], db: Connection) -> None: ...

    @charge.cancel
    def _(call: Call[Charge], db: Connection) -> None: ...

    hall = Participant("hall", create_async_engine("sqlite+aiosqlite:///hall.db"))

    @hall.action("seat")
    async def seat(call: Call[Seat], session: AsyncSession) -> Held | None:
        xid: str | None = current_xid()
        number: int | None = current_branch_id()
        await session.execute(text("SELECT 1"))
        return None if xid is None or number is None else Held(xid)

    @seat.confirm
    async def confirm_seat(call: Call[Seat], db: AsyncConnection) -> None: ...

    @seat.cancel
    async def cancel_seat(call: Call[Seat], db: AsyncConnection) -> None: ...

    def start(server: grpc.Server) -> str:
        attached = shop.add_to_server(server)
        attached.drain(5.0)
        with shop_client() as client:
            try:
                done = client.execute(
                    branch("shop", "order", Order("tea", 2)),
                    branch("shop", "charge", Charge(card="x", cents=5)),
                    idempotency_key="order-1",
                    timeout=10,
                    wait=Wait.DECIDED,
                    metadata={"tenant": "acme"},
                )
            except TransactionCancelled as cancelled:
                return cancelled.transaction.xid
            except OutcomeUnknown as unknown:
                return unknown.idempotency_key
        return done.xid

    def shop_client() -> TricordClient:
        return TricordClient("127.0.0.1:7800")

    async def main(server: grpc.aio.Server) -> None:
        await hall.add_to_server_async(server)
        serving = await hall.start_async("127.0.0.1:0", coordinator="127.0.0.1:7800")
        address: str = serving.address
        async with AsyncTricordClient(address) as client:
            await client.execute(branch("hall", "seat", Seat(number=1)))
        await asyncio.get_running_loop().run_in_executor(None, in_context(shop.prepare))
        with bound("0" * 32, 1):
            await serving.stop(grace=1)

    def test_order(db: Connection, session: Session) -> None:
        held = order(Call(payload=Order("tea", 1)), db)
        confirm_order(Call(payload=Order("tea", 1), result=held), ShopSession(bind=db))
        reveal_type(order)
        reveal_type(order(Call(payload=Order("tea", 1)), db))
        reveal_type(order.__call__)
        reveal_type(confirm_order)
        reveal_type(charge(Call(payload=Charge(card="x", cents=1)), session))
        reveal_type(seat)
        running = seat(Call(payload=Seat(1)), AsyncSession())
        _ = reveal_type(running)
        reveal_type(confirm_seat)
        reveal_type(Call(payload=Order("tea", 1)).payload)
        reveal_type(shop_client().get(xid="0" * 32))
"""

REVEALED = [
    "ActionDefinition[[call: Call[Order], db: Connection], Held]",
    "Held",
    "def (call: Call[Order], db: Connection) -> Held",
    "def (call: Call[Order], db: ShopSession)",
    "Int64Value",
    "ActionDefinition[[call: Call[Seat], session: AsyncSession], Coroutine[Any, Any, Held | None]]",
    "Coroutine[Any, Any, Held | None]",
    "def (call: Call[Seat], db: AsyncConnection) -> Coroutine[Any, Any, None]",
    "Order",
    "Transaction",
]

WRONG = """
    from datetime import timedelta

    from right import Order, Seat, engine, hall, order, seat, shop, shop_client
    from sqlalchemy import Connection

    from participant_sdk import Call, FenceTables, Participant, Refused, branch, current_xid

    def test(db: Connection, call: Call[Order]) -> None:
        order(call)  # call-arg
        order(db, call)  # arg-type
        order(Call(payload=Seat(1)), db)  # arg-type
        order(call, db).number  # attr-defined
        call.payload.price  # attr-defined
        call.xid = "other"  # misc
        Refused()  # call-arg
        current_xid() + "x"  # operator
        branch("shop", "order")  # call-arg
        shop_client().execute("shop", "order")  # arg-type
        shop_client().execute(timeout="soon")  # arg-type
        Participant("shop", "sqlite:///shop.db")  # arg-type
        Participant("shop", engine, retention=7)  # arg-type
        FenceTables(log_name=7)  # arg-type
        shop.action()  # call-arg
        shop.action("x", lease=30)  # arg-type
        shop.action("x", external=timedelta(1))  # arg-type
        order.confirm(5)  # type-var

    async def test_async(db: Connection) -> None:
        (await seat(Call(payload=Seat(1)), db)).hold  # arg-type union-attr
        await shop.prepare()  # misc
        hall.start_async("127.0.0.1:0").address  # attr-defined
"""


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What mypy says of both programs, line by line."""
    folder = tmp_path_factory.mktemp("program")
    for name, program in (("right", RIGHT), ("wrong", WRONG)):
        (folder / f"{name}.py").write_text(textwrap.dedent(program).lstrip())
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary"]
    # A cache of its own: it is not the house's settings that a user checks with.
    command += ["--config-file=", f"--cache-dir={ROOT / '.mypy_cache' / 'users'}", "right.py", "wrong.py"]
    environment = {**os.environ, "MYPYPATH": os.pathsep.join([str(ROOT), str(ROOT / "protos")])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.timeout(180)
def test_a_right_program_is_clean_and_keeps_its_types(judged: list[str]) -> None:
    said = [line for line in judged if line.startswith("right.py")]
    assert [line for line in said if " note: Revealed type" not in line] == []
    found = [line.split('"', 1)[1].rstrip('"') for line in said]
    assert [re.sub(r"\b(?:\w+\.)+(?=\w)", "", kind) for kind in found] == REVEALED


@pytest.mark.timeout(180)
def test_wrong_uses_are_found_and_nothing_else(judged: list[str]) -> None:
    wanted: dict[int, set[str]] = {}
    for number, line in enumerate(textwrap.dedent(WRONG).lstrip().splitlines(), 1):
        if "  # " in line:
            wanted[number] = set(line.split("  # ")[1].split())
    found: dict[int, set[str]] = {}
    for line in judged:
        if (error := re.fullmatch(r"wrong\.py:(\d+): error: .*\[([\w-]+)\]", line)) is not None:
            found.setdefault(int(error[1]), set()).add(error[2])
    assert found == wanted, "\n".join(line for line in judged if line.startswith("wrong.py"))
