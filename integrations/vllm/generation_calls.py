"""The calls that generate, on connections of their own. Never repeated: they do work."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager

import aiohttp

from rollout_sched.integrations.vllm.control import (
    CONNECT_S,
    KEEP_ALIVE_S,
    Answer,
    as_instance_errors,
    session,
)
from rollout_sched.live.ports import InstanceError


class GenerationCalls:
    """POST to one server; an answer may take as long as it takes, or `limit_s` seconds."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | None,
        limit_s: float | None,
    ) -> None:
        self._url = url
        self._headers = dict(headers)
        self._tls = tls
        self._timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_S)
        self._open: aiohttp.ClientSession | None = None

    async def post(
        self,
        target: str,
        headers: Mapping[str, str],
        body: bytes,
        largest: int,
        receive: Callable[[bytes], None] | None = None,
    ) -> Answer:
        """The answer, at most `largest` bytes long. The body of a 200 goes to `receive` instead,
        as it comes, if that is given."""
        size = 0
        kept = bytearray()
        with as_instance_errors(target):
            async with self._send(target, headers, body) as response:
                take = receive if receive is not None and response.status == 200 else kept.extend
                async for part in response.content.iter_any():
                    size += len(part)
                    if size > largest:
                        raise InstanceError(f"{target} answered with more than {largest} bytes")
                    take(part)
                return Answer(response.status, bytes(kept))

    def _send(
        self, target: str, headers: Mapping[str, str], body: bytes
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._open is None:
            self._open = session(self._headers, self._tls, keepalive_timeout=KEEP_ALIVE_S)
        # Redirects are not followed: they would carry the API key elsewhere.
        return self._open.post(
            self._url + target,
            data=body,
            headers=headers,
            timeout=self._timeout,
            allow_redirects=False,
        )

    async def close(self) -> None:
        if self._open is not None:
            await self._open.close()
        self._open = None
