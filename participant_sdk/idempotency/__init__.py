"""Requests that are safe to repeat: once, and the same answer each time. Stands alone, without a coordinator.

record, machine   what is stored under a key, and the pure rules of it
operation, keys, fingerprints, request
                  what is said of an operation, and a request with its key (canonical, pointers, request_parts, kinds)
errors            every way to be told no
store, stores, store_*, statements, sql, stored, tables, prepare
                  what is asked of a database, as scripts of steps; and how, on each
idempotency       `begin`: from a request to a run, or the stored answer (asking, reaching, waiting, listening,
                  claiming, setup)
runs              a run, and how it ends (run_state, ending, doubt, faults, heartbeat, lines, guard, joining,
                  same_database, moves)
phases            work with calls to others (phase_log)
functions, once   the door for functions (arguments, lending, values)
http_*, first_sent, quotas, problems
                  the HTTP door: what it says of an operation (http_policy, http_sources, http_statuses, http_headers,
                  http_routes), what a request has to pass (http_gate, first_sent, quotas), what becomes of an answer
                  (http_answers, http_spool) and how it is told (http_replies, problems), the status look-up
                  (http_status)
asgi, asgi_body, http_serving, http_store
                  it for every ASGI framework, with one run of it
wsgi, wsgi_*      it for every WSGI framework
fastapi           the same for FastAPI, by dependencies
grpc_*            the gRPC door: what is said of a method (grpc_policy), the interceptors (grpc_interceptors), one
                  call (grpc_calls, grpc_received, grpc_context, grpc_spool; grpc_threads, grpc_tasks), and what is
                  stored and told (grpc_answers, grpc_status). Its status look-up: participant_sdk.service_idempotency
fronts, redis_front, redis_client, front_codec, breaker
                  what may answer a repeat in front of the database
sweeping, sweepers, sweeping_sql, deleting
                  deleting what has expired
inspection, inspecting, inspection_sql, words, commands, commands_changing, command_options, command_fronts, telling
                  for operators: what there is, and their word on it
testing           for the tests of programs that use this: crashes, time that goes by, a suite for fronts
intents, retry_rules, retry_errors, retry_sending, retry_http, retry_grpc
                  client side: one key per intent, sent again until it is answered

Names are loaded when they are first used: a program that only sends requests never loads SQLAlchemy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from participant_sdk.idempotency.asgi import IdempotencyMiddleware
    from participant_sdk.idempotency.current import current_run
    from participant_sdk.idempotency.errors import (
        AnswerNotStored,
        ConfigurationError,
        FirstSentMalformed,
        IdempotencyError,
        IdempotencyKeyReused,
        InProgress,
        IntentTooOld,
        KeyMalformed,
        KeyMissing,
        LeaseLost,
        NotComparable,
        RequestTooLarge,
        RunUnknown,
        ScopeMissing,
        StoreUnavailable,
        TooManyKeys,
    )
    from participant_sdk.idempotency.fastapi import Idempotent, protect
    from participant_sdk.idempotency.fingerprints import (
        RAW,
        Custom,
        Fingerprinter,
        FormBody,
        JsonBody,
        MessageBody,
        RawBytes,
        keyed_request,
    )
    from participant_sdk.idempotency.first_sent import FirstSent
    from participant_sdk.idempotency.fronts import MemoryFront
    from participant_sdk.idempotency.functions import idempotent
    from participant_sdk.idempotency.grpc_answers import grpc_answer
    from participant_sdk.idempotency.grpc_interceptors import AsyncIdempotencyInterceptor, IdempotencyInterceptor
    from participant_sdk.idempotency.grpc_policy import GrpcOperation, ServerStreaming
    from participant_sdk.idempotency.grpc_status import GrpcCodes
    from participant_sdk.idempotency.http_policy import (
        ONE_TENANT,
        BodyKey,
        CallableKey,
        HeaderKey,
        HttpOperation,
        Streaming,
    )
    from participant_sdk.idempotency.http_status import IdempotencyStatus
    from participant_sdk.idempotency.http_statuses import Compat, Statuses
    from participant_sdk.idempotency.idempotency import AsyncIdempotency, Idempotency
    from participant_sdk.idempotency.intents import intent
    from participant_sdk.idempotency.keys import KeyRules
    from participant_sdk.idempotency.machine import TakeOver
    from participant_sdk.idempotency.once import AsyncOnce, Once
    from participant_sdk.idempotency.operation import KeyScope, Mode, Operation
    from participant_sdk.idempotency.problems import Answering, Codes
    from participant_sdk.idempotency.quotas import KeyQuota
    from participant_sdk.idempotency.record import Answer, Codec, Fingerprint, Record, State
    from participant_sdk.idempotency.redis_front import AsyncRedisFront, RedisFront
    from participant_sdk.idempotency.replay import Replay
    from participant_sdk.idempotency.request import KeyedRequest
    from participant_sdk.idempotency.request_parts import RequestParts
    from participant_sdk.idempotency.retry_errors import RetriesExhausted
    from participant_sdk.idempotency.retry_grpc import RetryClientInterceptor, async_retry_client_interceptors
    from participant_sdk.idempotency.retry_http import AsyncRetryTransport, RetryTransport
    from participant_sdk.idempotency.retry_rules import RetryPolicy
    from participant_sdk.idempotency.runs import AsyncRun, Run
    from participant_sdk.idempotency.sweepers import AsyncSweeper, Sweeper
    from participant_sdk.idempotency.sweeping import Sweep
    from participant_sdk.idempotency.tables import IdempotencyTables, metadata
    from participant_sdk.idempotency.values import ValueCodec, msgpack_codec
    from participant_sdk.idempotency.wsgi import WsgiIdempotencyMiddleware
    from participant_sdk.idempotency.wsgi_status import WsgiIdempotencyStatus
else:
    from participant_sdk.lazy_names import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "asgi": ("IdempotencyMiddleware",),
            "current": ("current_run",),
            "errors": (
                "AnswerNotStored",
                "ConfigurationError",
                "FirstSentMalformed",
                "IdempotencyError",
                "IdempotencyKeyReused",
                "InProgress",
                "IntentTooOld",
                "KeyMalformed",
                "KeyMissing",
                "LeaseLost",
                "NotComparable",
                "RequestTooLarge",
                "RunUnknown",
                "ScopeMissing",
                "StoreUnavailable",
                "TooManyKeys",
            ),
            "fastapi": ("Idempotent", "protect"),
            "fingerprints": (
                "RAW",
                "Custom",
                "Fingerprinter",
                "FormBody",
                "JsonBody",
                "MessageBody",
                "RawBytes",
                "keyed_request",
            ),
            "first_sent": ("FirstSent",),
            "fronts": ("MemoryFront",),
            "functions": ("idempotent",),
            "grpc_answers": ("grpc_answer",),
            "grpc_interceptors": ("AsyncIdempotencyInterceptor", "IdempotencyInterceptor"),
            "grpc_policy": ("GrpcOperation", "ServerStreaming"),
            "grpc_status": ("GrpcCodes",),
            "http_policy": ("ONE_TENANT", "BodyKey", "CallableKey", "HeaderKey", "HttpOperation", "Streaming"),
            "http_status": ("IdempotencyStatus",),
            "http_statuses": ("Compat", "Statuses"),
            "idempotency": ("AsyncIdempotency", "Idempotency"),
            "intents": ("intent",),
            "keys": ("KeyRules",),
            "machine": ("TakeOver",),
            "once": ("AsyncOnce", "Once"),
            "operation": ("KeyScope", "Mode", "Operation"),
            "problems": ("Answering", "Codes"),
            "quotas": ("KeyQuota",),
            "record": ("Answer", "Codec", "Fingerprint", "Record", "State"),
            "redis_front": ("AsyncRedisFront", "RedisFront"),
            "replay": ("Replay",),
            "request": ("KeyedRequest",),
            "request_parts": ("RequestParts",),
            "retry_errors": ("RetriesExhausted",),
            "retry_grpc": ("RetryClientInterceptor", "async_retry_client_interceptors"),
            "retry_http": ("AsyncRetryTransport", "RetryTransport"),
            "retry_rules": ("RetryPolicy",),
            "runs": ("AsyncRun", "Run"),
            "sweepers": ("AsyncSweeper", "Sweeper"),
            "sweeping": ("Sweep",),
            "tables": ("IdempotencyTables", "metadata"),
            "values": ("ValueCodec", "msgpack_codec"),
            "wsgi": ("WsgiIdempotencyMiddleware",),
            "wsgi_status": ("WsgiIdempotencyStatus",),
        },
    )

__all__ = [
    "ONE_TENANT",
    "RAW",
    "Answer",
    "AnswerNotStored",
    "Answering",
    "AsyncIdempotency",
    "AsyncIdempotencyInterceptor",
    "AsyncOnce",
    "AsyncRedisFront",
    "AsyncRetryTransport",
    "AsyncRun",
    "AsyncSweeper",
    "BodyKey",
    "CallableKey",
    "Codec",
    "Codes",
    "Compat",
    "ConfigurationError",
    "Custom",
    "Fingerprint",
    "Fingerprinter",
    "FirstSent",
    "FirstSentMalformed",
    "FormBody",
    "GrpcCodes",
    "GrpcOperation",
    "HeaderKey",
    "HttpOperation",
    "Idempotency",
    "IdempotencyError",
    "IdempotencyInterceptor",
    "IdempotencyKeyReused",
    "IdempotencyMiddleware",
    "IdempotencyStatus",
    "IdempotencyTables",
    "Idempotent",
    "InProgress",
    "IntentTooOld",
    "JsonBody",
    "KeyMalformed",
    "KeyMissing",
    "KeyQuota",
    "KeyRules",
    "KeyScope",
    "KeyedRequest",
    "LeaseLost",
    "MemoryFront",
    "MessageBody",
    "Mode",
    "NotComparable",
    "Once",
    "Operation",
    "RawBytes",
    "Record",
    "RedisFront",
    "Replay",
    "RequestParts",
    "RequestTooLarge",
    "RetriesExhausted",
    "RetryClientInterceptor",
    "RetryPolicy",
    "RetryTransport",
    "Run",
    "RunUnknown",
    "ScopeMissing",
    "ServerStreaming",
    "State",
    "Statuses",
    "StoreUnavailable",
    "Streaming",
    "Sweep",
    "Sweeper",
    "TakeOver",
    "TooManyKeys",
    "ValueCodec",
    "WsgiIdempotencyMiddleware",
    "WsgiIdempotencyStatus",
    "async_retry_client_interceptors",
    "current_run",
    "grpc_answer",
    "idempotent",
    "intent",
    "keyed_request",
    "metadata",
    "msgpack_codec",
    "protect",
]
