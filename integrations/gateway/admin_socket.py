"""A Unix socket for administrators: the permission to open its file replaces a key."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

from rollout_sched.core.errors import CallerError


class AdminSocket:
    """The socket is created at `path` and removed from there when it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener: asyncio.AbstractServer | None = None

    async def open(self, connect: Callable[[], asyncio.BaseProtocol]) -> None:
        """Only its owner can open it: connections are possible only after its mode is set.
        `connect` makes the protocol of each connection. Raises CallerError."""
        _clear_away(self.path)
        taken = socket.socket(socket.AF_UNIX)
        try:
            taken.bind(str(self.path))
            self.path.chmod(0o600)
        except OSError as error:
            taken.close()
            raise CallerError(f"--admin-socket {self.path}: {error}") from error
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_unix_server(connect, sock=taken)

    def close(self) -> None:
        """Accept no new connections. Does nothing if the socket was never opened."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
            self.path.unlink(missing_ok=True)


def _clear_away(path: Path) -> None:
    """Remove a stale socket, on which no process listens. Raises CallerError if one does."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise CallerError(f"--admin-socket {path}: another gateway listens on it")
