"""The circuit breaker by itself, on a clock that the test sets."""

import pytest

from coordinator.delivery_breaker import (
    CROWD_MS,
    FAILURES_MAX,
    OPEN_MS_MAX,
    OPEN_MS_MIN,
    RETURNS_PER_S,
    SILENT_MAX,
    SILENT_MS_MIN,
    Breaker,
    BreakerState,
)
from coordinator.model import Phase


class Clocked:
    """A breaker and its clock, in milliseconds."""

    def __init__(self, pause_ms_max: int = OPEN_MS_MAX) -> None:
        self.now_ms = 1_000_000.0
        self.breaker = Breaker("127.0.0.1:9", pause_ms_max, lambda: self.now_ms / 1000)

    def state(self) -> BreakerState:
        return self.breaker.state

    def fail(self, times: int = FAILURES_MAX) -> None:
        for _ in range(times):
            self.breaker.failed("nobody there")

    def probe(self) -> float:
        """Wait until a probe may go, and send it; how many ms that took."""
        started_ms = self.now_ms
        while not self.breaker.admits_probe():
            self.now_ms += 1
        self.breaker.begin_probe(7)
        return self.now_ms - started_ms


@pytest.fixture
def clocked() -> Clocked:
    return Clocked()


def test_it_opens_after_failures_in_a_row(clocked: Clocked) -> None:
    clocked.fail(FAILURES_MAX - 1)
    assert clocked.breaker.closed
    clocked.breaker.answered()
    clocked.fail(FAILURES_MAX - 1)
    assert clocked.state() is BreakerState.CLOSED
    clocked.fail(1)
    assert clocked.state() is BreakerState.OPEN
    assert clocked.breaker.last_error == "nobody there"
    assert not clocked.breaker.admits_probe()


def test_it_opens_after_silence(clocked: Clocked) -> None:
    opened = [clocked.breaker.timed_out(SILENT_MS_MIN, "no answer") for _ in range(SILENT_MAX + 3)]
    assert opened == [False] * (SILENT_MAX - 1) + [True] + [False] * 3


def test_an_answer_ends_the_silence(clocked: Clocked) -> None:
    for _ in range(SILENT_MAX - 1):
        clocked.breaker.timed_out(5_000, "no answer")
    clocked.breaker.answered()
    assert clocked.breaker.spotless
    assert not clocked.breaker.timed_out(5_000, "no answer")


def test_calls_without_time_tell_nothing(clocked: Clocked) -> None:
    for _ in range(2 * SILENT_MAX):
        assert not clocked.breaker.timed_out(SILENT_MS_MIN - 1, "no answer")
    assert clocked.breaker.spotless


def test_one_probe_at_a_time(clocked: Clocked) -> None:
    clocked.fail()
    assert 0.75 * OPEN_MS_MIN - 1 <= clocked.probe() <= 1.25 * OPEN_MS_MIN + 1
    assert clocked.state() is BreakerState.HALF_OPEN
    clocked.now_ms += 100_000
    assert not clocked.breaker.admits_probe()
    clocked.breaker.answered()
    assert clocked.state() is BreakerState.CLOSED
    clocked.fail()
    assert clocked.probe() <= 1.25 * OPEN_MS_MIN + 1, "it begins anew"


def test_the_open_period_doubles_up_to_its_cap(clocked: Clocked) -> None:
    clocked.fail()
    periods = []
    for _ in range(8):
        periods.append(clocked.probe())
        clocked.breaker.probe_failed()
        assert clocked.state() is BreakerState.OPEN
    wanted = [min(OPEN_MS_MIN * 2**n, OPEN_MS_MAX) for n in range(8)]
    assert wanted[-1] == OPEN_MS_MAX
    for period, want in zip(periods, wanted, strict=True):
        assert 0.75 * want - 1 <= period <= 1.25 * want + 1


def test_a_shorter_cap_holds_for_everything() -> None:
    clocked = Clocked(200)
    clocked.fail()
    for _ in range(5):
        assert clocked.probe() <= 251
        clocked.breaker.probe_failed()
    clocked.now_ms += 100_000
    assert max(clocked.breaker.retry_ms(Phase.CONFIRM) for _ in range(100)) <= 200


def test_failures_beside_the_probe_decide_nothing(clocked: Clocked) -> None:
    """Calls that were out when it opened come to their ends while it is open, or half open."""
    clocked.fail()
    clocked.probe()
    clocked.fail()
    clocked.breaker.timed_out(5_000, "no answer")
    assert clocked.state() is BreakerState.HALF_OPEN


def test_a_try_comes_again_just_after_the_probe(clocked: Clocked) -> None:
    clocked.fail()
    left_ms = (clocked.breaker.probe_at_s * 1000) - clocked.now_ms
    for _ in range(100):
        assert left_ms <= clocked.breaker.retry_ms(Phase.TRY) <= left_ms + 100 + 0.25 * (left_ms + 100) + 1


def test_while_a_probe_is_out_calls_do_not_ask_again_and_again(clocked: Clocked) -> None:
    """A hung participant's probe takes its whole time-out."""
    clocked.fail()
    clocked.probe()
    asked = 0
    end_ms = clocked.now_ms + 5_000
    while clocked.now_ms < end_ms:
        clocked.now_ms += clocked.breaker.retry_ms(Phase.TRY)
        asked += 1
    assert asked < 10


def test_the_more_are_owed_the_longer_each_waits(clocked: Clocked) -> None:
    clocked.fail()
    waits = [clocked.breaker.retry_ms(Phase.CONFIRM) for _ in range(5 * RETURNS_PER_S)]
    assert max(waits) > 4_000
    assert sum(wait <= 1_000 for wait in waits) < 3 * RETURNS_PER_S
    assert clocked.breaker.longest_ms(OPEN_MS_MAX) == pytest.approx(5_000)
    clocked.now_ms += 3_000
    clocked.breaker.book(RETURNS_PER_S)
    assert clocked.breaker.longest_ms(OPEN_MS_MAX) == pytest.approx(3_500)  # for so long it has been open, and longer
    clocked.breaker.book(60 * RETURNS_PER_S)
    assert clocked.breaker.longest_ms(OPEN_MS_MAX) == OPEN_MS_MAX


def test_when_somebody_says_that_it_is_back_calls_go_until_one_fails(clocked: Clocked) -> None:
    clocked.breaker.trust()
    assert clocked.breaker.spotless
    for how in (lambda: clocked.fail(1), lambda: clocked.breaker.timed_out(SILENT_MS_MIN, "no answer")):
        clocked.fail()
        clocked.breaker.book(60 * RETURNS_PER_S)
        clocked.breaker.trust()
        assert clocked.state() is BreakerState.CLOSED
        how()
        assert clocked.state() is BreakerState.OPEN
        assert not clocked.breaker.crowded()
        clocked.breaker.answered()
    clocked.fail()
    clocked.breaker.trust()
    clocked.breaker.answered()
    clocked.fail(FAILURES_MAX - 1)
    assert clocked.state() is BreakerState.CLOSED


def test_a_crowd_is_not_looked_at_while_it_is_open_but_for_a_probe(clocked: Clocked) -> None:
    few = int(RETURNS_PER_S * CROWD_MS / 1000)
    clocked.breaker.book(few + 1)
    assert not clocked.breaker.crowded()
    clocked.fail()
    assert clocked.breaker.crowded()
    clocked.now_ms += 10
    assert not clocked.breaker.crowded()
    clocked.breaker.book(10 * few)
    assert clocked.breaker.crowded()
    while not clocked.breaker.admits_probe():
        clocked.now_ms += 1
    assert not clocked.breaker.crowded()
    clocked.probe()
    assert clocked.breaker.crowded()
    clocked.breaker.answered()
    assert not clocked.breaker.crowded()


@pytest.mark.parametrize("phase", [Phase.CONFIRM, Phase.CANCEL])
def test_confirm_and_cancel_wait_the_longer_the_longer_it_is_open(clocked: Clocked, phase: Phase) -> None:
    clocked.fail()
    asked = 0
    end_ms = clocked.now_ms + 3_600_000
    while clocked.now_ms < end_ms:
        if clocked.breaker.admits_probe():
            clocked.breaker.begin_probe(7)
            clocked.breaker.probe_failed()
        wait_ms = clocked.breaker.retry_ms(phase)
        assert 0 <= wait_ms <= OPEN_MS_MAX
        clocked.now_ms += wait_ms + 1
        asked += 1
    assert asked < 3_600_000 / 5_000, "of an hour's outage, less than one call in five seconds"
