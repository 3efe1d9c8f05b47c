"""A block of code that is safe to repeat, with typed results: `Once` and `AsyncOnce`.

with Once(store, "payments.pay", key="p-1", fields={"account": "alice", "amount": 5}, returns=Receipt) as once:
    if once.replayed:
        return once.value
    receipt = book(once.run.connection)
    return once.finish(receipt)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeVar

from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.arguments import FieldRules, keyed_values
from participant_sdk.idempotency.idempotency import AsyncIdempotency, Idempotency
from participant_sdk.idempotency.keys import DEFAULT_RULES, KeyRules
from participant_sdk.idempotency.operation import Mode, Operation
from participant_sdk.idempotency.replay import Replay
from participant_sdk.idempotency.values import Answers, ValueCodec, codec_of

if TYPE_CHECKING:
    from participant_sdk.idempotency.request import KeyedRequest
    from participant_sdk.idempotency.runs import AsyncRun, Run

V = TypeVar("V")

FinalErrors = Mapping[type[Exception], ValueCodec | None] | Iterable[type[Exception]]
_ALL: Final = FieldRules()


class _Block:
    """`replayed`: whether the block has run before; `value` is its result then."""

    _flavour: ClassVar[type]

    def __init__(
        self,
        store: Any,
        operation: Operation | str,
        *,
        key: object,
        fields: Mapping[str, Any],
        tenant: str = "",
        returns: Any = None,
        codec: ValueCodec | None = None,
        final_errors: FinalErrors = (),
        key_rules: KeyRules = DEFAULT_RULES,
        on: Any = None,
    ) -> None:
        operation = operation_of(operation)
        who = operation.name
        if not isinstance(store, self._flavour):
            raise ConfigurationError(f"{who}: {type(self).__name__} takes an {self._flavour.__name__}, not {store!r}")
        request = keyed_values(who, key, tenant, fields, _ALL, key_rules)
        self._prepare(store, operation, request, Answers(who, codec or codec_of(who, returns), final_errors), on)

    @classmethod
    def of(cls, store: Any, operation: Operation, request: KeyedRequest, answers: Answers, on: Any = None) -> Self:
        """A block of which all is known already."""
        block = cls.__new__(cls)
        block._prepare(store, operation, request, answers, on)
        return block

    def _prepare(self, store: Any, operation: Operation, request: KeyedRequest, answers: Answers, on: Any) -> None:
        self._store, self._operation, self._request, self._answers, self._on = store, operation, request, answers, on
        self._begun: Any = None
        self.replayed = False
        self.value: Any = None

    def _joins_later(self) -> bool:
        """Whether what the user has given is joined by a run that has begun, and not by its beginning.

        Raises ConfigurationError if that local transaction began before the run will be claimed.
        """
        if self._on is None or self._operation.mode is Mode.ATOMIC:
            return False
        if getattr(self._on, "in_transaction", bool)():
            raise ConfigurationError(
                f"{self._operation.name} is {self._operation.mode.value}: its run is claimed before its local "
                "transaction begins; give a session or connection that has not begun"
            )
        return True

    def _has_begun(self, begun: Any) -> None:
        if isinstance(begun, Replay):
            self.value = self._answers.replay(begun.answer)
            self.replayed = True
        else:
            self._begun = begun

    def _the_run(self) -> Any:
        if self._begun is None:
            raise ConfigurationError(f"{self._operation.name}: there is no run: it has run before; see `replayed`")
        return self._begun


class Once(_Block):
    """A block that runs once per key, on an `Idempotency`. A context manager.

    `fields`: the values that make two calls the same call. `returns`: the type of the result, as a function would be
    annotated; without it, plain JSON. `codec`: instead of what `returns` says. `final_errors`: exceptions that are
    stored, and raised again by a repeat; by exact type, with a codec of each or None. `on`: your own session or
    connection, in which the block works and which its end commits; one that has begun only where it is ATOMIC.

    Entering raises what `Idempotency.begin` does. Leaving with any other exception lets the same call run again;
    leaving without `finish` is an error, and nothing of it stays.
    """

    _flavour = Idempotency
    _store: Idempotency

    @property
    def run(self) -> Run:
        """The run, with its connection. Raises ConfigurationError if there is none, because it has run before."""
        run: Run = self._the_run()
        return run

    def finish(self, value: V) -> V:
        """Store the result with the work, and commit; gives `value`. Raises as `Run.succeed`, and TypeError."""
        self.run.succeed(self._answers.of_value(value))
        return value

    def __enter__(self) -> Self:
        later = self._joins_later()
        self._has_begun(self._store.begin(self._operation, self._request, on=None if later else self._on))
        if self._begun is None:
            return self
        self._begun.__enter__()
        if later:
            try:
                self._begun.join(self._on)
            except BaseException as error:
                self._begun.__exit__(type(error), error, error.__traceback__)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._begun is None:
            return
        try:
            if error is not None and not self.run.ended and (answer := self._answers.of_error(error)) is not None:
                self.run.fail_final(answer)
        except BaseException as worse:
            self._begun.__exit__(type(worse), worse, worse.__traceback__)
            raise
        self._begun.__exit__(kind, error, trace)


class AsyncOnce(_Block):
    """As `Once`, on an `AsyncIdempotency`. An asynchronous context manager."""

    _flavour = AsyncIdempotency
    _store: AsyncIdempotency

    @property
    def run(self) -> AsyncRun:
        """As `Once.run`."""
        run: AsyncRun = self._the_run()
        return run

    async def finish(self, value: V) -> V:
        """As `Once.finish`."""
        await self.run.succeed(self._answers.of_value(value))
        return value

    async def __aenter__(self) -> Self:
        later = self._joins_later()
        self._has_begun(await self._store.begin(self._operation, self._request, on=None if later else self._on))
        if self._begun is None:
            return self
        await self._begun.__aenter__()
        if later:
            try:
                await self._begun.join(self._on)
            except BaseException as error:
                await self._begun.__aexit__(type(error), error, error.__traceback__)
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._begun is None:
            return
        try:
            if error is not None and not self.run.ended and (answer := self._answers.of_error(error)) is not None:
                await self.run.fail_final(answer)
        except BaseException as worse:
            await self._begun.__aexit__(type(worse), worse, worse.__traceback__)
            raise
        await self._begun.__aexit__(kind, error, trace)


def operation_of(operation: Operation | str) -> Operation:
    """The operation, of which only the name may be given. Raises ConfigurationError."""
    return Operation(name=operation) if isinstance(operation, str) else operation
