"""Rows that are claimed again and again, and never saved (protocol A7)."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import psycopg

from coordinator.delivery import Delivery
from coordinator.engine import Engine
from coordinator.ids import new_xid
from coordinator.machine import begin
from coordinator.model import Attention, BranchSpec, Policy, Spec, State, Transaction
from coordinator.participants import Participants
from coordinator.store.rows import CLAIMS_MAX
from coordinator.store.store import Store, backend_for
from tests.contract.rows import DUE_MS, open_store
from tests.coordinators import CALL_S, CoordinatorProcess, environment
from tests.postgres import free_port

from .participant_server import ParticipantServer
from .scene import QUICK

TIMEOUT_MS = 3_600_000
DEATHS_MAX = 20


def due(participant: str, policy: Policy) -> Transaction:
    """A transaction whose coordinator has died, as it stands in the store."""
    now_ms = int(time.time() * 1000)
    spec = Spec(new_xid(now_ms), b"", now_ms, TIMEOUT_MS, (BranchSpec(participant, "debit"),))
    return begin(spec, now_ms, policy)._replace(save_id=1, wake_ms=DUE_MS)


async def test_it_gets_attention_is_told_once_and_is_driven_all_the_same(tmp_path: Path) -> None:
    policy = Policy(call_timeout_ms=500, lease_ms=1_000, backoff_base_ms=20, backoff_cap_ms=20)
    store = Store(backend_for(str(tmp_path / "tricord.db"), policy.lease_ms))
    await store.open()
    delivery = Delivery(Participants(store))
    engine = Engine(store, delivery, policy)
    told: list[tuple[Attention, int | None]] = []
    engine.on_attention = lambda tx, branch: told.append((tx.attention, branch))
    try:
        tx = due("nobody", policy)
        await engine.journal.begin(tx)
        for _ in range(CLAIMS_MAX):
            await store.claim(1, 0)
        await engine.start()
        # Its first save, that of a call which could not be sent, takes the attention away.
        stands = await engine.wait(tx, lambda now: now.version > 1, CALL_S)
        assert stands.attention is Attention.NONE
        assert told == [(Attention.STUCK, None)]
    finally:
        await engine.stop(0.0)
        await delivery.close()
        await store.close()


def test_what_kills_each_coordinator_ends_alone(pg_database: str) -> None:
    """Claimed together with a row that kills the claimer, innocent ones end after a few restarts; it is shown."""
    policy = Policy(call_timeout_ms=QUICK["call_timeout_ms"], lease_ms=QUICK["lease_ms"])
    poison, *others = txs = [due(name, policy) for name in ("poison", *["bank"] * 5)]

    async def store_them() -> None:
        opened = await open_store(pg_database)
        engine = Engine(opened, Delivery(Participants(opened)), policy)
        await asyncio.gather(*map(engine.journal.begin, txs))
        await opened.close()

    with ParticipantServer() as bank, CoordinatorProcess(store=pg_database, **QUICK) as coordinator:
        coordinator.register("bank", bank.address)
        coordinator.stop()
        asyncio.run(store_them())
        deaths = 0
        while any(stored(pg_database, tx) != (State.CONFIRMED, Attention.NONE) for tx in others):
            deaths += 1
            assert deaths < DEATHS_MAX
            die(pg_database)
            with psycopg.connect(pg_database) as connection:  # in place of waiting for the first leases
                connection.execute(
                    "UPDATE tricord_transaction SET wake_ms = %s WHERE wake_ms IS NOT NULL AND claims < 3", [DUE_MS]
                )
        assert deaths > CLAIMS_MAX
        die(pg_database)
        assert stored(pg_database, poison) == (State.TRYING, Attention.STUCK)


def stored(dsn: str, tx: Transaction) -> tuple[int, int]:
    """Its state and attention."""
    with psycopg.connect(dsn) as connection:
        query = "SELECT state, attention FROM tricord_transaction WHERE xid = %s"
        found: tuple[int, int] | None = connection.execute(query, [tx.spec.xid]).fetchone()
    assert found is not None
    return found


def die(dsn: str) -> None:
    """Run a coordinator until it dies of what it claims."""
    command = [sys.executable, "-m", "tests.integration.mortal", "serve", "--store", dsn]
    command += ["--listen", f"127.0.0.1:{free_port()}"]
    for name, value in QUICK.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    ended = subprocess.run(
        command, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=CALL_S, check=False
    )
    assert ended.returncode == -9, ended.stderr
