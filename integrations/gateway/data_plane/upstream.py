"""What the gateway needs from an instance's client beyond the driver's port: to pass bytes on."""

from __future__ import annotations

from typing import Any, Protocol

from rollout_sched.integrations.http.exchange import Receiver
from rollout_sched.live.ports import Attempting


class UpstreamCall(Attempting, Protocol):
    """A call in flight."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Upstream(Protocol):
    """An instance's client (`integrations.vllm.http_instance`)."""

    @property
    def name(self) -> str: ...
    @property
    def pool(self) -> Any: ...
    @property
    def labelled(self) -> bool: ...
    @property
    def models(self) -> tuple[str, ...]: ...
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
    ) -> UpstreamCall: ...
