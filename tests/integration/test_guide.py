"""The guide's code, run: every pattern on every database, every command, and the house's own checks on all of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import Connection, create_engine, text

from tests.contract.participant.world import CANCEL, CONFIRM, DONE, REFUSED, TRY, new_xid
from tests.integration.guide_programs import PAGES, ROOT, Caller, Guide, blocks, programs, run, save

Rows = list[tuple[Any, ...]]


@dataclass(frozen=True)
class Pattern:
    """An action of the guide, and what its tables hold before Try, after it, and after Confirm."""

    program: str
    participant: str
    action: str
    payload: Mapping[str, object]
    no: Mapping[str, object]
    """A payload that is refused for `reason` once `payload` was tried."""
    reason: str
    seed: tuple[str, ...]
    sums: str
    before: Rows
    tried: Rows
    confirmed: Rows


DEBITS: Final = "SELECT (SELECT balance FROM account), (SELECT coalesce(sum(cents), 0) FROM hold)"
CREDITS: Final = (
    "SELECT (SELECT balance FROM account), (SELECT coalesce(sum(cents), 0) FROM incoming WHERE NOT confirmed), "
    "(SELECT coalesce(sum(cents), 0) FROM incoming WHERE confirmed)"
)
ALICE: Final = ("INSERT INTO account (name, balance) VALUES ('alice', 100)",)

PATTERNS: Final = (
    Pattern(
        program="stock", participant="warehouse", action="reserve",
        payload={"sku": "tea", "quantity": 3}, no={"sku": "tea", "quantity": 4}, reason="out_of_stock",
        seed=("INSERT INTO stock (sku, available, held) VALUES ('tea', 5, 0)",),
        sums="SELECT available, held FROM stock",
        before=[(5, 0)], tried=[(2, 3)], confirmed=[(2, 0)],
    ),
    Pattern(
        program="account", participant="bank", action="debit",
        payload={"account": "alice", "cents": 70}, no={"account": "alice", "cents": 40}, reason="insufficient_funds",
        seed=ALICE, sums=DEBITS, before=[(100, 0)], tried=[(30, 70)], confirmed=[(30, 0)],
    ),
    Pattern(
        program="account", participant="bank", action="credit",
        payload={"account": "alice", "cents": 70}, no={"account": "mallory", "cents": 1}, reason="unknown_account",
        seed=ALICE, sums=CREDITS, before=[(100, 0, 0)], tried=[(100, 70, 0)], confirmed=[(100, 0, 70)],
    ),
    Pattern(
        program="seat", participant="theatre", action="book",
        payload={"show": "Hamlet", "number": "A1"}, no={"show": "Hamlet", "number": "A1"}, reason="taken",
        seed=(), sums="SELECT number, status FROM seat",
        before=[], tried=[("A1", "held")], confirmed=[("A1", "sold")],
    ),
    Pattern(
        program="coupon", participant="coupons", action="redeem",
        payload={"code": "TEN"}, no={"code": "TEN"}, reason="no_such_coupon",
        seed=("INSERT INTO coupon (code, used) VALUES ('TEN', false)",),
        sums="SELECT CASE WHEN holder IS NULL THEN 0 ELSE 1 END, CASE WHEN used THEN 1 ELSE 0 END FROM coupon",
        before=[(0, 0)], tried=[(1, 0)], confirmed=[(1, 1)],
    ),
    Pattern(
        program="fund", participant="charity", action="donate",
        payload={"fund": "owls", "cents": 70}, no={"fund": "owls", "cents": 0}, reason="invalid_amount",
        seed=("INSERT INTO fund (name, cents, promised) VALUES ('owls', 100, 0)",),
        sums="SELECT cents, promised FROM fund",
        before=[(100, 0)], tried=[(100, 70)], confirmed=[(170, 0)],
    ),
)  # fmt: skip


class Played:
    """A pattern that serves, on a database with its seed."""

    def __init__(self, pattern: Pattern, module: Any, url: str, caller: Caller) -> None:
        self.pattern = pattern
        self.module = module
        self.caller = caller
        self._url = url

    async def does(self, phase: Any, xid: str, payload: Mapping[str, object] | None = None) -> tuple[Any, str]:
        """Call it; the outcome, and the reason if it was refused."""
        reply = await self.caller.call(phase, xid, dict(payload or self.pattern.payload))
        assert not reply.error
        return reply.outcome, reply.refusal.reason

    def sums(self, statement: str = "") -> Rows:
        """What the tables hold."""
        with database(self._url) as db:
            return [
                tuple(n if isinstance(n, str) else int(n) for n in row)
                for row in db.execute(text(statement or self.pattern.sums))
            ]


@contextmanager
def database(url: str) -> Iterator[Connection]:
    """A connection that is not the participant's; what is written is committed."""
    engine = create_engine(url)
    try:
        with engine.begin() as db:
            yield db
    finally:
        engine.dispose()


@asynccontextmanager
async def played(guide: Guide, url: str, pattern: Pattern) -> AsyncIterator[Played]:
    """Create the tables and serve the participant."""
    module = guide.load(pattern.program)
    metadata = module.Base.metadata if hasattr(module, "Base") else module.metadata
    with database(url) as db:
        metadata.create_all(db)
        for statement in pattern.seed:
            db.execute(text(statement))
    participant = getattr(module, pattern.participant)
    asynchronous = hasattr(module.engine, "sync_engine")
    if asynchronous:
        serving = await participant.start_async("127.0.0.1:0")
    else:
        serving = await asyncio.to_thread(participant.start, "127.0.0.1:0")
    caller = Caller(serving.address, pattern.participant, pattern.action)
    try:
        yield Played(pattern, module, url, caller)
    finally:
        await caller.close()
        assert await (serving.stop(10.0) if asynchronous else asyncio.to_thread(serving.stop, 10.0))


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: f"{pattern.program}-{pattern.action}")
async def test_the_sums_of_a_pattern_agree_whatever_comes(
    guide_on: Guide, guide_urls: tuple[str, str], pattern: Pattern
) -> None:
    async with played(guide_on, guide_urls[0], pattern) as shop:
        lost = new_xid()  # Cancel overtakes its Try
        assert await shop.does(CANCEL, lost) == (DONE, "")
        assert await shop.does(TRY, lost) == (REFUSED, "suspended")
        assert shop.sums() == pattern.before
        cancelled = new_xid()
        for phase, rows in ((TRY, pattern.tried), (TRY, pattern.tried), (CANCEL, pattern.before)):
            assert await shop.does(phase, cancelled) == (DONE, "")
            assert shop.sums() == rows
        confirmed = new_xid()
        for phase, rows in ((TRY, pattern.tried), (TRY, pattern.tried)):
            assert await shop.does(phase, confirmed) == (DONE, "")
            assert shop.sums() == rows
        refused = new_xid()
        for _ in range(2):
            assert await shop.does(TRY, refused, pattern.no) == (REFUSED, pattern.reason)
        assert await shop.does(CANCEL, refused, pattern.no) == (DONE, "")
        assert await shop.does(CANCEL, cancelled) == (DONE, "")  # again, and late
        assert shop.sums() == pattern.tried
        for _ in range(2):
            assert await shop.does(CONFIRM, confirmed) == (DONE, "")
            assert shop.sums() == pattern.confirmed


async def test_confirm_takes_less_than_was_reserved(guide_on: Guide, guide_urls: tuple[str, str]) -> None:
    pattern = next(pattern for pattern in PATTERNS if pattern.action == "debit")
    async with played(guide_on, guide_urls[0], pattern) as shop:
        xid = new_xid()
        await shop.does(TRY, xid)
        with database(guide_urls[0]) as db:
            assert shop.module.set_used(db, xid, 1, 20)
        with pytest.raises(Exception, match="hold_not_exceeded"), database(guide_urls[0]) as db:
            shop.module.set_used(db, xid, 1, 71)
        await shop.does(CONFIRM, xid)
        assert shop.sums() == [(80, 0)]
        with database(guide_urls[0]) as db:
            assert not shop.module.set_used(db, xid, 1, 10)  # too late
        await shop.does(CONFIRM, xid)
        assert shop.sums() == [(80, 0)]


async def test_confirmed_credits_are_folded_once(guide_on: Guide, guide_urls: tuple[str, str]) -> None:
    pattern = next(pattern for pattern in PATTERNS if pattern.action == "credit")
    async with played(guide_on, guide_urls[0], pattern) as shop:
        first, second = new_xid(), new_xid()
        for phase, xid in ((TRY, first), (TRY, second), (CONFIRM, first)):
            await shop.does(phase, xid)
        for _ in range(2):
            await asyncio.to_thread(shop.module.fold, shop.module.engine)
            assert shop.sums() == [(170, 70, 0)]


async def test_a_ticket_reaches_the_initiator(guide_on: Guide, guide_urls: tuple[str, str]) -> None:
    pattern = next(pattern for pattern in PATTERNS if pattern.program == "seat")
    async with played(guide_on, guide_urls[0], pattern) as shop:
        xid = new_xid()
        reply = await shop.caller.call(TRY, xid, dict(pattern.payload))
        assert reply.result.data.decode() == f'{{"code":"{xid}-1"}}'
        assert shop.sums("SELECT number, ticket FROM seat") == [("A1", f"{xid}-1")]


async def test_a_payload_that_cannot_be_read_is_refused_by_name(guide: Guide, tmp_path: Path) -> None:
    async with played(guide, f"sqlite:///{tmp_path / 'shop.db'}", PATTERNS[0]) as shop:
        for payload, field in (({"sku": "tea", "quantity": "3"}, "quantity"), ({"sku": "tea"}, "quantity")):
            reply = await shop.caller.call(TRY, new_xid(), payload)
            assert (reply.outcome, reply.refusal.reason) == (REFUSED, "invalid_payload")
            assert field in reply.refusal.message
        assert shop.sums() == PATTERNS[0].before


# --- the commands, and the code as such -------------------------------------------------------------------

SERVERS: Final = re.compile(r"tricord serve |python -m examples\.|uvicorn |curl ")
"""What test_fastapi_example runs."""


def test_the_guide_can_be_followed_from_top_to_bottom(tmp_path: Path) -> None:
    printed: dict[str, str] = {}
    for block in blocks("participants.md"):
        if block.file:
            save(tmp_path, block.file, block.text)
        for command in block.commands if block.language == "sh" else ():
            if not SERVERS.match(command):
                printed[command] = run(command, tmp_path)
    assert "2 passed" in printed["python -m pytest test_stock.py"]
    assert "No new upgrade operations detected" in printed["alembic check"]
    with database(f"sqlite:///{tmp_path / 'shop.db'}") as db:
        tables = {name for (name,) in db.execute(text("SELECT name FROM sqlite_master WHERE type = 'table'"))}
    assert {"stock", "tcc_fence_log", "tcc_fence_info"} <= tables
    assert "CREATE TABLE tcc_fence_log" in printed["tricord fence ddl --dialect postgresql"]
    (renamed,) = (text_ for command, text_ in printed.items() if "--log-name" in command)
    assert "CREATE TABLE payment_fence_log" in renamed
    assert "ENGINE=InnoDB" in renamed


def test_every_block_is_run() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert block.language in ("python", "sh"), block
            assert bool(block.file) is (block.language == "python"), block
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_guide*.py"))
    for file in programs():
        name = file.removesuffix(".py")
        assert f'"{name}"' in tests or file in ("database.py", "test_stock.py", "migrations/env.py"), file


def test_the_code_is_in_order(guide: Guide, tmp_path: Path) -> None:
    ruff = f"ruff --config {ROOT / 'pyproject.toml'}"
    run(f"{ruff} format --check --diff .", tmp_path)
    run(f"{ruff} check --no-cache .", tmp_path)
    run(f"mypy --strict --cache-dir {tmp_path / 'cache'} {' '.join(programs())}", tmp_path)


def test_the_pages_that_are_linked_exist() -> None:
    for page in PAGES:
        shown = (ROOT / "docs" / page).read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", shown):
            assert (ROOT / "docs" / link).exists(), link
        for path in re.findall(r"`((?:examples|tests|docs)/[^`]+)`", shown):
            assert (ROOT / path).exists(), path
