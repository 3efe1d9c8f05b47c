"""docs/idempotency-http.md, run: each program served by uvicorn as its readers would, and what the page says of it."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest
from sqlalchemy import create_engine, text

from examples.transfer.processes import Processes, free_address
from participant_sdk.errors import TricordError
from participant_sdk.idempotency import errors, problems
from participant_sdk.idempotency.http_statuses import NEVER
from tests.integration.guide_programs import ROOT, blocks, run, save

PAGE: Final = "idempotency-http.md"
TEXT: Final = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
WSGI: Final = "tickets"
ALICE: Final = {"Authorization": "Bearer alices-token", "Idempotency-Key": "o-1"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the page's programs."""
    for block in blocks(PAGE):
        if block.file:
            save(tmp_path, block.file, block.text)
    return tmp_path


def shown(language: str) -> list[Any]:
    """The page's documents."""
    return [json.loads(block.text) for block in blocks(PAGE) if block.language == language]


class Served(Processes):
    """One of the programs; WSGI's serves itself."""

    def __init__(self, folder: Path, module: str, address: str) -> None:
        super().__init__(folder)
        port = address.rpartition(":")[2]
        if module == WSGI:
            environment = {"DATABASE_URL": f"sqlite:///{folder / module}.db", "PORT": port}
            self.web = self._add("web", [sys.executable, str(folder / f"{module}.py")], r"serves on port ", environment)
            return
        command = [sys.executable, "-m", "uvicorn", "--app-dir", str(folder), "--port", port]
        environment = {"DATABASE_URL": f"sqlite+aiosqlite:///{folder / module}.db"}
        self.web = self._add("web", [*command, f"{module}:app"], r"INFO: +Uvicorn running on ", environment)


@contextmanager
def served(folder: Path, module: str) -> Iterator[httpx2.Client]:
    address = free_address()
    with Served(folder, module, address) as process:
        process.web.start()
        with httpx2.Client(base_url=f"http://{address}", timeout=60, trust_env=False) as client:
            yield client
        process.web.stop()
        log = process.web.log.read_text()
        assert module == WSGI or "Application shutdown complete" in log
        assert "Traceback" not in log


def rows(folder: Path, module: str, query: str) -> int:
    engine = create_engine(f"sqlite:///{folder / module}.db")
    with engine.connect() as connection:
        count = int(connection.execute(text(query)).scalar_one())
    engine.dispose()
    return count


def test_the_programs_are_in_order(folder: Path) -> None:
    ruff = f"ruff --config {ROOT / 'pyproject.toml'}"
    run(f"{ruff} format --check --diff .", folder)
    run(f"{ruff} check --no-cache .", folder)
    run(f"mypy --strict --cache-dir {folder / 'cache'} orders.py plain.py tickets.py", folder)


def test_orders_on_fastapi(folder: Path) -> None:
    (console,) = [block.text for block in blocks(PAGE) if block.language == "console"]
    _, curl, status, *lines = console.splitlines()
    words = shlex.split(curl.removeprefix("$ "))
    headers = dict(words[at + 1].split(": ") for at, word in enumerate(words) if word == "-H")
    assert headers == ALICE
    printed = dict(line.split(": ") for line in lines if ": " in line and not line.startswith("{"))
    with served(folder, "orders") as web:
        first = web.post("/orders", json=json.loads(words[-1]), headers=headers)
        assert f"HTTP/1.1 {first.status_code} {first.reason_phrase}" == status
        assert {name: first.headers[name] for name in printed} == printed
        assert first.text == lines[-1]
        again = web.post("/orders", json=json.loads(words[-1]), headers=headers)
        assert (again.headers["idempotency-status"], again.headers["idempotency-replayed"]) == ("replayed", "true")
        assert again.content == first.content
        assert rows(folder, "orders", "SELECT count(*) FROM orders") == 1

        problem, told = shown("json")
        reused = web.post("/orders", json={"item": "coffee"}, headers=headers)
        assert {**reused.json(), "detail": problem["detail"]} == problem
        status_of = web.get("/idempotency/o-1?operation=orders.create", headers=headers).json()
        assert {**status_of, "age_s": told["age_s"], "expires_in_s": told["expires_in_s"]} == told

        no = [
            web.post("/orders", json={"item": "moonlight"}, headers={**ALICE, "Idempotency-Key": "o-2"}) for _ in "12"
        ]
        assert [(answer.status_code, answer.headers.get("idempotency-replayed")) for answer in no] == [
            (404, None),
            (404, "true"),
        ]
        bob = web.post("/orders", json={"item": "tea"}, headers={**ALICE, "Authorization": "Bearer bobs-token"})
        assert bob.json() == {"order": 2}
        nobody = web.post("/orders", json={"item": "tea"}, headers={"Idempotency-Key": "o-1"})
        assert (nobody.status_code, nobody.json()["reason"]) == (403, "IDEMPOTENCY_SCOPE_MISSING")
        operation = web.get("/openapi.json").json()["paths"]["/orders"]["post"]
        assert [found["name"] for found in operation["parameters"]] == ["Idempotency-Key"]
        assert {"409", "422"} <= set(operation["responses"])


def test_payments_on_starlette(folder: Path) -> None:
    with served(folder, "plain") as web:

        def pay(**body: object) -> httpx2.Response:
            return web.post("/payments", json=body, headers={"Api-Version": "1"})

        first = pay(request_id="payment-1", cents=700, sent_at="12:00")
        again = pay(sent_at="12:01", cents=700, request_id="payment-1")
        assert (first.status_code, again.status_code) == (201, 201)
        assert again.headers["idempotent-replayed"] == "true"
        assert (again.content, again.headers["location"]) == (first.content, "/payments/1")
        other = pay(request_id="payment-1", cents=701)
        assert (other.status_code, other.json()["error"]["type"]) == (400, "idempotency_error")
        assert pay(request_id="short", cents=1).status_code == 400
        assert pay(cents=1).status_code == 400
        assert rows(folder, "plain", "SELECT count(*) FROM payments") == 1


def test_tickets_on_wsgi(folder: Path) -> None:
    with served(folder, WSGI) as web:

        def sell(key: str, began_s: float, user: str = "alice") -> httpx2.Response:
            headers = {"X-User": user, "Idempotency-Key": key, "First-Sent": f"@{began_s:.0f}"}
            return web.post("/tickets", json={"seat": "7a"}, headers=headers)

        first, again = sell("t-1", time.time()), sell("t-1", time.time())
        assert (first.status_code, first.json(), first.headers["idempotency-status"]) == (
            201,
            {"sold": "7a"},
            "executed",
        )
        assert (again.content, again.headers["idempotency-replayed"]) == (first.content, "true")
        late = sell("t-2", time.time() - 24 * 3600)
        assert (late.status_code, late.json()["reason"]) == (412, "IDEMPOTENCY_INTENT_TOO_OLD")
        assert sell("t-1", time.time(), "").status_code == 403
        asked = {"X-User": "alice"}
        assert web.get("/idempotency/t-1", headers=asked).json()["state"] == "succeeded"
        assert web.get("/idempotency/t-2", headers=asked).status_code == 404
        assert rows(folder, WSGI, "SELECT count(*) FROM tickets") == 1


def test_the_page_knows_every_status_and_reason() -> None:
    kept = TEXT.partition("## Which answers are kept")[2].partition("## What clients see")[0]
    assert {int(found) for found in re.findall(r"`(4\d\d)`", kept)} == NEVER
    told = set(re.findall(r"`(IDEMPOTENCY_\w+)`", TEXT))
    every = {
        kind.reason
        for kind in [*vars(errors).values(), *vars(problems).values()]
        if isinstance(kind, type) and issubclass(kind, TricordError)
    }
    assert every - {"IDEMPOTENCY", "TRICORD_ERROR", "CONFIGURATION"} <= told
