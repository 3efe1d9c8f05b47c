"""What the arguments of an idempotent function say: its key, its tenant, which calls are one, and what is lent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from google.protobuf.struct_pb2 import Struct
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.arguments import KIND, FieldRules, Signature, keyed_values
from participant_sdk.idempotency.errors import KeyMalformed, KeyMissing, ScopeMissing
from participant_sdk.idempotency.fingerprints import Custom, FormBody, JsonBody, MessageBody, RawBytes
from participant_sdk.idempotency.keys import KeyRules
from participant_sdk.idempotency.lending import Lent
from participant_sdk.idempotency.request import KeyedRequest
from participant_sdk.idempotency.runs import AsyncRun, Run

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

RULES = KeyRules(field="payment_id")


def pay(payment_id: Any, account: Any = "alice", amount: Any = 5, *, note: Any = "", db: Connection) -> None: ...


def request_of(
    *args: Any,
    fields: FieldRules = FieldRules(),  # noqa: B008
    key: Any = "payment_id",
    tenant: Any = None,
    function: Callable[..., Any] = pay,
    **kwargs: Any,
) -> KeyedRequest:
    return Signature("pay", function, key, tenant, fields).request(RULES, args, kwargs)


def same(one: KeyedRequest, other: KeyedRequest) -> bool:
    return one.matches(other.fingerprint) is True


def test_calls_that_say_the_same_are_one_however_they_are_written() -> None:
    one = request_of("p-1", "alice", 5)
    assert one.key == "p-1"
    assert same(one, request_of("p-2", amount=5, account="alice"))
    assert same(one, request_of("p-1"))
    for other in (request_of("p-1", "bob"), request_of("p-1", amount=6), request_of("p-1", amount="5")):
        assert not same(one, other)
    assert not same(request_of("p-1", amount=True), request_of("p-1", amount=1))
    assert not same(request_of("p-1", "x", b"y"), request_of("p-1", "x", "y"))
    assert not same(request_of("p-1", amount=None), request_of("p-1", amount=""))


def test_only_the_named_fields_count() -> None:
    named = FieldRules(("account", "amount"))
    assert same(request_of("p-1", note="a", fields=named), request_of("p-1", note="b", fields=named))
    assert same(request_of("p-1", note=object(), fields=named), request_of("p-1", fields=named))
    assert not same(request_of("p-1", "a", fields=named), request_of("p-1", "b", fields=named))
    with_key = FieldRules(("payment_id",))
    assert not same(request_of("p-1", fields=with_key), request_of("p-2", fields=with_key))


def test_fields_that_have_changed_are_compared_as_they_were() -> None:
    before = request_of("p-1", fields=FieldRules(("account",)))
    now = FieldRules(("account", "amount"), revision=1, older={0: ("account",)})
    assert request_of("p-1", amount=6, fields=now).matches(before.fingerprint) is True
    assert request_of("p-1", "bob", fields=now).matches(before.fingerprint) is False
    assert request_of("p-1", fields=FieldRules(("amount",), revision=2)).matches(before.fingerprint) is None


def test_a_message_and_bytes_are_compared_by_their_bytes() -> None:
    one, other = Struct(), Struct()
    one.update({"a": 1, "b": 2})
    other.update({"b": 2, "a": 1})
    assert same(request_of("p-1", one), request_of("p-1", other))
    assert not same(request_of("p-1", one), request_of("p-1", one.SerializeToString(deterministic=True)))
    assert same(request_of("p-1", b"x"), request_of("p-1", bytearray(b"x")))


def test_a_value_that_cannot_be_compared_is_named() -> None:
    for value in (object(), {1: 2}, float("nan"), {1, 2}):
        with pytest.raises(TypeError, match=r"pay: 'amount' cannot be compared with a repeat's: .*`fields`"):
            request_of("p-1", amount=value)


def test_a_key_is_text_a_uuid_or_a_number() -> None:
    assert request_of(UUID(int=7)).key == "00000000-0000-0000-0000-000000000007"
    assert request_of(0).key == "0"
    assert request_of("p-1", key=lambda payment_id, *rest: f"pay:{payment_id}").key == "pay:p-1"
    for nothing in (None, ""):
        with pytest.raises(KeyMissing, match="payment_id is not given"):
            request_of(nothing)
    for wrong in (True, 1.5, b"p-1", ["p-1"], "é", "x" * 256, "a\n"):
        with pytest.raises(KeyMalformed, match=r"^payment_id "):
            request_of(wrong)


def test_a_tenant_is_told_or_nothing_runs() -> None:
    assert request_of("p-1").tenant == ""
    assert request_of("p-1", tenant="account").tenant == "alice"
    assert request_of("p-1", 0, tenant="account").tenant == "0"
    assert request_of("p-1", tenant=lambda *args: "acme").tenant == "acme"
    for nothing in (None, "", "a\n", "x" * 201, b"alice", 1.5):
        with pytest.raises(ScopeMissing, match="pay: "):
            request_of("p-1", nothing, tenant="account")
    with pytest.raises(ScopeMissing):
        keyed_values("pay", "p-1", None, {}, FieldRules(), RULES)


class Service:
    def pay(self, payment_id: str, amount: int) -> None: ...


def test_a_method_says_what_counts() -> None:
    named = FieldRules(("amount",))
    one, other = (request_of(Service(), "p-1", 5, function=Service.pay, fields=named) for _ in range(2))
    assert same(one, other)
    with pytest.raises(TypeError, match="'self' cannot be compared"):
        request_of(Service(), "p-1", 5, function=Service.pay)


def session_by_name(key: str, session: Session, run: Run | None = None) -> None: ...
async def both(key: str, db: AsyncConnection, session: AsyncSession, run: AsyncRun) -> None: ...


def test_what_is_annotated_so_is_lent_and_not_asked_of_the_caller() -> None:
    signature = Signature("f", session_by_name, "key", None, FieldRules())
    from sqlalchemy.orm import Session as SessionClass

    assert signature.lent == {"session": SessionClass, "run": Lent.RUN}
    assert list(signature.public.parameters) == ["key"]
    asynchronous = Signature("f", both, "key", None, FieldRules())
    assert asynchronous.lent == {"db": Lent.CONNECTION, "session": AsyncSession, "run": Lent.RUN}


def test_a_lent_parameter_gets_what_is_lent_wherever_it_stands() -> None:
    def work(db: Connection, key: str, /, *rest: int, run: Run, **more: int) -> None: ...

    signature = Signature("f", work, "key", None, FieldRules())
    whole = signature.complete(("k", 1, 2), {"x": 3}, {"db": "the connection", "run": "the run"})
    assert whole.args == ("the connection", "k", 1, 2)
    assert whole.kwargs == {"run": "the run", "x": 3}


def test_what_the_caller_gives_is_worked_in() -> None:
    signature = Signature("f", session_by_name, "key", None, FieldRules())
    kwargs = {"key": "k", "session": "mine"}
    assert signature.take_lent(kwargs) == ({"session": "mine"}, "mine")
    assert kwargs == {"key": "k"}
    assert signature.take_lent({"key": "k", "session": None}) == ({}, None)
    with pytest.raises(TypeError, match="one session or connection can be given, and no run"):
        signature.take_lent({"run": "mine"})


def a_def(key: str, db: AsyncConnection) -> None: ...
async def an_async_def(key: str, db: Connection) -> None: ...
def with_async_run(key: str, run: AsyncRun) -> None: ...
def a_generator(key: str) -> Iterator[int]:
    yield 1


async def an_async_generator(key: str) -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (a_def, "f: db is annotated AsyncConnection: with an Engine it is lent a Connection"),
        (an_async_def, "f: db is annotated Connection: with an AsyncEngine it is lent a AsyncConnection"),
        (with_async_run, "f: run is annotated AsyncRun: a def is lent a Run"),
        (a_generator, "f is a generator"),
        (an_async_generator, "f is a generator"),
    ],
)
def test_a_function_that_cannot_be_idempotent_is_refused(function: Callable[..., Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        Signature("f", function, "key", None, FieldRules())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"key": "nope"}, "no parameter 'nope'"),
        ({"key": "db"}, "no parameter 'db'"),
        ({"tenant": "nope"}, "no parameter 'nope'"),
        ({"fields": FieldRules(("nope",))}, "no parameter 'nope'"),
        ({"fields": FieldRules(("amount",), 1, {0: ("nope",)})}, "no parameter 'nope'"),
    ],
)
def test_names_that_the_function_does_not_have_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        request_of("p-1", **settings)


def test_field_rules_that_cannot_work_are_refused() -> None:
    rules: list[Callable[[], FieldRules]] = [
        lambda: FieldRules("amount"),  # type: ignore[arg-type]
        lambda: FieldRules(("amount", "amount")),
        lambda: FieldRules(revision=1_000),
        lambda: FieldRules(revision=0, older={0: None}),
        lambda: FieldRules(revision=0, older={-1: None}),
    ]
    for make in rules:
        with pytest.raises(ConfigurationError):
            make()


def test_what_is_stored_today_can_be_compared_for_ever() -> None:
    found = request_of("p-1", "alice", {"b": [1.5, None], "a": "é"}).fingerprint
    assert found.version == 6_000
    assert found.digest.hex() == "66ba6ecbcd431a3e498a1013e3e0b49e577f458b344cda6bd5de498d32b3a702"
    assert KIND not in {algorithm.kind for algorithm in (RawBytes, JsonBody, FormBody, MessageBody, Custom)}
