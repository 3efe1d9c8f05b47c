"""The Tricord SDK: take part in distributed transactions, and start them.

    participant   Participant: actions on an engine, served over gRPC
    actions, annotations
                  Try, Confirm and Cancel handlers and what is checked about them
    fence         the pure table that says what a call may do
    fence_tables, fence_row
                  the fence's tables, and a row of them as a value
    databases/    the statements, per database
    local_transaction, external, handling, handler, session_guard, steps, engines, turns, prepare, lost_actions
                  one call's local transaction: its steps written once, two thin runners, the user's handlers
    lanes, service, service_messages, exchange, serve, serve_attached, registration
                  from the network to the fence and back
    payload, payload_libraries, payload_parts, payload_pydantic, payload_msgspec, json_types, json_text
                  annotated Python types as bytes
    call          a call, its reply, and what a handler is called with
    client, client_request, client_asking, client_executing, client_interacting, interactive, client_watching,
    client_connection, coordinator_messages, coordinator_lookup, initiator_metadata, transaction
                  for initiators
    context, branch_keys, context_headers, interceptors, asgi
                  which transaction the running code belongs to, and how that travels
    enlist, enlist_errors, client_enlisting, client_enlist_connection, tried_memory
                  taking part when called directly: Enlist, Try through the lanes, Report
    upkeep*       purging what nothing can ask for any more, settling what waited too long
    service_fence, service_inspection, inspection_sql, inspection_errors, holds, holds_tally, holds_sql, service_holds
                  what operators may ask: the fence, and what is reserved against it
    service_idempotency
                  what became of an idempotency key (`idempotency/`, a package of its own)
    errors        the tree of errors
    lazy_names    what loads the names below when they are first used

Names are loaded when they are first used: a program that only starts transactions never loads SQLAlchemy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from participant_sdk.asgi import XidMiddleware
    from participant_sdk.call import Call
    from participant_sdk.client import AsyncTricordClient, TricordClient
    from participant_sdk.client_request import Wait, branch
    from participant_sdk.context import (
        ContextThreadPoolExecutor,
        bound,
        collecting,
        current_branch_id,
        current_xid,
        in_context,
        pinned_branch_key,
    )
    from participant_sdk.context_headers import collect_tried, outgoing_headers
    from participant_sdk.enlist_errors import BranchUnknown, NotEnlisted
    from participant_sdk.errors import (
        AlreadyDecided,
        ConfigurationError,
        IdempotencyKeyReused,
        InvalidRequest,
        OutcomeUnknown,
        Refused,
        RequestFailed,
        TransactionCancelled,
        TransactionNotFound,
        TricordError,
        UnknownParticipant,
    )
    from participant_sdk.fence_tables import FenceTables, metadata
    from participant_sdk.holds import Hold
    from participant_sdk.interactive import AsyncOpenTransaction, OpenTransaction
    from participant_sdk.interceptors import (
        AsyncXidServerInterceptor,
        XidClientInterceptor,
        XidServerInterceptor,
        async_xid_client_interceptors,
    )
    from participant_sdk.participant import Participant
    from participant_sdk.payload import Payload, PayloadError
    from participant_sdk.serve import SERVER_OPTIONS, AsyncServing, Serving
    from participant_sdk.service_idempotency import AsyncIdempotencyService, IdempotencyService
    from participant_sdk.transaction import Branch, BranchRefusal, BranchState, Transaction, TransactionState
    from participant_sdk.upkeep import PurgeReport, ResolveReport, Upkeep, UpkeepState
else:
    from participant_sdk.lazy_names import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "asgi": ("XidMiddleware",),
            "call": ("Call",),
            "client": ("AsyncTricordClient", "TricordClient"),
            "client_request": ("Wait", "branch"),
            "context": (
                "ContextThreadPoolExecutor",
                "bound",
                "collecting",
                "current_branch_id",
                "current_xid",
                "in_context",
                "pinned_branch_key",
            ),
            "context_headers": ("collect_tried", "outgoing_headers"),
            "enlist_errors": ("BranchUnknown", "NotEnlisted"),
            "errors": (
                "AlreadyDecided",
                "ConfigurationError",
                "IdempotencyKeyReused",
                "InvalidRequest",
                "OutcomeUnknown",
                "Refused",
                "RequestFailed",
                "TransactionCancelled",
                "TransactionNotFound",
                "TricordError",
                "UnknownParticipant",
            ),
            "fence_tables": ("FenceTables", "metadata"),
            "holds": ("Hold",),
            "interactive": ("AsyncOpenTransaction", "OpenTransaction"),
            "interceptors": (
                "AsyncXidServerInterceptor",
                "XidClientInterceptor",
                "XidServerInterceptor",
                "async_xid_client_interceptors",
            ),
            "participant": ("Participant",),
            "payload": ("Payload", "PayloadError"),
            "serve": ("SERVER_OPTIONS", "AsyncServing", "Serving"),
            "service_idempotency": ("AsyncIdempotencyService", "IdempotencyService"),
            "transaction": ("Branch", "BranchRefusal", "BranchState", "Transaction", "TransactionState"),
            "upkeep": ("PurgeReport", "ResolveReport", "Upkeep", "UpkeepState"),
        },
    )

__all__ = [
    "SERVER_OPTIONS",
    "AlreadyDecided",
    "AsyncIdempotencyService",
    "AsyncOpenTransaction",
    "AsyncServing",
    "AsyncTricordClient",
    "AsyncXidServerInterceptor",
    "Branch",
    "BranchRefusal",
    "BranchState",
    "BranchUnknown",
    "Call",
    "ConfigurationError",
    "ContextThreadPoolExecutor",
    "FenceTables",
    "Hold",
    "IdempotencyKeyReused",
    "IdempotencyService",
    "InvalidRequest",
    "NotEnlisted",
    "OpenTransaction",
    "OutcomeUnknown",
    "Participant",
    "Payload",
    "PayloadError",
    "PurgeReport",
    "Refused",
    "RequestFailed",
    "ResolveReport",
    "Serving",
    "Transaction",
    "TransactionCancelled",
    "TransactionNotFound",
    "TransactionState",
    "TricordClient",
    "TricordError",
    "UnknownParticipant",
    "Upkeep",
    "UpkeepState",
    "Wait",
    "XidClientInterceptor",
    "XidMiddleware",
    "XidServerInterceptor",
    "async_xid_client_interceptors",
    "bound",
    "branch",
    "collect_tried",
    "collecting",
    "current_branch_id",
    "current_xid",
    "in_context",
    "metadata",
    "outgoing_headers",
    "pinned_branch_key",
]
