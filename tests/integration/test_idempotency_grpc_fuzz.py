"""Fuzzed metadata, keys and bodies: no INTERNAL and no UNKNOWN, and nothing is stored wrongly."""

import random
import string
from typing import Any, Final

import grpc
import pytest
from google.protobuf.message import DecodeError
from sqlalchemy import select

from participant_sdk.idempotency.errors import KeyMalformed
from participant_sdk.idempotency.keys import KeyRules, parse_key
from participant_sdk.idempotency.operation import Mode
from participant_sdk.idempotency.record import State
from participant_sdk.idempotency.tables import DEFAULT
from tricord.v1 import types_pb2

from .keyed_shop import SERVICE, Shop, policy
from .keyed_shop_handlers import CALL_S
from .keyed_shops import MOST, Open, flavours, open_shop, replayed, told

__all__ = ["open_shop"]  # a fixture

flavour = flavours(MOST)

pytestmark = pytest.mark.database
CALLS: Final = 400
PRINTABLE: Final = "".join(chr(code) for code in range(0x20, 0x7F))
KEYS: Final = [
    "k1",
    '"k1"',
    "k2",
    '"k\\"2"',
    '"a b"',
    "a b",
    "a,b",
    '"k1";v=1',
    '"k1',
    "",
    "x" * 256,
    '""',
    "'; DROP TABLE",
]
ALLOWED: Final = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


def drawn(dice: random.Random) -> tuple[list[tuple[str, str | bytes]], bytes]:
    """The metadata and the body of a call."""
    keys = dice.choice([[dice.choice(KEYS)]] * 8 + [[], [dice.choice(KEYS)] * 2])
    if dice.random() < 0.3:
        keys = ["".join(dice.choices(PRINTABLE, k=dice.randrange(40)))]
    metadata: list[tuple[str, str | bytes]] = [("idempotency-key", key) for key in keys]
    if dice.random() < 0.9:
        metadata.append(("tenant", dice.choice(["alice", "bob", "", "t" * 201, "~" * 200])))
    for _ in range(dice.randrange(3)):
        name = "".join(dice.choices(string.ascii_lowercase + string.digits + "-_.", k=dice.randrange(1, 20)))
        if not name.startswith(("grpc-", "-", "_", ".")) and name != "te":
            value = dice.randbytes(dice.randrange(30)) if name.endswith("-bin") else "v" * dice.randrange(30)
            metadata.append((name, value))
    dice.shuffle(metadata)
    if dice.random() < 0.6:
        body = types_pb2.Payload(data=dice.choice([b"tea", b"coffee", b""]), content_type="ok").SerializeToString()
    else:
        body = dice.randbytes(dice.randrange(60))
    return metadata, body


def expected_key(metadata: list[tuple[str, str | bytes]]) -> str | None:
    """The key that a call has; None if it has none that is taken."""
    values = [value for name, value in metadata if name == "idempotency-key"]
    try:
        return parse_key(values[0], KeyRules()) if len(values) == 1 else None
    except KeyMalformed:
        return None


def is_plan(body: bytes) -> bool:
    """Whether the shop can do what is said there."""
    try:
        return types_pb2.Payload.FromString(body).content_type in ("", "ok")
    except DecodeError:
        return False


@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_sent(open_shop: Open, seed: int) -> None:
    mode = (Mode.ATOMIC, Mode.LEASED)[seed]
    shop = open_shop(policy(operation={"mode": mode}, request_bytes_max=50))
    dice = random.Random(seed)
    stub: Any = shop.channel.unary_unary(f"/{SERVICE}/Create")
    first: dict[tuple[str, str], tuple[bytes, bytes]] = {}
    for _ in range(CALLS):
        metadata, body = drawn(dice)
        try:
            types_pb2.Payload.FromString(body)
        except DecodeError:
            pass
        else:
            if not is_plan(body):
                continue
        call = stub.future(body, metadata=metadata, timeout=CALL_S)
        code = call.code()
        assert code in ALLOWED, (metadata, body, code, call.details())
        tenant = dict(metadata).get("tenant")
        key = expected_key(metadata)
        assert (code is grpc.StatusCode.OK) <= (key is not None and tenant in ("alice", "bob", "~" * 200))
        if code is grpc.StatusCode.OK:
            assert isinstance(tenant, str)
            assert key is not None
            assert replayed(call) == ((tenant, key) in first)
            assert first.setdefault((tenant, key), (body, call.result())) == (body, call.result())
            assert shop.runs == len(first)
        elif told(call)[1] == "IDEMPOTENCY_KEY_REUSED":
            assert key is not None
            assert first[str(tenant), key][0] != body
    assert len(first) == shop.runs == shop.records() == len(shop.items()) > 3
    assert states(shop) == {State.SUCCEEDED}


def states(shop: Shop) -> set[int]:
    """Those of all records."""
    with shop.engine.connect() as db:
        return set(db.execute(select(DEFAULT.records.c.state).where(DEFAULT.records.c.operation != "")).scalars())
