"""What an idempotent function is lent by annotation: the run, the connection of its local transaction, or a session."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from participant_sdk.annotations import Unreadable, lent_as, without_none
from participant_sdk.errors import ConfigurationError
from participant_sdk.idempotency.run_state import AnyRun
from participant_sdk.idempotency.runs import AsyncRun, Run

if TYPE_CHECKING:
    from collections.abc import Mapping


class Lent(Enum):
    """What is lent, where it is no session."""

    RUN = "run"
    CONNECTION = "connection"


NOTHING: Final = object()
_RUNS: Final = {False: Run, True: AsyncRun}
_LENT: Final = (Run, AsyncRun, Connection, AsyncConnection, Session, AsyncSession)
_NAMES: Final = frozenset(kind.__name__ for kind in _LENT)


def lent_kind(what: str, who: str, annotation: Any, *, asynchronous: bool) -> Any:
    """A `Lent`, the class of a session, or NOTHING for a parameter of the caller's.

    Raises ConfigurationError for a kind of the other flavour. `what`: how that error begins.
    """
    annotation = without_none(annotation)
    if isinstance(annotation, Unreadable):
        name = str(annotation).removesuffix(" | None").rpartition(".")[2]
        if name not in _NAMES:
            return NOTHING
        annotation = Unreadable(name)
    elif isinstance(annotation, type) and issubclass(annotation, _LENT):
        name = annotation.__name__
    else:
        return NOTHING
    if annotation in (Run, AsyncRun) or name in ("Run", "AsyncRun"):
        wanted = _RUNS[asynchronous].__name__
        if name != wanted:
            raise ConfigurationError(
                f"{what} annotated {name}: {'an async def' if asynchronous else 'a def'} is lent a {wanted}"
            )
        return Lent.RUN
    return lent_as(what, who, annotation, asynchronous) or Lent.CONNECTION


@contextmanager
def lending(run: Run, who: str, kinds: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What the parameters of these names get, while the function runs. `given`: what the caller has given.

    Raises RunMisused if the function has ended the local transaction that it was lent.
    """
    lent = {name: given[name] if name in given else _one(run, kind) for name, kind in kinds.items()}
    with _guarded(run, who, kinds, given):
        yield lent


@asynccontextmanager
async def lending_async(
    run: AsyncRun, who: str, kinds: Mapping[str, Any], given: Mapping[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """As `lending`."""
    lent = {name: given[name] if name in given else await _one_async(run, kind) for name, kind in kinds.items()}
    with _guarded(run, who, kinds, given):
        yield lent


@contextmanager
def _guarded(run: AnyRun, who: str, kinds: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[None]:
    """Not where nothing is lent, or only what is the caller's own."""
    line = run.line
    if given or line is None or line.guard is None or all(kind is Lent.RUN for kind in kinds.values()):
        yield
        return
    with line.guard.lent_to(who):
        yield


def _one(run: Run, kind: Any) -> Any:
    if kind is Lent.RUN:
        return run
    return run.connect() if kind is Lent.CONNECTION else run.session(kind)


async def _one_async(run: AsyncRun, kind: Any) -> Any:
    if kind is Lent.RUN:
        return run
    return await run.connect() if kind is Lent.CONNECTION else await run.session(kind)
