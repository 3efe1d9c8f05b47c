"""Which statuses are kept (case 43), and which settings of that are refused at start."""

import pytest

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.http_statuses import Compat, Ending, Statuses

NEVER = [401, 403, 408, 421, 425, 429, 500, 502, 503, 504, 599]


@pytest.mark.parametrize("status", NEVER)
@pytest.mark.parametrize("said", [None, "final", "retryable"])
def test_case_43_what_is_of_this_moment_is_never_kept(status: int, said: str | None) -> None:
    assert Statuses().ending(status, said) is Ending.AGAIN
    with pytest.raises(ConfigurationError, match=str(status)):
        Statuses(final=frozenset({404, status}))


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299, 301, 303, 307])
def test_what_went_well_is_kept(status: int) -> None:
    assert Statuses().ending(status) is Ending.DONE
    assert Statuses().ending(status, "final") is Ending.DONE
    assert Statuses().ending(status, "retryable") is Ending.AGAIN


@pytest.mark.parametrize("status", [400, 402, 404, 409, 410, 422])
def test_a_no_is_kept_where_it_is_final(status: int) -> None:
    assert Statuses().ending(status) is Ending.AGAIN
    assert Statuses().ending(status, "final") is Ending.FINAL
    final = Statuses(final={status})
    assert final.ending(status) is Ending.FINAL
    assert final.ending(status, "retryable") is Ending.AGAIN


@pytest.mark.parametrize("status", [0, 99, 200, 399, 600, "404"])
def test_what_is_no_final_status_is_refused(status: int) -> None:
    with pytest.raises(ConfigurationError, match="400 to 499"):
        Statuses(final=frozenset({status}))


def test_the_old_habit_of_stripe() -> None:
    habit = Statuses(compat=Compat.STRIPE_V1)
    assert habit.ending(500) is Ending.FINAL
    assert habit.ending(503, "retryable") is Ending.AGAIN
    assert habit.ending(429) is Ending.AGAIN
    assert habit.ending(404) is Ending.AGAIN
    assert Statuses(final=frozenset({500}), compat=Compat.STRIPE_V1).ending(500) is Ending.FINAL
    with pytest.raises(ConfigurationError, match="429"):
        Statuses(final=frozenset({429}), compat=Compat.STRIPE_V1)
