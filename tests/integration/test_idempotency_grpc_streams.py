"""Keyed calls that stream: requests are taken whole before anything runs, responses as the method's policy says."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import pytest

from participant_sdk.idempotency.grpc_policy import ServerStreaming
from participant_sdk.idempotency.operation import Mode

from .keyed_shop import Shop, policy
from .keyed_shop_handlers import CALL_S
from .keyed_shops import MOST, Open, flavours, open_shop, replayed, told

__all__ = ["open_shop"]  # a fixture

flavour = flavours(MOST)

pytestmark = pytest.mark.database
CUTS = 40
OK, INVALID = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT


coroutines_only = pytest.mark.parametrize(
    "flavour", [each for each in MOST if not each.startswith("tasks-threads")], indirect=True
)


def watched(call: Any) -> tuple[list[bytes], grpc.StatusCode]:
    """What a call's responses were, and how it ended."""
    responses = []
    with suppress(grpc.RpcError):
        for response in call:
            responses.append(bytes(response.data))
    return responses, call.code()


@coroutines_only
@pytest.mark.parametrize("mode", [Mode.ATOMIC, Mode.LEASED])
def test_a_clients_stream_is_one_request(open_shop: Open, mode: Mode) -> None:
    shop = open_shop(policy("Upload", operation={"mode": mode}))
    first = shop.done("Upload", requests=[b"a", b"b"])
    again = shop.done("Upload", requests=[b"a", b"b"])
    assert first.result().data == again.result().data == b"1:tea+a+b"
    assert (replayed(first), replayed(again)) == (False, True)
    for other in ([b"ab"], [b"b", b"a"], [b"a"], [b"a", b"b", b""]):
        call = shop.done("Upload", requests=other)
        assert told(call) == (grpc.StatusCode.FAILED_PRECONDITION, "IDEMPOTENCY_KEY_REUSED", None)
    assert (shop.runs, shop.items()) == (1, [b"tea+a+b"])


@coroutines_only
def test_a_clients_stream_that_is_larger_than_what_is_held_in_memory(open_shop: Open) -> None:
    shop = open_shop(policy("Upload"))
    parts = [bytes([65 + n]) * 1_000 for n in range(10)] * 200
    assert shop.ask("Upload", requests=parts) == shop.ask("Upload", requests=parts)
    assert told(shop.done("Upload", requests=parts[::-1]))[1] == "IDEMPOTENCY_KEY_REUSED"
    assert shop.runs == 1


@coroutines_only
def test_a_clients_stream_over_the_limit_is_refused_and_not_run(open_shop: Open) -> None:
    shop = open_shop(policy("Upload", request_bytes_max=1_000))
    call = shop.done("Upload", requests=[b"x" * 100] * 10)
    assert told(call) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "IDEMPOTENCY_REQUEST_TOO_LARGE", None)
    assert "1000 bytes" in call.details()
    assert (shop.runs, shop.records()) == (0, 0)
    assert shop.ask("Upload", requests=[b"x"]) == b"1:tea+x"


@coroutines_only
def test_a_clients_stream_that_is_cut_off_is_not_run(open_shop: Open) -> None:
    shop = open_shop(policy("Upload"))
    for n in range(CUTS):
        sent, cut = threading.Event(), threading.Event()

        def requests(sent: threading.Event = sent, cut: threading.Event = cut) -> Iterator[bytes]:
            yield b"a"
            sent.set()
            cut.wait(CALL_S)

        call = shop.call("Upload", f"k{n}", requests=requests())
        assert sent.wait(CALL_S)
        call.cancel()
        cut.set()
    assert shop.ask("Upload", "last", requests=[b"a"]).endswith(b":tea+a")
    assert (shop.runs, shop.items()) == (1, [b"tea+a"])
    for n in range(CUTS):
        assert shop.ask("Upload", f"k{n}", requests=[b"a", b"b"]).endswith(b":tea+a+b")


@coroutines_only
def test_the_key_in_the_first_message(open_shop: Open) -> None:
    shop = open_shop(policy("Upload", key_field="content_type"))
    assert shop.ask("Upload", None, requests=[b"a"]) == shop.ask("Upload", None, requests=[b"a"]) == b"1:tea+a"
    assert told(shop.done("Upload", "unseen", plan=""))[:2] == (INVALID, "IDEMPOTENCY_KEY_MISSING")


@pytest.mark.parametrize("flavour", ["tasks-threads-postgres"], indirect=True)
def test_a_clients_stream_is_nothing_for_a_plain_function_under_asyncio(open_shop: Open) -> None:
    shop = open_shop(policy("Upload"))
    assert told(shop.done("Upload")) == (grpc.StatusCode.INTERNAL, "CONFIGURATION", None)
    assert (shop.runs, shop.records()) == (0, 0)


@coroutines_only
def test_a_streamed_answer_is_refused_where_nothing_else_is_said(open_shop: Open) -> None:
    shop = open_shop(policy("Watch", required=False), policy("Chat", server_streaming=ServerStreaming.SPOOL))
    assert watched(shop.call("Watch", None)) == ([b"0:tea", b"1:tea", b"2:tea", b"no run:tea"], OK)
    for method in ("Watch", "Chat"):
        call = shop.call(method)
        assert watched(call) == ([], INVALID)
        assert told(call)[1] == "INVALID_REQUEST"
    assert (shop.runs, shop.records()) == (1, 0)


@pytest.mark.parametrize("mode", [Mode.ATOMIC, Mode.LEASED])
def test_a_streamed_answer_that_is_kept(open_shop: Open, mode: Mode) -> None:
    settings = {"server_streaming": ServerStreaming.SPOOL, "stored_codes": [grpc.StatusCode.NOT_FOUND]}
    shop = open_shop(policy("Watch", operation={"mode": mode, "answer_bytes_max": 1_000}, **settings))
    first = shop.call("Watch")
    assert watched(first) == ([b"0:tea", b"1:tea", b"2:tea", b"1:tea"], OK)
    again = shop.call("Watch")
    assert watched(again) == ([b"0:tea", b"1:tea", b"2:tea", b"1:tea"], OK)
    assert (replayed(first), replayed(again)) == (False, True)
    for n in range(2):
        call = shop.call("Watch", "final", plan="abort:NOT_FOUND")
        responses, code = watched(call)
        assert code is grpc.StatusCode.NOT_FOUND
        # gRPC's clients need not hand out what came before a status that is an error.
        assert responses == [b"0:tea", b"1:tea", b"2:tea"][: len(responses)]
        assert replayed(call) == bool(n)
    for _ in range(2):
        call = shop.call("Watch", "retryable", plan="abort:UNAVAILABLE")
        assert watched(call) == ([], grpc.StatusCode.UNAVAILABLE)
    assert shop.runs == 4
    large = shop.call("Watch", "large", plan="size:5000")
    assert len(watched(large)[0][-1]) > 5_000
    assert told_of_stream(shop, "large", "size:5000") == "IDEMPOTENCY_ANSWER_NOT_STORED"
    assert (shop.runs, shop.items()) == (5, [b"tea", b"tea"])


@pytest.mark.parametrize("mode", [Mode.ATOMIC, Mode.LEASED])
def test_a_streamed_answer_that_is_not_kept(open_shop: Open, mode: Mode) -> None:
    shop = open_shop(policy("Watch", operation={"mode": mode}, server_streaming=ServerStreaming.TOMBSTONE))
    call = shop.call("Watch", plan="gate")
    responses = iter(call)
    assert [bytes(next(responses).data) for _ in range(3)] == [b"0:tea", b"1:tea", b"2:tea"]  # before the work is done
    shop.gate.open.set()
    assert [bytes(response.data) for response in responses] == [b"1:tea"]
    assert call.code() is OK
    assert told_of_stream(shop, "k1", "gate") == "IDEMPOTENCY_ANSWER_NOT_STORED"
    assert watched(shop.call("Watch", "k2", plan="abort:NOT_FOUND"))[1] is grpc.StatusCode.NOT_FOUND
    assert (shop.runs, shop.items()) == (2, [b"tea"])


def told_of_stream(shop: Shop, key: str, plan: str) -> str:
    """The reason for which a repeat gets nothing."""
    call = shop.call("Watch", key, plan=plan)
    assert watched(call)[0] == []
    return told(call)[1]
