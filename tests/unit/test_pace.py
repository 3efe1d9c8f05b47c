"""How often, and for how long at a time, a coordinator is asked."""

import grpc
import pytest

from participant_sdk.client_asking import ATTEMPT_SECONDS, ATTEMPT_SECONDS_MAX, ATTEMPT_SECONDS_MIN, Pace, pause_seconds
from participant_sdk.coordinator_messages import Failure
from tricord.v1 import coordinator_pb2

REQUEST = coordinator_pb2.GetRequest()
SILENT = Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "nothing was heard")
BUSY = Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "ask again", "OVERLOADED", retry_after=7.0)
AWAY = Failure(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")


def test_an_attempt_that_nobody_answers_doubles_the_next() -> None:
    pace = Pace(1_000)
    seen = []
    for _ in range(5):
        seen.append(pace.ask(REQUEST).seconds)
        assert pace.failed(SILENT) is not None
    assert seen == [ATTEMPT_SECONDS, 2 * ATTEMPT_SECONDS, *[ATTEMPT_SECONDS_MAX] * 3]


def test_one_that_is_answered_at_once_does_not() -> None:
    pace = Pace(1_000)
    for failure in (AWAY, BUSY):
        assert pace.failed(failure) is not None
    assert pace.ask(REQUEST).seconds == ATTEMPT_SECONDS
    assert pace.not_yet() is not None
    assert pace.ask(REQUEST).seconds == ATTEMPT_SECONDS


@pytest.mark.parametrize("patience", [-1.0, 0.0, 0.05])
def test_without_patience_it_is_asked_once(patience: float) -> None:
    assert Pace(patience).ask(REQUEST).seconds == ATTEMPT_SECONDS_MIN
    assert Pace(min(patience, 0.0)).failed(AWAY) is None


def test_time_is_left_for_another_coordinator() -> None:
    pace = Pace(6)
    assert pace.ask(REQUEST).seconds == 3
    pace.failed(SILENT)
    assert pace.ask(REQUEST).seconds == 3


def test_it_gives_up_rather_than_ask_too_early() -> None:
    assert Pace(6.9).failed(BUSY) is None
    pause = Pace(1_000).failed(BUSY)
    assert pause is not None
    assert pause.seconds >= BUSY.retry_after
    assert pause_seconds(50) < pause_seconds(0, BUSY)


def test_what_may_have_arrived_is_remembered() -> None:
    pace = Pace(1_000)
    pace.failed(AWAY)
    assert not pace.may_have_arrived
    pace.failed(SILENT)
    pace.failed(AWAY)
    assert pace.may_have_arrived
