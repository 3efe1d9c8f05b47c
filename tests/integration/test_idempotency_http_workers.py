"""Several processes on one database, and processes that are killed: uvicorn's own workers, over real HTTP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import create_engine, text

from tests.contract.participant.world import postgres_url
from tests.integration.guide_programs import ROOT
from tests.integration.idempotent_shop import SQL, WAIT_S, Seen, until
from tests.integration.served_shop import Shop
from tests.postgres import free_port

pytestmark = pytest.mark.database


class Process:
    """`uvicorn` with the shop, in processes of its own."""

    def __init__(self, url: str, workers: int) -> None:
        self.port = free_port()
        module = "tests.integration.idempotent_shop:from_environment"
        command = [sys.executable, "-m", "uvicorn", "--factory", module, "--port", str(self.port)]
        command += ["--workers", str(workers), "--log-level", "warning"]
        self._command, self._environment = command, {**os.environ, "SHOP_DATABASE": url}
        self.start()

    def start(self) -> None:
        """Start, on the same port; returns when it answers."""
        self._process = subprocess.Popen(
            self._command, env=self._environment, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL
        )
        until(self._answers)

    def _answers(self) -> bool:
        assert self._process.poll() is None, "it has ended"
        try:
            return httpx2.get(f"http://127.0.0.1:{self.port}/", trust_env=False).status_code == 404
        except httpx2.TransportError:
            return False

    def kill(self) -> None:
        """All its processes at once."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End in order."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                self.kill()


@contextmanager
def running(dsn: str, workers: int) -> Iterator[tuple[Shop, Process]]:
    engine = create_engine(postgres_url(dsn))
    with engine.begin() as connection:
        connection.execute(text(SQL))
    process = Process(postgres_url(dsn), workers)
    shop = Shop(f"http://127.0.0.1:{process.port}", engine, Seen())
    try:
        with shop.client:
            yield shop, process
    finally:
        process.close()
        engine.dispose()


def test_two_workers_run_each_request_once(pg_database: str) -> None:
    with running(pg_database, 2) as (shop, _), ThreadPoolExecutor(16) as pool:

        def order(number: int) -> tuple[int, bytes, str | None]:
            with httpx2.Client(base_url=shop.address, timeout=WAIT_S, trust_env=False) as client:  # any worker's
                name = f"item-{number}"
                headers = {"X-Account": "acme", "Idempotency-Key": name}
                answer = client.post("/orders", json={"item": name, "do": {}}, headers=headers)
                return answer.status_code, answer.content, answer.headers.get("idempotency-replayed")

        numbers = [number for number in range(12) for _ in range(4)]
        answers = list(pool.map(order, numbers))
        for number in range(12):
            own = [answer for asked, answer in zip(numbers, answers, strict=True) if asked == number]
            assert {status for status, _, _ in own} == {201}
            assert len({body for _, body, _ in own}) == 1
            assert sorted(str(replayed) for _, _, replayed in own) == ["None", "true", "true", "true"]
            assert shop.placed(f"item-{number}") == 1


def unless(folder: Path) -> dict[str, Any]:
    """Makes the first run wait for ever, and no later one."""
    return {"stuck_unless": str(folder / "begun")}


def killed_while_it_runs(shop: Shop, process: Process, item: str, path: str, folder: Path) -> None:
    """An order whose process dies while its handler is at work, and is started again."""
    begun = folder / "begun"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(shop.order, item, path=path, **unless(folder))
        until(begun.exists)
        process.kill()
        assert isinstance(asked.exception(), httpx2.TransportError)
    process.start()


def test_case_38_an_atomic_run_that_is_killed_has_left_nothing(pg_database: str, tmp_path: Path) -> None:
    with running(pg_database, 1) as (shop, process):
        killed_while_it_runs(shop, process, "tea", "/orders", tmp_path)
        assert (shop.placed("tea"), shop.records()) == (0, 0)
        again = shop.order("tea", **unless(tmp_path))
        assert (again.status_code, shop.placed("tea")) == (201, 1)


def test_case_38_where_take_over_is_off_it_is_unknown_and_does_not_run_again(pg_database: str, tmp_path: Path) -> None:
    with running(pg_database, 1) as (shop, process):
        killed_while_it_runs(shop, process, "tea", "/never", tmp_path)
        assert (shop.placed("tea"), shop.records()) == (0, 1)

        def unknown() -> bool:
            answer = shop.order("tea", path="/never", **unless(tmp_path))
            assert answer.status_code == 409
            return bool(answer.json()["reason"] == "IDEMPOTENCY_OUTCOME_UNKNOWN")

        until(unknown)  # the lease is over then
        assert shop.placed("tea") == 0
        headers = {"X-Account": "acme"}
        assert shop.client.get("/idempotency/tea", headers=headers).json()["state"] == "unknown"
