"""The rules of a record, as a table written by hand beside the code: every state, fingerprint, time and policy."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.machine import TRANSITIONS, Rules, TakeOver, Verdict, verdict
from participant_sdk.idempotency.operation import KeyScope, Mode, Operation
from participant_sdk.idempotency.record import Answer, Codec, Fingerprint, Record, State
from participant_sdk.idempotency.request import KeyedRequest

MINE = Fingerprint(1, b"m" * 32)
RECORD = Record(
    key_hash=b"k" * 32, tenant="t", operation="pay", key_hint="", state=State.PROCESSING, fingerprint=MINE,
    fence=7, attempt=1, age_ms=10, lease_left_ms=1_000,
)  # fmt: skip
LATER = 60_000


def same(stored: Fingerprint) -> bool | None:
    return stored == MINE


def differs(stored: Fingerprint) -> bool | None:
    return False


def unknown(stored: Fingerprint) -> bool | None:
    return None


def record(state: State, **changes: Any) -> Record:
    ends = None if state in (State.PROCESSING, State.UNKNOWN) else LATER
    return replace(RECORD, **{"state": state, "expires_left_ms": ends, **changes})


def asked(met: Record | None, matches: Any = same, **rules: Any) -> Verdict:
    return verdict(
        met, matches, Rules("pay", **{"take_over": TakeOver.AUTO, "reentrant": None, "attempts_max": 9, **rules})
    )


def test_without_a_record_it_runs() -> None:
    assert asked(None) is Verdict.RUN
    assert asked(None, unknown) is Verdict.RUN


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (State.PROCESSING, Verdict.IN_PROGRESS),
        (State.SUCCEEDED, Verdict.REPLAY),
        (State.FAILED_FINAL, Verdict.REPLAY),
        (State.FAILED_RETRYABLE, Verdict.RUN_AGAIN),
        (State.UNKNOWN, Verdict.UNKNOWN),
        (State.TOMBSTONE, Verdict.NO_ANSWER),
    ],
)
def test_each_state_and_each_fingerprint(state: State, expected: Verdict) -> None:
    """The fingerprint is compared on every path (case 40)."""
    assert asked(record(state)) is expected
    assert asked(record(state), differs) is Verdict.MISMATCH
    assert asked(record(state), unknown) is Verdict.NOT_COMPARABLE
    assert asked(record(state, operation="refund")) is Verdict.MISMATCH


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("left_ms", [1, 0, -1])
def test_what_has_expired_is_as_if_it_had_never_been(state: State, left_ms: int) -> None:
    """But for what is processed, and what nobody knows the end of: those have no end."""
    met = record(state, expires_left_ms=left_ms)
    if left_ms > 0 or state in (State.PROCESSING, State.UNKNOWN):
        assert asked(met, differs) is Verdict.MISMATCH
        assert asked(met) is not Verdict.RUN
    else:
        assert asked(met) is Verdict.RUN
        assert asked(met, differs) is Verdict.RUN


def test_a_record_without_an_end_does_not_expire() -> None:
    assert asked(record(State.SUCCEEDED, expires_left_ms=None)) is Verdict.REPLAY


@pytest.mark.parametrize("left_ms", [1, 0, -1])
@pytest.mark.parametrize(
    ("rules", "over"),
    [
        ({}, Verdict.RUN_AGAIN),
        ({"take_over": TakeOver.NEVER}, Verdict.GIVE_UP),
        ({"take_over": TakeOver.ONLY_IF_REENTRANT, "reentrant": lambda met: met.fence == 7}, Verdict.RUN_AGAIN),
        ({"take_over": TakeOver.ONLY_IF_REENTRANT, "reentrant": lambda met: met.fence == 8}, Verdict.GIVE_UP),
        ({"take_over": TakeOver.ONLY_IF_REENTRANT}, Verdict.GIVE_UP),
        ({"attempts_max": 1}, Verdict.GIVE_UP),
        ({"attempts_max": 2}, Verdict.RUN_AGAIN),
    ],
)
def test_after_the_lease(left_ms: int, rules: dict[str, Any], over: Verdict) -> None:
    """Nobody has said what became of the run (case 38): whether it runs again is the operation's to say."""
    met = record(State.PROCESSING, lease_left_ms=left_ms)
    assert asked(met, **rules) is (Verdict.IN_PROGRESS if left_ms > 0 else over)
    assert asked(met, differs, **rules) is Verdict.MISMATCH
    assert asked(met, unknown, **rules) is Verdict.NOT_COMPARABLE


def test_what_failed_may_run_again_however_often() -> None:
    """Attempts are bounded where nobody knows the end of one."""
    assert asked(record(State.FAILED_RETRYABLE, attempt=99), attempts_max=1) is Verdict.RUN_AGAIN


def test_what_may_follow_what() -> None:
    assert set(TRANSITIONS) == {None, *State}
    for ended in (State.SUCCEEDED, State.FAILED_FINAL, State.TOMBSTONE):
        assert ended.ended
        assert not TRANSITIONS[ended]
    assert TRANSITIONS[State.UNKNOWN] == {*State} - {State.PROCESSING, State.UNKNOWN}
    assert TRANSITIONS[State.PROCESSING] == {*State}
    assert TRANSITIONS[State.FAILED_RETRYABLE] == {*State} - {State.UNKNOWN}
    assert TRANSITIONS[None] == {*State} - {State.UNKNOWN}
    assert not any(state.ended for state in (State.PROCESSING, State.FAILED_RETRYABLE, State.UNKNOWN))


def test_an_older_fingerprint_is_compared_with_its_own_algorithm() -> None:
    """Algorithms change from one version of a program to the next; records are older than that."""
    old = {1: b"o" * 32}
    request = KeyedRequest("k", Fingerprint(2, b"n" * 32), old.get)
    assert request.matches(Fingerprint(2, b"n" * 32)) is True
    assert request.matches(Fingerprint(2, b"o" * 32)) is False
    assert request.matches(Fingerprint(1, b"o" * 32)) is True
    assert request.matches(Fingerprint(1, b"n" * 32)) is False
    assert request.matches(Fingerprint(3, b"n" * 32)) is None


def test_an_answer_knows_what_it_takes() -> None:
    assert Answer(Codec.HTTP).bytes_held == 64
    assert Answer(Codec.HTTP, 200, ((b"abc", b"de"),), b"12345").bytes_held == 64 + 5 + 5 + 8


def test_it_needs_no_database_and_no_clock() -> None:
    code = (
        "import sys, participant_sdk.idempotency.machine\n"
        "print(*{'sqlalchemy', 'grpc', 'asyncio', 'random', 'datetime', 'logging'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []


# --- operations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": ""}, "operation name '' is not 1 to 200 printable ASCII characters"),
        ({"name": "a b"}, "operation name 'a b'"),
        ({"name": "x" * 201}, "operation name"),
        ({"name": "päy"}, "operation name"),
        ({"wait_s": -1}, "pay: wait_s -1 is not 0 to 3600 seconds"),
        ({"wait_s": float("nan")}, "pay: wait_s nan"),
        ({"wait_s": 3_601}, "pay: wait_s 3601"),
        ({"ttl_s": 0}, "pay: ttl_s 0 is not 1 to 31622400 seconds"),
        ({"ttl_s": float("inf")}, "pay: ttl_s inf"),
        ({"ttl_s": 10, "retry_horizon_s": 11}, "pay: ttl_s 10 is shorter than retry_horizon_s 11"),
        ({"lease_s": 0}, "pay: lease_s 0 is not 0.1 to 86400 seconds"),
        ({"attempts_max": 0}, "pay: attempts_max 0 is not 1 to 1000000"),
        ({"answer_bytes_max": -1}, "pay: answer_bytes_max -1 is not 0 to 1073741824"),
        ({"key_hint_chars": 17}, "pay: key_hint_chars 17 is not 0 to 16"),
        ({"mode": Mode.LEASED, "take_over": TakeOver.ONLY_IF_REENTRANT}, "pay: `reentrant` goes with"),
        ({"mode": Mode.LEASED, "reentrant": lambda met: True}, "pay: `reentrant` goes with"),
        ({"take_over": TakeOver.NEVER}, "pay: an atomic run leaves nothing to take over"),
    ],
)
def test_an_operation_that_cannot_work_is_an_error_at_start(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Operation(**{"name": "pay", **settings})
    assert said in str(caught.value)


def test_what_an_operation_hands_to_the_rules() -> None:
    operation = Operation(name="pay", mode=Mode.LEASED, take_over=TakeOver.NEVER, attempts_max=3)
    assert operation.rules == Rules("pay", TakeOver.NEVER, None, 3)
    assert operation.scope is KeyScope.OPERATION
    assert Operation(name="x" * 200, ttl_s=1, retry_horizon_s=1, wait_s=3_600, lease_s=0.1, key_hint_chars=16)
