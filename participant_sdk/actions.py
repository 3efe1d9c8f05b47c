"""Actions: the Try, Confirm and Cancel handlers that belong together, and what is checked about them.

    @bank.action("debit")
    def debit(call: Call[Debit], db: Connection) -> Held: ...
    @debit.confirm
    def confirm_debit(call: Call[Debit], db: Connection) -> None: ...
    @debit.cancel
    def cancel_debit(call: Call[Debit], db: Connection) -> None: ...

Shaped like `property`. What can be wrong is found when the module is imported or, at the latest, when the participant
starts, and never when money is on its way. The functions stay plain functions that a unit test can call.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, ParamSpec, TypeAlias, TypeVar, cast

from participant_sdk.annotations import annotations_of, second_argument, signature_of, type_name
from participant_sdk.batch_keys import BatchKey, reader
from participant_sdk.call import Call
from participant_sdk.errors import ConfigurationError
from participant_sdk.handler import Handler
from participant_sdk.payload import Codec, Payload, PayloadError, UnsupportedType, codec_for, decode_untyped

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

Enlist: TypeAlias = Callable[[str, object, str | None, float | None], Any]
"""Enlists a branch: action, payload, branch_key, timeout in s."""

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


def check_name(kind: str, name: str) -> str:
    """`name` if it may name a participant or an action; raises ConfigurationError otherwise."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigurationError(f"{kind} name {name!r} is not 1 to 64 characters of A-Z a-z 0-9 . _ -")
    return name


@dataclass(frozen=True, slots=True)
class Action:
    """A complete, checked action. `lease_ms`: of the intent of an external Try; None: not external.

    `batch_key` reads what calls that run together have in common from a payload; None: each runs by itself.
    """

    name: str
    try_handler: Handler
    confirm_handler: Handler
    cancel_handler: Handler
    payload: Codec
    result: Codec | None
    lease_ms: int | None
    batch_key: Callable[[Any], Hashable] | None = None

    def decode_payload(self, payload: Payload) -> Any:
        """What the handlers get as `call.payload`; raises PayloadError."""
        return self.payload.decode(payload)

    def decode_result(self, stored: Payload | None) -> Any:
        """What Confirm and Cancel get as `call.result`; raises PayloadError."""
        if stored is None:
            return None
        return decode_untyped(stored) if self.result is None else self.result.decode(stored)


Actions: TypeAlias = Mapping[str, Action]


class ActionDefinition(Generic[P, R]):
    """A Try handler with the decorators that add its Confirm and Cancel. Calling it calls the Try function."""

    def __init__(
        self,
        name: str,
        try_handler: Callable[P, R],
        *,
        asynchronous: bool,
        lease_ms: int | None = None,
        batch_key: BatchKey | None = None,
        enlist: Enlist | None = None,
    ) -> None:
        self._enlist = enlist
        self.name = check_name("action", name)
        self._lease_ms = lease_ms
        self._batch_key = batch_key
        self._asynchronous = asynchronous
        self._handlers: dict[str, Callable[..., Any]] = {}
        self.__wrapped__ = try_handler
        self.__doc__ = try_handler.__doc__
        self._add("Try", try_handler)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.__wrapped__(*args, **kwargs)

    def confirm(self, handler: F) -> F:
        """Decorator: `handler(call, db)` makes final what Try reserved. It may be needed at any later time."""
        self._add("Confirm", handler)
        return handler

    def cancel(self, handler: F) -> F:
        """Decorator: `handler(call, db)` gives back what Try reserved."""
        self._add("Cancel", handler)
        return handler

    def enlist(self, payload: object, *, branch_key: str | None = None, timeout: float | None = None) -> R:
        """Run the action as a branch of the transaction that the running code belongs to, which was called directly.

        Registers the branch at the coordinator, runs Try, reports it, and returns what Try returned; for `async def`
        handlers `await` it. The coordinator calls Confirm or Cancel later. The transaction is `current_xid()`; a repeat
        of the call that is served finds the same branch by the key that it brought, or by a `branch_key` of your own,
        unique in the transaction. `timeout` (default: what the served gRPC call has left, else 10) is in seconds.

        Raises Refused (Try said no), NotEnlisted (the coordinator takes no branch: decided, sealed, …), BranchUnknown
        (not known; it bars the confirm), InvalidRequest, ConfigurationError (not served with a coordinator).
        """
        if self._enlist is None:
            raise ConfigurationError(f"action {self.name!r} belongs to no participant")
        return cast(R, self._enlist(self.name, payload, branch_key, timeout))

    def _add(self, phase: str, handler: Callable[..., Any]) -> None:
        if phase in self._handlers:
            raise ConfigurationError(f"action {self.name!r} has two {phase} handlers")
        _check_shape(f"the {phase} handler of action {self.name!r}", handler, self._asynchronous)
        self._handlers[phase] = handler

    def complete(self) -> Action:
        """The checked action; raises ConfigurationError naming the handler or annotation that is missing or wrong."""
        for phase in ("Confirm", "Cancel"):
            if phase not in self._handlers:
                raise ConfigurationError(
                    f"action {self.name!r} has no {phase} handler: add one with @{self._try_name()}.{phase.lower()}"
                )
        annotations = {phase: annotations_of(handler) for phase, handler in self._handlers.items()}
        kind = self._payload_type("Try", annotations["Try"][0])
        if kind is None:
            raise ConfigurationError(
                f"action {self.name!r}: annotate the first parameter of its Try handler as Call[...] with the type of "
                "the payload: a dataclass, a pydantic model, a msgspec Struct, a protobuf message class, dict or bytes"
            )
        for phase in ("Confirm", "Cancel"):
            other = self._payload_type(phase, annotations[phase][0])
            if other is not None and other != kind:
                raise ConfigurationError(
                    f"action {self.name!r}: its {phase} handler takes Call[{type_name(other)}], its Try handler "
                    f"Call[{type_name(kind)}]; the payload is the same in every phase"
                )
        try:
            payload = codec_for(kind)
        except UnsupportedType as error:
            raise ConfigurationError(f"action {self.name!r}: its payload type {error}") from None
        handlers = {phase: self._handler(phase, handler) for phase, handler in self._handlers.items()}
        return Action(
            name=self.name,
            try_handler=handlers["Try"],
            confirm_handler=handlers["Confirm"],
            cancel_handler=handlers["Cancel"],
            payload=payload,
            result=self._result_codec(annotations["Try"][1]),
            lease_ms=self._lease_ms,
            batch_key=None if self._batch_key is None else reader(self.name, self._batch_key, kind),
        )

    def _handler(self, phase: str, handler: Callable[..., Any]) -> Handler:
        who = f"the {phase} handler of action {self.name!r}"
        return Handler(handler, second_argument(who, handler, asynchronous=self._asynchronous))

    def _try_name(self) -> str:
        return getattr(self.__wrapped__, "__name__", "action")

    def _payload_type(self, phase: str, annotation: Any) -> Any:
        """T of `Call[T]`; None if the parameter is not annotated."""
        if annotation is None or annotation is Any:
            return None
        if typing.get_origin(annotation) is not Call or isinstance(typing.get_args(annotation)[0], TypeVar):
            raise ConfigurationError(
                f"action {self.name!r}: the first parameter of its {phase} handler is annotated "
                f"{type_name(annotation)}, not Call[...] with the type of the payload"
            )
        return typing.get_args(annotation)[0]

    def _result_codec(self, annotation: Any) -> Codec | None:
        members = [annotation]
        if typing.get_origin(annotation) in (typing.Union, types.UnionType):
            members = [member for member in typing.get_args(annotation) if member is not type(None)]
        if len(members) != 1 or members[0] in (None, type(None), Any):
            return None
        try:
            return codec_for(members[0])
        except UnsupportedType as error:
            raise ConfigurationError(f"action {self.name!r}: the return type of its Try handler {error}") from None


def complete_actions(participant: str, definitions: Mapping[str, ActionDefinition[Any, Any]]) -> Actions:
    """All actions of a participant, checked; raises ConfigurationError."""
    if not definitions:
        raise ConfigurationError(f"participant {participant!r} has no actions: add one with @….action(name)")
    return {name: definition.complete() for name, definition in definitions.items()}


def _check_shape(who: str, handler: Callable[..., Any], asynchronous: bool) -> None:
    if not callable(handler):
        raise ConfigurationError(f"{who} is not a function")
    if inspect.iscoroutinefunction(handler) != asynchronous:
        wanted, engine = ("async def", "AsyncEngine") if asynchronous else ("def", "Engine")
        raise ConfigurationError(f"{who} must be a plain `{wanted}` function, because the participant has an {engine}")
    try:
        signature_of(handler).bind(object(), object())
    except TypeError as error:
        raise ConfigurationError(f"{who} must take two parameters, (call, db): {error}") from None


__all__ = ["Action", "ActionDefinition", "Actions", "PayloadError", "check_name", "complete_actions"]
