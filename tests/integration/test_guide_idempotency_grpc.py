"""docs/idempotency-grpc.md, run: its servers, its client, and what the page says of them."""

from __future__ import annotations

import asyncio
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from sqlalchemy import create_engine, text

from participant_sdk.idempotency import errors
from participant_sdk.idempotency.grpc_policy import NEVER_STORED
from participant_sdk.idempotency.grpc_status import GrpcCodes
from tests.integration.guide_programs import ROOT, blocks, run, save
from tests.postgres import free_port

PAGE: Final = "idempotency-grpc.md"
TEXT: Final = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the page's programs; they can be imported from there."""
    for block in blocks(PAGE):
        if block.file:
            save(tmp_path, block.file, block.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def programs(folder: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """What each of them defines."""
    names = [path.stem for path in sorted(folder.glob("*.py"))]
    yield {name: vars(importlib.import_module(name)) for name in names}
    for name in names:
        del sys.modules[name]


@pytest.fixture
def orders(programs: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The address of the page's first server, which runs."""
    program, address = programs["orders_grpc"], f"127.0.0.1:{free_port()}"
    server = program["serve"](address)
    yield address
    server.stop(5).wait(60)
    program["idempotency"].close()
    program["engine"].dispose()


def test_the_programs_are_in_order(folder: Path) -> None:
    ruff = f"ruff --config {ROOT / 'pyproject.toml'}"
    run(f"{ruff} format --check --diff .", folder)
    run(f"{ruff} check --no-cache .", folder)
    run(f"mypy --strict --cache-dir {folder / 'cache'} .", folder)


def test_asking_twice_prints_what_the_page_shows(orders: str, folder: Path) -> None:
    (console,) = [block.text for block in blocks(PAGE) if block.language == "console"]
    command, *printed = console.splitlines()
    asked = command.removeprefix("$ ").replace("127.0.0.1:50061", orders)
    assert run(asked, folder).splitlines() == printed
    assert count(folder / "orders.db") == 1


def test_what_is_told(orders: str, folder: Path, programs: dict[str, dict[str, Any]]) -> None:
    ask, look_up = programs["ask_grpc"]["order"], programs["look_up_grpc"]["state_of"]
    assert ask(orders, "tea", "k1") == (1, False)
    assert ask(orders, "tea", '"k1"') == (1, True)
    for item, key, code in (("coffee", "k1", "FAILED_PRECONDITION"), ("tea", "a b", "INVALID_ARGUMENT")):
        with pytest.raises(grpc.RpcError) as refused:
            ask(orders, item, key)
        assert refused.value.code() is grpc.StatusCode[code]
    for _ in range(2):
        with pytest.raises(grpc.RpcError) as refused:
            ask(orders, "moonlight", "k2")
        assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.NOT_FOUND, "it is not for sale")
    assert look_up(orders, "k1") == "IDEMPOTENCY_KEY_STATE_SUCCEEDED"
    assert look_up(orders, "k2") == "IDEMPOTENCY_KEY_STATE_FAILED_FINAL"
    assert look_up(orders, "k3") == "NOT_FOUND"
    assert count(folder / "orders.db") == 1


async def test_the_asyncio_server(folder: Path, programs: dict[str, dict[str, Any]]) -> None:
    ask, address = programs["ask_grpc"]["order"], f"127.0.0.1:{free_port()}"
    stopped = asyncio.Event()
    serving = asyncio.create_task(programs["orders_grpc_aio"]["serve_until"](stopped, address))
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            await asyncio.wait_for(channel.channel_ready(), 60)
        answers = await asyncio.gather(*(asyncio.to_thread(ask, address, "tea", f"k{n % 2}") for n in range(6)))
    finally:
        stopped.set()
        await serving
    assert sorted({number for number, _ in answers}) == [1, 2]
    assert sum(not replayed for _, replayed in answers) == 2
    assert count(folder / "orders_aio.db") == 2


def test_the_page_knows_every_error_and_every_code() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "reason")]
    told = {kind.reason for kind in kinds} - {"CONFIGURATION", "TRICORD_ERROR", "IDEMPOTENCY"}
    named = set(re.findall(r"`((?:IDEMPOTENCY|INVALID)_\w+)`", TEXT))
    assert named == told | {"INVALID_REQUEST", "IDEMPOTENCY_RACE_LOST"}
    sentence = TEXT[TEXT.index("UNAUTHENTICATED, ") : TEXT.index(" say nothing for good")]
    assert set(re.findall(r"[A-Z_]{3,}", sentence)) == {code.name for code in NEVER_STORED}


def test_the_page_says_the_codes_as_they_are() -> None:
    rows = re.findall(r"^\| ([A-Z_]+)(?: \(or [A-Z_]+\))? \| (`.*?`) \|", TEXT, re.MULTILINE)
    said = {reason: code for code, reasons in rows for reason in re.findall(r"`(\w+)`", reasons)}
    made: list[errors.IdempotencyKeyReused | errors.IdempotencyError] = [
        errors.KeyMissing(""),
        errors.KeyMalformed(""),
        errors.ScopeMissing(""),
        errors.RequestTooLarge(1),
    ]
    made += [errors.IdempotencyKeyReused(""), errors.InProgress(1), errors.LeaseLost(""), errors.AnswerNotStored("")]
    made += [errors.FirstSentMalformed(""), errors.IntentTooOld(1), errors.TooManyKeys(1, 1, 1)]
    made += [errors.RunUnknown(""), errors.StoreUnavailable(""), errors.NotComparable("")]
    assert {error.reason: GrpcCodes().refusal(error).code.name for error in made} == {
        reason: code for reason, code in said.items() if reason not in ("INVALID_REQUEST", "IDEMPOTENCY_RACE_LOST")
    }


def count(path: Path) -> int:
    """How many orders there are."""
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        number = int(connection.execute(text("SELECT count(*) FROM orders")).scalar_one())
    engine.dispose()
    return number
