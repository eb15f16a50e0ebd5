"""Control calls to one vLLM server, with limits on rate, time and size of the answer."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import aiohttp
import msgspec
from asyncio_throttle.throttler import Throttler

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.http import Headers
from rollout_sched.integrations.vllm.protocol.refusals import REMEDIES, AnswerRefused, refusal
from rollout_sched.live.ports import InstanceError


class Throttle(Throttler):
    """At most `rate` calls in any second. Raises CallerError for a rate below one.

    `take` avoids a coroutine if the call does not have to wait.
    """

    def __init__(self, rate: int, setting: str) -> None:
        if rate < 1:
            raise CallerError(
                f"{setting} is {rate}; it must be a number of calls per second, at least 1"
            )
        super().__init__(rate_limit=rate)

    async def acquire(self) -> None:
        """Returns when the next call may be made."""
        await super().acquire()  # type: ignore[no-untyped-call]

    def take(self) -> bool:
        """Whether a call may be made now; if so, it is counted."""
        now, calls = time.monotonic(), self._task_logs
        while calls and now - calls[0] > self.period:
            calls.popleft()
        if len(calls) >= self.rate_limit:
            return False
        calls.append(now)
        return True


KEEP_ALIVE_S = 3.0  # vLLM's uvicorn closes idle connections after 5 s
CONNECT_S = 10.0
LARGEST_ANSWER = 32 * 2**20  # bytes; /metrics has 28 KB for each data-parallel rank


class ControlAnswer(msgspec.Struct, frozen=True):
    """Status and body of an HTTP answer."""

    status: int
    body: bytes


class ServerControl:
    """GET and POST to one server.

    A call that is safe to repeat is sent again, once and on a new connection, if the server closes
    the connection it was sent on, as it does with connections that were idle too long. Other calls
    use a new connection at once, and are never repeated.
    """

    def __init__(
        self,
        url: str,
        headers: Headers,
        tls: ssl.SSLContext | None,
        rate: int,
        limit_s: float,
    ) -> None:
        self.url = url
        self._headers = {name.decode(): value.decode() for name, value in headers}
        self._tls = tls
        self.throttle = Throttle(rate, "control_rate")
        self._limit_s = limit_s
        self._open: tuple[aiohttp.ClientSession, aiohttp.ClientSession] | None = None

    async def get(self, path: str) -> ControlAnswer:
        """An answer with any status; raises InstanceError if there is none."""
        return await self.send("GET", path)

    async def call(
        self,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        repeatable: bool = True,
        throttled: bool = True,
        limit_s: float | None = None,
        remedies: Mapping[int, str] = REMEDIES,
    ) -> bytes:
        """POST that must succeed within `limit_s` seconds. Returns the body of the 200.

        `throttled=False` is for a caller that has already passed the throttle. `remedies`: what to
        do, by the status of a refusal.
        """
        if throttled:
            await self.throttle.acquire()
        answer = await self._exchange("POST", path, body, query, repeatable, limit_s)
        if answer.status != 200:
            raise refusal(answer.status, answer.body, path, remedies)
        return answer.body

    async def send(self, method: str, path: str, body: Any = None) -> ControlAnswer:
        """An answer with any status to a call that is safe to repeat; raises InstanceError if there
        is none."""
        await self.throttle.acquire()
        return await self._exchange(method, path, body, None, True, None)

    async def _exchange(
        self,
        method: str,
        path: str,
        body: Any,
        query: Mapping[str, str] | None,
        repeatable: bool,
        limit_s: float | None,
    ) -> ControlAnswer:
        timeout = aiohttp.ClientTimeout(limit_s or self._limit_s, sock_connect=CONNECT_S)
        data = None if body is None else msgspec.json.encode(body)
        options = {"data": data, "params": query, "timeout": timeout}
        kept, fresh = self._sessions()
        with as_instance_errors(path):
            if repeatable:
                try:
                    return await self._once(kept, method, path, options)
                except (aiohttp.ServerDisconnectedError, ConnectionResetError, BrokenPipeError):
                    pass  # the server has just closed an idle connection
            return await self._once(fresh, method, path, options)

    async def _once(
        self, session: aiohttp.ClientSession, method: str, path: str, options: dict[str, Any]
    ) -> ControlAnswer:
        # Redirects are not followed: they would send the API key to another server.
        url = self.url + path
        async with session.request(method, url, allow_redirects=False, **options) as response:
            body = bytearray()
            async for part in response.content.iter_any():
                body += part
                if len(body) > LARGEST_ANSWER:
                    raise InstanceError(f"{path} answered with more than {LARGEST_ANSWER} bytes")
            return ControlAnswer(response.status, bytes(body))

    def _sessions(self) -> tuple[aiohttp.ClientSession, aiohttp.ClientSession]:
        """One that keeps connections and one that does not; created within the event loop."""
        if self._open is None:
            self._open = (
                session(self._headers, self._tls, keepalive_timeout=KEEP_ALIVE_S),
                session(self._headers, self._tls, force_close=True),
            )
        return self._open

    async def close(self) -> None:
        for each in self._open or ():
            await each.close()
        self._open = None


def session(
    headers: Mapping[str, str], tls: ssl.SSLContext | None, **connector: Any
) -> aiohttp.ClientSession:
    """Connections to one server, as many as needed at once."""
    verify: Any = True if tls is None else tls
    return aiohttp.ClientSession(
        headers=headers, connector=aiohttp.TCPConnector(ssl=verify, limit=0, **connector)
    )


@contextmanager
def as_instance_errors(path: str) -> Iterator[None]:
    """Turns errors of a call to `path` into InstanceErrors."""
    try:
        yield
    except TimeoutError as error:
        raise InstanceError(f"{path} did not answer in time") from error
    except aiohttp.ClientResponseError as error:  # its text quotes the answer
        unquoted = f"{path} failed: the answer is not HTTP"
        raise AnswerRefused(f"{path} failed: {error}", unquoted=unquoted) from error
    except (aiohttp.ClientError, OSError) as error:
        raise InstanceError(f"{path} failed: {error or type(error).__name__}") from error


def decoded(path: str, body: bytes, type_: type[Any]) -> Any:
    """The JSON of an answer as `type_`; raises InstanceError if it is something else."""
    try:
        return msgspec.json.decode(body, type=type_)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        unquoted = f"{path} gave an unexpected answer: is it vLLM?"
        raise AnswerRefused(
            f"{path} gave an unexpected answer ({error}): {body[:200]!r}", unquoted=unquoted
        ) from error
