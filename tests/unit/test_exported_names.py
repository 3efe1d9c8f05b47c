"""The public names: none is missing, none is there by accident, none is loaded before it is needed."""

import ast
import subprocess
import sys
from pathlib import Path

import participant_sdk

EXPORTED = [
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


def test_all_is_what_is_promised() -> None:
    assert participant_sdk.__all__ == EXPORTED


def test_every_name_can_be_had() -> None:
    for name in participant_sdk.__all__:
        assert getattr(participant_sdk, name) is not None
    assert set(EXPORTED) <= set(dir(participant_sdk))


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(participant_sdk.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = [alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(seen) == sorted(EXPORTED)


def test_a_client_does_not_load_sqlalchemy() -> None:
    code = "import sys; from participant_sdk import TricordClient, branch; print('sqlalchemy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_the_sdk_and_the_coordinator_know_nothing_of_each_other() -> None:
    for package, other in (("participant_sdk", "coordinator"), ("coordinator", "participant_sdk")):
        root = Path(participant_sdk.__file__).parents[1] / package
        for path in root.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    names = [node.module or ""]
                assert not any(name.partition(".")[0] == other for name in names), path
