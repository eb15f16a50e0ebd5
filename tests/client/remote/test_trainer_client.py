"""What a trainer in another process calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollout_sched.client.remote import MSGPACK, calls
from rollout_sched.client.remote.calls import (
    GatewayError,
    TrainerClient,
)
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.control_plane.codec import refusal
from tests import virtual_net

Handler = Callable[[web.Request], Awaitable[web.Response]]


def against(handler: Handler, use: Callable[[TrainerClient], Awaitable[Any]]) -> Any:
    async def scene() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        async with TestServer(app, host="127.0.0.1") as server:
            client = TrainerClient(str(server.make_url("/")), "root")
            await client.open()
            try:
                return await use(client)
            finally:
                await client.close()

    return virtual_net.run(scene())


@pytest.mark.parametrize(
    "url", ["", "gateway:8000", "ftp://a", "http://", "http://a?x=1", "unix://"]
)
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(CallerError, match="unix:///path"):
        TrainerClient(url, None)


def test_calls_are_msgpack_with_the_key() -> None:
    async def handler(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer root"
        assert request.content_type == request.headers["Accept"] == MSGPACK
        told = {"path": request.raw_path, "body": msgspec.msgpack.decode(await request.read())}
        return web.Response(body=msgspec.msgpack.encode(told), status=202)

    async def use(client: TrainerClient) -> Any:
        status, body = await client.post("/admin/instances/http%3A%2F%2Fa", {"a": b"1"})
        return status, msgspec.msgpack.decode(body)

    told = {"path": "/admin/instances/http%3A%2F%2Fa", "body": {"a": b"1"}}
    assert against(handler, use) == (202, told)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, CallerError), (404, CallerError), (409, CallerError), (413, CallerError)]
    + [(status, GatewayError) for status in (301, 401, 403, 500, 502, 503)],
)
def test_an_error_is_of_whoever_made_it(status: int, kind: type[Exception]) -> None:
    async def handler(request: web.Request) -> web.Response:
        return refusal(status, "not like this")

    with pytest.raises(kind, match="not like this") as caught:
        against(handler, lambda client: client.post("/x"))
    assert getattr(caught.value, "status", status) == status


def test_an_error_that_is_no_errors_body_is_quoted() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=500, text="<html>")

    with pytest.raises(GatewayError, match="answered 500: <html>"):
        against(handler, lambda client: client.send("GET", "/x"))


def test_a_gateway_that_has_vanished_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is gone closes no connection."""
    monkeypatch.setattr(calls, "ANSWER_S", 0.05)

    async def handler(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    with pytest.raises(GatewayError, match="imeout"):
        against(handler, lambda client: client.post("/x"))


def test_it_has_to_be_opened() -> None:
    with pytest.raises(CallerError, match="async with"):
        virtual_net.run(TrainerClient("http://a", None).post("/x"))
