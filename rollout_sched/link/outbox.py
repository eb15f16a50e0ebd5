"""Collects messages and sends them together, once per turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Sends messages in the order of `put`; sends nothing after `close`."""

    def __init__(self, send: Callable[[list[T]], None]) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._messages: list[T] = []
        self._closed = False

    def put(self, message: T) -> None:
        if not self._messages:
            self._loop.call_soon(self._flush)
        self._messages.append(message)

    def _flush(self) -> None:
        messages, self._messages = self._messages, []
        if not self._closed:
            self._send(messages)

    def close(self) -> None:
        self._closed = True
