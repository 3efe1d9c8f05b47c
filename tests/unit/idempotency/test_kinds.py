"""A setting of the wrong kind is an error at start that names it, in everything that takes settings."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.first_sent import FirstSent
from participant_sdk.idempotency.grpc_policy import GrpcOperation
from participant_sdk.idempotency.http_policy import ONE_TENANT, HttpOperation
from participant_sdk.idempotency.http_statuses import Statuses
from participant_sdk.idempotency.operation import Operation
from participant_sdk.idempotency.problems import Answering
from participant_sdk.idempotency.quotas import KeyQuota

ORDERS = Operation(name="orders")
TAKERS: list[tuple[Any, dict[str, Any]]] = [
    (Operation, {"name": "orders"}),
    (HttpOperation, {"operation": ORDERS, "path": "/", "tenant": ONE_TENANT}),
    (GrpcOperation, {"operation": ORDERS, "method": "/a.B/C", "tenant": None}),
    (Answering, {}),
    (Statuses, {}),
    (FirstSent, {}),
    (KeyQuota, {"keys": 1, "window_s": 1}),
]
SETTINGS = [(taker, right, found.name) for taker, right in TAKERS for found in fields(taker) if found.init]


@pytest.mark.parametrize(("taker", "right", "field"), SETTINGS)
def test_no_setting_takes_what_it_is_not(taker: Any, right: dict[str, Any], field: str) -> None:
    taker(**right)
    is_flag = isinstance(taker.__dataclass_fields__[field].default, bool)
    for wrong in (object(), -1, math.nan, b"x", 1.5, [7], True, 10**30):
        if (wrong == 1.5 and field.endswith("_s")) or (wrong is True and is_flag):
            continue
        with pytest.raises(ConfigurationError, match=field):
            taker(**{**right, field: wrong})
