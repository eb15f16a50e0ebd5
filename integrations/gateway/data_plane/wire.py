"""The way from the gateway to one instance: bytes there, bytes back."""

from __future__ import annotations

from typing import Any, Protocol

from rollout_sched.integrations.gateway.data_plane.dialects import ENGINE_ID
from rollout_sched.integrations.http.exchange import Receiver
from rollout_sched.live.ports import Attempting, InstanceError, RequestRejected

#: Statuses that say more about the instance than about the request, but for a 404 that says that
#: there is no such model (vLLM's words): the client named it.
_INSTANCE_AT_FAULT = (404, 408, 409, 425, 429)


class ProxyCall(Attempting, Protocol):
    """A call under way."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Upstream(Protocol):
    """What the gateway needs of an instance's client beside the port (integrations.vllm)."""

    @property
    def name(self) -> str: ...
    @property
    def pool(self) -> Any: ...
    @property
    def labelled(self) -> bool: ...
    @property
    def request_headers(self) -> list[tuple[bytes, bytes]]: ...
    def pass_on(
        self,
        order_id: str,
        engine_id: str,
        path: str,
        header_lines: bytes,
        body: bytes,
        receiver: Receiver,
    ) -> ProxyCall: ...


def engine_id(path: bytes, name: bytes) -> str:
    """The id that the engine makes of X-Request-Id, which is what an abort must name."""
    return ENGINE_ID[path.partition(b"?")[0]] % name.decode("latin-1")


def refuse(status: int, body: bytes) -> Exception:
    """What an answer with another status than 200 means."""
    text = f"status {status}: {body[:200].decode(errors='replace')}"
    no_model = status == 404 and b"NotFoundError" in body
    if 400 <= status < 500 and (no_model or status not in _INSTANCE_AT_FAULT):
        return RequestRejected(text, status, body)
    return InstanceError(text)
