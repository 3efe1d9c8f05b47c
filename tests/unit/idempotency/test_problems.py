"""How each error of the store is told over HTTP."""

import json

import pytest

from participant_sdk.errors import ConfigurationError, TricordError
from participant_sdk.idempotency import errors
from participant_sdk.idempotency.problems import (
    AnswerEncoded,
    Answering,
    Codes,
    KeyUnknown,
    RequestLengthMissing,
    RequestTruncated,
    StreamRefused,
)

ALL: list[tuple[TricordError, int, str, str | None]] = [
    (errors.KeyMissing("Idempotency-Key is required"), 400, "idempotency-key-missing", None),
    (errors.KeyMalformed("Idempotency-Key is 300 bytes long"), 400, "idempotency-key-malformed", None),
    (errors.ScopeMissing("whose?"), 403, "idempotency-scope-missing", None),
    (errors.RequestTooLarge(10), 413, "idempotency-request-too-large", None),
    (errors.IdempotencyKeyReused("another"), 422, "idempotency-key-reused", None),
    (errors.InProgress(2_001), 409, "idempotency-in-progress", "3"),
    (errors.InProgress(0), 409, "idempotency-in-progress", "1"),
    (errors.AnswerNotStored("done"), 409, "idempotency-answer-not-stored", None),
    (errors.RunUnknown("who knows"), 409, "idempotency-outcome-unknown", None),
    (errors.LeaseLost("lost"), 409, "idempotency-lease-lost", "1"),
    (errors.NotComparable("newer"), 503, "idempotency-fingerprint-version", "1"),
    (errors.StoreUnavailable("away", 1_500), 503, "idempotency-store-unavailable", "2"),
    (errors.FirstSentMalformed("no time"), 400, "idempotency-first-sent-malformed", None),
    (errors.IntentTooOld(86_340), 412, "idempotency-intent-too-old", None),
    (errors.TooManyKeys(100, 60, 1_200), 429, "idempotency-too-many-keys", "2"),
    (RequestLengthMissing(), 411, "idempotency-request-length-missing", None),
    (RequestTruncated("half"), 400, "idempotency-request-truncated", None),
    (AnswerEncoded("gzip"), 406, "idempotency-answer-encoded", None),
    (KeyUnknown(), 404, "idempotency-key-unknown", None),
    (StreamRefused("a stream"), 500, "idempotency-stream-refused", None),
]


@pytest.mark.parametrize(("error", "status", "kind", "retry_after"), ALL)
def test_every_error_is_a_problem(error: TricordError, status: int, kind: str, retry_after: str | None) -> None:
    problem = Answering().problem(error, "/idempotency/k")
    headers = {name.decode(): value.decode() for name, value in problem.headers}
    content = json.loads(problem.body)
    assert (problem.status, content["status"]) == (status, status)
    assert headers["content-type"] == "application/problem+json"
    assert headers.get("retry-after") == retry_after
    assert content["type"] == f"urn:tricord:problem:{kind}"
    assert (content["reason"], content["detail"]) == (error.reason, str(error))
    assert content["retryable"] is (retry_after is not None)
    assert content["title"]


def test_every_error_of_the_store_is_in_the_table() -> None:
    known = {type(error) for error, *_ in ALL}
    every = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TricordError)}
    assert every - known == {errors.IdempotencyError, errors.ConfigurationError, TricordError}


def test_another_error_is_a_500() -> None:
    assert Answering().problem(TricordError("?")).status == 500


def test_the_status_is_linked_where_asking_again_tells_nothing_new() -> None:
    answering = Answering(status_path="/idempotency/")
    url = answering.status_url('a/b "c"', "orders.create")
    assert url == "/idempotency/a%2Fb%20%22c%22?operation=orders.create"
    for error, *_ in ALL:
        linked = isinstance(error, errors.AnswerNotStored | errors.RunUnknown | errors.InProgress | errors.IntentTooOld)
        problem = answering.problem(error, url)
        assert ((b"link", f'<{url}>; rel="status"'.encode()) in problem.headers) is linked
        assert (json.loads(problem.body).get("status_url") == url) is linked
    assert Answering().status_url("a", "b") is None


def test_options() -> None:
    assert Answering(gone=True).problem(errors.AnswerNotStored("")).status == 410
    assert Answering(scope_status=401).problem(errors.ScopeMissing("")).status == 401
    based = Answering(type_base="https://shop.example/problems#").problem(errors.KeyMissing(""))
    assert json.loads(based.body)["type"] == "https://shop.example/problems#idempotency-key-missing"
    assert Answering().marker == "Idempotency-Replayed"
    assert Answering(codes=Codes.STRIPE).marker == "Idempotent-Replayed"
    assert Answering(replayed_header="X-Again").marker == "X-Again"


def test_423_is_for_what_is_in_progress_alone() -> None:
    locked = Answering(codes=Codes.LOCKED)
    assert locked.marker == Answering().marker
    for error, status, *_ in ALL:
        problem = locked.problem(error)
        assert problem.status == json.loads(problem.body)["status"]
        assert problem.status == (423 if isinstance(error, errors.InProgress) else status)
        assert (b"content-type", b"application/problem+json") in problem.headers


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.IdempotencyKeyReused("other"), 400, "idempotency_key_reused"),
        (errors.InProgress(1), 409, "idempotency_key_in_use"),
        (errors.KeyMissing("none"), 400, "idempotency_key_missing"),
        (errors.StoreUnavailable("away"), 503, "idempotency_store_unavailable"),
    ],
)
def test_stripes_habit(error: TricordError, status: int, code: str) -> None:
    problem = Answering(codes=Codes.STRIPE).problem(error)
    assert problem.status == status
    assert (b"content-type", b"application/json") in problem.headers
    assert json.loads(problem.body) == {"error": {"type": "idempotency_error", "code": code, "message": str(error)}}


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"replayed_header": "two words"}, "replayed_header"),
        ({"scope_status": 400}, "scope_status"),
        ({"status_path": "idempotency"}, "status_path"),
        ({"status_path": "/a\r\nb"}, "status_path"),
        ({"type_base": "a b"}, "type_base"),
    ],
)
def test_what_cannot_be_sent_is_refused_at_start(settings: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigurationError, match=field):
        Answering(**settings)  # type: ignore[arg-type]


def test_text_that_cannot_be_encoded_does_not_break_the_answer() -> None:
    assert b"?" in Answering().problem(errors.KeyMalformed("key \ud800")).body
