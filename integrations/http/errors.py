"""Errors of HTTP/1.1 connections; in a module of its own because exceptions are not compiled."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from typing import Protocol

#: What a callback may raise. The result of a cancelled future raises CancelledError, which is not
#: an Exception.
RAISED = (Exception, asyncio.CancelledError)


class Malformed(ValueError):
    """The received data is not HTTP/1.1, or too long; `status` is the server's answer to it."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class ExchangeError(ConnectionError):
    """An exchange that did not complete; base class of the two below."""


class NotConnected(ExchangeError):
    """No connection could be opened: the instance has not seen the request."""


class AnswerBroken(ExchangeError):
    """The answer did not complete: the instance may have seen the request.

    The connection broke, the data is not HTTP or too long, or the receiver raised (`__cause__`).
    """


def report(doing: str, error: BaseException) -> None:
    """Report an unexpected exception to the event loop's exception handler."""
    asyncio.get_running_loop().call_exception_handler(
        {"message": f"{doing} failed", "exception": error}
    )


# ------------------------------------------------------------------------------------------
# Socket options that detect a peer which has vanished without closing the connection.
#
# A peer whose machine died, or whose connection a NAT or firewall has dropped, sends nothing, and
# neither does a peer that is busy. TCP itself can tell them apart if these options are set.

#: Unanswered probes after which a peer counts as gone.
PROBES = 3


class Socket(Protocol):
    """The result of `transport.get_extra_info("socket")`, or a socket."""

    def setsockopt(self, level: int, option: int, value: int, /) -> None: ...


def watch_peer(sock: Socket | None, dead_s: float) -> None:
    """Make the system close a connection whose peer is silent for about `dead_s` seconds.

    Silent means: it neither acknowledges sent data (TCP_USER_TIMEOUT, where available) nor answers
    probes while nothing is sent (keep-alive). 0 leaves it to the system. A socket without these
    options, or a closed one, is left unchanged.
    """
    if sock is None or dead_s <= 0:
        return
    with contextlib.suppress(OSError):
        for level, option, value in _options(dead_s):
            sock.setsockopt(level, option, value)


@functools.cache
def _options(dead_s: float) -> list[tuple[int, int, int]]:
    """Level, option and value of each, as far as the system knows them."""
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
    return settings
