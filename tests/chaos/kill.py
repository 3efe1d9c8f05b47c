"""SIGKILL the coordinator or a bank at random moments under load; at the end nothing may be lost, doubled or left.

    python -m tests.chaos.kill --rounds 100 --store all

Each round kills one process while transfers run, and starts it again. A round whose kill met no transaction in flight
proves nothing and does not count: the coordinator's database, read right after the kill, must hold transactions that
were begun before it and are unfinished. Which process and after how long is drawn from ``--seed``; what the kill then
meets is up to the machine.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from examples.transfer.databases import Databases
from examples.transfer.processes import ProcessFailed
from tests.chaos.load import Load
from tests.chaos.recorded import program
from tests.chaos.verdict import violations
from tests.postgres import PostgresServer, PostgresUnavailable
from tests.processes import Cast, fresh_databases, opening_accounts

STORES = ("sqlite", "postgres")
ANSWERS_BETWEEN = 10
"""Answers after which the next kill may come: everybody is back at work."""
DELAY_S_MAX = 0.3
DOWN_S_MAX = 0.3
REPEATS_MAX = 20


def main() -> int:
    """Run it; 1 if anything did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.kill", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=100, help="kills per store")
    parser.add_argument("--store", choices=("all", *STORES), default="all")
    parser.add_argument("--coordinators", type=int, default=1, help="on one database (PostgreSQL only)")
    parser.add_argument("--seed", type=int, default=None, help="repeat a run's choices")
    options = parser.parse_args()
    if options.rounds < 1 or options.coordinators < 1:
        parser.error("--rounds and --coordinators must be 1 or more")
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    print(f"chaos: {options.rounds} rounds per store, seed {seed}", flush=True)
    ok = True
    for store in STORES if options.store == "all" else (options.store,):
        ok = run(store, options.rounds, seed, options.coordinators if store == "postgres" else 1) and ok
    return 0 if ok else 1


def run(store: str, rounds: int, seed: int, coordinators: int) -> bool:
    """All rounds on one kind of store; whether everything held."""
    folder = Path(tempfile.mkdtemp(prefix=f"tricord-chaos-{store}-"))
    try:
        if store == "sqlite":
            found, transactions = _play(store, folder, None, rounds, seed, coordinators)
        else:
            with PostgresServer.from_environment() as server:
                found, transactions = _play(store, folder, server, rounds, seed, coordinators)
    except (ProcessFailed, TimeoutError, PostgresUnavailable) as error:
        found, transactions = [f"it did not come to its end: {error}"], 0
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if found:
        for violation in found:
            print(f"chaos: {store}: VIOLATED: {violation}")
        print(f"chaos: {store}: failed with seed {seed}; logs and history.jsonl are kept in {folder}", flush=True)
        return False
    shutil.rmtree(folder)
    print(f"chaos: {store}: {rounds} rounds, {transactions} transactions, sums conserved, nothing left", flush=True)
    return True


def _play(
    store: str, folder: Path, server: PostgresServer | None, rounds: int, seed: int, coordinators: int
) -> tuple[list[str], int]:
    rng = random.Random(seed)
    opening = opening_accounts()
    with (
        fresh_databases(folder, server) as databases,
        Cast(folder, databases, coordinators=coordinators, program=program) as cast,
    ):
        load = Load(cast.endpoints, opening, seed)
        try:
            load.start()
            done = repeats = 0
            while done < rounds:
                if _round(f"{store}: round {done + 1}/{rounds}", cast, load, databases, rng):
                    done += 1
                else:
                    repeats += 1
                    if repeats > rounds + REPEATS_MAX:
                        raise TimeoutError(f"{repeats} kills met no transaction in flight")
            load.stop()
        finally:
            load.close()
        late = []
        try:
            cast.settle()
        except TimeoutError as error:
            late.append(str(error))
        exits = {process.name: process.stop() for process in reversed(cast.everybody)}
        late += [f"{name} ended with code {code} when it was asked to" for name, code in exits.items() if code != 0]
        return late + violations(folder, databases, opening, load), len(databases.transactions())


def _round(name: str, cast: Cast, load: Load, databases: Databases, rng: random.Random) -> bool:
    """Kill somebody and bring it back; whether the kill met transactions in flight."""
    load.wait_for_answers(ANSWERS_BETWEEN)
    time.sleep(rng.uniform(0, DELAY_S_MAX))
    victim = rng.choice(cast.everybody)
    pid = victim.pid
    if pid is None:
        raise ProcessFailed(f"{victim.name} ended by itself:\n{victim.tail()}")
    killed_ms = time.time_ns() // 1_000_000
    victim.kill()
    unanswered = load.unanswered()
    met = sum(stored.created_ms <= killed_ms for stored in databases.transactions(unfinished=True))
    time.sleep(rng.uniform(0, DOWN_S_MAX))
    victim.start()
    counts = "" if met else " (does not count)"
    print(
        f"chaos: {name}: killed {victim.name} ({pid}): {met} transactions in flight, {unanswered} unanswered{counts}; "
        f"{len(load.told)} answered so far",
        flush=True,
    )
    return met > 0


if __name__ == "__main__":
    sys.exit(main())
