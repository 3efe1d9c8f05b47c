"""The programs of docs/idempotency.md, on each kind of database, and its client against a server that fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from sqlalchemy import func, select

from coordinator.config import Settings
from coordinator.errors import Conflict, InvalidRequest, Violation
from coordinator.wire import KEY_CHARS_MAX, read_key
from participant_sdk.idempotency import IdempotencyKeyReused, KeyMalformed, KeyRules, Operation, State
from participant_sdk.idempotency.grpc_status import GrpcCodes
from tests.integration.guide_programs import Guide
from tests.integration.scripted_http import LOSE, scripted_server


@contextmanager
def opened(guide: Guide, name: str) -> Iterator[Any]:
    """One of the programs, with its tables, its store started."""
    module = guide.load(name)
    module.metadata.create_all(module.engine)
    with module.store:
        yield module


def wallets(module: Any) -> dict[str, int]:
    with module.engine.connect() as db:
        return dict(tuple(row) for row in db.execute(select(module.wallet)))


@pytest.mark.database
def test_a_transfer_moves_money_once(guide_on: Guide) -> None:
    with opened(guide_on, "transfers") as transfers:
        with transfers.engine.begin() as db:
            db.execute(transfers.wallet.insert(), [{"name": "alice", "cents": 700}, {"name": "bob", "cents": 0}])
        receipts = [transfers.make_transfer("t-1", "alice", "bob", 500) for _ in range(3)]
        assert receipts == [transfers.Receipt("t-1", 200)] * 3
        with pytest.raises(transfers.NotEnough):
            transfers.make_transfer("t-2", "alice", "bob", 500)
        with transfers.engine.begin() as db:
            db.execute(transfers.wallet.update().values(cents=1_000))
        with pytest.raises(transfers.NotEnough):
            transfers.make_transfer("t-2", "alice", "bob", 500)
        with pytest.raises(IdempotencyKeyReused):
            transfers.make_transfer("t-1", "alice", "bob", 501)
        assert wallets(transfers) == {"alice": 1_000, "bob": 1_000}


@pytest.mark.database
def test_a_statement_is_drawn_without_a_local_transaction_and_stored_once(
    guide_on: Guide, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(guide_on, "statements") as statements:
        drawing, go = threading.Event(), threading.Event()

        def draw(month: str) -> str:
            assert statements.engine.pool.checkedout() == 0
            drawing.set()
            assert go.wait(60)
            return f"drawn for {month}"

        monkeypatch.setattr(statements, "draw", draw)
        found: list[str] = []
        first = threading.Thread(target=lambda: found.append(statements.draw_statement("r-1", "2026-11")))
        first.start()
        assert drawing.wait(60)
        with pytest.raises(IdempotencyKeyReused):  # known at once, while the first one runs
            statements.draw_statement("r-1", "2026-12")
        go.set()
        assert statements.draw_statement("r-1", "2026-11") == "drawn for 2026-11"
        first.join()
        assert found == ["drawn for 2026-11"]
        with statements.engine.connect() as db:
            assert db.scalar(select(func.count()).select_from(statements.statement)) == 1


class Carrier:
    """Somebody else: knows a repeat by its key, and may be away after it has taken a parcel."""

    def __init__(self) -> None:
        self.sent: dict[str, str] = {}
        self.calls = 0
        self.fails = 0

    def send(self, key: str, city: str) -> str:
        self.calls += 1
        tracking = self.sent.setdefault(key, f"{city}-{len(self.sent) + 1}")
        if self.fails:
            self.fails -= 1
            raise ConnectionError("the answer was lost")
        return tracking


@pytest.mark.database
def test_a_parcel_is_sent_once_although_the_carriers_answer_was_lost(guide_on: Guide) -> None:
    with opened(guide_on, "parcels") as parcels:
        carrier = Carrier()
        carrier.fails = 2
        for _ in range(2):
            with pytest.raises(ConnectionError):
                parcels.send_parcel("r-1", "p-1", "Oslo", carrier)
        assert [parcels.send_parcel("r-1", "p-1", "Oslo", carrier) for _ in range(2)] == ["Oslo-1"] * 2
        assert (len(carrier.sent), carrier.calls) == (1, 3)
        with parcels.engine.connect() as db:
            assert [tuple(row) for row in db.execute(select(parcels.parcel))] == [("p-1", "Oslo-1")]
        record = parcels.store.look_up(parcels.sending, "r-1")
        assert (record.state, record.attempt) == (State.SUCCEEDED, 3)


async def test_the_client_orders_once_and_knows_its_key(guide: Guide) -> None:
    ask = guide.load("ask")
    with scripted_server() as server:
        server.answer = b'{"order": "o-1"}'
        server.status = 201
        server.script = [LOSE, (503, {"Retry-After": "0"})]
        assert ask.order(server.url, "7") == "order o-1"
        server.script = [(409, {})]
        assert ask.order(server.url, "8") == "no: 409"
    assert server.keys == ["order-7"] * 3 + ["order-8"]


class TestWhatTheCoordinatorShares:
    """The table of that section."""

    def test_the_limit_of_a_key_is_one_in_bytes_here_and_in_characters_there(self) -> None:
        assert KeyRules().bytes_max == KEY_CHARS_MAX == 255
        wrong: list[Violation] = []
        assert read_key("é" * 255, "shop", wrong) == b"shop\0" + "é".encode() * 255
        assert wrong == []
        for key in ("é" * 256, "  ", "a\n"):
            read_key(key, "", wrong)
        assert [violation.field for violation in wrong] == ["idempotency_key"] * 3
        for key in ("é", "a" * 256, "a\n", ""):
            with pytest.raises(KeyMalformed):
                KeyRules().check(key)

    def test_the_refusals(self) -> None:
        assert IdempotencyKeyReused.reason == "IDEMPOTENCY_KEY_REUSED"
        assert Conflict.code is GrpcCodes().reused is grpc.StatusCode.FAILED_PRECONDITION
        assert (InvalidRequest.reason, InvalidRequest.code) == ("INVALID_REQUEST", grpc.StatusCode.INVALID_ARGUMENT)
        assert KeyMalformed.reason == "IDEMPOTENCY_KEY_MALFORMED"

    def test_how_long_an_answer_is_kept(self) -> None:
        assert Operation(name="any").ttl_s == 86_400
        assert Settings.model_fields["retention_ms"].default == 30 * 86_400_000
