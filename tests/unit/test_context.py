"""current_xid() is right in every task, thread and scope, and nothing of a scope stays behind it."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context

import pytest
from hypothesis import given
from hypothesis import strategies as st

from participant_sdk.context import (
    ContextThreadPoolExecutor,
    Scope,
    arrived_context,
    bound,
    collecting,
    current_branch_id,
    current_xid,
    in_context,
    note_tried,
)
from participant_sdk.context_headers import (
    MalformedHeader,
    headers_to_add,
    outgoing_headers,
    read_headers,
)

A, B = "a" * 32, "b" * 32
WAIT_S = 30.0

Seen = tuple[str | None, int | None]
NONE: Seen = (None, None)


def seen() -> Seen:
    return current_xid(), current_branch_id()


class TestScopes:
    """`bound`, in one thread."""

    def test_there_is_none_by_default(self) -> None:
        assert seen() == NONE

    def test_nested_scopes(self) -> None:
        with bound(A, 1):
            with bound(B):
                assert seen() == (B, None)
                with bound(None):
                    assert seen() == NONE
                assert seen() == (B, None)
            assert seen() == (A, 1)
        assert seen() == NONE

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
    def test_case_15_an_exception_leaves_nothing_behind(self, error: type[BaseException]) -> None:
        with bound(A, 1):
            with pytest.raises(error), bound(B, 2):
                raise error
            assert seen() == (A, 1)
        assert seen() == NONE

    @pytest.mark.parametrize(
        "xid", ["", "a" * 31, "a" * 33, "A" * 32, "g" * 32, f"{A}\n", f"{A[:-1]}\n", "٣" * 32, f"{A[:8]}-{A[8:]}"]
    )
    def test_a_malformed_xid_is_refused_and_changes_nothing(self, xid: str) -> None:
        with bound(B, 2):
            with pytest.raises(ValueError, match="32 lowercase hexadecimal"), bound(xid):
                pytest.fail("it was taken")
            assert seen() == (B, 2)

    @pytest.mark.parametrize("branch_id", [0, -1, 2**32])
    def test_a_branch_id_out_of_range_is_refused(self, branch_id: int) -> None:
        with pytest.raises(ValueError, match="1 to 4294967295"), bound(A, branch_id):
            pytest.fail("it was taken")

    def test_a_branch_id_alone_is_refused(self) -> None:
        with pytest.raises(ValueError, match="without an xid"), bound(None, 1):
            pytest.fail("it was taken")

    def test_the_ends_of_the_range(self) -> None:
        for branch_id in (1, 2**32 - 1):
            with bound(A, branch_id):
                assert seen() == (A, branch_id)


class TestSteps:
    """`arrived_context`: code that stops and goes on."""

    def test_it_is_seen_inside_only_and_keeps_what_is_bound_across_a_yield(self) -> None:
        def steps() -> Iterator[Seen]:
            yield seen()
            with bound(B):
                yield seen()
                yield seen()
            yield seen()

        running, (context, _) = steps(), arrived_context(Scope(A, 7))
        for expected in [(A, 7), (B, None), (B, None), (A, 7)]:
            assert context.run(next, running) == expected
            assert seen() == NONE

    def test_it_takes_the_other_variables_along(self) -> None:
        tenant: ContextVar[str] = ContextVar("tenant")
        copy_context().run(tenant.set, "elsewhere")
        token = tenant.set("here")
        assert arrived_context(Scope(A))[0].run(tenant.get) == "here"
        tenant.reset(token)

    def test_it_collects_for_itself_alone(self) -> None:
        with collecting(A) as outside:
            context, inside = arrived_context(Scope(A))
            context.run(note_tried, A, [1])
        assert (inside, outside) == ({1}, set())


class TestTasks:
    """asyncio copies the context wherever a task or a thread begins."""

    async def test_a_task_inherits_and_keeps_it_beyond_the_scope(self) -> None:
        gate = asyncio.Event()

        async def late() -> Seen:
            await gate.wait()
            return seen()

        with bound(A, 1):
            task = asyncio.create_task(late())
        assert seen() == NONE
        gate.set()
        assert await task == (A, 1)

    async def test_to_thread_inherits_it(self) -> None:
        with bound(A, 1):
            assert await asyncio.to_thread(seen) == (A, 1)
        assert await asyncio.to_thread(seen) == NONE

    async def test_interleaved_tasks_see_their_own(self) -> None:
        count = 50
        together = asyncio.Barrier(count)

        async def request(number: int) -> list[Seen]:
            found = []
            with bound(f"{number:032x}", number):
                for _ in range(3):
                    await together.wait()
                    found.append(seen())
                found.append(await asyncio.create_task(asyncio.to_thread(seen)))
            await together.wait()
            return [*found, seen()]

        for number, found in enumerate(await asyncio.gather(*map(request, range(1, count + 1))), 1):
            assert found == [(f"{number:032x}", number)] * 4 + [NONE]

    async def test_case_15_a_cancelled_task_leaves_nothing_behind(self) -> None:
        started = asyncio.Event()
        found: list[Seen] = []

        async def request() -> None:
            try:
                with bound(A, 1):
                    started.set()
                    await asyncio.Event().wait()
            except asyncio.CancelledError:
                found.append(seen())
                raise

        task = asyncio.create_task(request())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert found == [NONE]

    async def test_a_thread_that_calls_back_into_the_loop_takes_it_along(self) -> None:
        loop = asyncio.get_running_loop()

        async def there() -> Seen:
            return seen()

        def thread() -> Seen:
            with bound(A, 1):
                return asyncio.run_coroutine_threadsafe(there(), loop).result(WAIT_S)

        assert await asyncio.to_thread(thread) == (A, 1)


class TestThreads:
    """`in_context` and ContextThreadPoolExecutor."""

    def test_case_15_a_pool_thread_sees_it_and_forgets_it(self) -> None:
        def fails() -> None:
            assert seen() == (A, 1)
            raise LookupError

        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(seen).result(WAIT_S) == NONE
            with bound(A, 1):
                assert pool.submit(in_context(seen)).result(WAIT_S) == (A, 1)
                with pytest.raises(LookupError):
                    pool.submit(in_context(fails)).result(WAIT_S)
                assert pool.submit(seen).result(WAIT_S) == NONE  # the same thread
            assert pool.submit(seen).result(WAIT_S) == NONE

    def test_it_is_the_context_of_where_it_was_wrapped(self) -> None:
        with bound(A, 1):
            wrapped = in_context(seen)
        with bound(B):
            assert wrapped() == (A, 1)
            assert seen() == (B, None)

    def test_one_runs_in_many_threads_at_once(self) -> None:
        together = threading.Barrier(3)

        def work(number: int) -> tuple[int, Seen]:
            together.wait(WAIT_S)
            return number, seen()

        with bound(A, 1), ThreadPoolExecutor(3) as pool:
            assert list(pool.map(in_context(work), [1, 2, 3], timeout=WAIT_S)) == [(n, (A, 1)) for n in (1, 2, 3)]

    def test_calls_of_one_do_not_see_each_others_changes(self) -> None:
        variable: ContextVar[int] = ContextVar("variable", default=0)

        def count() -> int:
            variable.set(variable.get() + 1)
            return variable.get()

        wrapped = in_context(count)
        assert [wrapped(), wrapped(), variable.get()] == [1, 1, 0]

    def test_arguments_results_and_names_pass(self) -> None:
        def joined(first: str, *, last: str) -> str:
            """Doc."""
            return first + last

        wrapped = in_context(joined)
        assert wrapped("a", last="b") == "ab"
        assert (wrapped.__name__, wrapped.__doc__) == ("joined", "Doc.")

    def test_what_runs_elsewhere_is_refused(self) -> None:
        async def coroutine() -> None: ...

        def generator() -> Iterator[int]:
            yield 1

        async def generator_of_tasks() -> AsyncIterator[int]:
            yield 1

        functions: list[Callable[[], object]] = [coroutine, generator, generator_of_tasks]
        with ContextThreadPoolExecutor(1) as pool:
            for function in functions:
                with pytest.raises(TypeError, match="plain functions"):
                    in_context(function)
                with pytest.raises(TypeError, match="plain functions"):
                    pool.submit(function)

    async def test_an_executor_that_does_it_by_itself(self) -> None:
        with ContextThreadPoolExecutor(1) as pool:
            assert pool.submit(seen).result(WAIT_S) == NONE
            with bound(A, 1):
                assert pool.submit(seen).result(WAIT_S) == (A, 1)
                assert list(pool.map(lambda _: seen(), range(3), timeout=WAIT_S)) == [(A, 1)] * 3
                assert await asyncio.get_running_loop().run_in_executor(pool, seen) == (A, 1)
            assert pool.submit(seen).result(WAIT_S) == NONE


class TestHeaders:
    """What travels."""

    def test_what_is_sent(self) -> None:
        assert outgoing_headers() == {}
        with bound(A):
            sent = outgoing_headers()
            assert sent == {"tricord-xid": A, "tricord-branch-key": sent["tricord-branch-key"]}
        with bound(A, 12):
            assert set(outgoing_headers().items()) >= {("tricord-xid", A), ("tricord-branch-id", "12")}

    @given(st.text("0123456789abcdef", min_size=32, max_size=32), st.none() | st.integers(1, 2**32 - 1))
    def test_what_is_sent_is_understood(self, xid: str, branch_id: int | None) -> None:
        with bound(xid, branch_id):
            sent = outgoing_headers()
        for headers in (sent.items(), [(key.encode(), value.encode()) for key, value in sent.items()]):
            read = read_headers(headers)
            assert (read.xid, read.branch_id, read.branch_key) == (xid, branch_id, sent["tricord-branch-key"])

    @pytest.mark.parametrize("key", ["tricord-xid", "tricord-branch-id"])
    def test_what_the_sender_has_set_stays_alone(self, key: str) -> None:
        with bound(A, 1):
            assert headers_to_add({"accept": "", key: ""}, "") == {}
            added = headers_to_add({"accept": ""}, "")
            assert list(added) == ["tricord-xid", "tricord-branch-key", "tricord-branch-id"]
            assert list(headers_to_add({"tricord-branch-key": "k"}, "")) == ["tricord-xid", "tricord-branch-id"]

    def test_others_are_passed_over(self) -> None:
        read = read_headers([("accept", "a"), ("accept", "b"), (b"x", b"\xff")])
        assert (read.xid, read.branch_id, read.branch_key) == (None, None, None)

    @pytest.mark.parametrize(
        ("headers", "named", "limit"),
        [
            ([("tricord-xid", "")], "tricord-xid", "32 lowercase hexadecimal"),
            ([("tricord-xid", A.upper())], "tricord-xid", "32 lowercase hexadecimal"),
            ([(b"tricord-xid", b"\xff" * 32)], "tricord-xid", "32 lowercase hexadecimal"),
            ([("tricord-xid", f"{A}, {A}")], "tricord-xid", "32 lowercase hexadecimal"),
            ([("tricord-xid", A), ("tricord-xid", A)], "tricord-xid", "more than once"),
            ([("tricord-branch-id", "1")], "tricord-branch-id", "without tricord-xid"),
            ([("tricord-branch-key", "k")], "tricord-branch-key", "without tricord-xid"),
            *(
                ([("tricord-xid", A), ("tricord-branch-key", text)], "tricord-branch-key", "1 to 200 characters")
                for text in ["", " ", "a b", "a,b", "é", "k" * 201]
            ),
            *(
                ([("tricord-xid", A), ("tricord-branch-id", text)], "tricord-branch-id", "1 to 4294967295")
                for text in ["", "0", "01", "-1", "+1", "1.0", "1e3", "1_0", " 1", "٣", "4294967296", "9" * 5000]
            ),
        ],
    )
    def test_what_is_malformed_is_named(
        self, headers: list[tuple[str | bytes, str | bytes]], named: str, limit: str
    ) -> None:
        with pytest.raises(MalformedHeader, match=limit) as caught:
            read_headers(headers)
        assert caught.value.name == named
        assert str(caught.value).startswith(named)
        assert len(str(caught.value)) < 100


HEAVY = ("sqlalchemy", "grpc", "google.protobuf", "msgspec", "pydantic", "starlette", "fastapi", "uvicorn")


@pytest.mark.parametrize(
    ("modules", "allowed"),
    [("context", ""), ("context_headers", ""), ("asgi", ""), ("interceptors", "grpc")],
)
def test_nothing_is_loaded_that_is_not_needed(modules: str, allowed: str) -> None:
    code = f"import sys, participant_sdk.{modules}; print(*[name for name in {HEAVY} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == allowed
