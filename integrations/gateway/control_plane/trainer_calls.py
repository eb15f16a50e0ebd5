"""A trainer's calls to a gateway in another process, independent of the transport."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from rollout_sched.core.errors import CallerError, RolloutError
from rollout_sched.live.leases import LeaseEnded
from rollout_sched.store.errors import StoreFull

log = logging.getLogger(__name__)

T = TypeVar("T")

STATE = "/rollout/v1/state"

#: Number of tries, and seconds between them, while the gateway cannot be reached; only for calls
#: that are safe to repeat.
TRIES = 60
RETRY_S = 1.0


#: The statuses that are the caller's fault.
_CALLERS: dict[int, type[CallerError]] = {
    400: CallerError,
    404: CallerError,
    409: CallerError,
    410: LeaseEnded,
    413: CallerError,
    507: StoreFull,
}


class GatewayError(RolloutError, RuntimeError):
    """The gateway could not be reached, or failed; `status` is its answer's status, or 0."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class TrainerCalls(ABC):
    """Calls in msgpack to a gateway's /rollout/v1 and /admin. Raises CallerError if the fault is
    the caller's, else GatewayError.

    name   the gateway's name, for people
    epoch  the epoch of the gateway's last answer; "" before the first
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = ""

    @abstractmethod
    async def open(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def greet(self) -> dict[str, Any]:
        """The gateway's state. Raises CallerError if the server is not a gateway."""

    @abstractmethod
    async def once(self, method: str, path: str, data: bytes) -> tuple[int, bytes]:
        """(status, body) of an answer that is not an error; remembers its epoch."""

    async def post(
        self, path: str, body: Any = None, *, repeatable: bool = False
    ) -> tuple[int, bytes]:
        return await self.send("POST", path, {} if body is None else body, repeatable=repeatable)

    async def send(
        self, method: str, path: str, body: Any = None, *, repeatable: bool = False
    ) -> tuple[int, bytes]:
        """(status, body) of an answer that is not an error."""
        data = b"" if body is None else msgspec.msgpack.encode(body)
        if not repeatable:
            return await self.once(method, path, data)
        return await self.repeated(lambda: self.once(method, path, data))

    async def repeated(self, call: Callable[[], Awaitable[T]]) -> T:
        """The result of a call that is repeated while the gateway cannot be reached."""
        for left in reversed(range(TRIES)):
            try:
                return await call()
            except GatewayError as error:
                if error.status or not left:
                    raise
                if left == TRIES - 1:
                    log.warning("%s; retrying for %g s", error, TRIES * RETRY_S)
            await asyncio.sleep(RETRY_S)
        raise AssertionError("the last try returns or raises")


def error_of(where: str, status: int, body: bytes) -> RolloutError:
    """The exception for an answer with this status."""
    try:
        text = str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        text = body[:200].decode(errors="replace")
    if status in _CALLERS:
        return _CALLERS[status](text)
    return GatewayError(f"{where} answered {status}: {text}", status)
