"""The guide's programs that serve and trace: embedded in other servers, with a real coordinator, ended gracefully."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect, text

from participant_sdk import (
    AsyncTricordClient,
    Transaction,
    TransactionCancelled,
    TricordClient,
    UnknownParticipant,
    branch,
)
from participant_sdk.context import bound
from participant_sdk.interceptors import XidServerInterceptor
from tests.coordinators import CoordinatorProcess
from tests.integration.guide_programs import Guide
from tests.integration.test_guide_payment import Provider
from tests.integration.told_service import ask, serving, told
from tests.postgres import free_port

XID = "a" * 32


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[str]:
    """The address of a coordinator."""
    with CoordinatorProcess(store=tmp_path / "coordinator.db") as process:
        yield process.endpoint


async def test_two_participants_on_a_server_of_the_programs_own(guide: Guide, coordinator: str) -> None:
    embedded, stock, account = guide.load("embedded"), guide.load("stock"), guide.load("account")
    with stock.engine.begin() as db:
        stock.metadata.create_all(db)
        account.metadata.create_all(db)
        db.execute(stock.stock.insert(), {"sku": "tea", "available": 5})
        db.execute(account.account.insert(), [{"name": "alice", "balance": 100}, {"name": "shop", "balance": 0}])

    def play() -> bool:
        stop = embedded.serve(f"127.0.0.1:{free_port()}", coordinator)
        try:
            with TricordClient(coordinator) as client:
                buy(client, 60)
                with pytest.raises(TransactionCancelled) as cancelled:
                    buy(client, 50)
                assert "insufficient_funds" in str(cancelled.value)
        finally:
            ended: bool = stop()
        return ended

    assert await asyncio.to_thread(play)
    account.fold(account.engine)
    with stock.engine.connect() as db:
        assert db.execute(text("SELECT available, held FROM stock")).all() == [(3, 0)]
        assert db.execute(text("SELECT balance FROM account ORDER BY name")).all() == [(40,), (60,)]
        assert db.execute(text("SELECT count(*) FROM hold")).scalar() == 0
        assert db.execute(text("SELECT count(*) FROM incoming")).scalar() == 0


def buy(client: TricordClient, cents: int) -> Transaction:
    """Two teas."""
    return client.execute(
        branch("warehouse", "reserve", {"sku": "tea", "quantity": 2}),
        branch("bank", "debit", {"account": "alice", "cents": cents}),
        branch("bank", "credit", {"account": "shop", "cents": cents}),
    )


async def test_two_databases_on_an_asyncio_server(guide: Guide, coordinator: str, tmp_path: Path) -> None:
    embedded, coupon, payment = guide.load("embedded_async"), guide.load("coupon"), guide.load("payment")
    payments_engine = create_engine(f"sqlite:///{tmp_path / 'payments.db'}")
    payment.Base.metadata.create_all(payments_engine)
    async with coupon.engine.begin() as db:
        await db.run_sync(coupon.metadata.create_all)
        await db.execute(coupon.coupon.insert(), {"code": "TEN"})
    stopped, provider = asyncio.Event(), Provider()
    serving = asyncio.create_task(embedded.serve_until(stopped, f"127.0.0.1:{free_port()}", coordinator, provider))
    branches = branch("coupons", "redeem", {"code": "TEN"}), branch("payments", "pay", {"card": "1", "cents": 5})
    async with AsyncTricordClient(coordinator) as client:
        while True:
            assert not serving.done()
            try:
                transaction = await client.execute(*branches)
            except UnknownParticipant:  # they register in the background
                await asyncio.sleep(0.05)
            else:
                break
        with pytest.raises(TransactionCancelled, match="no_such_coupon"):
            await client.execute(*branches)
    stopped.set()
    await serving
    assert sorted(provider.held.values()) in (["captured"], ["captured", "voided"])
    assert provider.held[f"{transaction.xid}-2"] == "captured"
    async with coupon.engine.connect() as db:
        assert (await db.execute(text("SELECT used, holder FROM coupon"))).all() == [(1, f"{transaction.xid}-1")]
        tables = await db.run_sync(lambda connection: inspect(connection).get_table_names())
    assert {"tcc_fence_log", "coupon"} <= set(tables)
    assert {"payment_fence_log", "payment"} <= set(inspect(payments_engine).get_table_names())
    assert "tcc_fence_log" not in inspect(payments_engine).get_table_names()
    payments_engine.dispose()


async def test_the_fence_is_kept_in_order_by_a_job(
    guide: Guide, coordinator: str, capsys: pytest.CaptureFixture[str]
) -> None:
    housekeeping = guide.load("housekeeping")
    assert await asyncio.to_thread(housekeeping.keep_in_order, coordinator)
    assert capsys.readouterr().out.count("warehouse: nothing to do") == 2


async def test_the_xid_is_traced(guide: Guide, caplog: pytest.LogCaptureFixture) -> None:
    tracing = guide.load("tracing")
    logger = logging.getLogger("guide")
    caplog.handler.addFilter(tracing.XidFilter())

    def play() -> None:
        seen = {"unary_unary": lambda request, context: told()}
        with serving(seen, XidServerInterceptor()) as (address, _), tracing.channel_to(address) as channel:
            for xid in (XID, None):
                with bound(xid):
                    logger.warning("here")
                    assert tracing.executor.submit(tracing.current_xid).result() == xid
                    assert ask(channel, "unary_unary") == [f"{xid}/None".encode()]

    await asyncio.to_thread(play)
    tracing.executor.shutdown()
    assert [record.__dict__["xid"] for record in caplog.records if record.name == "guide"] == [XID, "-"]
