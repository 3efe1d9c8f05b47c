"""A real Redis for tests: Debian's program, nothing on the disk.

    with RedisServer() as server:
        front = RedisFront.connect(server.dsn())
        server.kill()
        server.start()          # empty
        with server.frozen(): ...

Debian's redis-tools brings the server too: its redis-check-rdb is redis-server, called by another name.
"""

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import redis

from tests.servers import LocalServer, ServerUnavailable

DSN_VARIABLE = "TRICORD_TEST_REDIS_DSN"


class RedisUnavailable(ServerUnavailable):
    """No Redis could be found or started; the text says why."""


class RedisServer(LocalServer):
    """One server of our own, or (`external_dsn`) somebody else's, which is never stopped."""

    name = "redis"
    home = "0"
    dsn_variable = DSN_VARIABLE
    unavailable = RedisUnavailable
    stop_signal = signal.SIGTERM

    def flush(self) -> None:
        """Empty it."""
        with self._asked(self.dsn()) as client:
            client.flushdb()

    def _own_dsn(self, port: int, database: str) -> str:
        return f"redis://127.0.0.1:{port}/{database}"

    def _make_data(self, folder: Path) -> None:
        (folder / "data").mkdir()
        if program := shutil.which("redis-server"):
            (folder / "redis-server").symlink_to(program)
        elif program := shutil.which("redis-check-rdb"):
            (folder / "redis-server").symlink_to(os.path.realpath(program))
        else:
            raise RedisUnavailable("neither redis-server nor redis-check-rdb found; run `make servers`")

    def _command(self, folder: Path, port: int) -> Sequence[str]:
        command = [str(folder / "redis-server"), "--port", str(port), "--bind", "127.0.0.1"]
        return [*command, "--dir", str(folder / "data"), "--save", "", "--appendonly", "no"]

    def _answers(self, folder: Path, port: int) -> bool:
        try:
            with self._asked(self._own_dsn(port, self.home)) as client:
                return bool(client.config_get("dir")["dir"] == os.path.realpath(folder / "data"))
        except redis.RedisError:
            return False

    def _create_database(self, name: str) -> None:
        raise NotImplementedError("a Redis has numbered databases only: see flush")

    def _drop_database(self, name: str) -> None:
        raise NotImplementedError("a Redis has numbered databases only: see flush")

    @contextlib.contextmanager
    def _asked(self, dsn: str) -> Iterator["redis.Redis"]:
        client = redis.Redis.from_url(dsn, decode_responses=True, socket_timeout=10)
        try:
            yield client
        finally:
            client.close()
