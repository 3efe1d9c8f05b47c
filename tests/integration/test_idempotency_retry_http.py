"""The retrying transports, of httpx and of httpx2, sync and async, against a server that fails as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

import httpx
import httpx2
import pytest

from participant_sdk.idempotency import AsyncRetryTransport, RetriesExhausted, RetryPolicy, RetryTransport, intent
from participant_sdk.idempotency.errors import KeyMalformed
from tests.integration.scripted_http import DROP, HALF, LOSE, ScriptedServer, scripted_server
from tests.postgres import free_port

PATIENT_S: Final = 30.0
QUICK: Final = RetryPolicy(attempts_max=6, total_s=60.0, base_s=0.001, cap_s=0.002)
BUSY: Final = (503, {"Retry-After": "7"})
IN_PROGRESS: Final = (409, {"Retry-After": "3"})


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server


class Sender:
    """One client of one library, sync or async, and the waits that it has had. It does not really wait."""

    def __init__(self, library: Any, asynchronous: bool, policy: RetryPolicy = QUICK, **options: Any) -> None:
        self.library = library
        self._asynchronous = asynchronous
        self._policy = policy
        self._options = options
        self.waits: list[float] = []

    def send(self, method: str, url: str, **arguments: Any) -> Any:
        """One request, and its answer, read."""
        if self._asynchronous:
            return asyncio.run(self._send(method, url, arguments))
        inner = self.library.HTTPTransport()
        transport = RetryTransport(inner, self._policy, sleep=self.waits.append, **self._options)
        with self.library.Client(transport=transport, timeout=PATIENT_S) as client:
            return client.request(method, url, **arguments)

    async def _send(self, method: str, url: str, arguments: dict[str, Any]) -> Any:
        async def sleep(seconds: float) -> None:
            self.waits.append(seconds)

        inner = self.library.AsyncHTTPTransport()
        transport = AsyncRetryTransport(inner, self._policy, sleep=sleep, **self._options)
        async with self.library.AsyncClient(transport=transport, timeout=PATIENT_S) as client:
            return await client.request(method, url, **arguments)

    def streamed(self, chunks: list[bytes]) -> Any:
        """A body that can be sent once."""

        async def later() -> AsyncIterator[bytes]:
            for chunk in chunks:
                yield chunk

        return later() if self._asynchronous else iter(chunks)


Make = Callable[..., Sender]


@pytest.fixture(params=["httpx", "httpx-async", "httpx2", "httpx2-async"])
def make(request: pytest.FixtureRequest) -> Make:
    library = httpx if request.param.startswith("httpx-") or request.param == "httpx" else httpx2
    return lambda *given, **options: Sender(library, request.param.endswith("async"), *given, **options)


@pytest.mark.parametrize("failure", [DROP, LOSE, HALF, (502, {}), BUSY, IN_PROGRESS, (429, {})])
def test_one_key_goes_on_every_try_and_the_work_is_done_once(make: Make, server: ScriptedServer, failure: Any) -> None:
    server.script = [failure, failure]
    answer = make().send("POST", server.url, json={"sku": "tea"})
    assert (answer.status_code, answer.json()) == (200, {"done": True})
    assert answer.extensions["tricord_attempts"] == 3
    assert len(server.keys) == 3
    assert len(set(server.keys)) == 1
    assert server.done == [server.keys[0]]
    assert len(set(server.bodies)) == 1


def test_retry_after_is_waited_for(make: Make, server: ScriptedServer) -> None:
    sender = make()
    server.script = [BUSY, IN_PROGRESS]
    assert sender.send("POST", server.url).status_code == 200
    assert [int(wait) for wait in sender.waits] == [7, 3]


def test_a_retry_after_beyond_the_total_time_is_the_answer(make: Make, server: ScriptedServer) -> None:
    sender = make()
    server.script = [(503, {"Retry-After": "61"})]
    answer = sender.send("POST", server.url)
    assert (answer.status_code, answer.json(), sender.waits, len(server.keys)) == (503, {}, [], 1)


@pytest.mark.parametrize("answer", [(409, {}), (422, {}), (422, {"Retry-After": "1"}), (500, {}), (404, {})])
def test_a_definite_answer_is_the_answer(make: Make, server: ScriptedServer, answer: Any) -> None:
    server.script = [answer]
    assert make().send("POST", server.url).status_code == answer[0]
    assert len(server.keys) == 1


def test_500_by_option_but_not_when_it_is_replayed(make: Make, server: ScriptedServer) -> None:
    internal = RetryPolicy(base_s=0.001, retry_internal=True)
    server.script = [(500, {})]
    assert make(internal).send("POST", server.url).status_code == 200
    server.script = [(500, {"Idempotency-Replayed": "true"})]
    assert make(internal).send("POST", server.url).status_code == 500


def test_the_last_answer_is_returned_when_the_tries_are_used_up(make: Make, server: ScriptedServer) -> None:
    server.script = [(503, {})] * 10
    answer = make().send("POST", server.url)
    assert (answer.status_code, answer.extensions["tricord_attempts"], len(server.keys)) == (503, 6, 6)


def test_the_error_tells_how_often_and_what_came_last(make: Make, server: ScriptedServer) -> None:
    sender = make()
    server.script = [LOSE] * 10
    with pytest.raises(
        RetriesExhausted, match=r"sent 6 times in .* the last error: (ReadError|RemoteProtocol)"
    ) as told:
        sender.send("POST", server.url, headers={"Idempotency-Key": "mine"})
    assert (told.value.attempts, told.value.key, told.value.retryable) == (6, "mine", True)
    assert isinstance(told.value, sender.library.TransportError)
    assert isinstance(told.value.last_error, sender.library.TransportError)
    assert server.keys == ["mine"] * 6
    assert server.done == ["mine"]


def test_a_server_that_is_not_there_is_tried_again(make: Make) -> None:
    sender = make()
    with pytest.raises(sender.library.ConnectError, match="sent 6 times"):
        sender.send("POST", f"http://127.0.0.1:{free_port()}/")
    assert len(sender.waits) == 5


def test_what_cannot_be_otherwise_the_next_time_is_raised_as_it_is(make: Make) -> None:
    sender = make()
    with pytest.raises(sender.library.UnsupportedProtocol) as told:
        sender.send("POST", "gopher://127.0.0.1/")
    assert not isinstance(told.value, RetriesExhausted)


@pytest.mark.parametrize(("method", "times"), [("GET", 2), ("PUT", 1), ("DELETE", 1)])
def test_without_a_key_only_what_reads_is_sent_again(
    make: Make, server: ScriptedServer, method: str, times: int
) -> None:
    server.script = [(503, {})]
    assert make().send(method, server.url).status_code == (200 if times == 2 else 503)
    assert server.keys == [None] * times


def test_keys_for_other_methods_and_under_another_name(make: Make, server: ScriptedServer) -> None:
    server.script = [(503, {})]
    assert make(keyed_methods=["put"]).send("PUT", server.url).status_code == 200
    assert server.keys[0] is not None
    assert server.keys == [server.keys[0]] * 2
    make(keyed_methods=["put"]).send("POST", server.url)
    make(header="X-Key").send("POST", server.url)
    assert server.keys[2:] == [None, None]


def test_where_the_key_comes_from(make: Make, server: ScriptedServer) -> None:
    sender = make()
    own, extension = {"Idempotency-Key": "own"}, {"idempotency_key": "extension"}
    with intent("intent"):
        sender.send("POST", server.url, headers=own, extensions=extension)
        sender.send("POST", server.url, extensions=extension)
        sender.send("POST", server.url)
        sender.send("POST", server.url, extensions={"idempotency_key": None})
        sender.send("GET", server.url)
    sender.send("POST", server.url)
    sender.send("POST", server.url)
    assert server.keys[:5] == ["own", "extension", "intent", None, None]
    assert len({None, *server.keys[5:]}) == 3


def test_a_bad_key_is_refused_before_anything_is_sent(make: Make, server: ScriptedServer) -> None:
    with pytest.raises(KeyMalformed, match=r'extensions\["idempotency_key"\]: .* 1 to 255'):
        make().send("POST", server.url, extensions={"idempotency_key": "a b"})
    assert server.keys == []


def test_a_retry_of_the_program_itself_uses_the_same_key(make: Make, server: ScriptedServer) -> None:
    sender = make(RetryPolicy(attempts_max=1))
    server.script = [LOSE]
    with intent() as key:
        with pytest.raises(RetriesExhausted, match="sent once"):
            sender.send("POST", server.url)
        assert sender.send("POST", server.url).status_code == 200
    assert server.keys == [key, key]
    assert server.done == [key]


def test_a_body_that_is_streamed_gets_a_key_and_is_sent_once(make: Make, server: ScriptedServer) -> None:
    sender = make()
    server.script = [(503, {}), LOSE]
    assert sender.send("POST", server.url, content=sender.streamed([b"a", b"b"])).status_code == 503
    with pytest.raises(sender.library.TransportError) as told:
        sender.send("POST", server.url, content=sender.streamed([b"a", b"b"]))
    assert not isinstance(told.value, RetriesExhausted)
    assert None not in server.keys
    assert server.bodies == [b"ab", b"ab"]


def test_a_form_with_a_file_is_sent_again_once_it_was_read(server: ScriptedServer) -> None:
    transport = RetryTransport(httpx.HTTPTransport(), QUICK)
    with httpx.Client(transport=transport, timeout=PATIENT_S) as client:
        for read, times in ((False, 1), (True, 2)):
            server.script, server.keys, server.bodies = [(503, {})], [], []
            request = client.build_request("POST", server.url, files={"note": b"hello"})
            if read:
                request.read()
            client.send(request)
            assert len(server.keys) == times
            assert len(set(server.bodies)) == 1


def test_the_budget_of_a_client_bounds_what_a_server_that_is_down_gets(server: ScriptedServer) -> None:
    policy = RetryPolicy(attempts_max=10, base_s=0, budget_share=0.1, budget_burst=5)
    transport = RetryTransport(httpx.HTTPTransport(), policy)
    server.script = [(503, {})] * 1_000
    with httpx.Client(transport=transport, timeout=PATIENT_S) as client:
        attempts = [client.post(server.url).extensions["tricord_attempts"] for _ in range(50)]
    assert attempts[0] == 6
    assert sum(attempts) == len(server.keys) <= 50 + 5 + 5


def test_the_answer_reads_as_it_does_without_the_transport(make: Make, server: ScriptedServer) -> None:
    server.script = [(201, {"Location": "/1", "X-Two": "a"})]
    answer = make().send("POST", server.url)
    assert (answer.status_code, answer.headers["location"], answer.content, answer.http_version) == (
        201, "/1", b"{}", "HTTP/1.1",
    )  # fmt: skip
    assert answer.elapsed.total_seconds() > 0
    assert answer.request.headers["idempotency-key"] == server.keys[0]
    with (
        httpx.Client(transport=RetryTransport(httpx.HTTPTransport(), QUICK)) as client,
        client.stream("POST", server.url) as streamed,
    ):
        assert b"".join(streamed.iter_raw()) == b'{"done": true}'


def test_around_a_transport_without_a_network() -> None:
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["Idempotency-Key"])
        return httpx.Response(503 if len(seen) < 3 else 200, json={"tries": len(seen)})

    with httpx.Client(transport=RetryTransport(httpx.MockTransport(answer), QUICK)) as client:
        assert client.post("http://shop/").json() == {"tries": 3}
    assert len(set(seen)) == 1


def test_a_try_waits_no_longer_than_is_left(server: ScriptedServer) -> None:
    now, limits = [0.0], []

    class Slow(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            limits.append(request.extensions["timeout"]["read"])
            now[0] += 25.0
            return super().handle_request(request)

    policy = RetryPolicy(total_s=60.0, base_s=0)
    transport = RetryTransport(Slow(), policy, clock=lambda: now[0], sleep=lambda seconds: None)
    server.script = [(503, {})] * 5
    with httpx.Client(transport=transport, timeout=PATIENT_S) as client:
        assert client.post(server.url).status_code == 503
    assert limits == [30.0, 30.0, 10.0]
