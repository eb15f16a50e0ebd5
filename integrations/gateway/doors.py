"""Who may enter where: clients and administrators with keys, or programs of this machine."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path

from rollout_sched.core.errors import CallerError

#: Headers that a proxy or a browser adds: what carries one did not come from a program here.
_FROM_ELSEWHERE = ("Origin", "X-Forwarded-For", "Forwarded", "Via")


def read_keys(path: Path) -> list[str]:
    """The keys of a file, one on each line; empty lines and lines with # are left out.

    Raises CallerError for a file without a key, or with one that cannot stand in a header.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CallerError(f"{path}: cannot be read: {error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise CallerError(f"{path}: holds no key; write one on each line")
    for number, key in enumerate(keys, start=1):
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise CallerError(f"{path}: key {number} is not printable ASCII without spaces")
    return keys


class AdminDoor:
    """Lets in who has one of the keys; without keys, programs on this machine.

    Without keys a browser's page could ask too, by way of its user, so what a browser or a proxy
    has touched is not let in.
    """

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._keys = [key.encode() for key in keys]

    @property
    def has_keys(self) -> bool:
        return bool(self._keys)

    def refusal(self, peer: str | None, headers: Mapping[str, str]) -> str:
        """Why a request may not enter, and what to do; "" if it may."""
        if self._keys:
            given = (
                headers.get("Authorization", "")
                .removeprefix("Bearer ")
                .encode(errors="surrogateescape")
            )
            if any(hmac.compare_digest(given, key) for key in self._keys):
                return ""
            return "this needs the admin key as a bearer token"
        if not is_loopback(peer) or any(name in headers for name in _FROM_ELSEWHERE):
            return "without --admin-key-file this is open only to programs on the gateway's machine"
        return "" if _names_loopback(headers.get("Host", "")) else "the Host is not this machine"


def is_loopback(peer: str | None) -> bool:
    """Whether an address is one of this machine alone; names other than localhost are not."""
    if peer == "localhost":
        return True
    try:
        address = ip_address(peer or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or (mapped is not None and mapped.is_loopback)


def _names_loopback(host: str) -> bool:
    """A name that leads here from elsewhere may belong to a page that a browser shows."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    name = name.strip("[]")
    return not name or is_loopback(name)
