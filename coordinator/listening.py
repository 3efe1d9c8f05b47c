"""One address for several processes: held by the one that starts them, so that nobody else can join them unseen."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence


def cannot_listen(listen: str) -> OSError:
    """What is wrong with an address, and what to do."""
    return OSError(
        f"listen: cannot listen on {listen}: the port is in use, or the address is not this host's; "
        "stop what uses it, or name another with --listen"
    )


class HeldPort:
    """A port that processes of this user may share if they ask to, and that nobody can take for himself.

    Whoever holds it takes no connections. Raises OSError if it is in use, also by others who hold it.
    """

    def __init__(self, listen: str) -> None:
        host, _, port = listen.rpartition(":")
        self._sockets: list[socket.socket] = []
        self.port = int(port)
        missing: OSError | None = None
        for family, address in _addresses(host.strip("[]"), listen):
            try:
                held = _hold(family, (address, self.port))
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:  # localhost may name ::1 where there is no IPv6
                    self.close()
                    raise cannot_listen(listen) from error
                missing = error
                continue
            self._sockets.append(held)
            self.port = held.getsockname()[1]  # port 0 takes a free one
        if not self._sockets:
            raise cannot_listen(listen) from missing

    def close(self) -> None:
        """Let others have it."""
        while self._sockets:
            self._sockets.pop().close()


def _addresses(host: str, listen: str) -> Sequence[tuple[int, str]]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise cannot_listen(listen) from error
    return list(dict.fromkeys((int(family), str(address[0])) for family, _, _, _, address in found))


def _hold(family: int, address: tuple[str, int]) -> socket.socket:
    """A socket bound to an address that nobody else had: one that shares its port would not be told if somebody has."""
    with _socket(family, socket.SO_REUSEADDR) as alone:  # beside connections of a server that has just stopped
        alone.bind(address)
        alone.listen(1)  # of two who come to this at once, one fails here
        alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        shared = _socket(family, socket.SO_REUSEPORT)
        try:
            shared.bind(alone.getsockname())
        except OSError:
            shared.close()
            raise
        return shared


def _socket(family: int, option: int) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, option, 1)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return made
