"""A gate before every handler of a bank, so that a demo or a test can stop it at a point that is certain.

    python -m examples.transfer.gate --gate HOST:PORT …the bank's own options…

runs the bank of ``bank.py`` with one addition: each handler, before it does anything, tells ``Gate`` over a loopback
socket that it is there, and goes on when it is told to. To kill "a bank inside Confirm" the gate holds that Confirm,
waits until it has arrived, and only then is the process killed: no guess about time, and no hook in the product.
"""

from __future__ import annotations

import argparse
import functools
import json
import queue
import socket
import socketserver
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

from sqlalchemy import Engine

from participant_sdk import Call, Participant

from . import bank

CONNECT_S = 10.0


class Arrival(NamedTuple):
    """A handler that stands before the gate."""

    bank: str
    action: str
    phase: str
    """TRY, CONFIRM or CANCEL."""
    xid: str


class Hold:
    """Keeps handlers of one kind waiting until ``release``."""

    def __init__(self, bank: str, phase: str) -> None:
        self.bank = bank
        self.phase = phase
        self.arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self.released = threading.Event()

    def wait(self, seconds: float = 30.0) -> Arrival:
        """The next handler that stands before the gate. Raises TimeoutError."""
        try:
            return self.arrivals.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"no {self.phase} reached {self.bank} within {seconds:.0f} s") from None

    def release(self) -> None:
        """Let those that wait go on, and whoever comes after them."""
        self.released.set()


class Gate:
    """The side that decides who may go on: everybody that no ``Hold`` keeps."""

    def __init__(self) -> None:
        self._holds: list[Hold] = []
        self._server = _Server(("127.0.0.1", 0), _Visit)
        self._server.gate = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="gate", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """host:port for ``--gate``."""
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def hold(self, bank: str, phase: str) -> Hold:
        """From now on keep the handlers of a bank's phase waiting."""
        hold = Hold(bank, phase)
        self._holds.append(hold)
        return hold

    def pass_by(self, arrival: Arrival) -> None:
        """Returns when the arrival may go on."""
        for hold in tuple(self._holds):
            if (hold.bank, hold.phase) == (arrival.bank, arrival.phase) and not hold.released.is_set():
                hold.arrivals.put(arrival)
                hold.released.wait()

    def release(self) -> None:
        """Let everybody go on that any hold has kept until now."""
        for hold in tuple(self._holds):
            hold.release()

    def close(self) -> None:
        """Let everybody go on, and close."""
        self.release()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Server(socketserver.ThreadingTCPServer):
    request_queue_size = 128
    gate: Gate


class _Visit(socketserver.StreamRequestHandler):
    timeout = CONNECT_S  # for the one line; a handler that is held waits elsewhere

    def handle(self) -> None:
        try:
            line = self.rfile.readline()
            if not line.endswith(b"\n"):
                return
            assert isinstance(self.server, _Server)
            self.server.gate.pass_by(Arrival(**json.loads(line)))
            self.wfile.write(b"go\n")
        except OSError:
            pass  # the bank was killed meanwhile


# --- the bank's side --------------------------------------------------------------------------------------


class GatedParticipant(Participant):
    """A participant whose handlers wait before the gate."""

    def __init__(self, name: str, engine: Engine, *, gate: str) -> None:
        super().__init__(name, engine)
        host, _, port = gate.rpartition(":")
        self._gate = (host, int(port))

    def action(self, name: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
        """As the participant's own, with gates."""
        add = super().action(name, **options)

        def decorate(try_handler: Callable[..., Any]) -> Any:
            definition = add(self._gated(name, "TRY", try_handler))
            for phase in ("confirm", "cancel"):
                setattr(definition, phase, self._gating(name, phase, getattr(definition, phase)))
            return definition

        return decorate

    def _gating(self, action: str, phase: str, add: Callable[..., Any]) -> Callable[..., Any]:
        return lambda handler: add(self._gated(action, phase.upper(), handler))

    def _gated(self, action: str, phase: str, handler: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(handler)
        def gated(call: Call[Any], db: Any) -> Any:
            self._ask(Arrival(self.name, action, phase, call.xid))
            return handler(call, db)

        return gated

    def _ask(self, arrival: Arrival) -> None:
        with socket.create_connection(self._gate, CONNECT_S) as connection:
            connection.settimeout(None)
            connection.sendall(json.dumps(arrival._asdict()).encode() + b"\n")
            if not connection.recv(3):
                raise ConnectionError("the gate is closed")


def main() -> None:
    """Run a gated bank."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--gate", required=True, metavar="HOST:PORT")
    options, rest = parser.parse_known_args(sys.argv[1:])
    bank.main(rest, functools.partial(GatedParticipant, gate=options.gate))


if __name__ == "__main__":
    main()
