"""The way from the gateway to one instance: bytes there, bytes back."""

from __future__ import annotations

from typing import Any, Protocol

from rollout_sched.integrations.gateway.dialects import ENGINE_ID
from rollout_sched.live.ports import InstanceError, RequestRejected

#: Statuses that say more about the instance than about the request.
_INSTANCE_AT_FAULT = (404, 408, 409, 425, 429)


class Forwarding(Protocol):
    """What the gateway needs of an instance's client beside the port."""

    @property
    def name(self) -> str: ...
    @property
    def pool(self) -> Any: ...
    @property
    def request_headers(self) -> list[tuple[bytes, bytes]]: ...
    def known_as(self, order_id: str, engine_id: str) -> None: ...


def announce(
    client: Forwarding, path: bytes, order_id: str, request_id: bytes
) -> tuple[bytes, bytes]:
    """The header that names an attempt: as the client did, or by the order.

    The engine makes its own id of it; that is what an abort must name.
    """
    name = request_id or order_id.encode()
    pattern = ENGINE_ID.get(path)
    if pattern is not None:
        client.known_as(order_id, pattern % name.decode("latin-1"))
    return b"x-request-id", name


def refuse(status: int, body: bytes) -> Exception:
    """What an answer with another status than 200 means."""
    text = f"status {status}: {body[:200].decode(errors='replace')}"
    if 400 <= status < 500 and status not in _INSTANCE_AT_FAULT:
        return RequestRejected(text, status, body)
    return InstanceError(text)
