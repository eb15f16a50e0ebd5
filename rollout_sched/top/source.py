"""Requests the live state of a gateway."""

from __future__ import annotations

import urllib.error
import urllib.request
from urllib.parse import urlsplit

import msgspec

from rollout_sched.core.errors import CallerError, RolloutError
from rollout_sched.top.document import SCHEMA, Document

PATH = "/admin/live"

#: The environment variable that holds an administrator's key.
KEY = "ROLLOUT_SCHED_ADMIN_KEY"

#: Timeout in seconds.
PATIENCE_S = 5.0


class Away(RolloutError):
    """The gateway does not answer now, but may answer later."""


class GatewaySource:
    """One gateway; `key`: an administrator's, "" for none. Raises CallerError for a bad URL."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CallerError(f"{url!r} is not a gateway's URL, such as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._request = urllib.request.Request(self.url + PATH, headers=headers)
        # Ignore the proxy settings of the environment: gateways are reached directly.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self) -> Document:
        """Raises Away if the gateway does not answer, CallerError if a retry cannot help."""
        try:
            with self._opener.open(self._request, timeout=PATIENCE_S) as answer:
                body = answer.read()
        except urllib.error.HTTPError as error:
            raise self._refused(error.code) from error
        except OSError as error:  # includes URLError
            raise Away(str(getattr(error, "reason", error))) from error
        try:
            return msgspec.json.decode(body, type=Document)
        except msgspec.DecodeError as error:
            raise CallerError(
                f"{self.url}{PATH} does not answer as {SCHEMA}: {error}; use the same version as "
                "the gateway's"
            ) from error

    def _refused(self, status: int) -> RolloutError:
        if status in (401, 403):
            return CallerError(
                f"{self.url} needs an administrator's key ({status}): set it as {KEY} in the "
                "environment"
            )
        if status == 404:
            return CallerError(f"{self.url} has no {PATH}: it is not a gateway, or an older one")
        return Away(f"the gateway answered {status}")
