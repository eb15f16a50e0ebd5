"""The live page at `/`, and the route for its data."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import cache

import msgspec
from aiohttp import web

from rollout_sched.integrations.gateway.control_plane.codec import refusal, reply
from rollout_sched.integrations.gateway.control_plane.live_watch import LiveWatch
from rollout_sched.page.live_page import live_page

EVENT_STREAM = "text/event-stream"

#: Streams that may be open at once.
MOST_STREAMS = 16

#: Seconds within which a browser must read what it is sent.
TAKE_S = 10.0

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class LiveRoutes:
    """The page itself has no data and is open to everybody; its data is for administrators."""

    def __init__(self, watch: LiveWatch) -> None:
        self._watch = watch

    def open_routes(self) -> list[web.RouteDef]:
        return [web.get("/", self.page)]

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/admin/live", self.live)]

    async def page(self, request: web.Request) -> web.Response:
        return web.Response(
            body=_page(), content_type="text/html", charset="utf-8", headers=_HEADERS
        )

    async def live(self, request: web.Request) -> web.StreamResponse:
        """One document, or a stream of them if the client accepts a stream."""
        if EVENT_STREAM not in request.headers.get("Accept", ""):
            return reply(request, self._watch.state())
        if self._watch.streams >= MOST_STREAMS:
            return refusal(503, f"{MOST_STREAMS} pages are open, which is the limit; close one")
        response = web.StreamResponse(headers={"Content-Type": EVENT_STREAM, **_HEADERS})
        await response.prepare(request)
        try:
            async with aclosing(self._watch.stream()) as states:
                async for state in states:
                    async with asyncio.timeout(TAKE_S):
                        await response.write(_event(msgspec.json.encode(state)))
        except (ConnectionError, TimeoutError):
            pass  # the browser has disconnected or reads too slowly
        return response


@cache
def _page() -> bytes:
    return live_page()


def _event(data: bytes) -> bytes:
    return b"event: state\ndata: " + data + b"\n\n"
