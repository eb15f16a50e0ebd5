"""A client's request on the hot paths: checked, and ready to be passed on to an instance."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rollout_sched.integrations.gateway.data_plane.body import ClientBody, Envelope, check_name
from rollout_sched.integrations.gateway.data_plane.fields import BadRequest
from rollout_sched.integrations.vllm.protocol.endpoints import Endpoint

Headers = Sequence[tuple[bytes, bytes]]


class HttpRequest(Protocol):
    """A client's HTTP request, as the hot path's server passes it (integrations.http.server). It
    has a complete body. Call `answer` once, or `begin`, then `write`, then `end`."""

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
    @property
    def peer(self) -> str: ...

    disconnected: bool
    on_disconnect: Callable[[], None] | None
    on_pause: Callable[[], None] | None
    on_resume: Callable[[], None] | None

    def answer(self, status: int, headers: bytes | Headers, body: bytes) -> None: ...
    def begin(self, status: int, headers: Headers) -> None: ...
    def write(self, data: bytes) -> None: ...
    def end(self) -> None: ...


#: Hop-by-hop headers, which are not passed on (RFC 9110, 7.6.1), and headers that the gateway sets
#: itself.
NOT_FORWARDED = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"host",
        b"content-length",
        b"expect",
        b"accept-encoding",
        b"authorization",
        b"x-request-id",
    )
)

#: Content encodings that mean "not encoded", and charsets that are UTF-8 or a subset of it.
_AS_IT_IS = (b"", b"identity")
_UTF8 = (b"utf-8", b"utf8", b"us-ascii", b"ascii")
_CHARSET = re.compile(rb"""(?i);\s*charset\s*=\s*["']?([^"';\s]*)""")

#: Bytes of a client's request id that are passed on to an instance, and the characters it may not
#: contain.
_ID_SHOWN = 64
_NOT_IN_IDS = re.compile(rb"[^0-9A-Za-z._:-]")


class ClientRequest:
    """What the responses of one call have in common.

    `header_lines`: the client's headers that are passed on; `request_id`: the client's own id.
    """

    __slots__ = ("body", "endpoint", "envelope", "header_lines", "path", "request_id")

    def __init__(
        self,
        endpoint: Endpoint,
        path: bytes,
        header_lines: bytes,
        request_id: bytes,
        body: ClientBody,
        envelope: Envelope,
    ) -> None:
        self.endpoint = endpoint
        self.path = path
        self.header_lines = header_lines
        self.request_id = request_id
        self.body = body
        self.envelope = envelope


def read_client_request(
    request: HttpRequest, endpoint: Endpoint, body: ClientBody, envelope: Envelope
) -> ClientRequest:
    """What the responses of a call share. Group and session names in headers take precedence over
    those in the body."""
    fields = request.fields
    group, session = names_in(request)
    envelope.group = group or envelope.group
    envelope.session = session or envelope.session
    request_id = fields.get(b"x-request-id") or b""
    if request_id:
        _name("X-Request-Id", request_id)
        request_id = _NOT_IN_IDS.sub(b"_", request_id[:_ID_SHOWN])
    # Headers that were parsed from lines are safe to write as lines.
    lines = [b"%b: %b\r\n" % f for f in request.headers if f[0] not in NOT_FORWARDED]
    return ClientRequest(endpoint, request.target, b"".join(lines), request_id, body, envelope)


def names_in(request: HttpRequest) -> tuple[str, str]:
    """(group, session) by the headers; "" for none. Raises BadRequest."""
    group = request.fields.get(b"x-group-id") or b""
    session = request.fields.get(b"x-session-id") or b""
    return _name("X-Group-ID", group), _name("X-Session-ID", session)


def _name(header: str, value: bytes) -> str:
    """Raises BadRequest for an invalid name."""
    name = value.decode("latin-1")
    check_name(header, name)
    return name


def check_head(request: HttpRequest) -> None:
    """Raises BadRequest for a head that cannot be passed on, or that an instance would read
    differently than the gateway."""
    if not request.target.isascii():
        raise BadRequest("the path contains bytes that are not ASCII; percent-encode them")
    fields = request.fields
    coding = fields.get(b"content-encoding", b"").lower()
    if coding not in _AS_IT_IS:
        told = coding.decode("latin-1")
        raise BadRequest(f"Content-Encoding {told!r} is not supported; send the body as it is", 415)
    kind = fields.get(b"content-type")
    charset = None if kind is None else _CHARSET.search(kind)
    if charset is not None and charset[1].lower() not in _UTF8:
        told = charset[1].decode("latin-1")
        raise BadRequest(f"charset {told!r} is not supported; send JSON as UTF-8", 415)
