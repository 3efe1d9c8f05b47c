"""Which run the running code belongs to: `current_run()`.

It is a context variable, as `current_xid()` is (participant_sdk.context): tasks that are started inherit it, and
`in_context` and ContextThreadPoolExecutor carry it into threads.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from participant_sdk.idempotency.runs import AsyncRun, Run

_current: Final[ContextVar[Run | AsyncRun | None]] = ContextVar("tricord_current_run", default=None)


def current_run() -> Run | AsyncRun | None:
    """The run that the running code belongs to, None where there is none."""
    return _current.get()


class bound_run:
    """In the `with` block the running code belongs to `run` (None: to none); afterwards as before."""

    __slots__ = ("_run", "_token")

    def __init__(self, run: Run | AsyncRun | None) -> None:
        self._run = run

    def __enter__(self) -> None:
        self._token: Token[Run | AsyncRun | None] = _current.set(self._run)

    def __exit__(self, *raised: object) -> None:
        try:
            _current.reset(self._token)
        except ValueError:  # the block was entered in another context, such as another task
            if _current.get() is self._run:
                _current.set(None)
