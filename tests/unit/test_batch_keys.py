"""What is declared of a batched action, and what its calls have in common."""

import time
from dataclasses import dataclass
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from sqlalchemy import create_engine

from participant_sdk import Call, ConfigurationError, Participant
from participant_sdk.batch_keys import KNOWN_MAX, BatchKeys
from participant_sdk.call import IncomingCall, fingerprint
from participant_sdk.fence import Phase
from participant_sdk.payload import Payload, encode


@dataclass(frozen=True)
class Debit:
    account: str
    amount: int = 1
    tags: tuple[str, ...] = ()


def declare(kind: Any, **options: Any) -> Any:
    bank = Participant("bank", create_engine("sqlite:///never.db"))

    def debit(call: Any, db: Any) -> None: ...

    debit.__annotations__["call"] = Call[kind]
    definition = bank.action("debit", **options)(debit)
    for phase in (definition.confirm, definition.cancel):

        @phase  # type: ignore[untyped-decorator,unused-ignore]
        def other(call: Any, db: Any) -> None: ...

    return bank.check()


def key(actions: Any, payload: Payload, phase: Phase = Phase.TRY, action: str = "debit") -> Any:
    expires_at = time.monotonic() + 5
    digest = fingerprint(action, payload)
    keys = actions if isinstance(actions, BatchKeys) else BatchKeys(actions)
    return keys.of(IncomingCall(phase, "a" * 32, 1, "bank", action, payload, 1, expires_at, digest))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"batch": True}, "no batch_key"),
        ({"batch_key": "account"}, "needs batch=True"),
        ({"batch": True, "batch_key": 7}, "neither a field's name nor a function"),
        ({"batch": True, "batch_key": "account", "external": True}, "external=True and batch=True"),
        ({"batch": True, "batch_key": "acount"}, "'acount' is no field of Debit"),
    ],
)
def test_what_cannot_be_declared_is_told_with_the_actions_name(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error) as told:
        declare(Debit, **options)
    assert "'debit'" in str(told.value)


def test_bytes_have_no_fields() -> None:
    with pytest.raises(ConfigurationError, match="'account' is no field of bytes"):
        declare(bytes, batch=True, batch_key="account")


def test_the_key_is_a_field_or_a_function_of_the_payload() -> None:
    alice = encode(Debit("alice"))
    for kind, batch_key, payload, expected in (
        (Debit, "account", alice, "alice"),
        (dict, "account", alice, "alice"),
        (dict[str, Any], lambda debit: debit["account"].upper(), alice, "ALICE"),
        (bytes, lambda data: data[:1], Payload(b"xyz"), b"x"),
        (Timestamp, "seconds", encode(Timestamp(seconds=7)), 7),
    ):
        actions = declare(kind, batch=True, batch_key=batch_key)
        for phase in (Phase.TRY, Phase.CONFIRM, Phase.CANCEL):
            assert key(actions, payload, phase) == (phase, "debit", expected)


def test_calls_that_run_by_themselves(caplog: pytest.LogCaptureFixture) -> None:
    """Their key cannot be told, or there is none."""
    batched = declare(Debit, batch=True, batch_key="account")
    alice = encode(Debit("alice"))
    assert key(declare(Debit), alice) is None
    assert key(batched, alice, Phase.SETTLE_CONFIRMED) is None
    assert key(batched, alice, action="gone") is None
    assert key(batched, Payload(b'{"account": 7}', "application/json")) is None
    assert key(batched, Payload(b"", "text/plain")) is None
    assert caplog.records == []
    for failing in (lambda debit: 1 / 0, lambda debit: [debit.account]):
        assert key(declare(Debit, batch=True, batch_key=failing), alice) is None
    assert [record.message.split(": ", 1)[1] for record in caplog.records] == [
        "the batch_key of its action failed, it runs by itself"
    ] * 2


def test_the_key_of_a_payload_is_remembered_for_its_confirm_and_not_for_ever() -> None:
    asked: list[int] = []

    def amount(debit: Debit) -> int:
        asked.append(debit.amount)
        return debit.amount

    keys = BatchKeys(declare(Debit, batch=True, batch_key=amount))
    for phase in (Phase.TRY, Phase.CONFIRM):
        assert key(keys, encode(Debit("alice", 0)), phase) == (phase, "debit", 0)
    assert asked == [0]
    for number in range(KNOWN_MAX):
        key(keys, encode(Debit("alice", number)))
    assert len(keys._known) <= KNOWN_MAX
