"""Decode the bodies and parameters of calls, and encode JSON answers."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from aiohttp import web

# ------------------------------------------------------------------------------------------
# Error answers in vLLM's format.

_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class Refusal(Exception):
    """A request that the server refuses, with its HTTP status. `param` names the field."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


def content(refusal: Refusal) -> dict[str, Any]:
    error = {
        "message": str(refusal),
        "type": _TYPES[refusal.status],
        "param": refusal.param,
        "code": refusal.status,
    }
    return {"error": error}


T = TypeVar("T")


def decode(raw: bytes, body: type[T]) -> T:
    """Decode the body. Raises Refusal, as vLLM does, if a field is missing or of a wrong type."""
    try:
        return msgspec.json.decode(raw, type=body)
    except msgspec.DecodeError as error:
        raise Refusal(400, str(error)) from None


def flag(request: web.Request, name: str, default: bool) -> bool:
    """A boolean parameter of the query. Raises Refusal."""
    told = request.query.get(name)
    if told is None:
        return default
    if told.lower() not in ("true", "false", "1", "0"):
        raise Refusal(400, f"{name} must be true or false, got {told!r}", name)
    return told.lower() in ("true", "1")


def reply(content: object, status: int = 200) -> web.Response:
    body = msgspec.json.encode(content)
    return web.Response(body=body, status=status, content_type="application/json")
