"""Which transaction the running code belongs to: `current_xid()` and `current_branch_id()`.

It is a context variable, so that each task and each thread has its own, and a task that is started inherits it
(`asyncio.create_task`, `asyncio.to_thread`). Threads of a pool do not: they live longer than any transaction. What is
handed to one goes through `in_context`, or through a ContextThreadPoolExecutor, which does that by itself.

The SDK sets it around each handler; interceptors and middleware set it around each request, also to "none": what a
request does not say must never come from the one before it, or from the code that happened to start the server.

`collecting()` gathers which branches the services that are called from here have tried. How a call to one of them is
known again when it is repeated is in `branch_keys`.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, ContextVar, Token, copy_context
from typing import Final, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

XID_FORM: Final = "32 lowercase hexadecimal characters"
BRANCH_ID_MAX: Final = 4_294_967_295
BRANCH_ID_FORM: Final = f"a whole number from 1 to {BRANCH_ID_MAX}"
BRANCH_KEY_FORM: Final = "1 to 200 characters of A-Z a-z 0-9 . _ : / -"

_XID: Final = re.compile(r"[0-9a-f]{32}")

_BRANCH_KEY: Final = re.compile(r"[A-Za-z0-9._:/-]{1,200}")


class Scope:
    """What the running code belongs to. Tasks and threads that it starts share the one object.

    `branch_key` is that of the call that brought the code here, or of the Try that it is in; None where code runs that
    nobody would repeat with the same one. `expires_at` (of `time.monotonic()`): when the caller stops waiting.
    """

    __slots__ = ("_lock", "_positions", "branch_id", "branch_key", "expires_at", "xid")

    def __init__(
        self,
        xid: str | None = None,
        branch_id: int | None = None,
        branch_key: str | None = None,
        expires_at: float | None = None,
    ) -> None:
        self.xid = xid
        self.branch_id = branch_id
        self.branch_key = branch_key
        self.expires_at = expires_at
        self._positions: dict[str, int] = {}
        self._lock = threading.Lock()

    def position(self, kind: str) -> int:
        """1, 2, ...: the how-manieth of its kind is asked for."""
        with self._lock:
            self._positions[kind] = position = self._positions.get(kind, 0) + 1
            return position


# One variable for all: a branch id can then never be read beside the xid of another scope.
_NOWHERE: Final = Scope()
_current: Final[ContextVar[Scope]] = ContextVar("tricord_current", default=_NOWHERE)


def current_xid() -> str | None:
    """The xid of the transaction that the running code belongs to: 32 lowercase hexadecimal characters, or None."""
    return _current.get().xid


def current_branch_id() -> int | None:
    """The branch of `current_xid()` that the running code belongs to; None where there is no branch, or no xid."""
    return _current.get().branch_id


def current_scope() -> Scope:
    """All that is known of where the running code belongs."""
    return _current.get()


class bound:
    """In the `with` block the running code belongs to `xid` (None: to no transaction); afterwards as before.

    Nothing is taken over from the scope around it: `bound(xid)` has no branch id. Raises ValueError, before anything
    is changed, if the xid is not 32 lowercase hexadecimal characters or the branch id is not 1 to 4294967295.
    """

    __slots__ = ("_scope", "_token")

    def __init__(self, xid: str | None, branch_id: int | None = None) -> None:
        self._scope = checked_scope(xid, branch_id)

    def __enter__(self) -> None:
        self._token = _current.set(self._scope)

    def __exit__(self, *raised: object) -> None:
        _put_back(_current, self._token, self._scope, _NOWHERE)


class Collector:
    """The branches of one transaction that were seen tried in a part of the program."""

    __slots__ = ("_outer", "_xid", "seen")

    def __init__(self, xid: str | None, outer: Collector | None = None) -> None:
        self.seen: set[int] = set()
        self._xid = xid
        self._outer = outer

    def note(self, xid: str, branch_ids: Iterable[int]) -> None:
        """Some branches of `xid` were tried. What is not of this one's transaction goes to the next one outside."""
        if self._xid is None:
            self._xid = xid
        if self._xid == xid:
            self.seen.update(branch_ids)
        elif self._outer is not None:
            self._outer.note(xid, branch_ids)


class Calling(NamedTuple):
    """What holds for the calls that leave the running code."""

    collector: Collector | None
    """Where the branches that they see tried are gathered; None: nowhere."""
    pinned_key: str | None
    """The branch key that all of them carry; None: each gets one of its own."""


_ORDINARY: Final = Calling(None, None)
_calling: Final[ContextVar[Calling]] = ContextVar("tricord_calling", default=_ORDINARY)


def current_calling() -> Calling:
    """What holds for calls that leave now."""
    return _calling.get()


def note_tried(xid: str, branch_ids: Iterable[int]) -> None:
    """Gather these branches of `xid`, where somebody wants to know."""
    if (collector := _calling.get().collector) is not None:
        collector.note(xid, branch_ids)


class collecting:
    """`with collecting() as seen:` gathers in the set `seen` the branches that services which are called report tried.

    Those of the transaction `xid`, without it of the current one, without that of the first one that any are seen of.
    Nested blocks see their own: what the inner one takes the outer one does not get. Only answers that say that all
    went well count: a branch whose call failed is never seen tried, and so bars the confirm.
    """

    __slots__ = ("_calling", "_seen", "_token")

    def __init__(self, xid: str | None = None) -> None:
        outer, pinned_key = _calling.get()
        collector = Collector(xid or current_xid(), outer)
        self._seen = collector.seen
        self._calling = Calling(collector, pinned_key)

    def __enter__(self) -> set[int]:
        self._token = _calling.set(self._calling)
        return self._seen

    def __exit__(self, *raised: object) -> None:
        _put_back(_calling, self._token, self._calling, _ORDINARY)


class pinned_branch_key:
    """In the `with` block calls carry this branch key: `with pinned_branch_key("order-1/flight"):` around a retry loop.

    For one call that your own code repeats until it is answered; another call needs another key, each unique in the
    transaction. Raises ValueError if it is not 1 to 200 characters of A-Z a-z 0-9 . _ : / -
    """

    __slots__ = ("_key", "_token")

    def __init__(self, branch_key: str) -> None:
        if not is_branch_key(branch_key):
            raise ValueError(f"the branch key is not {BRANCH_KEY_FORM}")
        self._key = branch_key

    def __enter__(self) -> None:
        self._token = _calling.set(Calling(_calling.get().collector, self._key))

    def __exit__(self, *raised: object) -> None:
        _calling.reset(self._token)


class arrived:
    """In the `with` block something begins anew where `scope` says: a request, a handler.

    `with arrived(scope) as seen` collects for it alone: nothing around it sees what it sees tried.
    """

    __slots__ = ("_calling", "_calling_token", "_scope", "_scope_token", "seen")

    def __init__(self, scope: Scope) -> None:
        collector = Collector(scope.xid or "")
        self.seen = collector.seen
        self._scope = scope
        self._calling = Calling(collector, None)

    def __enter__(self) -> set[int]:
        self._scope_token = _current.set(self._scope)
        self._calling_token = _calling.set(self._calling)
        return self.seen

    def __exit__(self, *raised: object) -> None:
        _calling.reset(self._calling_token)
        _current.reset(self._scope_token)


def arrived_context(scope: Scope) -> tuple[Context, set[int]]:
    """As `arrived`, for code that runs in steps, such as a generator: a context of its own, and what it sees tried.

    A `with` block around a `yield` would hold for whoever consumes the generator too.
    """
    context = copy_context()
    arrival = arrived(scope)
    context.run(arrival.__enter__)
    return context, arrival.seen


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


def _put_back(variable: ContextVar[T], token: Token[T], ours: T, default: T) -> None:
    """As it was before `ours` was set; also in another context than it was set in, if that one took it over."""
    try:
        variable.reset(token)
    except ValueError:  # the block was entered in another context, such as another task
        if variable.get() is ours:
            variable.set(default if token.old_value is Token.MISSING else token.old_value)


def is_xid(text: str) -> bool:
    """Whether it has the form of an xid."""
    return _XID.fullmatch(text) is not None


def is_branch_key(text: str) -> bool:
    """Whether it has the form of a branch key that a request brings."""
    return _BRANCH_KEY.fullmatch(text) is not None


def checked_scope(xid: str | None, branch_id: int | None = None) -> Scope:
    """A scope, or ValueError as `bound` raises it."""
    if xid is not None and not is_xid(xid):
        raise ValueError(f"the xid is not {XID_FORM}")
    if branch_id is not None and xid is None:
        raise ValueError("a branch id without an xid names nothing")
    if branch_id is not None and not 1 <= branch_id <= BRANCH_ID_MAX:
        raise ValueError(f"the branch_id is not {BRANCH_ID_FORM}")
    return Scope(xid, branch_id)
