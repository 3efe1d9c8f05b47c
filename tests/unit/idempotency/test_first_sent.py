"""When a request was first sent: which times are taken, and when its record may be gone."""

from __future__ import annotations

import math
from typing import Any

import pytest

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.errors import FirstSentMalformed, IntentTooOld
from participant_sdk.idempotency.first_sent import FirstSent
from participant_sdk.idempotency.grpc_policy import GrpcOperation
from participant_sdk.idempotency.http_policy import ONE_TENANT, HttpOperation
from participant_sdk.idempotency.operation import Operation

NOW_S = 1_767_225_600.5
HOUR = Operation(name="orders", ttl_s=3_600)


@pytest.mark.parametrize(
    ("age_s", "outcome"),
    [(0, None), (3_539, None), (3_541, IntentTooOld), (1e9, IntentTooOld), (-60, None), (-62, FirstSentMalformed)],
)
@pytest.mark.parametrize("form", ["@%d", "%d", " @%d\t", b"@%d"])
def test_a_record_may_be_gone_after_its_ttl_less_what_clocks_are_off(age_s: float, outcome: Any, form: Any) -> None:
    lines = [form % int(NOW_S - age_s)]
    if outcome is None:
        FirstSent(skew_s=60).check(HOUR, lines, NOW_S)
    else:
        with pytest.raises(outcome):
            FirstSent(skew_s=60).check(HOUR, lines, NOW_S)


@pytest.mark.parametrize(
    "lines",
    [
        [""],
        ["@"],
        ["@-1"],
        ["@1.5"],
        ["@1;a"],
        ["+1"],
        ["1_0"],
        ["1" * 12],
        ["@1", "@1"],
        ["\u0661"],
        [b"\xb2"],
        ["@1 2"],
    ],
)
def test_what_is_no_time_is_refused_and_named(lines: Any) -> None:
    with pytest.raises(FirstSentMalformed, match="Began-At"):
        FirstSent(name="Began-At").check(HOUR, lines, NOW_S)


def test_it_may_be_missing_unless_it_is_required() -> None:
    FirstSent().check(HOUR, [], NOW_S)
    with pytest.raises(FirstSentMalformed, match="First-Sent is required"):
        FirstSent(required=True).check(HOUR, [], NOW_S)


@pytest.mark.parametrize("settings", [{"name": "a b"}, {"name": ""}, {"name": 7}, {"skew_s": -1}, {"skew_s": math.nan}])
def test_wrong_settings_are_errors_at_start(settings: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"first_sent: {next(iter(settings))}"):
        FirstSent(**settings)


def test_it_has_to_fit_its_operation() -> None:
    wrong = FirstSent(skew_s=3_600)
    with pytest.raises(ConfigurationError, match=r"orders: first_sent's skew_s 3600 is not shorter than ttl_s 3600"):
        HttpOperation(operation=HOUR, path="/", tenant=ONE_TENANT, first_sent=wrong)
    with pytest.raises(ConfigurationError, match="skew_s"):
        GrpcOperation(operation=HOUR, method="/a.B/C", tenant=None, first_sent=wrong)
    with pytest.raises(ConfigurationError, match="first_sent 'grpc-time'"):
        GrpcOperation(operation=HOUR, method="/a.B/C", tenant=None, first_sent=FirstSent(name="Grpc-Time"))
