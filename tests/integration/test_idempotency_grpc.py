"""Methods of a gRPC server that are safe to repeat: cases 37 to 44, on thread and asyncio servers and each database."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
import pytest

from participant_sdk.idempotency.grpc_answers import grpc_answer
from participant_sdk.idempotency.grpc_policy import ServerStreaming
from participant_sdk.idempotency.grpc_status import GrpcCodes
from participant_sdk.idempotency.machine import TakeOver
from participant_sdk.idempotency.operation import KeyScope, Mode
from participant_sdk.idempotency.record import Answer
from tricord.v1 import types_pb2

from .keyed_shop import Shop, policy, tenant_of
from .keyed_shop_handlers import CALL_S
from .keyed_shops import EVERYWHERE, Open, flavours, open_shop, replayed, told

__all__ = ["open_shop"]  # a fixture

flavour = flavours(EVERYWHERE)

LEASED = {"mode": Mode.LEASED}


def over(shop: Shop, method: str, *arguments: Any, **settings: Any) -> Any:
    """A call that is over, and of which all responses were read."""
    call = shop.call(method, *arguments, **settings)
    if method == "Watch":
        with suppress(grpc.RpcError):
            list(call)
    call.code()
    return call


@pytest.mark.database
@pytest.mark.parametrize("mode", [Mode.ATOMIC, Mode.LEASED])
def test_a_repeat_gets_the_same_bytes_and_does_not_run(open_shop: Open, mode: Mode) -> None:
    shop = open_shop(policy(operation={"mode": mode}, kept_metadata=["receipt", "receipt-bin"]))
    first = shop.done(plan="trailing:one")
    again = shop.done(plan="trailing:one")
    assert first.result() == again.result()
    assert (replayed(first), replayed(again)) == (False, True)
    assert dict(first.trailing_metadata())["request-id"] == "one"
    kept = (("receipt", "r1"), ("receipt", "r2"), ("receipt-bin", b"\x00\xff"))
    assert tuple(tuple(pair) for pair in again.trailing_metadata()) == kept
    assert (shop.runs, shop.items(), shop.records()) == (1, [b"tea"], 1)


@pytest.mark.database
@pytest.mark.parametrize("method", ["Create", "Watch"])
def test_initial_metadata_is_part_of_the_answer(open_shop: Open, method: str) -> None:
    streamed: dict[str, Any] = {} if method == "Create" else {"server_streaming": ServerStreaming.SPOOL}
    shop = open_shop(policy(method, kept_metadata=["receipt", "receipt-bin"], **streamed))
    first, again = (over(shop, method, plan="initial:one trailing:two") for _ in range(2))
    kept = {"receipt": "i1", "receipt-bin": b"\x00i"}
    assert dict(first.initial_metadata()) == kept | {"request-id": "one"}
    assert dict(again.initial_metadata()) == kept | {"idempotency-replayed": "true"}
    assert ("receipt", "i1") not in [tuple(pair) for pair in again.trailing_metadata()]
    assert shop.runs == 1


@pytest.mark.parametrize("flavour", ["threads-sqlite", "tasks-sqlite"], indirect=True)
def test_an_answer_is_sealed_in_the_store_and_open_to_its_caller(open_shop: Open) -> None:
    def seal(answer: Answer) -> Answer:
        return replace(answer, body=bytes(byte ^ 0x55 for byte in answer.body))

    def fail(answer: Answer) -> Answer:
        raise LookupError("no key")

    shop = open_shop(
        policy(redact=seal, restore=seal),
        policy("Change", redact=fail),
        policy("Watch", redact=seal, restore=fail, server_streaming=ServerStreaming.SPOOL),
    )
    assert shop.ask(item=b"secret") == shop.ask(item=b"secret") == b"1:secret"
    assert not any(b"secret" in body for body in shop.bodies())
    for _ in range(2):
        assert told(shop.done("Change", "k2"))[:2] == (grpc.StatusCode.INTERNAL, "IDEMPOTENCY")
    assert shop.items() == [b"secret"], "what cannot be sealed is not done"
    assert over(shop, "Watch", "k3").code() is grpc.StatusCode.OK
    unread = told(over(shop, "Watch", "k3"))
    assert unread[:2] == (grpc.StatusCode.UNAVAILABLE, "IDEMPOTENCY_STORE_UNAVAILABLE")
    assert shop.items() == [b"secret", b"tea"]


@pytest.mark.parametrize("flavour", ["threads-sqlite", "tasks-sqlite"], indirect=True)
def test_a_repeat_is_told_what_it_is_by_now(open_shop: Open, flavour: str) -> None:
    def now(context: Any, answer: Answer) -> Answer:
        assert tenant_of(context) == "alice"
        return grpc_answer(types_pb2.Payload(data=b"sent"), trailing_metadata=(("receipt", "r9"),))

    async def now_async(context: Any, answer: Answer) -> Answer:
        return now(context, answer)

    def fail(context: Any, answer: Answer) -> Answer:
        raise LookupError("no such order")

    current: Any = now if flavour.startswith("threads") else now_async
    shop = open_shop(policy(current=current), policy("Change", current=fail))
    assert shop.ask() == b"1:tea"
    again = shop.done()
    assert (again.result().data, replayed(again)) == (b"sent", True)
    assert dict(again.trailing_metadata())["receipt"] == "r9"
    assert shop.ask("Change", "k2") == b"2:tea"
    unread = told(shop.done("Change", "k2"))
    assert unread[:2] == (grpc.StatusCode.UNAVAILABLE, "IDEMPOTENCY_STORE_UNAVAILABLE")
    assert shop.runs == 2


@pytest.mark.database
@pytest.mark.parametrize("mode", [Mode.ATOMIC, Mode.LEASED])
def test_case_37_fifty_at_once_run_once(open_shop: Open, mode: Mode) -> None:
    shop = open_shop(policy(operation={"mode": mode, "wait_s": 30.0}), workers=16, waiters_per_key_max=64)
    calls = [shop.call() for _ in range(50)]
    codes = [call.code() for call in calls]
    assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.ABORTED}
    assert {call.result().data for call in calls if call.code() is grpc.StatusCode.OK} == {b"1:tea"}
    assert (shop.runs, shop.items()) == (1, [b"tea"])
    assert sum(not replayed(call) for call in calls if call.code() is grpc.StatusCode.OK) == 1


@pytest.mark.database
def test_case_38_a_run_that_ends_nowhere_is_unknown_where_take_over_is_off(open_shop: Open) -> None:
    settings = {**LEASED, "take_over": TakeOver.NEVER, "lease_s": 0.1, "heartbeat": False}
    shop = open_shop(policy(operation=settings))
    first = shop.call(plan="gate")
    shop.gate.wait_reached()
    deadline = threading.Event()
    while (again := told(shop.call(plan="gate")))[1] == "IDEMPOTENCY_IN_PROGRESS":
        deadline.wait(0.05)
    assert again == (grpc.StatusCode.FAILED_PRECONDITION, "IDEMPOTENCY_OUTCOME_UNKNOWN", None)
    shop.gate.open.set()
    assert told(first)[:2] == (grpc.StatusCode.ABORTED, "IDEMPOTENCY_LEASE_LOST")
    assert (shop.runs, shop.items()) == (1, [])


@pytest.mark.database
def test_case_39_the_late_ones_work_rolls_back(open_shop: Open) -> None:
    shop = open_shop(policy(operation={**LEASED, "lease_s": 0.1, "heartbeat": False, "wait_s": 30.0}))
    late = shop.call(plan="gate", item=b"tea")
    shop.gate.wait_reached()
    second = shop.call(plan="gate", item=b"tea")
    shop.gate.wait_reached()  # it has taken over, and works
    shop.gate.open.set()
    assert second.result().data == b"2:tea"
    code, reason, after = told(late)
    assert (code, reason) == (grpc.StatusCode.ABORTED, "IDEMPOTENCY_LEASE_LOST")
    assert after is not None
    assert (shop.runs, shop.items()) == (2, [b"tea"])
    assert shop.ask(plan="gate") == b"2:tea"


@pytest.mark.database
@pytest.mark.parametrize("mode", [Mode.ATOMIC, Mode.LEASED])
def test_case_40_never_anothers_answer(open_shop: Open, mode: Mode) -> None:
    everywhere = {"mode": mode, "scope": KeyScope.GLOBAL}
    shop = open_shop(policy(operation={"mode": mode}), policy("Change", operation=everywhere))
    assert shop.ask() == b"1:tea"
    assert shop.ask(tenant="bob", item=b"coffee") == b"2:coffee"
    assert told(shop.call(item=b"coffee")) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "IDEMPOTENCY_KEY_REUSED",
        None,
    )
    assert told(shop.call(metadata=(("tricord-xid", "a" * 32),)))[1] == "IDEMPOTENCY_KEY_REUSED"
    assert shop.ask("Change") == b"3:tea"  # another operation
    assert shop.items() == [b"tea", b"coffee", b"tea"]
    assert told(shop.call(tenant=""))[:2] == (grpc.StatusCode.PERMISSION_DENIED, "IDEMPOTENCY_SCOPE_MISSING")
    assert told(shop.call(tenant="x" * 201))[:2] == (grpc.StatusCode.PERMISSION_DENIED, "IDEMPOTENCY_SCOPE_MISSING")
    assert shop.runs == 3


@pytest.mark.database
@pytest.mark.parametrize("mode", [Mode.ATOMIC, Mode.LEASED])
def test_case_41_an_answer_too_large_leaves_a_tombstone(open_shop: Open, mode: Mode) -> None:
    shop = open_shop(policy(operation={"mode": mode, "answer_bytes_max": 1_000}))
    assert len(shop.ask(plan="size:2000")) == 2005
    gone = (grpc.StatusCode.FAILED_PRECONDITION, "IDEMPOTENCY_ANSWER_NOT_STORED", None)
    assert told(shop.call(plan="size:2000")) == gone
    assert (shop.runs, shop.items()) == (1, [b"tea"])


@pytest.mark.database
def test_case_42_what_is_not_listed_is_not_replayed(open_shop: Open) -> None:
    shop = open_shop()
    assert "request-id" in dict(shop.done(plan="trailing:one").trailing_metadata())
    again = shop.done(plan="trailing:one")
    assert replayed(again)
    assert tuple(again.trailing_metadata()) == ()


@pytest.mark.database
@pytest.mark.parametrize("mode", [Mode.ATOMIC, Mode.LEASED])
def test_case_43_only_listed_codes_are_answers(open_shop: Open, mode: Mode) -> None:
    shop = open_shop(policy(operation={"mode": mode}, stored_codes=[grpc.StatusCode.NOT_FOUND]))
    plans = {"abort": "abort:{}", "code": "code:{} details:gone", "raise": "code:{} details:gone raise:boom"}
    for how, words in plans.items():
        plan, runs = words.format("NOT_FOUND"), shop.runs
        first, again = (shop.done("Create", how, plan=plan) for _ in range(2))
        assert (first.code(), again.code()) == (grpc.StatusCode.NOT_FOUND,) * 2
        assert first.details() == again.details() == ("no tea" if how == "abort" else "gone")
        assert (replayed(first), replayed(again), shop.runs) == (False, True, runs + 1)
    for code in ("UNAUTHENTICATED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "INVALID_ARGUMENT"):
        for how, words in plans.items():
            plan, key, runs = words.format(code), f"{code} {how}", shop.runs
            for _ in range(2):
                assert shop.refused("Create", f'"{key}"', plan=plan) is grpc.StatusCode[code]
            assert shop.runs == runs + 2
            assert told(shop.done("Create", f'"{key}"', b"coffee", plan))[1] == "IDEMPOTENCY_KEY_REUSED"
    assert shop.items() == []


@pytest.mark.database
def test_a_handler_that_fails_may_run_again(open_shop: Open) -> None:
    shop = open_shop()
    for _ in range(2):
        call = shop.call(plan="raise:boom")
        assert (call.code(), "boom" in call.details()) == (grpc.StatusCode.UNKNOWN, True)
    assert (shop.runs, shop.items()) == (2, [])


@pytest.mark.database
def test_hedged_calls_at_the_same_instant_on_two_servers(open_shop: Open) -> None:
    keyed = policy(operation={"wait_s": 30.0})
    shops = [open_shop(keyed), open_shop(keyed)]
    with ThreadPoolExecutor(8) as pool:
        for n in range(10):
            both = threading.Barrier(4)

            def one(shop: Shop, key: str, barrier: threading.Barrier) -> bytes:
                barrier.wait(CALL_S)
                return shop.ask("Create", key, key.encode())

            asked = [pool.submit(one, shop, f"key-{n}", both) for shop in shops * 2]
            assert len({each.result() for each in asked}) == 1
    assert sorted(shops[0].items()) == sorted(f"key-{n}".encode() for n in range(10))


@pytest.mark.database
def test_in_progress_is_told_as_wished(open_shop: Open) -> None:
    codes = GrpcCodes(in_progress=grpc.StatusCode.UNAVAILABLE, reused=grpc.StatusCode.ALREADY_EXISTS)
    shop = open_shop(policy(operation=LEASED), codes=codes)
    first = shop.call(plan="gate")
    shop.gate.wait_reached()
    code, reason, after = told(shop.call(plan="gate"))
    assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "IDEMPOTENCY_IN_PROGRESS")
    assert after is not None
    assert told(shop.call(item=b"coffee"))[:2] == (grpc.StatusCode.ALREADY_EXISTS, "IDEMPOTENCY_KEY_REUSED")
    shop.gate.open.set()
    assert first.result().data == b"1:tea"


@pytest.mark.database
def test_a_call_without_a_key_is_left_alone_or_refused(open_shop: Open) -> None:
    shop = open_shop(policy(required=False), policy("Change"))
    assert shop.ask("Create", None) == b"no run:tea"
    assert shop.ask("Unlisted", "k1") == b"no run:tea"
    call = shop.done("Change", None)
    assert told(call) == (grpc.StatusCode.INVALID_ARGUMENT, "IDEMPOTENCY_KEY_MISSING", None)
    assert "metadata idempotency-key" in call.details()
    assert shop.records() == 0


@pytest.mark.database
def test_the_key_in_a_field(open_shop: Open) -> None:
    shop = open_shop(policy(key_field="content_type", required=False))
    assert shop.ask("Create", None, plan="ok") == shop.ask("Create", "other", plan="ok") == b"1:tea"
    assert shop.ask("Create", "unseen", plan="") == b"no run:tea"
    call = shop.done("Create", None, plan="o\nk")
    assert told(call)[:2] == (grpc.StatusCode.INVALID_ARGUMENT, "IDEMPOTENCY_KEY_MALFORMED")
    assert "field content_type" in call.details()


@pytest.mark.database
@pytest.mark.parametrize("how", ["cancelled", "deadline"])
def test_a_client_that_is_gone(open_shop: Open, flavour: str, how: str) -> None:
    """A thread goes on and its answer is stored; a task is cancelled, and what it did is undone."""
    shop = open_shop(policy(operation={"wait_s": 30.0}))
    first = shop.call(plan="gate", timeout=2.0 if how == "deadline" else CALL_S)
    shop.gate.wait_reached()
    if how == "cancelled":
        first.cancel()
    else:
        assert first.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    tasks = flavour.startswith("tasks") and not flavour.startswith("tasks-threads")
    if tasks:
        pause = threading.Event()
        while not shop.cancelled:
            pause.wait(0.01)
    shop.gate.open.set()
    assert shop.ask(plan="gate") == b"%d:tea" % (1 + tasks)
    assert shop.items() == [b"tea"]
