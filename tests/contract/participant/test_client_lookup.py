"""What the SDK makes of the answers to a look-up, of errors, and of what cannot be asked; sync and asyncio."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from participant_sdk.coordinator_lookup import (
    LOOK_UP_XIDS_MAX,
    AsyncCoordinatorLookup,
    CoordinatorLookup,
)
from participant_sdk.errors import ConfigurationError, InvalidRequest, OutcomeUnknown, RequestFailed
from participant_sdk.transaction import TransactionState
from tests.contract.participant.test_client import CONFIRMING, XID, Coordinator, serve, status, transaction

OTHER = "a" * 32


Ask = Callable[..., Any]


@pytest.fixture
def answering() -> Coordinator:
    return Coordinator()  # type: ignore[abstract]


@pytest.fixture(params=["sync", "async"])
async def ask(request: pytest.FixtureRequest, answering: Coordinator) -> AsyncIterator[Ask]:
    """Calls a method of either flavour by its name."""
    server, address = await serve(answering)
    if request.param == "sync":
        with CoordinatorLookup(address) as lookup:
            yield lambda name, *arguments: asyncio.to_thread(getattr(lookup, name), *arguments)
    else:
        async with AsyncCoordinatorLookup(address) as also:
            yield lambda name, *arguments: getattr(also, name)(*arguments)
    await server.stop(None)


async def test_an_answer(answering: Coordinator, ask: Ask) -> None:
    """A state that this SDK does not know is UNKNOWN, and not finished."""
    answering.answers = [transaction(CONFIRMING)]
    found = await ask("look_up", [XID, OTHER, "b" * 32])
    assert found.states == {XID: TransactionState.CONFIRMING, OTHER: TransactionState.UNKNOWN}
    assert (found.store_id, found.incarnation) == ("store", 7)
    assert list(answering.requests[0].xids) == [XID, OTHER, "b" * 32]


def test_which_states_are_finished() -> None:
    assert [state.name for state in TransactionState if state.finished] == ["CONFIRMED", "CANCELLED"]


async def test_one_that_is_not_there_is_none(answering: Coordinator, ask: Ask) -> None:
    answering.answers = [status(grpc.StatusCode.NOT_FOUND, "TRANSACTION_NOT_FOUND")]
    assert await ask("fetch", XID) is None


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (status(grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE"), OutcomeUnknown),
        (status(grpc.StatusCode.INTERNAL), OutcomeUnknown),
        (status(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED"), OutcomeUnknown),
        (status(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", xids="is wrong"), InvalidRequest),
        (status(grpc.StatusCode.PERMISSION_DENIED), RequestFailed),
        (status(grpc.StatusCode.UNIMPLEMENTED), ConfigurationError),
    ],
)
@pytest.mark.parametrize("method", ["look_up", "fetch"])
async def test_errors(answering: Coordinator, ask: Ask, method: str, answer: Any, error: type[Exception]) -> None:
    """Each question is asked once: who asks comes again anyway."""
    answering.answers = [answer]
    with pytest.raises(error) as caught:
        await ask(method, [XID] if method == "look_up" else XID)
    assert type(caught.value) is error
    assert len(answering.requests) == 1


async def test_no_answer_in_time(answering: Coordinator, ask: Ask) -> None:
    async def hang(context: Any) -> None:
        await asyncio.Event().wait()

    answering.answers = [hang]
    with pytest.raises(OutcomeUnknown, match="DEADLINE_EXCEEDED"):
        await ask("look_up", [XID], 0.2)


@pytest.mark.parametrize(
    ("xids", "field"),
    [
        ([], "xids"),
        ([XID] * (LOOK_UP_XIDS_MAX + 1), "xids"),
        ([XID, XID.upper().replace("0", "A")], "xids[1]"),
        ([XID, f"{XID[:8]}-{XID[8:]}"], "xids[1]"),
        ([XID[:-1] + "\ud800"], "xids[0]"),
        ([XID, XID, None], "xids[2]"),
        (["0" * 33], "xids[0]"),
        (["\uff10" * 32], "xids[0]"),
    ],
    ids=["none", "too many", "upper case", "dashes", "no text", "None", "long", "wide digits"],
)
async def test_what_cannot_be_asked_is_told_here(answering: Coordinator, ask: Ask, xids: list[Any], field: str) -> None:
    """Another form of an xid would be answered in the one form, and so seem to be absent."""
    with pytest.raises(InvalidRequest) as caught:
        await ask("look_up", xids)
    assert list(caught.value.fields) == [field]
    assert answering.requests == []


async def test_closed_under_way_is_not_known(answering: Coordinator) -> None:
    """Of a thread that purges, when its participant stops."""
    arrived = asyncio.Event()

    async def hang(context: Any) -> None:
        arrived.set()
        await asyncio.Event().wait()

    server, address = await serve(answering)
    for kind in (CoordinatorLookup, AsyncCoordinatorLookup):
        answering.answers = [hang]
        arrived.clear()
        lookup: Any = kind(address)
        in_thread = kind is CoordinatorLookup
        asking = asyncio.ensure_future(asyncio.to_thread(lookup.look_up, [XID]) if in_thread else lookup.look_up([XID]))
        await arrived.wait()
        closing = lookup.close()
        if not in_thread:
            await closing
        with pytest.raises(OutcomeUnknown):
            await asking
        with pytest.raises(ConfigurationError, match="the client is closed"):
            await (asyncio.to_thread(lookup.fetch, XID) if in_thread else lookup.fetch(XID))
    await server.stop(None)
