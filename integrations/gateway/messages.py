"""Bodies of control calls: JSON, or msgpack for whoever speaks it."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from aiohttp import web

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.call import error_body

MSGPACK = "application/msgpack"

T = TypeVar("T")


async def read(request: web.Request, kind: type[T]) -> T:
    """The body as `kind`; an empty one as an empty object. Raises CallerError naming the field."""
    body = await request.read()
    try:
        if request.content_type == MSGPACK:
            return msgspec.msgpack.decode(body, type=kind)
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CallerError(f"body: {error}") from error


def reply(request: web.Request, value: Any, status: int = 200) -> web.Response:
    """A value, in the format that the client accepts."""
    if MSGPACK in request.headers.get("Accept", ""):
        body, kind = msgspec.msgpack.encode(value), MSGPACK
    else:
        body, kind = msgspec.json.encode(value), "application/json"
    return web.Response(status=status, body=body, content_type=kind)


def refusal(status: int, text: str) -> web.Response:
    """An error as OpenAI's clients expect it."""
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    if status == 503:
        headers["Retry-After"] = "1"
    body = error_body(status, text)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)
