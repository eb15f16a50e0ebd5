"""Checks the URL of a vLLM server."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from rollout_sched.core.errors import CallerError

#: No user, query or fragment, and no characters that URL parsers drop silently.
_URL = re.compile(r"https?://([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?(/[\w.~%/-]*)?", re.ASCII)


def checked_url(url: str) -> str:
    """The URL without its last slash. Raises CallerError if it is not the URL of a server."""
    hint = f"instance {url[:200]!r}: write it as http://host:port or https://host:port"
    if not _URL.fullmatch(url):
        raise CallerError(hint)
    try:
        port = urlsplit(url).port
    except ValueError as error:
        raise CallerError(hint) from error
    if port == 0:
        raise CallerError(hint)
    if urlsplit(url).path.rstrip("/").endswith("/v1"):
        raise CallerError(f"instance {url[:200]!r}: leave out /v1, it is added automatically")
    return url.rstrip("/")
