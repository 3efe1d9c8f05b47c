"""A small run of the shop's customers against killed processes; `make shop-chaos` is the large one."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from examples.shop_api.buyer import Bought
from participant_sdk.idempotency.record import State
from tests.chaos.shop_api import Options, asyncio_dsn, main, play, verdict
from tests.chaos.shop_town import Books, ShopTown, tea_at_first
from tests.postgres import PostgresServer

SMALL = Options(clients=40, orders=2, faults=6, pause_s=1.0, workers=2, seed=8)


@pytest.mark.database
@pytest.mark.timeout(600)
async def test_one_order_per_intent_and_an_answer_for_everybody(tmp_path: Path) -> None:
    with PostgresServer() as server, ShopTown(tmp_path, asyncio_dsn(server), SMALL.workers) as town:
        town.start()
        outcome = await play(town, server, SMALL)
        assert outcome.violations == [], town.tails()
        assert len(outcome.bought) == SMALL.clients * SMALL.orders
        assert outcome.kills.total() >= 1


@pytest.mark.database
@pytest.mark.timeout(300)
def test_the_command_tells_what_it_has_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--clients", "3", "--orders", "1", "--faults", "0", "--workers", "1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    counted = r"shop: 3 clients, 9 intents answered, \d+ requests sent, \d+ of them retries, nobody killed, \d+ s"
    assert re.fullmatch(counted, printed[0])
    assert printed[1].startswith("shop: one order, charge, payment and label for each intent")


BOUGHT = [Bought("r-1", "o-1", "c-1", "l-1", 6), Bought("r-2", "o-2", "c-2", "l-2", 7)]
BOOKS = Books(
    orders=[("r-1", "o-1"), ("r-2", "o-2")],
    payments=[("o-1", "c-1"), ("o-2", "c-2")],
    labels=[("o-1", "l-1"), ("o-2", "l-2")],
    charges=["c-1", "c-2"],
    tea_left=tea_at_first() - 4,
    records={State.SUCCEEDED: 6},
)


def test_the_verdict_finds_nothing_where_nothing_is_wrong() -> None:
    assert verdict(BOOKS, BOUGHT, 2) == []


@pytest.mark.parametrize(
    ("books", "found"),
    [
        (
            replace(BOOKS, orders=[*BOOKS.orders, ("r-2", "o-3")]),
            ["orders", "3 orders for 2 intents", "of tea are left"],
        ),
        (replace(BOOKS, charges=[*BOOKS.charges, "c-3"]), ["charges"]),
        (replace(BOOKS, payments=[("o-1", "c-1"), ("o-2", "")]), ["payments"]),
        (replace(BOOKS, labels=[*BOOKS.labels, ("o-2", "l-3")]), ["labels"]),
        (replace(BOOKS, tea_left=tea_at_first()), ["of tea are left"]),
        (replace(BOOKS, records={State.SUCCEEDED: 5, State.PROCESSING: 1}), ["records by state"]),
    ],
)
def test_the_verdict_finds_what_is_wrong(books: Books, found: list[str]) -> None:
    violations = verdict(books, BOUGHT, 2)
    assert len(violations) == len(found)
    assert all(part in violation for part, violation in zip(found, violations, strict=True))
