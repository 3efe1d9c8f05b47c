"""Somebody else, who charges once per key: a real HTTP server, which can kill whoever asks it."""

import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Charger:
    """`asked`: how often it was asked under each key; `charged`: what it has charged, by key."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.charged: dict[str, int] = {}
        self.kills = False
        self.fails = 0
        self.address = ""

    def charge(self, key: str, amount: int, pid: int) -> str | None:
        """What it says; None: nothing, it is out of order."""
        self.asked[key] += 1
        if self.fails:
            self.fails -= 1
            return None
        self.charged.setdefault(key, amount)
        if self.kills:
            os.kill(pid, signal.SIGKILL)
        return f"charge-{list(self.charged).index(key)}"


@contextmanager
def charging() -> Iterator[Charger]:
    """One that serves."""
    charger = Charger()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            key, amount, pid = self.rfile.read(int(self.headers["Content-Length"])).decode().split()
            said = charger.charge(key, int(amount), int(pid))
            body = (said or "out of order").encode()
            with contextlib.suppress(OSError):  # whoever asked has died
                self.send_response(200 if said else 503)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *arguments: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        charger.address = f"http://127.0.0.1:{server.server_port}/"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield charger
        finally:
            server.shutdown()
            thread.join()
