"""Functions that are safe to repeat: `@idempotent`.

    @idempotent(store, "payments.pay", key="payment_id", fields=("account", "amount"), final_errors=(NoMoney,))
    def pay(payment_id: str, account: str, amount: int, db: Connection) -> Receipt: ...

    pay("p-1", "alice", 5)      # `db` is lent: the local transaction in which the receipt is stored, too

A repeat with the same key gets an equal result of the same type, or the same error, and the function does not run. Any
other exception leaves nothing but a record that says so, and the same call may run again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.arguments import FieldRules, Reader, Signature
from participant_sdk.idempotency.faults import lost_a_race
from participant_sdk.idempotency.idempotency import AsyncIdempotency, Idempotency
from participant_sdk.idempotency.keys import KeyRules
from participant_sdk.idempotency.lending import Lent, lending, lending_async
from participant_sdk.idempotency.once import AsyncOnce, FinalErrors, Once, operation_of
from participant_sdk.idempotency.operation import Mode, Operation
from participant_sdk.idempotency.values import Answers, ValueCodec, codec_of

R = TypeVar("R")

AnyStore = Idempotency | AsyncIdempotency
RERUNS: Final = 3
"""How often a function runs again by itself that lost a race in the database: a deadlock, a serialization failure."""


def idempotent(
    store: AnyStore | Callable[[], AnyStore],
    operation: Operation | str,
    *,
    key: Reader,
    fields: tuple[str, ...] | None = None,
    tenant: Reader | None = None,
    codec: ValueCodec | None = None,
    final_errors: FinalErrors = (),
    key_rules: KeyRules | None = None,
    revision: int = 0,
    older_fields: Mapping[int, tuple[str, ...] | None] | None = None,
    reruns: int = RERUNS,
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Decorator: the function runs once per key, on `store`, or on what `store()` gives when it is called.

    `key` and `tenant`: the name of a parameter, or a function of the same arguments. An explicit key is best: one that
    is made from the arguments takes two calls that are both wanted for one. `fields`: the parameters that make two
    calls the same call; without it, all but those two. Choose them, and give another `revision` whenever you change
    them, with the earlier ones in `older_fields` by revision: a call that is repeated meanwhile is still known.

    Parameters annotated Connection or Session (AsyncConnection, AsyncSession, for `async def`) or Run (AsyncRun) are
    lent, and not given by the caller; one that is given by name, such as `db=session`, is worked in instead, and
    committed. The function neither commits nor rolls back; one that does raises RunMisused, and nothing of it stays.

    The result is stored as its annotation says: a dataclass, a pydantic model, a msgspec Struct, a protobuf message,
    bytes, or what JSON holds; or by `codec`. `final_errors`: exceptions that are an answer, too, by exact type, each
    with a codec or None; the work is rolled back, and a repeat raises an equal one. `reruns`: how often a function
    that lost a race in the database runs again by itself.

    Raises ConfigurationError for what cannot work; a call raises what `Idempotency.begin` does, KeyMissing,
    KeyMalformed, ScopeMissing, and TypeError for a value that cannot be compared, or given again.
    """
    if not 0 <= reruns <= 100:
        raise ConfigurationError(f"reruns {reruns} is not 0 to 100")
    checked = operation_of(operation)

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        who = getattr(function, "__qualname__", repr(function))
        signature = Signature(who, function, key, tenant, FieldRules(fields, revision, older_fields))
        if checked.mode is Mode.PHASED and any(kind is not Lent.RUN for kind in signature.lent.values()):
            raise ConfigurationError(f"{who} is PHASED: it is lent its run, and each phase a local transaction")
        answers = Answers(who, codec or codec_of(who, signature.result), final_errors)
        rules = key_rules or KeyRules(field=key if isinstance(key, str) else f"key of {who}")
        made = _Function(who, function, store, checked, signature, answers, rules, reruns)
        made.check(store)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return made.call(args, kwargs)

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            return await made.call_async(args, kwargs)

        found: Any = call_async if signature.asynchronous else call
        found.__signature__ = signature.public
        return cast(Callable[..., R], found)

    return decorate


@dataclass(frozen=True, slots=True)
class _Function:
    """A decorated function."""

    who: str
    function: Callable[..., Any]
    store: AnyStore | Callable[[], AnyStore]
    operation: Operation
    signature: Signature
    answers: Answers
    rules: KeyRules
    reruns: int

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result, or the stored one."""
        given, on = self.signature.take_lent(kwargs)
        request = self.signature.request(self.rules, args, kwargs)
        left = 0 if on is not None else self.reruns
        while True:
            try:
                with Once.of(self._found(), self.operation, request, self.answers, on) as once:
                    if once.replayed:
                        return once.value
                    with lending(once.run, self.who, self.signature.lent, given) as lent:
                        whole = self.signature.complete(args, kwargs, lent)
                        value = self.function(*whole.args, **whole.kwargs)
                    return once.finish(value)
            except Exception as error:
                if not left or not lost_a_race(error):
                    raise
                left -= 1

    async def call_async(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `call`."""
        given, on = self.signature.take_lent(kwargs)
        request = self.signature.request(self.rules, args, kwargs)
        left = 0 if on is not None else self.reruns
        while True:
            try:
                async with AsyncOnce.of(self._found(), self.operation, request, self.answers, on) as once:
                    if once.replayed:
                        return once.value
                    async with lending_async(once.run, self.who, self.signature.lent, given) as lent:
                        whole = self.signature.complete(args, kwargs, lent)
                        value = await self.function(*whole.args, **whole.kwargs)
                    return await once.finish(value)
            except Exception as error:
                if not left or not lost_a_race(error):
                    raise
                left -= 1

    def check(self, store: object) -> None:
        """Raises ConfigurationError if `store` is of the other flavour than the function."""
        wanted, other = (Idempotency, AsyncIdempotency)[:: -1 if self.signature.asynchronous else 1]
        if isinstance(store, other):
            raise ConfigurationError(
                f"{self.who} is {'an async def' if self.signature.asynchronous else 'a def'}: "
                f"it takes an {wanted.__name__}, not an {other.__name__}"
            )

    def _found(self) -> Any:
        if isinstance(self.store, (Idempotency, AsyncIdempotency)):
            return self.store
        found = self.store()
        self.check(found)
        return found
