"""A Unix socket for administrators: who may open its file needs no key."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

from rollout_sched.core.errors import CallerError


class AdminSocket:
    """Made in the file `path`, and gone from there once it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener: asyncio.AbstractServer | None = None

    async def open(self, connect: Callable[[], asyncio.BaseProtocol]) -> None:
        """Only its owner can open it: nobody can connect before its mode is set. `connect` makes
        the protocol of each connection. Raises CallerError."""
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
        """Accept no more. Without `open` this changes nothing."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
            self.path.unlink(missing_ok=True)


def _clear_away(path: Path) -> None:
    """A socket that a gateway has left behind, to which nobody listens. Raises CallerError."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise CallerError(f"--admin-socket {path}: another gateway listens there")
