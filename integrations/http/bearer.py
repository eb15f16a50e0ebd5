"""API keys as bearer tokens (RFC 6750): who may call, and what a key may be."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from rollout_sched.core.errors import CallerError


def check_key(where: str, key: str) -> None:
    """Raises CallerError, naming `where` it stands, for what cannot stand in a header."""
    if not key or not (key.isascii() and key.isprintable()) or " " in key:
        raise CallerError(f"{where}: an API key is printable ASCII without spaces, and not empty")


def authorization(key: str) -> bytes:
    """The value of the header that carries a key."""
    return b"Bearer " + key.encode()


class BearerKeys:
    """The keys that let a call in; without any, every call."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._keys = [key.encode() for key in keys]

    @property
    def known(self) -> bool:
        """Whether a call needs one."""
        return bool(self._keys)

    def admit(self, given: bytes | None) -> bool:
        """Whether the value of an Authorization header lets a call in.

        How long it takes tells nothing of the keys: each is compared, to its end.
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
