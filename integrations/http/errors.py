"""Errors of HTTP/1.1 connections; in a module of its own because exceptions are not compiled."""

from __future__ import annotations

import asyncio

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
