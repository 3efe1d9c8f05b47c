"""Metadata at the initiator: sent as given, and what is wrong with it is told before anything is sent."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from participant_sdk import InvalidRequest
from tests.contract.participant.test_client import CONFIRMED, DEBIT, Client, Coordinator, serve, transaction

LARGEST = {f"{n:064}": "漢" * 256 for n in range(16)}


@pytest.fixture
def answering() -> Coordinator:
    return Coordinator()  # type: ignore[abstract]


@pytest.fixture(params=["sync", "async"])
async def asking(request: pytest.FixtureRequest, answering: Coordinator) -> AsyncIterator[Client]:
    server, address = await serve(answering)
    client = Client(request.param, address)
    yield client
    await client.close()
    await server.stop(None)


@pytest.mark.parametrize("metadata", [{"tenant": "a"}, LARGEST, {"A-z_0.9": ""}, {}, None])
async def test_it_is_sent_and_told_again(
    answering: Coordinator, asking: Client, metadata: dict[str, str] | None
) -> None:
    answering.answers = [transaction(CONFIRMED, metadata=metadata)]
    found = await asking.execute(DEBIT, metadata=metadata)
    assert dict(answering.requests[0].metadata) == found.metadata == (metadata or {})
    assert hash(found) == hash(found)


@pytest.mark.parametrize(
    ("metadata", "field", "said"),
    [
        ({str(n): "" for n in range(17)}, "metadata", "has 17 entries; the limit is 16"),
        ({"": "a"}, 'metadata[""]', "a key is 1 to 64 characters of A-Z a-z 0-9 . _ -"),
        ({"k" * 65: "a"}, f'metadata["{"k" * 64}"]', "a key is 1 to 64 characters"),
        ({"a b": "a"}, 'metadata["a b"]', "a key is"),
        ({"a\n": "a"}, r'metadata["a\n"]', "a key is"),
        ({"é": "a"}, r'metadata["\u00e9"]', "a key is"),
        ({"a\ud800": "a"}, r'metadata["a\ud800"]', "a key is"),
        ({1: "a"}, "metadata[1]", "a key is"),
        ({"tenant": "a" * 257}, 'metadata["tenant"]', "has 257 characters; the limit is 256"),
        ({"tenant": "a\0"}, 'metadata["tenant"]', "control or other unprintable characters"),
        ({"tenant": "a\ud800"}, 'metadata["tenant"]', "unprintable"),
        ({"tenant": "\u202e"}, 'metadata["tenant"]', "unprintable"),
        ({"tenant": 5}, 'metadata["tenant"]', "is int and not a string"),
        ({"tenant": b"a"}, 'metadata["tenant"]', "is bytes and not a string"),
        ({"tenant": None}, 'metadata["tenant"]', "is NoneType and not a string"),
        ([("tenant", "a")], "metadata", "is list and not a mapping of strings to strings"),
        ("tenant", "metadata", "is str and not a mapping"),
    ],
)
async def test_what_is_wrong_is_told_before_it_is_sent(
    answering: Coordinator, asking: Client, metadata: Any, field: str, said: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await asking.execute(DEBIT, metadata=metadata)
    assert list(caught.value.fields) == [field]
    assert said in caught.value.fields[field]
    assert str(caught.value).isprintable()
    assert answering.requests == []


async def test_all_that_is_wrong_is_told_at_once(answering: Coordinator, asking: Client) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await asking.execute(DEBIT, metadata={"a": "\0", "ok": "fine", "": "x"})
    assert list(caught.value.fields) == ['metadata["a"]', 'metadata[""]']
