"""Payload and result types other than dataclasses, through server and fence row."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pydantic
import pytest
from google.protobuf.wrappers_pb2 import Int64Value

from participant_sdk import Call
from participant_sdk.payload import encode
from tests.contract.participant.world import CANCEL, CONFIRM, DONE, REFUSED, TRY, World, new_xid
from tricord.v1 import types_pb2


class Line(pydantic.BaseModel):
    """As a user would write it."""

    amount: int = pydantic.Field(alias="Amount", ge=0)


class Hold(msgspec.Struct, rename="camel"):
    """As a user would write it."""

    hold_id: int


KINDS: dict[str, tuple[Any, Any, Any, Any]] = {
    # action: payload type, result type, payload, what Try returns for it
    "protobuf": (types_pb2.Refusal, Int64Value, types_pb2.Refusal(reason="r"), Int64Value(value=7)),
    "dict": (dict[str, int], dict, {"a": 1}, {"hold": [1, None]}),
    "bytes": (bytes, bytes, b"\x00\xff", b"\xfe\x00"),
    "pydantic": (Line, Line, Line(Amount=1), Line(Amount=2)),
    "msgspec": (Hold, Hold, Hold(1), Hold(2)),
    "untyped_result": (bytes, None, b"x", {"hold": 1}),
}


class Seen:
    """What the handlers were called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, Any]] = []


def define(world: World, seen: Seen, action: str) -> None:
    payload_type, result_type, _, result = KINDS[action]

    def note(phase: str, call: Call[Any]) -> Any:
        assert (call.action, call.participant) == (action, "bank")
        assert 0 < call.deadline <= 10
        seen.calls.append((phase, call.payload, call.result))
        return result

    if world.is_async:

        async def try_async(call: Any, db: Any) -> Any:
            return note("try", call)

        async def confirm_async(call: Any, db: Any) -> None:
            note("confirm", call)

        async def cancel_async(call: Any, db: Any) -> None:
            note("cancel", call)

        handlers: tuple[Any, ...] = (try_async, confirm_async, cancel_async)
    else:
        handlers = (
            lambda call, db: note("try", call),
            lambda call, db: note("confirm", call),
            lambda call, db: note("cancel", call),
        )
    call_of: Any = Call
    handlers[0].__annotations__.update({"call": call_of[payload_type], "return": result_type})
    definition = world.participant.action(action)(handlers[0])
    definition.confirm(handlers[1])
    definition.cancel(handlers[2])


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
async def world(flavour: str, participant_url: str, seen: Seen) -> AsyncIterator[World]:
    world = World(flavour, participant_url)
    for action in KINDS:
        define(world, seen, action)
    await world.start()
    yield world
    await world.close()


async def test_every_kind_of_payload_and_result(world: World, seen: Seen) -> None:
    for action, (_, _, payload, result) in KINDS.items():
        for phase, name in ((CONFIRM, "confirm"), (CANCEL, "cancel")):
            xid = new_xid()
            sent = encode(payload)
            reply = await world.call(TRY, xid, action=action, payload=sent)
            assert (reply.outcome, reply.result.data) == (DONE, encode(result).data), reply
            assert reply.result.content_type == encode(result).content_type
            assert (await world.call(TRY, xid, action=action, payload=sent)).result == reply.result
            assert (await world.call(phase, xid, action=action, payload=sent)).outcome == DONE
            assert seen.calls == [("try", payload, None), (name, payload, result)]
            seen.calls.clear()


async def test_a_payload_of_another_type_is_refused(world: World, seen: Seen) -> None:
    for action in ("protobuf", "dict"):
        xid = new_xid()
        reply = await world.call(TRY, xid, action=action, payload=encode(b"\xff\xff"))
        assert (reply.outcome, reply.refusal.reason) == (REFUSED, "invalid_payload")
        assert "has content type 'application/octet-stream'" in reply.refusal.message
    assert seen.calls == []


async def test_large_payloads_and_results_travel(world: World, seen: Seen) -> None:
    """As large as the coordinator lets through, many at once."""
    payload = encode(b"x" * 1024 * 1024)
    messages = [world.message(TRY, new_xid(), action="bytes", payload=payload, call_id=n) for n in range(1, 9)]
    replies = await world.exchange(*([message] for message in messages))
    assert [replies[n].outcome for n in range(1, 9)] == [DONE] * 8
    await asyncio.gather(*(world.call(CONFIRM, each.xid, action="bytes", payload=payload) for each in messages))
    assert len(seen.calls) >= 16  # under SERIALIZABLE some lose a race and run again
