"""What may be sent again and when, with values only: no clock, no network."""

import subprocess
import sys
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.errors import KeyMalformed
from participant_sdk.idempotency.intents import checked_key, current_intent, intent, new_key
from participant_sdk.idempotency.retry_rules import (
    Fault,
    RetryBudget,
    RetryPolicy,
    Tries,
    grpc_fault,
    http_fault,
    read_retry_after,
)

AGAIN = Fault(True)
POLICY = RetryPolicy(attempts_max=5, total_s=10.0, base_s=0.1, cap_s=0.5)
NOON = 1_700_000_000.0


def tries(policy: RetryPolicy = POLICY, total_s: float | None = None) -> Tries:
    return Tries(policy, RetryBudget(policy), 100.0, total_s)


def waits(made: Tries, chance: float = 1.0, fault: Fault = AGAIN, step_s: float = 0.0) -> list[float]:
    """The waits of a request that fails at once each time, up to the end."""
    now, found = 100.0, []
    while (wait_s := made.wait_s(now, fault, chance)) is not None:
        found.append(wait_s)
        now += wait_s + step_s
    return found


def test_the_waits_grow_up_to_the_cap_and_the_attempts_end() -> None:
    made = tries()
    assert waits(made) == pytest.approx([0.1, 0.2, 0.4, 0.5])
    assert made.attempts == 5


@given(st.floats(0, 1), st.integers(0, 2_000))
def test_jitter_is_full(chance: float, retry: int) -> None:
    assert 0 <= POLICY.jitter_s(retry, chance) <= min(0.5, 0.1 * 2.0 ** min(retry, 900))
    assert POLICY.jitter_s(retry, 0.0) == 0.0


def test_retry_after_comes_before_the_jitter() -> None:
    assert waits(tries(), 0.0, Fault(True, 2.0)) == [2.0] * 4
    assert waits(tries(), 1.0, Fault(True, 2.0))[:2] == pytest.approx([2.1, 2.2])


def test_no_try_begins_after_the_total_time() -> None:
    assert len(waits(tries(), step_s=4.9)) == 2
    assert waits(tries(), fault=Fault(True, 10.0)) == []
    assert len(waits(tries(total_s=0.15))) == 1
    assert tries(total_s=3.0).left_s(102.0) == 1.0
    assert tries(total_s=300.0).left_s(100.0) == 10.0
    assert tries(total_s=3.0).left_s(104.0) == 0.0


def test_what_may_not_pass_is_not_sent_again() -> None:
    made = tries()
    assert waits(made, fault=Fault(False)) == []
    assert made.attempts == 1


class TestBudget:
    def test_retries_are_a_share_of_the_calls(self) -> None:
        policy = RetryPolicy(attempts_max=1_000, budget_share=0.2, budget_burst=3, base_s=0)
        budget = RetryBudget(policy)
        sent = [0]
        for _ in range(100):
            made = Tries(policy, budget, 0.0)
            while made.wait_s(0.0, AGAIN) is not None:
                pass
            sent.append(made.attempts)
        assert sent[1] == 4
        assert 100 + 3 + 19 - 1 <= sum(sent) <= 100 + 3 + 20

    def test_calls_that_go_well_save_no_more_than_the_burst(self) -> None:
        policy = RetryPolicy(budget_share=0.5, budget_burst=2)
        budget = RetryBudget(policy)
        for _ in range(100):
            budget.earn()
        assert [budget.spend() for _ in range(3)] == [True, True, False]

    def test_no_token_is_spent_twice(self) -> None:
        budget = RetryBudget(RetryPolicy(budget_share=0, budget_burst=500))
        got: list[bool] = []
        threads = [Thread(target=lambda: got.extend([budget.spend() for _ in range(200)])) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(got) == 500

    def test_a_wait_that_is_too_long_costs_nothing(self) -> None:
        policy = RetryPolicy(total_s=1.0, budget_share=0, budget_burst=1)
        budget = RetryBudget(policy)
        assert Tries(policy, budget, 0.0).wait_s(0.0, Fault(True, 2.0)) is None
        assert budget.spend()


@pytest.mark.parametrize(
    ("status", "retry_after", "again"),
    [
        (200, None, False), (201, "1", False), (302, None, False), (400, None, False), (401, None, False),
        (404, "1", False), (408, None, True), (409, None, False), (409, "1", True), (409, "soon", False),
        (423, None, False), (423, "1", True),
        (410, None, False), (422, None, False), (422, "1", False), (425, None, True), (429, None, True),
        (500, None, False), (501, None, False), (502, None, True), (503, None, True), (504, None, True),
        (505, None, False),
    ],
)  # fmt: skip
def test_the_table_of_http(status: int, retry_after: str | None, again: bool) -> None:
    found = http_fault(status, retry_after, False, POLICY, lambda: NOON)
    assert (found is not None) == again
    if found is not None:
        assert found == Fault(True, None if retry_after is None else 1.0)


def test_500_is_sent_again_if_that_is_wanted_but_a_replayed_one_never() -> None:
    wanted = RetryPolicy(retry_internal=True)
    assert http_fault(500, None, False, wanted, lambda: NOON) == AGAIN
    assert http_fault(500, None, True, wanted, lambda: NOON) is None
    assert http_fault(503, "1", True, wanted, lambda: NOON) is None


@pytest.mark.parametrize(
    ("code", "after_s", "again"),
    [
        ("UNAVAILABLE", None, True), ("UNAVAILABLE", 1.0, True), ("UNAVAILABLE", -1.0, False), ("ABORTED", None, True),
        ("DEADLINE_EXCEEDED", None, True), ("RESOURCE_EXHAUSTED", None, False), ("RESOURCE_EXHAUSTED", 1.0, True),
        ("INTERNAL", None, False), ("UNKNOWN", None, False), ("FAILED_PRECONDITION", 1.0, False),
        ("INVALID_ARGUMENT", None, False), ("CANCELLED", None, False), ("ALREADY_EXISTS", None, False),
    ],
)  # fmt: skip
def test_the_table_of_grpc(code: str, after_s: float | None, again: bool) -> None:
    assert grpc_fault(code, after_s, POLICY) == (Fault(True, after_s) if again else None)


def test_internal_and_unknown_are_sent_again_if_that_is_wanted() -> None:
    for code in ("INTERNAL", "UNKNOWN"):
        assert grpc_fault(code, None, RetryPolicy(retry_internal=True)) == AGAIN


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, None), ("", None), ("3", 3.0), (" 3 ", 3.0), ("0", 0.0), ("-1", None), ("1.5", None), ("soon", None),
        ("٣", None), ("9" * 400, 1e9), ("Tue, 14 Nov 2023 22:13:50 GMT", 30.0), ("Tue, 14 Nov 2023 22:13:10 GMT", 0.0),
        ("Tuesday, 14-Nov-23 22:13:50 GMT", 30.0), ("Tue Nov 14 22:13:50 2023", 30.0),
        ("Tue, 99 Nov 2023 22:13:50 GMT", None), ("Tue, 14 Nov 99999 22:13:50 GMT", None),
    ],
)  # fmt: skip
def test_retry_after(text: str | None, seconds: float | None) -> None:
    assert read_retry_after(text, lambda: NOON) == seconds


@given(st.text())
def test_no_retry_after_raises(text: str) -> None:
    found = read_retry_after(text, lambda: NOON)
    assert found is None or found >= 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attempts_max", 0), ("total_s", -1.0), ("total_s", float("inf")), ("base_s", float("nan")), ("cap_s", 1e9),
        ("try_s", 0.0), ("budget_share", -0.1), ("budget_burst", -1),
    ],
)  # fmt: skip
def test_a_policy_that_cannot_work_is_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=f"retry policy: {field} "):
        RetryPolicy(**{field: value})  # type: ignore[arg-type]


class TestIntents:
    def test_a_key_is_the_same_in_the_block_and_another_in_the_next(self) -> None:
        with intent() as first:
            assert current_intent() == first
            with intent("order-42") as inner:
                assert current_intent() == inner == "order-42"
            assert current_intent() == first
        assert current_intent() is None
        with intent() as second:
            assert second != first

    def test_new_keys_differ(self) -> None:
        assert len({new_key() for _ in range(1_000)}) == 1_000
        assert checked_key(new_key(), "key")

    @pytest.mark.parametrize("key", ["", "a b", "a\n", 'a"b', "a,b", "a;b", "a\\b", "\x00", "é", "a" * 256])
    def test_a_key_that_cannot_travel_is_refused(self, key: str) -> None:
        with pytest.raises(KeyMalformed, match=r"intent's key: .* 1 to 255 printable ASCII"), intent(key):
            pass

    def test_the_longest_key_is_taken(self) -> None:
        with intent("!" * 255) as key:
            assert len(key) == 255


@pytest.mark.parametrize(
    "used",
    ["RetryTransport", "AsyncRetryTransport", "RetryPolicy", "intent", "RetriesExhausted", "RetryClientInterceptor"],
)
def test_the_client_side_loads_no_library_that_it_does_not_need(used: str) -> None:
    heavy = ["sqlalchemy", "httpx", "httpx2", "tricord.v1"] + ([] if "Interceptor" in used else ["grpc", "google"])
    code = f"import sys; from participant_sdk.idempotency import {used}; print(*set({heavy}) & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""
