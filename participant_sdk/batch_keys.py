"""What the calls of a batched action have in common: the value of its batch key.

It is asked for before the fence is, so it may only decide who runs together. A call whose key cannot be told runs by
itself, and the fence decides what becomes of it.
"""

from __future__ import annotations

import logging
import typing
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from google.protobuf.message import Message

from participant_sdk.annotations import type_name
from participant_sdk.errors import ConfigurationError
from participant_sdk.fence import Phase
from participant_sdk.payload import Payload, PayloadError

if TYPE_CHECKING:
    from participant_sdk.actions import Actions
    from participant_sdk.call import IncomingCall

logger = logging.getLogger("tricord.participant")

BatchKey: TypeAlias = str | Callable[[Any], Hashable]
"""A field of the payload, or a function of it."""

KNOWN_MAX: Final = 10_000
_UNKNOWN: Final = object()
_PHASES: Final = frozenset({Phase.TRY, Phase.CONFIRM, Phase.CANCEL})


def check_declared(name: str, batch: bool, batch_key: BatchKey | None, external: bool) -> None:
    """Raises ConfigurationError for what cannot be declared of action `name`."""
    if not batch:
        if batch_key is not None:
            raise ConfigurationError(f"action {name!r} has a batch_key, which needs batch=True")
        return
    if external:
        raise ConfigurationError(
            f"action {name!r} is external=True and batch=True: an effect outside the database cannot be rolled back "
            "with those of others; choose one of the two"
        )
    if batch_key is None:
        raise ConfigurationError(
            f"action {name!r} is batch=True and has no batch_key: name the payload's field, or give the function of "
            "the payload, that tells which row its calls meet at, such as batch_key='account'"
        )
    if not isinstance(batch_key, str) and not callable(batch_key):
        raise ConfigurationError(f"the batch_key of action {name!r} is neither a field's name nor a function")


def reader(name: str, batch_key: BatchKey, kind: Any) -> Callable[[Any], Hashable]:
    """What reads the key from a payload of type `kind`; raises ConfigurationError for a field that it does not have."""
    if not isinstance(batch_key, str):
        return batch_key
    field = batch_key
    if kind is dict or typing.get_origin(kind) is dict:
        return lambda payload: payload[field]
    if field not in _fields(kind):
        raise ConfigurationError(f"action {name!r}: its batch_key {field!r} is no field of {type_name(kind)}")
    return lambda payload: getattr(payload, field)


def _fields(kind: Any) -> typing.Container[str]:
    if isinstance(kind, type) and issubclass(kind, Message):
        return kind.DESCRIPTOR.fields_by_name
    kind = typing.get_origin(kind) or kind
    if kind in (bytes, Payload):
        return ()
    try:
        return typing.get_type_hints(kind)
    except Exception:  # names that cannot be found now; then the attribute is asked of the payload
        return {name for base in getattr(kind, "__mro__", ()) for name in getattr(base, "__annotations__", {})}


class BatchKeys:
    """The keys of a participant's calls. Confirm has the payload of its Try, whose key is remembered for a while.

    Safe for threads.
    """

    def __init__(self, actions: Actions) -> None:
        self._actions = actions
        self._known: dict[bytes, Hashable] = {}

    def of(self, call: IncomingCall) -> Hashable | None:
        """What `call` has in common with those that it runs together with; None: it runs by itself."""
        action = self._actions.get(call.action)
        if action is None or action.batch_key is None or call.phase not in _PHASES:
            return None
        known = self._known
        key = known.get(call.fingerprint, _UNKNOWN)
        if key is _UNKNOWN:
            try:
                key = action.batch_key(action.decode_payload(call.payload))
                hash(key)
            except PayloadError:
                return None
            except Exception:
                logger.warning("%s: the batch_key of its action failed, it runs by itself", call, exc_info=True)
                return None
            if len(known) >= KNOWN_MAX:
                self._known = known = {}
            known[call.fingerprint] = key
        return call.phase, call.action, key
