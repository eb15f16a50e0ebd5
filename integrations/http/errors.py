"""What goes wrong between two ends of an HTTP/1.1 connection."""

from __future__ import annotations


class Malformed(ValueError):
    """What arrived is not HTTP/1.1; `status` is what a server answers to it."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class ExchangeError(ConnectionError):
    """An exchange that did not come to its end; the base of the two below."""


class NotConnected(ExchangeError):
    """No connection could be had: the instance has not seen the request."""


class AnswerBroken(ExchangeError):
    """The connection broke or what came is not HTTP: the instance may have seen the request."""
