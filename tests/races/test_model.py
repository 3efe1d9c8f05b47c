"""The model and the scheduler by themselves: a judge that lets everything pass would find no violation either."""

import random
import threading

import pytest

from participant_sdk.call import Outcome
from participant_sdk.fence import Phase, Status
from tests.races import schedule
from tests.races.model import NEVER, Branch, Seen, order_of
from tests.races.schedule import Runner, Schedule

TRY, CONFIRM, CANCEL = Phase.TRY, Phase.CONFIRM, Phase.CANCEL
DONE, REFUSED, UNKNOWN, VIOLATION = Outcome.DONE, Outcome.REFUSED, Outcome.UNKNOWN, Outcome.VIOLATION
SUSPENDED = ("suspended", "")
AFTER_CONFIRM = "violation: Cancel of a branch that was confirmed"


def seen(phase: Phase, invoked: float, answered: float, outcome: Outcome | None, **more: object) -> Seen:
    if phase is TRY and outcome is DONE:
        more = {"run": "1", "tried": ("1",), **more}
    values = {"handled": 1, **more}
    return Seen(f"{phase.name} {invoked}", phase, invoked, answered, outcome, **values)  # type: ignore[arg-type]


TRIED = seen(TRY, 1, 2, DONE)
CONFIRMED = Branch(Status.COMMITTED, effects=("try 1", "confirm 1"))
CANCELLED = Branch(Status.ROLLBACKED, effects=("try 1", "cancel 1"))

RIGHT = {
    "confirmed": ([TRIED, seen(CONFIRM, 3, 4, DONE)], CONFIRMED),
    "a repeat gets the same result": ([TRIED, seen(TRY, 3, 4, DONE, tried=()), seen(CONFIRM, 5, 6, DONE)], CONFIRMED),
    "suspended": ([seen(CANCEL, 1, 2, DONE), seen(TRY, 3, 4, REFUSED, refusal=SUSPENDED)], Branch(Status.SUSPENDED)),
    "together, Cancel first": (
        [seen(TRY, 1, 4, REFUSED, refusal=SUSPENDED), seen(CANCEL, 2, 3, DONE)],
        Branch(Status.SUSPENDED),
    ),
    "a dead Confirm that happened late": (
        [TRIED, seen(CONFIRM, 3, NEVER, None), seen(CANCEL, 4, 9, VIOLATION, error=AFTER_CONFIRM)],
        CONFIRMED,
    ),
    "a dead Confirm that never happened": ([TRIED, seen(CONFIRM, 3, NEVER, None), seen(CANCEL, 4, 5, DONE)], CANCELLED),
    "refused": (
        [seen(TRY, 1, 2, REFUSED, refused=("1",), refusal=("no", "1")), seen(CANCEL, 3, 4, DONE)],
        Branch(Status.ROLLBACKED),
    ),
    "unknown, and nothing happened": ([seen(TRY, 1, 2, UNKNOWN), seen(CANCEL, 3, 4, DONE)], Branch(Status.SUSPENDED)),
}

TRIED_ONCE = Branch(Status.TRIED, effects=("try 1",))
WRONG = {
    "an effect twice": (
        [TRIED, seen(CONFIRM, 3, 4, DONE)],
        Branch(Status.COMMITTED, effects=("try 1", "try 1", "confirm 1")),
    ),
    "an effect is missing": ([TRIED, seen(CONFIRM, 3, 4, DONE)], Branch(Status.COMMITTED, effects=("try 1",))),
    "both": ([TRIED, seen(CONFIRM, 3, 5, DONE), seen(CANCEL, 4, 6, DONE)], CONFIRMED),
    "a Try after its Cancel": ([seen(CANCEL, 1, 2, DONE), seen(TRY, 3, 4, DONE)], TRIED_ONCE),
    "an order that time forbids": (
        [seen(TRY, 1, 2, REFUSED, refusal=SUSPENDED), seen(CANCEL, 3, 4, DONE)],
        Branch(Status.SUSPENDED),
    ),
    "another result": ([TRIED, seen(TRY, 3, 4, DONE, run="2", tried=("2",))], TRIED_ONCE),
    "an empty Confirm": ([seen(CONFIRM, 1, 2, DONE)], Branch()),
    "the wrong words": ([TRIED, seen(CONFIRM, 3, 4, VIOLATION, error="never tried here")], TRIED_ONCE),
    "unknown, and yet it happened": ([seen(TRY, 1, 2, UNKNOWN, tried=("1",))], TRIED_ONCE),
    "without a handler": ([TRIED, seen(CONFIRM, 3, 4, DONE, handled=0)], CONFIRMED),
    "a refusal that is not the stored one": (
        [seen(TRY, 1, 2, REFUSED, refused=("1",), refusal=("no", "1")), seen(TRY, 3, 4, REFUSED, refusal=("no", "2"))],
        Branch(Status.ROLLBACKED),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_can_have_happened_has_an_order(name: str) -> None:
    history, end = RIGHT[name]
    assert order_of(history, end) is not None


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_have_happened_has_none(name: str) -> None:
    history, end = WRONG[name]
    assert order_of(history, end) is None


def external(phase: Phase, invoked: float, answered: float, outcome: Outcome | None, **more: object) -> Seen:
    return seen(phase, invoked, answered, outcome, external=True, **more)


LAPSED = Seen("time", None, 5, 6, DONE)
STILL_RUNS = "unknown: the external Try of this branch may still be running"
OVERTAKEN = external(TRY, 1, 10, UNKNOWN, tried=("1",), error="Cancel came first; Cancel's handler has run again")
CANCELLED_TWICE = Branch(Status.ROLLBACKED, effects=("cancel None", "cancel None"))


@pytest.mark.parametrize(
    ("history", "end", "possible"),
    [
        ([external(TRY, 1, 2, DONE), external(CANCEL, 3, 4, DONE)], CANCELLED, True),
        (
            [external(TRY, 1, NEVER, None), external(CANCEL, 3, 4, UNKNOWN, error=STILL_RUNS)],
            Branch(Status.TRIED),
            True,
        ),
        ([external(TRY, 1, NEVER, None), external(CANCEL, 3, 4, UNKNOWN, error=STILL_RUNS)], Branch(), False),
        ([external(TRY, 1, 2, DONE), external(CANCEL, 3, 4, UNKNOWN, error=STILL_RUNS)], CANCELLED, False),
        (
            [external(TRY, 1, NEVER, None), LAPSED, external(CANCEL, 7, 8, DONE)],
            Branch(Status.ROLLBACKED, effects=("cancel None",)),
            True,
        ),
        ([OVERTAKEN, LAPSED, external(CANCEL, 7, 8, DONE)], CANCELLED_TWICE, True),
        ([OVERTAKEN, external(CANCEL, 3, 4, DONE), LAPSED], CANCELLED_TWICE, False),
        ([external(TRY, 1, NEVER, None), external(CONFIRM, 3, 4, DONE)], Branch(Status.COMMITTED), False),
    ],
)
def test_an_external_try_happens_at_two_moments(history: list[Seen], end: Branch, possible: bool) -> None:
    assert (order_of(history, end) is not None) is possible


def test_the_schedule_lets_one_go_on_at_a_time_and_can_be_had_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "TICK_SECONDS", 10.0)  # nobody waits for a lock here, however slow he is

    def play(seed: int, forced: list[int]) -> tuple[list[int], list[int], int]:
        gates = [threading.Semaphore(0) for _ in range(3)]
        runners = [Runner(str(number), gate.release) for number, gate in enumerate(gates)]
        turns = Schedule(runners, runners, random.Random(seed), 1.0, forced)
        order: list[int] = []
        inside, most = 0, 0

        def run(number: int) -> None:
            nonlocal inside, most
            for _ in range(4):
                if not turns.arrive(runners[number], "point"):
                    gates[number].acquire()
                inside += 1
                most = max(most, inside)
                order.append(number)
                inside -= 1
            turns.end(runners[number])

        threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        assert turns.watch(20)
        for thread in threads:
            thread.join()
        return order, turns.choices, most

    order, choices, most = play(1, [])
    assert (sorted(order), most) == ([0] * 4 + [1] * 4 + [2] * 4, 1)
    assert play(2, choices)[:2] == (order, choices)
    assert len({tuple(play(seed, [])[0]) for seed in range(20)}) > 10


def test_who_does_not_come_back_is_taken_to_wait() -> None:
    gates = [threading.Semaphore(0) for _ in range(2)]
    runners = [Runner("waits", gates[0].release), Runner("other", gates[1].release)]
    schedule = Schedule(runners, runners, random.Random(1), 0.0)
    lock = threading.Semaphore(0)

    def waits() -> None:
        if not schedule.arrive(runners[0], "takes the lock"):
            gates[0].acquire()
        lock.acquire()
        schedule.end(runners[0])

    def other() -> None:
        if not schedule.arrive(runners[1], "gives it back"):
            gates[1].acquire()
        lock.release()
        schedule.end(runners[1])

    threads = [threading.Thread(target=waits), threading.Thread(target=other)]
    for thread in threads:
        thread.start()
    assert schedule.watch(20)
    for thread in threads:
        thread.join()
    assert schedule.choices == [0, 1]
    assert ("waits", "… waits") in schedule.trace
