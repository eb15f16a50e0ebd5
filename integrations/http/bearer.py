"""API keys as bearer tokens (RFC 6750): checks calls, and the form of keys."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from rollout_sched.core.errors import CallerError


def check_key(where: str, key: str) -> None:
    """Raises CallerError, with the place `where`, for a key that is not valid in a header."""
    if not key or not (key.isascii() and key.isprintable()) or " " in key:
        raise CallerError(f"{where}: an API key must be printable ASCII without spaces, not empty")


def authorization(key: str) -> bytes:
    """The value of the Authorization header for a key."""
    return b"Bearer " + key.encode()


class BearerKeys:
    """The keys that admit a call; if there are none, every call is admitted."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._keys = [key.encode() for key in keys]

    @property
    def known(self) -> bool:
        """Whether a call needs a key."""
        return bool(self._keys)

    def admit(self, given: bytes | None) -> bool:
        """Whether the value of an Authorization header admits a call.

        The time it takes reveals nothing about the keys: every key is compared completely.
        """
        if not self._keys:
            return True
        scheme, _, token = (given or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        admitted = False
        for key in self._keys:
            admitted |= hmac.compare_digest(token, key)
        return admitted
