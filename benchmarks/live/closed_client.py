"""A client that sends a whole batch at once and waits for every answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import aiohttp
import msgspec

from benchmarks.live.rollout_batch import Ask

PATH = "/v1/completions"


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Answer(msgspec.Struct):
    usage: _Usage


@dataclass(frozen=True)
class Finished:
    """When the answers arrived, in seconds since the batch was sent, ascending; and failures."""

    at_s: Sequence[float]
    failures: Sequence[str]

    def after(self, share: float) -> float:
        """Seconds until this share of the answers had arrived; infinite if it never did."""
        wanted = round(share * (len(self.at_s) + len(self.failures)))
        return self.at_s[wanted - 1] if wanted <= len(self.at_s) else float("inf")


async def send_all(batch: Sequence[Ask], urls: Sequence[str]) -> Finished:
    """Send every request at once, to the addresses in turn, and wait for all answers.

    An answer that is not 200, or whose length differs from the trace, is a failure.
    """
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        start = time.monotonic()
        told = await asyncio.gather(
            *(_send(session, url, ask) for ask, url in zip(batch, cycle(urls), strict=False))
        )
    return Finished(
        sorted(one - start for one in told if isinstance(one, float)),
        [one for one in told if isinstance(one, str)],
    )


async def _send(session: aiohttp.ClientSession, url: str, ask: Ask) -> float | str:
    """The time of the answer, or what was wrong with it."""
    try:
        async with session.post(url + PATH, data=ask.body, headers=ask.headers) as answer:
            body = await answer.read()
            if answer.status != 200:
                return f"{ask.session}: {answer.status} {body[:200].decode('utf-8', 'replace')}"
            tokens = msgspec.json.decode(body, type=_Answer).usage.completion_tokens
    except (aiohttp.ClientError, msgspec.MsgspecError) as error:
        return f"{ask.session}: {error}"
    if tokens != ask.tokens:
        return f"{ask.session}: {tokens} tokens, not {ask.tokens}"
    return time.monotonic()
