"""One round: what came before, the race, and the end that a coordinator would bring about. Then the verdict."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from participant_sdk.call import Outcome, fingerprint
from participant_sdk.fence import Phase
from participant_sdk.payload import encode
from tests.contract.participant.world import new_xid
from tests.races.actor import Actor, Clock, TimedCall
from tests.races.bank import Bank
from tests.races.faults import Traps
from tests.races.handlers import AUTHORISE, MOVE, Move
from tests.races.model import PHASES, Seen
from tests.races.schedule import Runner, Schedule
from tests.races.stories import Before, Story
from tests.races.verdict import sight_violations, violations

SECONDS: Final = 30.0
"""A call's time; it passes only where a fault says so."""
RACE_SECONDS_MAX: Final = 60.0
AMOUNT: Final = 7


@dataclass(frozen=True)
class Played:
    """What came of a round."""

    story: Story
    wrong: list[str]
    calls: list[Actor]
    trace: list[str]
    choices: list[int]

    @property
    def struck(self) -> list[str]:
        """The faults that have struck somebody in the race."""
        racing = [actor for actor in self.calls if actor.racing]
        return [f"{actor.call.phase.name.capitalize()} {fault.label}" for actor in racing for fault in actor.struck]

    @property
    def came_up(self) -> bool:
        """Whether what the round was made for has happened."""
        cell = self.story.cell
        if cell is None or cell.phase is None:
            return True
        return f"{cell.phase.name.capitalize()} {cell.label}" in self.struck


class Round:
    """A story as it is played on a bank. `forced`: the choices of a replay."""

    def __init__(self, bank: Bank, story: Story, forced: Sequence[int] = (), xid: str = "") -> None:
        self._bank = bank
        self._story = story
        self._forced = forced
        self._rng = random.Random(story.seed + 1)
        self._numbers = itertools.count(1)
        self.xid = xid or new_xid()
        self._calls: list[Actor] = []
        self._choices: list[int] = []
        self._trace: list[str] = []
        self._wrong: list[str] = []
        self._times: list[Seen] = []
        self._raced = False

    def play(self) -> Played:
        """The whole round."""
        self._opening = self._bank.look(self.xid)
        for branch_id, branch in enumerate(self._story.branches, 1):
            for before in branch.before:
                self._send_before(branch_id, before)
        self._race()
        for branch_id, branch in enumerate(self._story.branches, 1):
            if branch.external and self._rng.random() < 0.3:  # that nobody should send
                self._raced = self._rng.random() < 0.5
                self._alone(branch_id, Phase.CONFIRM, "too early: ")
        self._raced = True
        for actor in [actor for actor in self._calls if actor.racing]:
            if actor.reply is None or actor.reply.outcome is Outcome.UNKNOWN:
                self._alone(actor.call.branch_id, actor.call.phase, "repeated ")
        for branch_id in range(1, len(self._story.branches) + 1):
            self._finish(branch_id)
        end = self._bank.look(self.xid)
        provider = self._bank.provider
        self._wrong += violations(self._story, self._calls, self._times, provider, self._opening, end, AMOUNT)
        return Played(self._story, self._wrong, self._calls, self._trace, self._choices)

    def actor(self, name: str, branch_id: int, phase: Phase, instance: int, traps: Traps, attempt: int) -> Actor:
        """A call, ready to be run."""
        branch = self._story.branches[branch_id - 1]
        payload = encode(Move(list(branch.accounts), AMOUNT, branch.writes))
        action = AUTHORISE if branch.external else MOVE
        call = TimedCall(
            phase=phase,
            xid=self.xid,
            branch_id=branch_id,
            participant="bank",
            action=action,
            payload=payload,
            attempt=attempt,
            expires_at=time.monotonic() + SECONDS,
            fingerprint=fingerprint(action, payload),
            clock=Clock(SECONDS),
        )
        actor = Actor(f"{name}#{branch_id}@{'AB'[instance]}", instance, call, traps, self._number)
        self._calls.append(actor)
        return actor

    def _number(self) -> int:
        return next(self._numbers)

    # --- calls that meet nobody ---

    def _alone(self, branch_id: int, phase: Phase, why: str, traps: Traps | None = None) -> None:
        """A call that meets nobody; after the race, when every lease has run out."""
        if self._raced:
            self._let_time_pass()
        instance = self._rng.randrange(self._bank.instances)
        name, attempt = f"{why}{phase.name.capitalize()}", 9 if self._raced else 1
        actor = self.actor(name, branch_id, phase, instance, traps or Traps(()), attempt)
        actor.together = [actor]
        self._bank.run(actor)
        self._trace += [f"{actor.name:<24} {text}" for text in actor.aside]

    def _send_before(self, branch_id: int, before: Before) -> None:
        self._alone(branch_id, before.phase, "before: ", Traps(() if before.fault is None else (before.fault,)))

    def _finish(self, branch_id: int) -> None:
        """As its coordinator: what is decided, else Confirm if it may be, else Cancel. Then anything once more."""
        calls = [actor for actor in self._calls if actor.call.branch_id == branch_id]
        done = {actor.call.phase for actor in calls if actor.reply and actor.reply.outcome is Outcome.DONE}
        decided = [phase for phase in (Phase.CONFIRM, Phase.CANCEL) if phase in done]
        if not decided:
            decided = [Phase.CONFIRM if Phase.TRY in done and self._rng.random() < 0.5 else Phase.CANCEL]
        self._alone(branch_id, decided[0], "finally: ")
        self._alone(branch_id, self._rng.choice(PHASES), "once more: ")

    # --- the race ---

    def _race(self) -> None:
        traps = Traps(self._story.faults)
        racing: list[Actor] = []
        for branch_id, branch in enumerate(self._story.branches, 1):
            for kind in branch.meeting:
                instance = int(self._rng.random() < self._story.apart)
                name = f"{len(racing)}:{kind}"
                racing.append(self.actor(name, branch_id, kind.phase, instance, traps, 1 + kind.repeated))
        beside: list[Beside] = []
        if self._story.time_passes:
            beside.append(Beside("time", "passes", self._let_time_pass))
        if self._story.looks:
            beside.append(Beside("auditor", "looks", self._look, self._story.looks))
        runners = [*(actor.runner for actor in racing), *(each.runner for each in beside)]
        schedule = Schedule(runners, self._priority(racing, runners), self._rng, self._story.switch, self._forced)
        for actor in racing:
            actor.schedule, actor.together, actor.racing = schedule, racing, True
        ends = [self._bank.start(actor) for actor in racing]
        ends += [self._bank.start_beside(each.run_in(schedule)) for each in beside]
        if not schedule.watch(RACE_SECONDS_MAX):
            raise TimeoutError(f"the race of {self._story} has not ended: {schedule.trace}")
        for end in ends:
            end.result(RACE_SECONDS_MAX)
        self._trace += [f"  {name:<22} {text}" for name, text in schedule.trace]
        self._choices = schedule.choices

    def _priority(self, racing: Sequence[Actor], runners: Sequence[Runner]) -> list[Runner]:
        shuffled = self._rng.sample(runners, len(runners))
        if not self._story.orderly:
            return shuffled
        cell = self._story.cell
        rank = {actor.runner: 0 if actor.call.phase is Phase.TRY else 2 for actor in racing}
        rank |= {actor.runner: 1 for actor in racing if cell is not None and actor.call.phase is cell.phase}
        return sorted(shuffled, key=lambda runner: rank.get(runner, 2))

    def _let_time_pass(self) -> None:
        if any(branch.external for branch in self._story.branches):
            began = self._number()
            self._bank.let_leases_lapse(self.xid)
            self._times.append(Seen("time passes", None, began, self._number(), Outcome.DONE))

    def _look(self) -> None:
        self._wrong += sight_violations(self._story, self._opening, self._bank.look_beside(self.xid))


class Beside:
    """Something that takes its turns in a race like a call."""

    def __init__(self, name: str, does: str, function: Callable[[], None], times: int = 1) -> None:
        self._does = does
        self._function = function
        self._times = times
        self._gate = threading.Semaphore(0)
        self.runner = Runner(name, self._gate.release)

    def run_in(self, schedule: Schedule) -> Callable[[], None]:
        """What a thread of its own has to do."""

        def run() -> None:
            try:
                for _ in range(self._times):
                    if not schedule.arrive(self.runner, self._does):
                        self._gate.acquire()
                    self._function()
            finally:
                schedule.end(self.runner)

        return run
