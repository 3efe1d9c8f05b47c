"""Participants in the configuration: what is taken, and what the complaint says."""

import json

import pytest
from pydantic import TypeAdapter, ValidationError

from coordinator.config_participants import ADDRESSES_MAX, PARTICIPANTS_MAX, StaticParticipant, StaticParticipants

ADAPTER: TypeAdapter[dict[str, StaticParticipant]] = TypeAdapter(StaticParticipants)
BANK = {"addresses": ["10.0.0.5:7801", "[::1]:7802", "bank.internal:7803"], "actions": ["debit", "credit"]}


def test_what_a_file_says() -> None:
    bank = ADAPTER.validate_python({"bank": BANK})["bank"]
    assert bank.addresses == ("10.0.0.5:7801", "[::1]:7802", "bank.internal:7803")
    assert bank.actions == ("debit", "credit")


def test_what_the_environment_says() -> None:
    assert ADAPTER.validate_python(json.dumps({"bank": BANK})) == ADAPTER.validate_python({"bank": BANK})


@pytest.mark.parametrize(
    ("value", "place", "said"),
    [
        ({"b nk": BANK}, "b nk", "1 to 64 of A-Z"),
        ({"b" * 65: BANK}, "b" * 65, "65 characters"),
        ({"bank": {**BANK, "addresses": []}}, "bank.addresses", "at least 1"),
        ({"bank": {**BANK, "addresses": ["nowhere"]}}, "bank.addresses.0", "host:port with at most 255 characters"),
        ({"bank": {**BANK, "addresses": ["h:1", "h:0"]}}, "bank.addresses.1", "host:port"),
        ({"bank": {**BANK, "addresses": ["h:65536"]}}, "bank.addresses.0", "host:port"),
        ({"bank": {**BANK, "addresses": ["h" * 254 + ":1"]}}, "bank.addresses.0", "255 characters"),
        ({"bank": {**BANK, "addresses": ["h:1", "h:1"]}}, "bank.addresses", "names h:1 twice"),
        ({"bank": {**BANK, "addresses": [f"h:{n + 1}" for n in range(ADDRESSES_MAX + 1)]}}, "bank.addresses", "64"),
        ({"bank": {**BANK, "actions": []}}, "bank.actions", "at least 1"),
        ({"bank": {**BANK, "actions": ["de bit"]}}, "bank.actions.0", "1 to 64 of A-Z"),
        ({"bank": {**BANK, "actions": ["a", "a"]}}, "bank.actions", "names a twice"),
        ({"bank": {**BANK, "actions": [f"a{n}" for n in range(257)]}}, "bank.actions", "256"),
        ({"bank": {"addresses": ["h:1"]}}, "bank.actions", "required"),
        ({"bank": {**BANK, "address": "h:1"}}, "bank.address", "not permitted"),
        ({"bank": BANK, " bank": BANK}, "", "names bank twice"),
        ('{"bank": {}, "bank": {}}', "", "names bank twice"),
        ('{"bank": {"actions": [], "actions": []}}', "", "names actions twice"),
        ({f"p{n}": BANK for n in range(PARTICIPANTS_MAX + 1)}, "", "at most 1000"),
        ("{", "", "must be JSON"),
        ("[" * 100_000, "", "must be JSON"),
        ("[]", "", "valid dictionary"),
    ],
)
def test_what_is_wrong_is_named_with_its_limit(value: object, place: str, said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ADAPTER.validate_python(value)
    (detail, *_) = caught.value.errors()
    assert ".".join(str(part) for part in detail["loc"] if part != "[key]") == place
    assert said in detail["msg"]
