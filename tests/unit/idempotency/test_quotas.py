"""How many new keys a tenant may bring."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.errors import TooManyKeys
from participant_sdk.idempotency.quotas import Buckets, KeyQuota


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def taken(buckets: Buckets, tenant: str = "a") -> bool:
    try:
        buckets.take(tenant)
    except TooManyKeys:
        return False
    return True


def test_a_bucket_is_full_at_first_and_fills_evenly() -> None:
    clock = Clock()
    buckets = Buckets(KeyQuota(keys=5, window_s=10), clock)
    assert [taken(buckets) for _ in range(7)] == [True] * 5 + [False] * 2
    with pytest.raises(TooManyKeys, match="more than 5 new keys in 10 seconds") as refused:
        buckets.take("a")
    assert refused.value.retry_after_ms == 2_000
    assert taken(buckets, "b")
    clock.now += 2.0
    assert [taken(buckets) for _ in range(2)] == [True, False]
    buckets.give_back("a")
    assert [taken(buckets) for _ in range(2)] == [True, False]
    clock.now += 1_000
    assert [taken(buckets) for _ in range(6)] == [True] * 5 + [False]


def test_the_tenants_that_were_active_last_are_kept_in_mind() -> None:
    buckets = Buckets(KeyQuota(keys=1, window_s=1e6, tenants_max=3), Clock())
    for number in range(10):
        assert taken(buckets, str(number))
        assert not taken(buckets, "0" if number < 3 else str(number))
    assert len(buckets) == 3
    assert [taken(buckets, tenant) for tenant in ("9", "8", "1")] == [False, False, True]
    buckets.give_back("5")  # forgotten: nothing to be given


@given(
    steps=st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=60),
    keys=st.integers(1, 7),
    window_s=st.floats(0.01, 20),
)
def test_no_window_has_more_than_twice_its_keys(steps: Any, keys: int, window_s: float) -> None:
    clock = Clock()
    buckets, moments = Buckets(KeyQuota(keys=keys, window_s=window_s), clock), []
    for after_s, needed in steps:
        clock.now += after_s
        if taken(buckets):
            if needed:
                moments.append(clock.now)
            else:
                buckets.give_back("a")
    for begin in moments:
        assert sum(begin <= moment < begin + window_s for moment in moments) <= 2 * keys


def test_threads_get_no_more_together() -> None:
    buckets = Buckets(KeyQuota(keys=100, window_s=1e6), Clock())
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(lambda _: taken(buckets), range(400))) == 100


@pytest.mark.parametrize(
    "settings",
    [{"keys": 0}, {"keys": 1.5}, {"keys": "9"}, {"window_s": 0}, {"window_s": float("inf")}, {"tenants_max": 0}],
)
def test_wrong_settings_are_errors_at_start(settings: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"quota: {next(iter(settings))}"):
        KeyQuota(**{"keys": 1, "window_s": 1, **settings})
