"""What a gRPC call has to pass before the store is asked: its age, its tenant's quota of keys."""

from __future__ import annotations

import time
from typing import Any

import grpc
import pytest

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.first_sent import FirstSent
from participant_sdk.idempotency.grpc_interceptors import IdempotencyInterceptor
from participant_sdk.idempotency.intents import intent
from participant_sdk.idempotency.quotas import KeyQuota
from participant_sdk.idempotency.retry_grpc import RetryClientInterceptor
from tricord.v1 import types_pb2

from .keyed_shop import SERVICE, policy
from .keyed_shops import Open, flavours, open_shop, replayed, told

flavour = flavours(["threads-sqlite", "tasks-sqlite"])
__all__ = ["flavour", "open_shop"]
CODE = grpc.StatusCode


def test_what_was_first_sent_too_long_ago_does_not_run(open_shop: Open) -> None:
    shop = open_shop(policy(operation={"ttl_s": 3_600}, first_sent=FirstSent()))
    for first_sent, code, reason in (
        (f"@{time.time() - 3_600:.0f}", CODE.FAILED_PRECONDITION, "IDEMPOTENCY_INTENT_TOO_OLD"),
        ("soon", CODE.INVALID_ARGUMENT, "IDEMPOTENCY_FIRST_SENT_MALFORMED"),
    ):
        assert told(shop.call(metadata=(("first-sent", first_sent),))) == (code, reason, None)
    assert (shop.runs, shop.records()) == (0, 0)
    channel = grpc.intercept_channel(shop.channel, RetryClientInterceptor(first_sent="First-Sent"))
    create: Any = channel.unary_unary(
        f"/{SERVICE}/Create",
        request_serializer=types_pb2.Payload.SerializeToString,
        response_deserializer=types_pb2.Payload.FromString,
    )
    with intent("k1", began_s=time.time() - 7_200), pytest.raises(grpc.RpcError) as refused:
        create(types_pb2.Payload(data=b"tea", content_type="ok"), metadata=(("tenant", "alice"),))
    assert refused.value.code() is CODE.FAILED_PRECONDITION
    with intent("k1"):
        create(types_pb2.Payload(data=b"tea", content_type="ok"), metadata=(("tenant", "alice"),))
    assert shop.items() == [b"tea"]


def test_a_tenant_brings_no_more_keys_than_it_may(open_shop: Open) -> None:
    shop = open_shop(policy(quota=KeyQuota(keys=2, window_s=86_400)))
    for key in ("k1", "k1", "k1", "k2"):
        assert shop.call(key=key).code() is CODE.OK
    code, reason, after_s = told(shop.call(key="k3"))
    assert (code, reason, shop.records()) == (CODE.RESOURCE_EXHAUSTED, "IDEMPOTENCY_TOO_MANY_KEYS", 2)
    assert after_s is not None
    assert 43_000 < after_s <= 43_200
    assert not replayed(shop.done(key="k3", tenant="bob"))


def test_one_operation_has_one_quota() -> None:
    two = [policy(), policy("Change", operation={"name": "shop.Create"}, quota=KeyQuota(keys=1, window_s=1))]
    store: Any = None
    with pytest.raises(ConfigurationError, match=r"shop\.Create: quota"):
        IdempotencyInterceptor(store, two)
