"""What a trainer asks a gateway in another process, over whatever carries it there."""

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

#: A gateway that is away is asked again, so often and after so many seconds; only calls that are
#: safe to repeat.
TRIES = 60
RETRY_S = 1.0


#: What of the answers is the caller's fault.
_CALLERS: dict[int, type[CallerError]] = {
    400: CallerError,
    404: CallerError,
    409: CallerError,
    410: LeaseEnded,
    413: CallerError,
    507: StoreFull,
}


class GatewayError(RolloutError, RuntimeError):
    """The gateway could not be reached, or failed; `status` is 0 or what it answered."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class TrainerCalls(ABC):
    """msgpack to a gateway's /rollout/v1 and /admin. Raises CallerError for what is the caller's
    fault, else GatewayError.

    name   of the gateway, for people
    epoch  of the gateway that answered last; "" before
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
        """Its state. Raises CallerError if it is no gateway that answers."""

    @abstractmethod
    async def once(self, method: str, path: str, data: bytes) -> tuple[int, bytes]:
        """(status, body) of an answer that is no error; notes its epoch."""

    async def post(
        self, path: str, body: Any = None, *, repeatable: bool = False
    ) -> tuple[int, bytes]:
        return await self.send("POST", path, {} if body is None else body, repeatable=repeatable)

    async def send(
        self, method: str, path: str, body: Any = None, *, repeatable: bool = False
    ) -> tuple[int, bytes]:
        """(status, body) of an answer that is no error."""
        data = b"" if body is None else msgspec.msgpack.encode(body)
        if not repeatable:
            return await self.once(method, path, data)
        return await self.repeated(lambda: self.once(method, path, data))

    async def repeated(self, call: Callable[[], Awaitable[T]]) -> T:
        """What a call comes to that may be made again while the gateway is away."""
        for left in reversed(range(TRIES)):
            try:
                return await call()
            except GatewayError as error:
                if error.status or not left:
                    raise
                if left == TRIES - 1:
                    log.warning("%s; asked again for %g s", error, TRIES * RETRY_S)
            await asyncio.sleep(RETRY_S)
        raise AssertionError("the last try returns or raises")


def error_of(where: str, status: int, body: bytes) -> RolloutError:
    """What an answer of this status means."""
    try:
        text = str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        text = body[:200].decode(errors="replace")
    if status in _CALLERS:
        return _CALLERS[status](text)
    return GatewayError(f"{where} answered {status}: {text}", status)
