"""Reads and writes bodies of control calls: JSON, or msgpack for clients that use it."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from rollout_sched.client.remote import MSGPACK
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.data_plane.call import error_body

#: Seconds for a whole body to arrive.
BODY_S = 120.0

T = TypeVar("T")


async def body_of(request: web.Request) -> bytes:
    """The raw body. Raises an HTTP error if it is too long, or does not arrive in time."""
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError as error:
        text = f"the body did not arrive within {BODY_S:g} s; send less in one call"
        raise web.HTTPRequestTimeout(text=text) from error


async def read(request: web.Request, kind: type[T]) -> T:
    """The body as `kind`; an empty body is an empty object. Raises CallerError with the field."""
    coding = request.headers.get("Content-Encoding", "identity")
    if coding.lower() != "identity":
        text = f"Content-Encoding {coding!r}: send the body as it is, without Content-Encoding"
        raise web.HTTPUnsupportedMediaType(text=text)
    body = await body_of(request)
    try:
        if request.content_type == MSGPACK:
            return msgspec.msgpack.decode(body, type=kind)
        return msgspec.json.decode(body or b"{}", type=kind)
    except UnicodeDecodeError as error:
        raise CallerError(f"body: byte {error.start} is not UTF-8; send UTF-8") from error
    except RecursionError as error:
        raise CallerError("body: nested too deeply; send it with fewer levels") from error
    except msgspec.DecodeError as error:
        raise CallerError(f"body: {error}") from error


def reply(request: web.Request, value: Any, status: int = 200) -> web.Response:
    """A value, in the format that the client accepts."""
    if MSGPACK in request.headers.get("Accept", ""):
        body, kind = msgspec.msgpack.encode(value), MSGPACK
    else:
        body, kind = msgspec.json.encode(value), "application/json"
    return web.Response(status=status, body=body, content_type=kind)


def refusal(status: int, text: str) -> web.Response:
    """An error in the format that OpenAI's clients expect."""
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    if status == 503:
        headers["Retry-After"] = "1"
    body = error_body(status, text)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)
