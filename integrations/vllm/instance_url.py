"""The URL of a vLLM server."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from rollout_sched.core.errors import CallerError

#: No user, no query, no fragment, and nothing that a parser of URLs would take out in silence.
_URL = re.compile(r"https?://([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?(/[\w.~%/-]*)?", re.ASCII)


def checked_url(url: str) -> str:
    """A URL without its last slash. Raises CallerError if it is none that can be called."""
    hint = f"instance {url[:200]!r}: give it as http://host:port or https://host:port"
    if not _URL.fullmatch(url):
        raise CallerError(hint)
    try:
        port = urlsplit(url).port
    except ValueError as error:
        raise CallerError(hint) from error
    if port == 0:
        raise CallerError(hint)
    if urlsplit(url).path.rstrip("/").endswith("/v1"):
        raise CallerError(f"instance {url[:200]!r}: leave out /v1, which is added to it")
    return url.rstrip("/")
