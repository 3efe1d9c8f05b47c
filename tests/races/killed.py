"""Races of real processes, some of which kill themselves by SIGKILL at a place of a call, or while COMMIT is under way.

Each call runs in a process of its own; nothing orders their steps. It is slower than the races of threads and hits
less, but here nothing stands in for the death of a process: also SQLite's COMMIT is cut in the middle.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from typing import Final

from participant_sdk.call import Reply
from participant_sdk.fence import Phase
from tests.races import faults
from tests.races.actor import Actor
from tests.races.bank import Bank
from tests.races.faults import Fault, Traps
from tests.races.handlers import Provider
from tests.races.play import Played, Round
from tests.races.stories import MEETINGS, Before, BranchStory, Kind, Story
from tests.races.watch import watched

CHILD_SECONDS_MAX: Final = 60.0
COMMIT_SECONDS: Final = 0.001
"""About how long a COMMIT takes; the process dies at a random moment of it."""
ROUNDS_PER_KILL_MAX: Final = 10
RUNS_MAX: Final = 3
"""So often, at most, a child that died may have run its handler."""


class NamedRuns(Provider):
    """Numbers its runs so that also those of a process that died are known."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def next_run(self) -> str:
        """See Provider."""
        return f"{self._prefix}.{super().next_run()}"


@dataclass
class Told:
    """What a child says before it ends in order."""

    reply: Reply | None
    tried: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    handled: int = 0
    crashed: str = ""


@dataclass(frozen=True)
class Errand:
    """What a child does."""

    database: str
    level: str
    url: str
    name: str
    phase: Phase
    xid: str
    story: Story
    fault: Fault | None


def run_child(errand: Errand, pipe: Pipe) -> None:
    """The life of a child: get ready, wait for the start, make one call, tell."""
    with Bank(errand.database, errand.level, errand.url, tables=False, instances=1) as bank, watched():
        bank.provider = NamedRuns(errand.name)
        round_ = Round(bank, errand.story, xid=errand.xid)
        traps = Traps(() if errand.fault is None else (errand.fault,))
        actor = round_.actor(errand.name, 1, errand.phase, 0, traps, 1)
        actor.really_dies = die
        pipe.send("ready")
        pipe.recv()
        bank.run(actor)
        crashed = "" if actor.crashed is None else repr(actor.crashed)
        pipe.send(Told(actor.reply, actor.tried, actor.refused, actor.handled, crashed))


def die(place: str) -> None:
    """By SIGKILL: at once, or a little later if `place` is in COMMIT."""
    if place != faults.IN_COMMIT:
        os.kill(os.getpid(), signal.SIGKILL)
    delay = random.uniform(0, COMMIT_SECONDS)

    def later() -> None:
        ends_at = time.perf_counter() + delay
        while time.perf_counter() < ends_at:
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=later).start()


@dataclass
class Child:
    """One of the processes of a race, and our end of the pipe to it."""

    actor: Actor
    name: str
    process: BaseProcess
    pipe: Pipe


class KilledRound(Round):
    """A round whose racing calls are processes. The first of the fault's phase is the one that dies."""

    def _race(self) -> None:
        (branch,) = self._story.branches
        (fault,) = self._story.faults
        victim = [kind.phase for kind in branch.meeting].index(fault.phase)
        with ExitStack() as stack:
            children = [
                self._child(number, kind, fault if number == victim else None, stack)
                for number, kind in enumerate(branch.meeting)
            ]
            for child in children:
                assert child.pipe.recv() == "ready"
                child.actor.invoked = self._number()
            self._rng.shuffle(children)
            for child in children:
                child.pipe.send("go")
            for child in children:
                self._gather(child)

    def _child(self, number: int, kind: Kind, fault: Fault | None, stack: ExitStack) -> Child:
        actor = self.actor(f"{number}:{kind}", 1, kind.phase, number % 2, Traps(()), 1 + kind.repeated)
        actor.racing = True
        actor.struck = [] if fault is None else [fault]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        mine, its = context.Pipe()
        stack.callback(mine.close)
        bank, name = self._bank, f"child{number}"
        errand = Errand(bank.database, bank.level, bank.url, name, kind.phase, self.xid, self._story, fault)
        process: BaseProcess = context.Process(target=run_child, args=(errand, its))
        process.start()
        its.close()
        return Child(actor, name, process, mine)

    def _gather(self, child: Child) -> None:
        actor, process = child.actor, child.process
        try:
            told: Told | None = child.pipe.recv()
        except EOFError:
            told = None
        process.join(CHILD_SECONDS_MAX)
        if process.exitcode is None:
            self._wrong.append(f"{actor.name} has not ended")
            process.kill()
            process.join()
        code = process.exitcode
        process.close()
        if code == -signal.SIGKILL:
            actor.killed, actor.handled = True, 1
            actor.tried = [f"{child.name}.{run}" for run in range(1, RUNS_MAX + 1)]
            self._trace.append(f"  {actor.name:<22} died: {[fault.label for fault in actor.struck]}")
        elif told is None or code != 0 or told.crashed or told.reply is None:
            self._wrong.append(f"{actor.name} ended with exit code {code}: {told}")
        else:
            actor.struck = []
            actor.tried, actor.refused, actor.handled = told.tried, told.refused, told.handled
            actor.ended(told.reply)
            self._trace.append(f"  {actor.name:<22} {actor.aside[-1]}")


def killed_story(seed: int, number: int) -> Story:
    """Any meeting; each place has its turn."""
    rng = random.Random(seed)
    meeting = rng.choice(MEETINGS)
    place = faults.PLACES[number % len(faults.PLACES)]
    phase = rng.choice([kind.phase for kind in meeting])
    before = () if Phase.TRY in {kind.phase for kind in meeting if not kind.repeated} else (Before(Phase.TRY, None),)
    branch = BranchStory(before, meeting, (1,))
    return Story(seed, (branch,), (Fault(faults.KILLED, place, phase),), None, 0.5, 0.0)


def play_killed(bank: Bank, kills: int, seed: int) -> Iterator[Played]:
    """Rounds until so many processes have killed themselves; within `watched()`."""
    for number in range(ROUNDS_PER_KILL_MAX * kills):
        played = KilledRound(bank, killed_story(seed * 1_000_000 + number, number)).play()
        yield played
        kills -= len(played.struck)
        if kills <= 0:
            return
