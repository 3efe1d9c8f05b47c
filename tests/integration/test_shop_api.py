"""The shop's API as its users start it, over real HTTP: double-clicks, others' keys, declined cards, lost answers."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final
from uuid import uuid4

import httpx
import pytest

import examples.shop_api
from examples.shop_api.buyer import Buyer
from examples.shop_api.provider import SLOW_CARD
from participant_sdk.idempotency.record import State
from tests.chaos.shop_town import ShopTown, tea_at_first
from tests.contract.participant.world import postgres_url
from tests.integration.guide_programs import blocks

WAIT_S: Final = 60.0
TEA: Final = {"sku": "tea", "quantity": 2, "reference": "mine"}


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.database)])
def town(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShopTown]:
    folder = tmp_path_factory.mktemp("shop")
    if request.param == "sqlite":
        database = f"sqlite+aiosqlite:///{folder / 'shop.db'}"
    else:
        database = postgres_url(request.getfixturevalue("postgres_server").create_database())
    with ShopTown(folder, database, loses=0.5) as town:
        town.start()
        yield town


class Customer:
    """Sends each request once, with the key that the test gives."""

    def __init__(self, town: ShopTown, name: str) -> None:
        self._http = httpx.Client(base_url=town.url, timeout=WAIT_S)
        self._headers = {"Authorization": f"Bearer secret-of-{name}"} if name else {}

    def post(self, path: str, body: Any, key: str | None) -> httpx.Response:
        """One try."""
        return self._http.post(path, json=body, headers={**self._headers, **({"Idempotency-Key": key} if key else {})})

    def get(self, path: str) -> httpx.Response:
        """Look at something."""
        return self._http.get(path, headers=self._headers)

    def order(self, key: str, **changes: Any) -> str:
        """The id of an order."""
        return str(self.post("/orders", TEA | changes, key).raise_for_status().json()["order"])


@pytest.fixture
def alice(town: ShopTown) -> Iterator[Customer]:
    yield from _customer(town, f"alice_{uuid4().hex}")


@pytest.fixture
def bob(town: ShopTown) -> Iterator[Customer]:
    yield from _customer(town, f"bob_{uuid4().hex}")


def _customer(town: ShopTown, name: str) -> Iterator[Customer]:
    customer = Customer(town, name)
    with customer._http:
        yield customer


def test_a_repeat_gets_the_same_answer_and_orders_nothing(town: ShopTown, alice: Customer) -> None:
    before = town.books()
    first, second = alice.post("/orders", TEA, "o-1"), alice.post("/orders", TEA, '"o-1"')
    assert first.status_code == second.status_code == 201
    assert first.content == second.content
    assert "idempotency-replayed" not in first.headers
    assert second.headers["idempotency-replayed"] == "true"
    after = town.books()
    assert len(after.orders) == len(before.orders) + 1
    assert after.tea_left == before.tea_left - 2


def test_twenty_clicks_at_once_are_one_order(town: ShopTown, alice: Customer) -> None:
    before = len(town.books().orders)
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: alice.post("/orders", TEA, "clicks"), range(20)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.content for answer in answers}) == 1
    assert len(town.books().orders) == before + 1


def test_another_order_under_the_key_is_refused(alice: Customer) -> None:
    alice.order("o-1")
    refused = alice.post("/orders", TEA | {"quantity": 3}, "o-1")
    assert refused.status_code == 422
    assert refused.headers["content-type"] == "application/problem+json"


def test_two_customers_may_use_one_key(alice: Customer, bob: Customer) -> None:
    first, second = alice.order("o-1"), bob.order("o-1")
    assert first != second
    assert bob.get(f"/orders/{first}").status_code == 404


@pytest.mark.parametrize(
    ("name", "key", "status"), [("", "k", 403), ("x y", "k", 403), ("eve", None, 400), ("eve", "k" * 256, 400)]
)
def test_who_or_what_cannot_be_told_is_refused(town: ShopTown, name: str, key: str | None, status: int) -> None:
    before = town.books()
    for customer in _customer(town, name):
        assert customer.post("/orders", TEA, key).status_code == status
    assert town.books() == before


def test_a_definite_no_is_the_answer_for_its_key(alice: Customer) -> None:
    assert alice.post("/orders", TEA | {"sku": "gold"}, "o-1").status_code == 404
    assert alice.post("/orders", TEA | {"sku": "mug", "quantity": 100}, "o-2").status_code == 409
    again = alice.post("/orders", TEA | {"sku": "mug", "quantity": 100}, "o-2")
    assert (again.status_code, again.headers["idempotency-replayed"]) == (409, "true")
    assert "retry-after" not in again.headers


def test_a_payment_is_charged_once_although_answers_get_lost(town: ShopTown, alice: Customer) -> None:
    order = alice.order("o-1")
    before = len(town.books().charges)
    wanted = {"card": "4242", "cents": 900}
    while (first := alice.post(f"/orders/{order}/payment", wanted, "p-1")).status_code == 503:
        pass
    assert first.status_code == 201
    assert alice.post(f"/orders/{order}/payment", wanted, "p-1").content == first.content
    assert alice.get(f"/orders/{order}").json()["paid"] is True
    assert alice.post(f"/orders/{order}/payment", wanted, "p-2").status_code == 409
    assert len(town.books().charges) == before + 1


def test_a_later_attempt_pays_with_the_key_of_the_first(town: ShopTown, alice: Customer) -> None:
    order = alice.order("o-1")
    before = len(town.books().charges)
    wanted = {"card": SLOW_CARD, "cents": 900}
    statuses = [alice.post(f"/orders/{order}/payment", wanted, "p-1").status_code for _ in range(5)]
    assert statuses[0] == 503
    assert statuses[-1] == 201
    assert len(town.books().charges) == before + 1


def test_a_declined_card_is_final_for_its_key_and_another_card_may_be_tried(alice: Customer) -> None:
    order = alice.order("o-1")
    path = f"/orders/{order}/payment"
    assert alice.post(path, {"card": "4242", "cents": 1}, "p-0").status_code == 409
    for replayed in (False, True):
        while (answer := alice.post(path, {"card": "0000", "cents": 900}, "p-1")).status_code == 503:
            pass
        assert (answer.status_code, "idempotency-replayed" in answer.headers) == (402, replayed)
    assert alice.get(f"/orders/{order}").json()["paid"] is False
    while (answer := alice.post(path, {"card": "4242", "cents": 900}, "p-2")).status_code == 503:
        pass
    assert answer.status_code == 201


def test_a_provider_that_is_down_leaves_a_payment_that_goes_on_later(town: ShopTown, alice: Customer) -> None:
    order, wanted = alice.order("o-1"), {"card": "4242", "cents": 900}
    town.provider.kill()
    try:
        failed = alice.post(f"/orders/{order}/payment", wanted, "p-1")
        assert (failed.status_code, failed.headers["retry-after"]) == (503, "1")
        told = alice.get("/idempotency/p-1?operation=payments.create").json()
        assert told["state"] == "failed_retryable"
    finally:
        town.provider.start()
    while (answer := alice.post(f"/orders/{order}/payment", wanted, "p-1")).status_code == 503:
        pass
    assert answer.status_code == 201


def test_a_label_is_printed_once(town: ShopTown, alice: Customer) -> None:
    order = alice.order("o-1")
    before = len(town.books().labels)
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda _: alice.post(f"/orders/{order}/labels", {}, "l-1"), range(5)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.content for answer in answers}) == 1
    assert len(town.books().labels) == before + 1


def test_what_is_known_of_a_key_is_told_to_its_owner_alone(alice: Customer, bob: Customer) -> None:
    alice.order("o-1")
    told = alice.get("/idempotency/o-1?operation=orders.create")
    assert (told.status_code, told.json()["state"]) == (200, "succeeded")
    assert bob.get("/idempotency/o-1?operation=orders.create").status_code == 404
    assert alice.get("/idempotency/o-2?operation=orders.create").status_code == 404


async def test_the_buyer_of_the_example(town: ShopTown) -> None:
    async with Buyer(town.url, "carol") as buyer:
        first = await buyer.buy("carol-1")
        again = await buyer.buy("carol-1")
    assert (first.order, first.charge, first.label) == (again.order, again.charge, again.label)
    assert min(first.sent, again.sent) >= 6


def test_the_commands_that_guide_and_example_print_do_what_they_say(town: ShopTown) -> None:
    text = (examples.shop_api.__doc__ or "").replace("\\\n", "").replace("http://127.0.0.1:8000", town.url)
    lines = [line.strip() for line in text.splitlines()]
    (shown,) = [block.commands for block in blocks("idempotency.md") if block.language == "sh"]
    assert [line for line in lines if line.startswith("python -m") and "--workers" not in line] == shown
    assert [line.split()[3] for line in shown] == ["provider", "serve", "buy"]
    buy = shlex.split(shown[2])
    done = subprocess.run(
        [sys.executable, *buy[1:], "--shop", town.url], text=True, capture_output=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("paid by") == 5
    (curl,) = [shlex.split(line) for line in lines if line.startswith("curl")]
    assert curl[:4] == ["curl", "-i", "-X", "POST"]
    given = list(zip(curl[5::2], curl[6::2], strict=True))
    headers = dict(value.split(": ") for option, value in given if option == "-H")
    (body,) = [value for option, value in given if option == "-d"]
    answers = [httpx.post(curl[4], headers=headers, content=body, timeout=WAIT_S) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[0].content == answers[1].content


def test_all_that_was_done_here_has_its_record(town: ShopTown) -> None:
    books = town.books()
    assert books.tea_left == tea_at_first() - 2 * len(books.orders)
    assert books.records.get(State.PROCESSING, 0) == books.records.get(State.UNKNOWN, 0) == 0
