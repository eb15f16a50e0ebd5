"""Error answers in vLLM's format."""

from __future__ import annotations

from typing import Any

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
