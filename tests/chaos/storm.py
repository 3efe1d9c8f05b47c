"""Three coordinators and four participants under load, while every 3 s one of them, or PostgreSQL, meets its end.

    python -m tests.chaos.storm --transactions 20000 --in-flight 200 --seconds 240

Three parts, one after another, in one town (``town``):

storm     faults of eleven kinds (``faults``) under load; when they stop, everything must end within 30 s
rolling   one coordinator after another is restarted by SIGTERM under load, as an upgrade does it
calm      no faults: each thing is asked of a participant exactly once, however many coordinators there are

At the end the history of the run (``history.jsonl``) is judged by the invariants, as by ``tricord check``: sums are
conserved, nothing is left reserved, every fence agrees with its coordinator's decision, and what clients were told,
then and when they ask again, is what is stored.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from examples.transfer.processes import ProcessFailed
from participant_sdk.fence import Phase
from tests.chaos.crowd import Crowd
from tests.chaos.faults import Faults
from tests.chaos.town import PARTICIPANTS, Town, fresh_tables, opening_accounts, opening_stock
from tests.chaos.verdict import shown, stock_balances, violations
from tests.postgres import PostgresServer, PostgresUnavailable

END_S = 30.0
"""Everything must have ended so long after the last fault."""
CALM_IN_FLIGHT = 30
CALM_S = 10.0
CALM_ATTEMPTS = 2
"""A machine that pauses for longer than a call's time-out makes repeats too; coordinators that send twice always do."""
ROLLING_PAUSE_S = 2.0
ASKED_AGAIN = 200
TELL_S = 15.0


class Options(NamedTuple):
    """What a run is asked for."""

    transactions: int
    in_flight: int
    seconds: float
    seed: int


def main() -> int:
    """Run it; 1 if anything did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.storm", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--transactions", type=int, default=20_000, help="the storm ends when so many were begun …")
    parser.add_argument("--seconds", type=float, default=240.0, help="… or after this time")
    parser.add_argument("--in-flight", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="repeat a run's draws")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    folder = Path(tempfile.mkdtemp(prefix="tricord-storm-"))
    try:
        with PostgresServer() as server:
            found = Storm(Options(options.transactions, options.in_flight, options.seconds, seed)).play(folder, server)
    except (ProcessFailed, TimeoutError, PostgresUnavailable) as error:
        found = [f"it did not come to its end: {error}"]
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if found:
        for violation in found:
            print(f"storm: VIOLATED: {violation}")
        print(f"storm: failed with seed {seed}; logs and history.jsonl are kept in {folder}", flush=True)
        return 1
    shutil.rmtree(folder)
    print("storm: sums conserved, nothing left, everybody was told what is stored", flush=True)
    return 0


def _tracebacks(folder: Path) -> list[str]:
    """No fault of others makes a coordinator come upon an error that nobody has thought of."""
    logs = {path.name: path.read_text(errors="replace") for path in sorted(folder.glob("coordinator-*.log"))}
    return [f"{name} holds {text.count('Traceback')} tracebacks" for name, text in logs.items() if "Traceback" in text]


class Storm:
    """One run."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._begun_s = time.monotonic()
        self._left = False
        """Whether something did not come to its end."""

    def play(self, folder: Path, server: PostgresServer) -> list[str]:
        """All parts; what did not hold."""
        options = self._options
        self._say(f"{options.transactions} transactions or {options.seconds:.0f} s, seed {options.seed}")
        with fresh_tables(folder, server) as tables, Town(folder, tables) as town:
            crowd = Crowd(town.endpoints, options.seed)
            try:
                found = self._storm(town, server, crowd)
                if not self._left:
                    found += self._rolling(town, crowd)
                    found += self._calm(town, crowd)
                    found += self._asked_again(crowd)
            finally:
                crowd.close()
            exits = {process.name: process.stop() for process in reversed(town.everybody)}
            found += [f"{name} ended with code {code} when it was asked to" for name, code in exits.items() if code]
            found += _tracebacks(folder)
            stock = [*stock_balances("before", opening_stock()), *stock_balances("after", tables.stock())]
            found += violations(folder, tables, opening_accounts(), crowd, PARTICIPANTS, stock)
            self._say(f"{len(crowd.told)} transactions in all; {_shares(crowd)}")
        return found

    def _storm(self, town: Town, server: PostgresServer, crowd: Crowd) -> list[str]:
        options = self._options
        faults = Faults(town, server, random.Random(options.seed), self._say)
        running = crowd.run("storm", options.in_flight)
        start_s = time.monotonic()
        tell_s = start_s + TELL_S
        try:
            faults.start()
            while (now_s := time.monotonic()) < start_s + options.seconds and not running.done():
                if len(crowd.told) >= options.transactions and not _missing(faults):
                    break
                if now_s > tell_s:
                    tell_s += TELL_S
                    self._say(f"{len(crowd.told)} answered, {len(crowd.started) - len(crowd.told)} in flight")
                time.sleep(0.1)
        finally:
            faults.stop()
        stopped_s = time.monotonic()
        in_flight = len(crowd.started) - len(crowd.told)
        left = self._end("storm", running, town, crowd)
        ended_s = time.monotonic() - stopped_s
        faults.check_alive()
        rate = len(crowd.told) / (stopped_s - start_s)
        self._say(f"storm over: {len(crowd.told)} transactions, {rate:.0f}/s; {in_flight} were in flight when the")
        self._say(f"faults stopped after {stopped_s - start_s:.0f} s, and all had ended {ended_s:.1f} s later")
        for kind in faults.kinds:
            self._say(f"    {faults.counts[kind]:4} {kind}")
        self._say(_repeats("storm", town, crowd)[0])
        found = [f"no fault of this kind: {kind}" for kind in _missing(faults)] + faults.found + left
        if ended_s > END_S:
            found.append(f"it took {ended_s:.1f} s until all had ended, and must take {END_S:.0f} s at the most")
        return found

    def _rolling(self, town: Town, crowd: Crowd) -> list[str]:
        """Restart one coordinator after another, as for a new version, under load."""
        running = crowd.run("rolling", CALM_IN_FLIGHT)
        found = []
        for process in town.coordinators:
            time.sleep(ROLLING_PAUSE_S)
            code = process.stop()
            if code != 0:
                found.append(f"rolling restart: {process.name} ended with code {code}:\n{process.tail()}")
            process.start()
        time.sleep(ROLLING_PAUSE_S)
        found += self._end("rolling", running, town, crowd)
        self._say(f"rolling restart: {_repeats('rolling', town, crowd)[0]}")
        return found

    def _calm(self, town: Town, crowd: Crowd) -> list[str]:
        """No faults: nothing may be asked twice."""
        left: list[str] = []
        repeated: list[str] = []
        for attempt in range(1, CALM_ATTEMPTS + 1):
            running = crowd.run(f"calm{attempt}", CALM_IN_FLIGHT)
            time.sleep(CALM_S)
            left += self._end("calm", running, town, crowd)
            text, repeated = _repeats(f"calm{attempt}", town, crowd)
            self._say(f"calm: {text}")
            if not repeated:
                break
        return left + shown("called again without any fault", repeated)

    def _end(self, part: str, running: Future[None], town: Town, crowd: Crowd) -> list[str]:
        """Start no more, and wait until all is answered and finished; what was not after twice the time it may take."""
        crowd.stop()
        left = []
        try:
            running.result(END_S * 2)
        except TimeoutError:
            left.append(f"{part}: {len(crowd.started) - len(crowd.told)} requests are not answered")
        try:
            town.settle(END_S)
        except TimeoutError as error:
            left.append(f"{part}: {error}")
        self._left = self._left or bool(left)
        return left

    def _asked_again(self, crowd: Crowd) -> list[str]:
        """The same request under the same key, at another coordinator than the first time: the history tells both."""
        keys = random.Random(self._options.seed).sample(sorted(crowd.told), min(ASKED_AGAIN, len(crowd.told)))
        again = crowd.ask_again(keys)
        return shown("not told again", [f"{key}: {told.error}" for key, told in again.items() if told.state is None])

    def _say(self, text: str) -> None:
        print(f"storm: {time.monotonic() - self._begun_s:5.1f} s: {text}", flush=True)


def _missing(faults: Faults) -> list[str]:
    return [kind for kind in faults.kinds if not faults.counts[kind]]


def _repeats(part: str, town: Town, crowd: Crowd) -> tuple[str, list[str]]:
    """How often participants were asked for the same thing again, in one part of the run."""
    xids = _xids(crowd, part)
    calls = {called: count for called, count in town.calls().items() if called.xid in xids}
    again = sum(calls.values()) - len(calls)
    by_phase = ", ".join(
        f"{phase.name} {sum(count - 1 for called, count in calls.items() if called.phase == f'PHASE_{phase.name}')}"
        for phase in Phase
    )
    share = again / sum(calls.values()) if calls else 0.0
    text = f"{len(xids)} transactions, {sum(calls.values())} calls, {again} of them repeats ({share:.2%}: {by_phase})"
    return text, [f"{called}: {count} times" for called, count in calls.items() if count > 1]


def _xids(crowd: Crowd, part: str) -> set[str]:
    return {told.xid for key, told in crowd.told.items() if key.startswith(f"{part}-") and told.xid}


def _shares(crowd: Crowd) -> str:
    states = [told.state.name if told.state is not None else "without an outcome" for told in crowd.told.values()]
    return ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))


if __name__ == "__main__":
    sys.exit(main())
