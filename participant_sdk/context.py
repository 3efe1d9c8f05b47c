"""Which transaction the running code belongs to: `current_xid()` and `current_branch_id()`.

It is a context variable, so that each task and each thread has its own, and a task that is started inherits it
(`asyncio.create_task`, `asyncio.to_thread`). Threads of a pool do not: they live longer than any transaction. What is
handed to one goes through `in_context`, or through a ContextThreadPoolExecutor, which does that by itself.

The SDK sets it around each handler; interceptors and middleware set it around each request, also to "none": what a
request does not say must never come from the one before it, or from the code that happened to start the server.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, ContextVar, copy_context
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

XID_FORM: Final = "32 lowercase hexadecimal characters"
BRANCH_ID_MAX: Final = 4_294_967_295
BRANCH_ID_FORM: Final = f"a whole number from 1 to {BRANCH_ID_MAX}"

_XID: Final = re.compile(r"[0-9a-f]{32}")

# One variable for both: a branch id can then never be read beside the xid of another scope.
_current: Final[ContextVar[tuple[str | None, int | None]]] = ContextVar("tricord_current", default=(None, None))


def current_xid() -> str | None:
    """The xid of the transaction that the running code belongs to: 32 lowercase hexadecimal characters, or None."""
    return _current.get()[0]


def current_branch_id() -> int | None:
    """The branch of `current_xid()` that the running code belongs to; None where there is no branch, or no xid."""
    return _current.get()[1]


class bound:
    """In the `with` block the running code belongs to `xid` (None: to no transaction); afterwards as before.

    Nothing is taken over from the scope around it: `bound(xid)` has no branch id. Raises ValueError, before anything
    is changed, if the xid is not 32 lowercase hexadecimal characters or the branch id is not 1 to 4294967295.
    """

    __slots__ = ("_scope", "_token")

    def __init__(self, xid: str | None, branch_id: int | None = None) -> None:
        self._scope = _checked(xid, branch_id)

    def __enter__(self) -> None:
        self._token = _current.set(self._scope)

    def __exit__(self, *raised: object) -> None:
        _current.reset(self._token)


def bound_context(xid: str | None, branch_id: int | None = None) -> Context:
    """A copy of the caller's context that is `bound`, for code that runs in steps, such as a generator.

    A `with` block around a `yield` would hold for whoever consumes the generator too. Raises ValueError as `bound`.
    """
    context = copy_context()
    context.run(_current.set, _checked(xid, branch_id))
    return context


def in_context(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, to be called in another thread as if from here: `executor.submit(in_context(function), …)`.

    Each call gets a copy of its own of the context in which `in_context` was called, all context variables included,
    so one can run in many threads at once and leaves nothing behind in them. Raises TypeError for coroutine and
    generator functions: those run where they are awaited or consumed, so it would do nothing for them.
    """
    if any(test(function) for test in _RUN_ELSEWHERE):
        raise TypeError(f"in_context takes plain functions, {function!r} runs where it is awaited or consumed")
    context = copy_context()

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return context.copy().run(function, *args, **kwargs)

    return call


_RUN_ELSEWHERE: Final = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


class ContextThreadPoolExecutor(ThreadPoolExecutor):
    """A ThreadPoolExecutor whose work runs `in_context` of whoever submits it.

    For code that submits by itself, such as `loop.run_in_executor(executor, function)`.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As `ThreadPoolExecutor.submit`; `map` comes here too. Raises TypeError as `in_context`."""
        return super().submit(in_context(fn), *args, **kwargs)


def is_xid(text: str) -> bool:
    """Whether it has the form of an xid."""
    return _XID.fullmatch(text) is not None


def _checked(xid: str | None, branch_id: int | None) -> tuple[str | None, int | None]:
    if xid is not None and not is_xid(xid):
        raise ValueError(f"the xid is not {XID_FORM}")
    if branch_id is not None and xid is None:
        raise ValueError("a branch id without an xid names nothing")
    if branch_id is not None and not 1 <= branch_id <= BRANCH_ID_MAX:
        raise ValueError(f"the branch_id is not {BRANCH_ID_FORM}")
    return xid, branch_id
