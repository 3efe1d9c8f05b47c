"""Case "rolling upgrade": a newer version takes the place of the one before under load, on the same store (G2)."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa

from coordinator.engine import OPEN_FORMAT
from coordinator.model import State
from examples.transfer.bank import Credit, Debit
from examples.transfer.databases import Databases, eventually
from examples.transfer.processes import Process, Processes, ProcessFailed, free_address
from participant_sdk import RequestFailed, TricordClient, branch
from tests.chaos.load import Load, Told, Transfer
from tests.chaos.verdict import violations
from tests.contract.stores import at_revision
from tests.coordinators import tricord
from tests.postgres import PostgresServer
from tests.processes import OPENING, SHORT, fresh_databases, opening_accounts

ANSWERS = 25


class Street(Processes):
    """Two addresses of coordinators, each with a program of the version before and one of this; and two banks."""

    def __init__(self, folder: Path, databases: Databases) -> None:
        super().__init__(folder)
        self.databases = databases
        self.endpoints = [free_address() for _ in range(2)]
        older, newer = ("tests.chaos.older", "older"), ("coordinator", "newer")
        self.older = [self._program(*older, endpoint) for endpoint in self.endpoints]
        self.newer = [self._program(*newer, endpoint) for endpoint in self.endpoints]
        self.too_old, self.too_new = self._program(*older, free_address()), self._program(*newer, free_address())
        self.banks = [
            self.bank(name, free_address(), url, endpoint, OPENING[name])
            for (name, url), endpoint in zip(databases.banks.items(), self.endpoints, strict=True)
        ]

    def _program(self, module: str, name: str, endpoint: str) -> Process:
        command = [sys.executable, "-m", module, "serve", "--listen", endpoint]
        for flag, value in SHORT.items():
            command += [f"--{flag.replace('_', '-')}", str(value)]
        environment = {"TRICORD_STORE": self.databases.store}
        return self._add(f"{name}-{endpoint}", command, "tricord: listening on ", environment)

    def rows_by_format(self) -> Counter[int]:
        """How many transactions are stored in each format."""
        with psycopg.connect(self.databases.store) as connection:
            return Counter(format_ for (format_,) in connection.execute("SELECT format FROM tricord_transaction"))

    def migrate(self, *flags: str) -> tuple[int, str]:
        """Run the command; its exit code and what it says."""
        run = tricord("migrate", "--store", self.databases.store, *flags)
        return run.returncode, run.stdout + run.stderr


def read_everywhere(endpoints: Sequence[str], xids: Sequence[str]) -> None:
    """Every coordinator reads what any has written, whoever drove it."""
    clients = [TricordClient(endpoint) for endpoint in endpoints]
    try:
        for xid in xids:
            one, other = (client.get(xid=xid) for client in clients)
            assert (one.state, one.branches) == (other.state, other.branches)
    finally:
        for client in clients:
            client.close()


def takes_what_is_new(endpoint: str, load: Load) -> bool:
    """Whether this coordinator runs what only rows of the newer format hold; if so, it is part of the load."""
    transfer = Transfer(f"new-{endpoint}", "alice@bank-a", "bob@bank-b", 1)
    debit, credit = branch("bank-a", "debit", Debit("alice", 1)), branch("bank-b", "credit", Credit("bob", 1))
    with TricordClient(endpoint) as client:
        try:
            tx = client.execute(debit, credit, ordered=True, idempotency_key=transfer.key)
        except RequestFailed as refused:
            if "tricord migrate --finish" not in str(refused):
                raise
            return False
    load.ask(transfer)
    load.tell(transfer, Told(State.CONFIRMED, tx.xid))
    return True


def roll(street: Street, load: Load) -> None:
    """From two coordinators of the version before to two of this, and one of these killed in between."""
    (first, last), (new_first, new_last) = street.older, street.newer
    load.wait_for_answers(ANSWERS)
    with pytest.raises(ProcessFailed, match="run `tricord migrate`"):
        street.too_new.start()
    code, said = street.migrate()  # under load
    assert (code, "rows up to format 1, for programs from format 1 on" in said) == (0, True), said
    load.wait_for_answers(ANSWERS)
    assert load.unanswered() > 0
    first.kill()
    load.wait_for_answers(ANSWERS)
    new_first.start()
    load.wait_for_answers(2 * ANSWERS)  # by one of each version
    xids = [told.xid for told in list(load.told.values()) if told.xid]
    read_everywhere(street.endpoints, xids[-2 * ANSWERS :])
    assert not takes_what_is_new(street.endpoints[0], load)
    code, said = street.migrate("--finish")
    assert (code, "coordinators of an older version still use the store" in said) == (1, True), said
    new_first.kill()  # what it was at goes on at the older one
    load.wait_for_answers(ANSWERS)
    last.stop()
    last.start()  # which may start again until the end of the roll
    new_first.start()
    load.wait_for_answers(ANSWERS)
    last.kill()
    load.wait_for_answers(ANSWERS)
    new_last.start()
    load.wait_for_answers(ANSWERS)


@pytest.mark.database
def test_rolling_upgrade_under_load(tmp_path: Path, postgres_server: PostgresServer) -> None:
    """Nothing is lost, nothing doubled; and what older programs cannot read is written only when none is left."""
    with fresh_databases(tmp_path, postgres_server) as databases, Street(tmp_path, databases) as street:
        engine = sa.create_engine(databases.store.replace("postgresql:", "postgresql+psycopg:", 1))
        at_revision(engine, "0001")
        engine.dispose()
        for process in (*street.older, *street.banks):
            process.start()
        load = Load(street.endpoints, opening_accounts(), seed=1, clients=4)
        try:
            load.start()
            roll(street, load)
            assert set(street.rows_by_format()) == {1}
            eventually("the last session has ended", lambda: street.migrate("--finish")[0] == 0)
            load.wait_for_answers(ANSWERS)
            waiting = set(street.endpoints)
            while waiting:  # they look once in a few seconds
                waiting -= {endpoint for endpoint in waiting if takes_what_is_new(endpoint, load)}
            load.wait_for_answers(ANSWERS)
            load.stop()
        finally:
            load.close()
        with pytest.raises(ProcessFailed, match="another version of Tricord"):
            street.too_old.start()
        eventually("all are finished", lambda: not databases.transactions(unfinished=True))
        assert street.rows_by_format()[OPEN_FORMAT] == 2
        assert violations(tmp_path, databases, opening_accounts(), load) == []
