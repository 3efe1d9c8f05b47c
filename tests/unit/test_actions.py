"""Actions: what is wrong with one is found at import or at the start, and said by name."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from participant_sdk import Call, ConfigurationError, Participant, Refused
from participant_sdk.payload import encode
from tricord.v1 import types_pb2


@dataclass(frozen=True)
class Debit:
    amount: int


@dataclass(frozen=True)
class Held:
    hold: int


class OwnSession(Session):
    """A user's."""


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return create_engine(f"sqlite:///{tmp_path / 'bank.db'}")


@pytest.fixture
def bank(engine: Engine) -> Participant:
    return Participant("bank-a", engine)


def complete(bank: Participant, try_handler: Callable[..., Any], name: str = "debit") -> Any:
    """`try_handler` with a Confirm and a Cancel that fit anything, checked."""
    definition = bank.action(name)(try_handler)
    definition.confirm(lambda call, db: None)
    definition.cancel(lambda call, db: None)
    return bank.check()[name]


def test_handlers_stay_functions_that_a_test_can_call(bank: Participant) -> None:
    @bank.action("debit")
    def debit(call: Call[Debit], db: Connection | None) -> Held:
        """Reserve."""
        if call.payload.amount > 10:
            raise Refused("insufficient_funds", "too much")
        return Held(call.payload.amount)

    @debit.confirm
    def confirm_debit(call: Call[Debit], db: Connection | None) -> str:
        return f"confirmed {call.result}"

    @debit.cancel
    def cancel_debit(call: Call[Debit], db: Connection | None) -> str:
        return f"cancelled {call.result}"

    assert debit(Call(payload=Debit(5)), None) == Held(5)
    with pytest.raises(Refused, match="insufficient_funds: too much"):
        debit(Call(payload=Debit(11)), None)
    assert confirm_debit(Call(payload=Debit(5), result=Held(5)), None) == "confirmed Held(hold=5)"
    assert cancel_debit(Call(payload=Debit(5)), None) == "cancelled None"
    assert debit.__doc__ == "Reserve."
    action = bank.check()["debit"]
    assert action.decode_payload(encode(Debit(5))) == Debit(5)
    assert action.decode_result(encode(Held(5))) == Held(5)


def test_a_call_in_a_test_has_all_the_time_in_the_world() -> None:
    call = Call(payload=b"")
    assert call.deadline == float("inf")
    assert Call(payload=b"", expires_at=0.0).deadline == 0.0


@pytest.mark.parametrize("missing", ["confirm", "cancel"])
def test_an_action_must_be_complete(bank: Participant, missing: str) -> None:
    @bank.action("debit")
    def debit(call: Call[Debit], db: Connection) -> None: ...

    other = "cancel" if missing == "confirm" else "confirm"
    getattr(debit, other)(lambda call, db: None)
    with pytest.raises(ConfigurationError, match=f"'debit' has no {missing.capitalize()} handler.*@debit.{missing}"):
        bank.check()


def test_a_participant_needs_an_action(bank: Participant) -> None:
    with pytest.raises(ConfigurationError, match="'bank-a' has no actions"):
        bank.check()


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "ü", "a/b", "a\n", None])
def test_names_are_short_and_plain(engine: Engine, bank: Participant, name: Any) -> None:
    with pytest.raises(ConfigurationError, match="participant name"):
        Participant(name, engine)
    with pytest.raises(ConfigurationError, match="action name"):
        bank.action(name)(lambda call, db: None)


def test_the_longest_name_is_taken(engine: Engine) -> None:
    assert Participant("a" * 64, engine).name == "a" * 64


def test_two_actions_of_one_name(bank: Participant) -> None:
    complete(bank, _typed)
    with pytest.raises(ConfigurationError, match="two actions 'debit'"):
        bank.action("debit")(_typed)


def test_two_confirm_handlers(bank: Participant) -> None:
    definition = bank.action("debit")(_typed)
    definition.confirm(lambda call, db: None)
    with pytest.raises(ConfigurationError, match="'debit' has two Confirm handlers"):
        definition.confirm(lambda call, db: None)


@pytest.mark.parametrize(
    "handler", [lambda: None, lambda call: None, lambda call, db, more: None, lambda *, call, db: None]
)
def test_handlers_take_call_and_db(bank: Participant, handler: Callable[..., Any]) -> None:
    with pytest.raises(
        ConfigurationError, match=r"Try handler of action 'debit' must take two parameters, \(call, db\)"
    ):
        bank.action("debit")(handler)
    with pytest.raises(ConfigurationError, match="Cancel handler of action 'credit' must take two parameters"):
        bank.action("credit")(_typed).cancel(handler)


def test_more_parameters_with_defaults_are_fine(bank: Participant) -> None:
    def debit(call: Call[Debit], db: Connection, verbose: bool = False) -> None: ...

    assert complete(bank, debit).name == "debit"


def test_the_flavour_must_match_the_engine(bank: Participant) -> None:
    async def debit(call: Call[Debit], db: Any) -> None: ...

    with pytest.raises(
        ConfigurationError, match="must be a plain `def` function, because the participant has an Engine"
    ):
        bank.action("debit")(debit)
    with pytest.raises(ConfigurationError, match="Confirm handler of action 'credit' must be a plain `def`"):
        bank.action("credit")(_typed).confirm(debit)


def test_the_flavour_must_match_the_async_engine() -> None:
    bank = Participant("bank-a", create_async_engine("sqlite+aiosqlite:///never-opened.db"))
    with pytest.raises(ConfigurationError, match=r"must be a plain `async def` function.*AsyncEngine"):
        bank.action("debit")(_typed)


def test_the_payload_type_must_be_annotated(bank: Participant) -> None:
    def plain(call, db): ...  # type: ignore[no-untyped-def]

    with pytest.raises(ConfigurationError, match=r"'plain': annotate the first parameter .* as Call\[...\]"):
        complete(bank, plain, "plain")


@pytest.mark.parametrize("annotation", [Debit, Call, "Call", dict[str, int], "Debit"])
def test_the_annotation_must_be_a_call_of_something(bank: Participant, annotation: Any) -> None:
    def debit(call: Any, db: Any) -> None: ...

    debit.__annotations__["call"] = annotation
    with pytest.raises(ConfigurationError, match=r"first parameter of its Try handler is annotated .* not Call\[...\]"):
        complete(bank, debit)


def test_an_annotation_that_cannot_be_looked_up(bank: Participant) -> None:
    def debit(call: Any, db: Any) -> None: ...

    debit.__annotations__["call"] = "Call[Nowhere]"
    with pytest.raises(ConfigurationError, match=r"'Call\[Nowhere\]' of .*debit cannot be looked up"):
        complete(bank, debit)


@pytest.mark.parametrize("kind", [int, list[int], set[str], object])
def test_a_payload_type_that_cannot_be_carried(bank: Participant, kind: Any) -> None:
    def debit(call: Any, db: Any) -> None: ...

    debit.__annotations__["call"] = Call[kind]
    with pytest.raises(ConfigurationError, match="action 'debit': its payload type"):
        complete(bank, debit)


def test_a_result_type_that_cannot_be_carried(bank: Participant) -> None:
    def debit(call: Call[Debit], db: Connection) -> set[int]: ...  # type: ignore[empty-body]

    with pytest.raises(ConfigurationError, match="action 'debit': the return type of its Try handler"):
        complete(bank, debit)


def test_the_phases_must_agree_on_the_payload(bank: Participant) -> None:
    definition = bank.action("debit")(_typed)

    @definition.confirm
    def confirm_debit(call: Call[Held], db: Connection) -> None: ...

    definition.cancel(lambda call, db: None)
    with pytest.raises(ConfigurationError, match=r"Confirm handler takes Call\[Held\], its Try handler Call\[Debit\]"):
        bank.check()


def test_annotations_may_be_text_and_the_connection_unknown(bank: Participant) -> None:
    def debit(call: Any, db: Any) -> Any: ...

    debit.__annotations__.update({"call": "Call[Debit]", "db": "sa.Connection", "return": "Held"})
    action = complete(bank, debit)
    assert action.decode_payload(encode(Debit(5))) == Debit(5)
    assert action.decode_result(encode(Held(5))) == Held(5)
    assert action.try_handler.session_class is None


@pytest.mark.parametrize(
    ("annotation", "session_class"),
    [
        (Connection, None),
        (Any, None),
        (Connection | None, None),
        (Session, Session),
        (Session | None, Session),
        (OwnSession, OwnSession),
        ("orm.Session", Session),
    ],
)
def test_the_second_parameter_says_what_is_lent(bank: Participant, annotation: Any, session_class: Any) -> None:
    def debit(call: Any, db: Any) -> Any: ...

    debit.__annotations__.update({"call": "Call[Debit]", "db": annotation})
    assert complete(bank, debit).try_handler.session_class is session_class


@pytest.mark.parametrize("annotation", [AsyncConnection, AsyncSession, int, "SomethingElse", Connection | Session])
def test_nothing_else_is_lent(bank: Participant, annotation: Any) -> None:
    def debit(call: Any, db: Any) -> Any: ...

    debit.__annotations__.update({"call": "Call[Debit]", "db": annotation})
    with pytest.raises(ConfigurationError, match="with an Engine it is lent a Connection or Session"):
        complete(bank, debit)


@pytest.mark.parametrize(
    ("annotation", "value", "wanted"),
    [
        (None, Held(5), {"hold": 5}),
        (Any, Held(5), {"hold": 5}),
        (Held | None, Held(5), Held(5)),
        (types_pb2.Refusal, types_pb2.Refusal(reason="r"), types_pb2.Refusal(reason="r")),
        (bytes, b"x", b"x"),
        (dict, {"a": 1}, {"a": 1}),
    ],
)
def test_the_stored_result_comes_back_as_annotated(bank: Participant, annotation: Any, value: Any, wanted: Any) -> None:
    def debit(call: Call[Debit], db: Connection) -> Any: ...

    debit.__annotations__["return"] = annotation
    action = complete(bank, debit)
    assert action.decode_result(encode(value)) == wanted
    assert action.decode_result(None) is None


@pytest.mark.parametrize(
    ("setting", "value", "error"),
    [
        ("try_workers", 0, "try_workers is 0, but must be 1 or more"),
        ("phase2_workers", 0, "phase2_workers is 0, but must be 1 or more"),
        ("waiting_max", 0, "waiting_max is 0, but must be 1 or more"),
        ("retention", timedelta(hours=24), "retention is 1 day, 0:00:00, but must be 1 day, 1:00:00 to"),
        ("retention", timedelta(days=10_000), "retention is 10000 days"),
    ],
)
def test_settings_are_checked(engine: Engine, setting: str, value: Any, error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        Participant("bank-a", engine, **{setting: value})


@pytest.mark.parametrize("lease", [timedelta(0), timedelta(milliseconds=999), timedelta(days=2)])
def test_a_lease_is_checked(bank: Participant, lease: timedelta) -> None:
    with pytest.raises(ConfigurationError, match=r"the lease of action 'charge' is .*, but must be 1 s to 1 day"):
        bank.action("charge", external=True, lease=lease)


def test_a_refusal_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="reason"):
        Refused("")


def _typed(call: Call[Debit], db: Connection) -> Held:
    return Held(1)
