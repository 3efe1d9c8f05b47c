"""What every benchmark of the coordinator needs of PostgreSQL: its settings as it tells them, and ``pgbench`` on it."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import LiteralString

import psycopg

from tests.postgres import PostgresServer

from .report import progress

SCALE = 10
CLIENTS = 16
SETTINGS = ("server_version", "fsync", "synchronous_commit", "full_page_writes")


@contextmanager
def measured() -> Iterator[tuple[PostgresServer, Path]]:
    """A server whose settings have been shown, and a folder for logs."""
    with ExitStack() as stack:
        server = stack.enter_context(PostgresServer.from_environment())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tricord-bench-")))
        _print_settings(server)
        yield server, folder


@contextmanager
def pgbench_database(server: PostgresServer) -> Iterator[str]:
    """A database with the tables of ``pgbench``, dropped at the end."""
    dsn = server.create_database()
    try:
        _pgbench(server, ["-i", "-q", "-s", str(SCALE), dsn])
        yield dsn
    finally:
        server.drop_database(dsn)


def figure(dsn: str, query: LiteralString) -> int:
    """A number that the server tells."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(query).fetchone()
    assert row is not None
    return int(row[0])


def commits(dsn: str) -> int:
    """How many there were in this database, by the server's own count, which open sessions bring up to date late."""
    return figure(dsn, "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")


def _print_settings(server: PostgresServer) -> None:
    """Durability as the server tells it."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        settings = {name: connection.execute(f"SHOW {name}").fetchone() for name in SETTINGS}
    text = ", ".join(f"{name}={row[0]}" for name, row in settings.items() if row)
    progress(f"PostgreSQL as read back from it: {text}; {os.cpu_count()} cores for everything")


def pgbench_tps(server: PostgresServer, dsn: str, seconds: int = 10) -> float:
    """Transactions per second of ``pgbench -N -c16``."""
    arguments = ["-N", f"-c{CLIENTS}", "-j2", f"-T{seconds}", "-M", "simple", dsn]
    output = _pgbench(server, arguments)
    match = re.search(r"^tps = ([0-9.]+)", output, re.MULTILINE)
    if match is None:
        raise RuntimeError(f"pgbench printed no rate: {output}")
    return float(match[1])


def _pgbench(server: PostgresServer, arguments: list[str]) -> str:
    done = subprocess.run([server.bin_dir / "pgbench", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pgbench failed: {done.stderr[-2000:]}")
    return done.stdout
