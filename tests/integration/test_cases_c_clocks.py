"""The coordinator's case of time zones and clocks, by its number: nobody's clock is right, and no two are alike."""

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import psycopg
import pytest
from psycopg import sql

from examples.transfer.bank import Debit
from examples.transfer.databases import Databases
from examples.transfer.processes import Process, Processes, free_address
from participant_sdk import TricordClient, branch
from tests.chaos.counted import Called, read
from tests.coordinators import CALL_S, states
from tests.coordinators import branch as branch_message
from tests.processes import fresh_databases
from tricord.v1 import coordinator_pb2 as pb
from tricord.v1 import coordinator_pb2_grpc

from .scene import finished


class Clock(NamedTuple):
    """Of a machine."""

    wrong_by_s: int
    zone: str


CLOCKS = (Clock(600, "Pacific/Kiritimati"), Clock(-900, "America/St_Johns"))


class Everywhere(Processes):
    """Coordinators and two banks in different time zones, each by minutes wrong about the time. Banks count calls."""

    def __init__(self, folder: Path, databases: Databases, coordinators: int) -> None:
        super().__init__(folder)
        self.endpoints = [free_address() for _ in range(coordinators)]
        self.coordinators = [
            self._coordinator(f"coordinator-{number}", clock, databases.store, endpoint)
            for number, (clock, endpoint) in enumerate(zip(CLOCKS, self.endpoints, strict=False))
        ]
        self.banks = [
            self._bank(bank, clock, url)
            for clock, (bank, url) in zip(reversed(CLOCKS), databases.banks.items(), strict=True)
        ]

    def _coordinator(self, name: str, clock: Clock, store: str, endpoint: str) -> Process:
        command = ["coordinator", "serve", "--store", store, "--listen", endpoint]
        command += ["--call-timeout-ms=20000", "--lease-ms=25000"]  # no call is repeated because of a slow machine
        return self._away(name, clock, command, "tricord: listening on ")

    def _bank(self, name: str, clock: Clock, url: str) -> Process:
        command = ["tests.chaos.counted", "bank", "--calls", str(self.folder / name), "--name", name]
        command += ["--listen", free_address(), "--database", url, "--coordinator", self.endpoints[0]]
        return self._away(name, clock, [*command, "--accounts", "alice=1000"], f"participant {name} serves on ")

    def _away(self, name: str, clock: Clock, command: Sequence[str], ready: str) -> Process:
        wrong = [sys.executable, "-m", "tests.wrong_clock", str(clock.wrong_by_s), *command]
        return self._add(name, wrong, ready, {"TZ": clock.zone})

    def calls(self) -> Counter[Called]:
        """How often each thing was asked of a bank."""
        return sum((read(self.folder / bank.name) for bank in self.banks), Counter())


@contextmanager
def databases_elsewhere(kind: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[Databases]:
    """Fresh databases; on a server, in yet another time zone."""
    server = request.getfixturevalue("postgres_server") if kind == "postgresql" else None
    with fresh_databases(folder, server) as databases:
        if kind == "postgresql":
            for url in (databases.store, *databases.banks.values()):
                with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
                    name = sql.Identifier(connection.info.dbname)
                    connection.execute(sql.SQL("ALTER DATABASE {} SET timezone TO 'Asia/Kathmandu'").format(name))
        yield databases


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.database)])
def test_case_26_time_zones_and_wrong_clocks_hurry_nothing(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """No call comes twice, no deadline before its time; also not at a coordinator that takes over from another."""
    with (
        databases_elsewhere(kind, request, tmp_path) as databases,
        Everywhere(tmp_path, databases, 2 if kind == "postgresql" else 1) as everywhere,
    ):
        for process in (*everywhere.coordinators, *everywhere.banks):
            process.start()
        transfer = [branch(bank, "debit", Debit("alice", 1)) for bank in databases.banks]
        for endpoint in everywhere.endpoints * 10:
            with TricordClient(endpoint) as client:
                client.execute(*transfer, timeout=25)  # or it raises
        calls = everywhere.calls()
        assert len(calls) == len(everywhere.endpoints) * 10 * 2 * 2
        assert set(calls.values()) == {1}

        with grpc.insecure_channel(everywhere.endpoints[0]) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            begin = pb.BeginRequest()
            begin.timeout.FromMilliseconds(3_000)
            begun = stub.Begin(begin, timeout=CALL_S).transaction
            left = branch_message("bank-a", data=b'{"account": "alice", "amount": 1}')
            stub.Try(pb.CoordinatorServiceTryRequest(xid=begun.xid, branch_key="1", branch=left), timeout=CALL_S)
        everywhere.coordinators[0].kill()
        if kind == "sqlite":
            everywhere.coordinators[0].start()
        with grpc.insecure_channel(everywhere.endpoints[-1]) as channel:
            tx = finished(coordinator_pb2_grpc.CoordinatorServiceStub(channel), xid=begun.xid)
        assert states(tx) == ["CANCELLED", "CANCELLED"]
        assert (
            tx.decide_time.ToMilliseconds() >= tx.deadline_time.ToMilliseconds() == begun.deadline_time.ToMilliseconds()
        )
        assert tx.deadline_time.ToMilliseconds() - tx.create_time.ToMilliseconds() == 3_000
        if kind == "postgresql":  # where the coordinators go by the database's clock
            assert abs(tx.create_time.ToMilliseconds() / 1_000 - time.time()) < 300
        assert set(everywhere.calls().values()) == {1}
        assert len(everywhere.calls()) == len(calls) + 2
