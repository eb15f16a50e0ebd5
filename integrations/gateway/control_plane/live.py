"""The run's state for the live page: one document or a stream. It costs nothing without viewers.

The fold behind the page is attached to the event pump only while a page is open, and a minute
longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import cache
from typing import Any

import msgspec
from aiohttp import web

from rollout_sched.integrations.gateway.control_plane.codec import reply
from rollout_sched.integrations.gateway.control_plane.gateway import Gateway
from rollout_sched.page.live_page import LiveFold, last_steps, live_page

SCHEMA = "rollout-sched-live/1"

#: Seconds between two documents of a stream.
EACH_S = 1.0

#: Seconds for which a document is kept, whoever asks.
KEPT_S = 0.5

#: Seconds that observation continues after the last viewer has left, in case one returns.
LINGER_S = 60.0

#: Fields of an InstanceView that do not change and are shown elsewhere.
_STATIC = ("max_model_len", "model", "capabilities", "notes")

#: Fields of the scheduler's state that are shown here too.
_STATE = (
    "version",
    "fleet_version",
    "broken",
    "requests",
    "groups",
    "batches",
    "prompts_per_step",
    "trainer_waiting",
    "waits_for",
)


class LiveWatch:
    """Folds the driver's events while there are viewers; `streams` counts the open streams."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._pump = gateway.driver.pump
        self._fold: LiveFold | None = None
        self._kept: tuple[LiveFold, dict[str, Any]] | None = None
        self.streams = 0
        self._ending: asyncio.TimerHandle | None = None
        self._closed = asyncio.Event()

    def state(self) -> dict[str, Any]:
        """One document, without the attempts; observation continues for LINGER_S."""
        found = self._state(self._look())
        self._end_later()
        return found

    async def stream(self) -> AsyncGenerator[dict[str, Any], None]:
        """A document now, with all remembered attempts, then one each second with the attempts that
        have begun or ended since. Ends when the gateway stops."""
        self.streams += 1
        try:
            known: LiveFold | None = None
            seen = 0
            while not self._closed.is_set():
                fold = self._look()
                anew = fold is not known
                known, after, seen = fold, 0 if anew else seen, fold.attempts.serial
                yield {**self._state(fold), "attempts": fold.attempts.since(after), "anew": anew}
                await self._next()
        finally:
            self.streams -= 1
            self._end_later()

    def close(self) -> None:
        """End the streams."""
        self._closed.set()
        self._stop()

    async def _next(self) -> None:
        try:
            async with asyncio.timeout(EACH_S):
                await self._closed.wait()
        except TimeoutError:
            return

    def _look(self) -> LiveFold:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        if self._fold is None:
            self._fold = LiveFold(self._gateway.driver.view, self._pump.now)
            self._pump.observers.append(self._fold.observe)
        return self._fold

    def _end_later(self) -> None:
        if self.streams == 0 and self._fold is not None and self._ending is None:
            loop = asyncio.get_running_loop()
            self._ending = loop.call_later(LINGER_S, self._stop)

    def _stop(self) -> None:
        fold, self._fold, self._ending, self._kept = self._fold, None, None, None
        if fold is not None:
            others = [each for each in self._pump.observers if each != fold.observe]
            self._pump.observers = others

    def _state(self, fold: LiveFold) -> dict[str, Any]:
        gateway, now = self._gateway, self._pump.now
        if self._kept is not None and self._kept[0] is fold:
            kept = self._kept[1]
            if now - kept["now"] < KEPT_S:
                return kept
        state = gateway.state()
        progress = gateway.driver.view.run
        document = {
            "schema": SCHEMA,
            "now": now,
            "watched_s": now - fold.began_s,
            "policy": gateway.policy,
            "healthy": gateway.healthy,
            **{name: state[name] for name in _STATE},
            "instances": [self._instance(each) for each in gateway.supervisors()],
            "instance_s": dict(gateway.figures.fleet.seconds(now)),
            "step": {
                "number": progress.batches,
                "elapsed_s": now - fold.step_began_s,
                "finished": fold.finished,
                "in_batch": state["in_batch"],
                "complete": state["groups"]["complete"],
            },
            "steps": last_steps(gateway.figures.steps.delivered),
            "staleness": dict(sorted(fold.staleness.items())),
            "waste": dict(fold.waste),
            "changes": [change._asdict() for change in fold.changes.last],
        }
        self._kept = fold, document
        return document

    def _instance(self, supervisor: Any) -> dict[str, Any]:
        told: dict[str, Any] = msgspec.to_builtins(self._gateway.view(supervisor))
        return {name: value for name, value in told.items() if name not in _STATIC}


EVENT_STREAM = "text/event-stream"

#: Streams that may be open at once. One more closes the oldest: a client that never reads is not
#: noticed until the kernel's buffers are full, which takes hours with a small fleet.
MAX_STREAMS = 16

#: Seconds within which a browser must read what it is sent.
TAKE_S = 10.0

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LiveRoutes:
    """The live page, and its data. The page itself has no data and is open to
    everybody; its data is for administrators."""

    def __init__(self, watch: LiveWatch) -> None:
        self._watch = watch
        self._streaming: dict[web.StreamResponse, web.Request] = {}  # in order of arrival

    async def page(self, request: web.Request) -> web.Response:
        """The live page."""
        return web.Response(
            body=_page(), content_type="text/html", charset="utf-8", headers=_HEADERS
        )

    async def live(self, request: web.Request) -> web.StreamResponse:
        """One document, or a stream of them if the client accepts a stream."""
        if EVENT_STREAM not in request.headers.get("Accept", ""):
            return reply(request, self._watch.state())
        if len(self._streaming) >= MAX_STREAMS:
            oldest = self._streaming.pop(next(iter(self._streaming)))
            if oldest.transport is not None:
                oldest.transport.abort()
        response = web.StreamResponse(headers={"Content-Type": EVENT_STREAM, **_HEADERS})
        self._streaming[response] = request
        try:
            await response.prepare(request)
            async with aclosing(self._watch.stream()) as states:
                async for state in states:
                    async with asyncio.timeout(TAKE_S):
                        await response.write(_event(msgspec.json.encode(state)))
        except (ConnectionError, TimeoutError):
            pass  # the browser has disconnected or reads too slowly
        finally:
            self._streaming.pop(response, None)
        return response


@cache
def _page() -> bytes:
    return live_page()


def _event(data: bytes) -> bytes:
    return b"event: state\ndata: " + data + b"\n\n"
