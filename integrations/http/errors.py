"""What goes wrong on an HTTP/1.1 connection; its own module because no exception is compiled."""

from __future__ import annotations

import asyncio

#: What a callback may raise. The result of a cancelled future is raised as no Exception.
RAISED = (Exception, asyncio.CancelledError)


class Malformed(ValueError):
    """What arrived is not HTTP/1.1, or too much; `status` is what a server answers to it."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class ExchangeError(ConnectionError):
    """An exchange that did not come to its end; the base of the two below."""


class NotConnected(ExchangeError):
    """No connection could be had: the instance has not seen the request."""


class AnswerBroken(ExchangeError):
    """The answer did not come to its end: the instance may have seen the request.

    The connection broke, what came is not HTTP or too much, or the receiver raised (`__cause__`).
    """


def report(doing: str, error: BaseException) -> None:
    """Tell whoever looks after the event loop of what should not have been raised."""
    asyncio.get_running_loop().call_exception_handler(
        {"message": f"{doing} failed", "exception": error}
    )
