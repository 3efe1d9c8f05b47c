"""The breaker in front of what may be down."""

from participant_sdk.idempotency.breaker import PAUSE_MAX_S, PAUSE_MIN_S, Breaker


class Clock:
    def __init__(self) -> None:
        self.seconds = 50.0

    def __call__(self) -> float:
        return self.seconds


def _fail(breaker: Breaker) -> bool:
    ticket = breaker.ticket()
    assert ticket is not None
    return breaker.failed(ticket)


def test_after_a_failure_nobody_asks_until_the_pause_is_over() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    assert _fail(breaker)
    assert breaker.ticket() is None
    clock.seconds += PAUSE_MIN_S
    assert breaker.ticket() is not None
    assert breaker.ticket() is None, "one at a time"


def test_a_success_closes_it() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    _fail(breaker)
    clock.seconds += PAUSE_MIN_S
    ticket = breaker.ticket()
    assert ticket is not None
    assert breaker.succeeded(ticket)
    assert not breaker.succeeded(ticket)
    assert breaker.ticket() is not None
    assert breaker.ticket() is not None


def test_the_pause_grows_up_to_its_limit() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    _fail(breaker)
    pauses = []
    for _ in range(12):
        began_at = clock.seconds
        while breaker.ticket() is None:
            clock.seconds += 0.05
        pauses.append(clock.seconds - began_at)
        breaker.failed(len(pauses))
    assert pauses[0] <= PAUSE_MIN_S + 0.1
    assert pauses[3] > 2 * pauses[0]
    assert PAUSE_MAX_S * 0.9 <= pauses[-1] <= PAUSE_MAX_S + 0.1


def test_of_many_that_fail_together_one_counts() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    tickets = [breaker.ticket() for _ in range(10)]
    news = [breaker.failed(ticket) for ticket in tickets if ticket is not None]
    assert news == [True] + [False] * 9
    clock.seconds += PAUSE_MIN_S
    assert breaker.ticket() is not None


def test_a_success_that_comes_late_says_nothing() -> None:
    breaker = Breaker(Clock())
    early = breaker.ticket()
    assert early is not None
    _fail(breaker)
    assert not breaker.succeeded(early)
    assert breaker.ticket() is None


def test_a_caller_that_never_tells_bars_nobody_for_ever() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    _fail(breaker)
    clock.seconds += PAUSE_MIN_S
    assert breaker.ticket() is not None
    clock.seconds += PAUSE_MIN_S
    assert breaker.ticket() is not None
