"""The example's bank, which may also be called directly: ``/test.Bank/debit`` enlists a debit, given as JSON.

python -m tests.integration.called_bank --serve HOST:PORT …the bank's own options…
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from examples.transfer import bank
from participant_sdk import Participant
from participant_sdk.context import pinned_branch_key
from participant_sdk.interceptors import XidClientInterceptor, XidServerInterceptor

METHOD = "/test.Bank/debit"


class CalledBank(Participant):
    """A bank with a business service beside it."""

    address = ""

    def serve(self, *arguments: Any, **options: Any) -> None:
        """Serve both until SIGTERM."""
        handler: Any = grpc.unary_unary_rpc_method_handler(self.debit)
        handlers = [grpc.method_handlers_generic_handler("test.Bank", {"debit": handler})]
        with ThreadPoolExecutor(4) as pool:
            server = grpc.server(pool, handlers, [XidServerInterceptor()], [("grpc.so_reuseport", 0)])
            server.add_insecure_port(self.address)
            server.start()
            try:
                super().serve(*arguments, **options)
            finally:
                server.stop(None).wait()

    def debit(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """The business RPC."""
        self._definitions["debit"].enlist(bank.Debit(**json.loads(request)))
        return b"held"


def pay(address: str, key: str, account: str, amount: int, timeout_s: float = 60.0) -> bytes:
    """Call a bank, for the transaction that the running code belongs to. Raises grpc.RpcError."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options=options) as plain, pinned_branch_key(key):
        call: Any = grpc.intercept_channel(plain, XidClientInterceptor()).unary_unary(METHOD)
        request = json.dumps({"account": account, "amount": amount}).encode()
        answer: bytes = call(request, timeout=timeout_s, wait_for_ready=True)
        return answer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--serve", required=True)
    given, rest = parser.parse_known_args(sys.argv[1:])
    CalledBank.address = given.serve
    bank.main(rest, CalledBank)
