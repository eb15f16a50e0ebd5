"""A trainer's calls to a gateway in another process: their messages, their errors, and HTTP."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
from yarl import URL

from rollout_sched.core.errors import CallerError, RolloutError
from rollout_sched.core.model.records import Count
from rollout_sched.live.trainer import TRAINER, LeaseEnded, TrainerName
from rollout_sched.store import StoreFull

log = logging.getLogger(__name__)

T = TypeVar("T")

MSGPACK = "application/msgpack"

STATE = "/rollout/v1/state"

#: A header of every answer to a trainer, and of every later call of the trainer: the epoch of the
#: scheduler's run. It changes when the gateway is restarted.
EPOCH = "Rollout-Epoch"

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


class Renewal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """trainer  the holder of the lease"""

    trainer: TrainerName = TRAINER


class SubmissionAnswer(msgspec.Struct, frozen=True):
    """accepted   number of submitted groups
    delivered  uids of those whose batch was acknowledged before: they are not generated again
    """

    accepted: Count
    delivered: list[str]


class NextBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """trainer    the name of the calling trainer
    ack        the number of the batch that has arrived
    part       only the parts of it up to this one have arrived
    parts      the finished part of the next batch is enough
    timeout_s  the longest wait
    """

    trainer: TrainerName = TRAINER
    ack: int | None = None
    part: int | None = None
    parts: bool = False
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 30.0


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


CONNECT_S = 10.0

#: Seconds without a byte of an answer after which the gateway counts as gone: without this limit, a
#: call to a machine that has vanished would never end. Far longer than the gateway lets calls wait.
ANSWER_S = 120.0


class TrainerClient(TrainerCalls):
    """Trainer calls over HTTP."""

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url)
        self._socket = parts.path if parts.scheme == "unix" else ""
        served = parts.scheme in ("http", "https") and parts.hostname and not parts.query
        if not served and not self._socket:
            raise CallerError(
                f"gateway {url!r}: write it as http://host:port, https://host:port, or "
                "unix:///path/of/its/admin/socket"
            )
        if parts.path.rstrip("/").endswith("/v1"):
            raise CallerError(f"gateway {url!r}: leave out /v1, which is for clients of a model")
        self.url = "http://localhost" if self._socket else url.rstrip("/")
        self._headers = {"Accept": MSGPACK, "Content-Type": MSGPACK}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        super().__init__(self.url)
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        # The gateway closes the connection after each call.
        connector: aiohttp.BaseConnector
        if self._socket:
            connector = aiohttp.UnixConnector(self._socket, force_close=True)
        else:
            connector = aiohttp.TCPConnector(force_close=True)
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=ANSWER_S),
        )

    async def greet(self) -> dict[str, Any]:
        """The gateway's state. Raises CallerError if the server is not a gateway."""
        try:
            _, body = await self.send("GET", STATE, repeatable=True)
            state = msgspec.msgpack.decode(body, type=dict[str, Any])
            if "fleet_version" in state:
                return state
        except (CallerError, msgspec.DecodeError):
            pass  # whatever the server is, it does not know the path
        if await self._is_vllm():
            raise CallerError(
                f"{self.url} is a vLLM server, not a gateway; schedule in this process with "
                f'from_toml(policy, ["{self.url}"]), or start rollout-sched serve --instance '
                f"{self.url} and connect to that"
            )
        raise CallerError(
            f"{self.url} is not a gateway of rollout-sched; connect to the URL that `rollout-sched "
            "serve` prints"
        )

    async def _is_vllm(self) -> bool:
        try:
            _, body = await self.send("GET", "/v1/models")
            return bool(msgspec.json.decode(body)["data"][0]["owned_by"] == "vllm")
        except (RolloutError, msgspec.DecodeError, LookupError, TypeError):
            return False

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def once(self, method: str, path: str, data: bytes) -> tuple[int, bytes]:
        if self._session is None:
            raise CallerError("the connection to the gateway is not open; use `async with`")
        # encoded=True: an instance's URL within the path keeps its %2F
        url = URL(self.url + path, encoded=True)
        epoch = {EPOCH: self.epoch} if self.epoch else {}
        try:
            async with self._session.request(
                method, url, data=data, headers=epoch, allow_redirects=False
            ) as response:
                body, status = await response.read(), response.status
                self.epoch = response.headers.get(EPOCH, self.epoch)
        except aiohttp.ClientResponseError as error:
            raise CallerError(f"{self.url}: the server there does not speak HTTP") from error
        except (aiohttp.ClientError, OSError) as error:
            text = str(error) or type(error).__name__
            raise GatewayError(f"{self.url}{path}: {text}") from error
        if status >= 300:
            raise error_of(f"{self.url}{path}", status, body)
        return status, body
