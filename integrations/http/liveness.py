"""Sockets that notice when the other side has vanished without a word.

A peer whose machine died, or that a NAT or firewall on the way has forgotten, sends nothing, and so
does one that works. TCP itself can tell them apart, if it is asked to.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Protocol

#: Probes that go unanswered before a peer is taken for gone.
PROBES = 3


class Socket(Protocol):
    """What `transport.get_extra_info("socket")` gives, or a socket."""

    def setsockopt(self, level: int, option: int, value: int, /) -> None: ...


def watch_peer(sock: Socket | None, dead_s: float) -> None:
    """Have the system close a connection whose peer has said nothing for about `dead_s` seconds.

    That is: neither acknowledged what was sent (TCP_USER_TIMEOUT, where there is such a thing) nor
    answered probes while nothing was (keep-alive). 0 leaves it to the system. A socket that knows
    none of this, or is closed already, is left as it is.
    """
    if sock is None or dead_s <= 0:
        return
    idle = max(1, round(dead_s / 2))
    every = max(1, round(dead_s / 2 / PROBES))
    settings = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for names, value in (
        (("TCP_KEEPIDLE", "TCP_KEEPALIVE"), idle),  # Linux's name, and macOS's
        (("TCP_KEEPINTVL",), every),
        (("TCP_KEEPCNT",), PROBES),
        (("TCP_USER_TIMEOUT",), max(1, round(dead_s * 1000))),
    ):
        known = [getattr(socket, name) for name in names if hasattr(socket, name)]
        settings += [(socket.IPPROTO_TCP, option, value) for option in known[:1]]
    with contextlib.suppress(OSError):
        for level, option, value in settings:
            sock.setsockopt(level, option, value)
