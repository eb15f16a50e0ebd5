"""The server to which the requests of a pool go."""

from __future__ import annotations

import ssl as tls
from typing import Final
from urllib.parse import urlsplit

from rollout_sched.integrations.http.heads import is_request_line

#: Request lines that are cached; a gateway uses only a few targets.
MAX_OPENINGS: Final = 256


class Origin:
    """Scheme, host and port of a base URL, and the path that is prepended to every target.

    `ssl` is for https; None: the system's trusted authorities. Raises ValueError if `url` is not a
    base URL.
    """

    __slots__ = ("_authority", "_openings", "_prefix", "host", "port", "ssl", "url")

    def __init__(self, url: str, ssl: tls.SSLContext | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a URL like http://host:port")
        if parts.query or parts.fragment or parts.username is not None:
            raise ValueError(f"{url!r}: a base URL has only a scheme, a host, a port and a path")
        secure = parts.scheme == "https"
        self.url = url
        self.host = parts.hostname
        self.port = parts.port or (443 if secure else 80)
        self.ssl = (ssl or tls.create_default_context()) if secure else None
        self._authority = parts.netloc
        self._prefix = parts.path.rstrip("/")
        self._openings: dict[tuple[str, str], bytes] = {}

    def opening(self, method: str, target: str) -> bytes:
        """The beginning of a request: its first line, and Host. Raises ValueError."""
        return self._openings.get((method, target)) or self._write(method, target)

    def _write(self, method: str, target: str) -> bytes:
        line = f"{method} {self._prefix}{target} HTTP/1.1".encode()
        if not target.startswith("/") or not is_request_line(line):
            raise ValueError(f"{method!r} and {target!r} do not make a request line")
        if len(self._openings) >= MAX_OPENINGS:
            self._openings.clear()
        opening = b"%b\r\nhost: %b\r\n" % (line, self._authority.encode())
        self._openings[method, target] = opening
        return opening
