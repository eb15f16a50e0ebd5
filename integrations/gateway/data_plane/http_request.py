"""A client's HTTP request, as the hot path's server passes it (integrations.http.server)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

Headers = Sequence[tuple[bytes, bytes]]


class HttpRequest(Protocol):
    """Its body is complete. Call `answer` once, or `begin`, then `write`, then `end`."""

    @property
    def method(self) -> bytes: ...
    @property
    def target(self) -> bytes: ...
    @property
    def headers(self) -> list[tuple[bytes, bytes]]: ...
    @property
    def fields(self) -> Mapping[bytes, bytes]: ...
    @property
    def body(self) -> bytes: ...

    gone: bool
    on_disconnect: Callable[[], None] | None
    on_pause: Callable[[], None] | None
    on_resume: Callable[[], None] | None

    def answer(self, status: int, headers: bytes | Headers, body: bytes) -> None: ...
    def begin(self, status: int, headers: Headers) -> None: ...
    def write(self, data: bytes) -> None: ...
    def end(self) -> None: ...
