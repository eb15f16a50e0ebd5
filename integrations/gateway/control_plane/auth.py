"""Who may enter where: clients and administrators with keys, or programs of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.http.bearer import BearerKeys, check_key

#: Headers that a proxy or a browser adds, and how the names of more of them begin: what carries
#: one did not come from a program here.
_FROM_ELSEWHERE = frozenset(
    (
        "cf-connecting-ip",
        "cookie",
        "fastly-client-ip",
        "forwarded",
        "origin",
        "referer",
        "true-client-ip",
        "via",
        "x-client-ip",
        "x-cluster-client-ip",
        "x-real-ip",
    )
)
_FROM_ELSEWHERE_TOO = ("sec-", "x-envoy-", "x-forwarded-", "x-original-")

_REMEDY = "start it with --admin-key-file and send a key, or use --admin-socket"


def read_keys(path: Path) -> list[str]:
    """The keys of a file, one on each line; empty lines and lines with # are left out.

    Raises CallerError for a file without a key, or with one that cannot stand in a header.
    """
    keys = []
    for number, key in lines_of(path):
        check_key(f"{path}:{number}", key)
        keys.append(key)
    return keys


def lines_of(path: Path) -> list[tuple[int, str]]:
    """The lines that say something, with their numbers. Raises CallerError if there are none."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CallerError(f"{path}: cannot be read: {error}") from error
    numbered = [(number, line.strip()) for number, line in enumerate(lines, start=1)]
    said = [(number, line) for number, line in numbered if line and not line.startswith("#")]
    if not said:
        raise CallerError(f"{path}: holds no key; write one on each line")
    return said


class AdminAuth:
    """Lets in who has a key or comes by the socket; with neither, programs of this machine.

    Those could also be a browser or a proxy that carries in somebody else's wish, so what shows
    their headers is not let in; one that shows none cannot be told from a program. With a key or a
    socket (`has_socket`) the port lets nobody in without a key.
    """

    def __init__(self, keys: Sequence[str] = (), *, has_socket: bool = False) -> None:
        self._keys = BearerKeys(keys)
        self._has_socket = has_socket

    @property
    def has_keys(self) -> bool:
        return self._keys.known

    @property
    def is_open(self) -> bool:
        """Whether programs on this machine need nothing."""
        return not self._keys.known and not self._has_socket

    def refusal(
        self, peer: str | None, headers: Mapping[str, str], *, by_socket: bool = False
    ) -> str:
        """Why a request may not enter, and what to do; "" if it may."""
        if by_socket:
            return ""
        if self._keys.known:
            given = headers.get("Authorization", "").encode(errors="surrogateescape")
            return "" if self._keys.admit(given) else "this needs the admin key as a bearer token"
        if self._has_socket:
            return "this is open only by the gateway's --admin-socket"
        if not is_loopback(peer):
            return f"this is open only to programs on the gateway's machine; {_REMEDY}"
        for name in headers:
            if name.lower() in _FROM_ELSEWHERE or name.lower().startswith(_FROM_ELSEWHERE_TOO):
                return f"{name} says that a browser or a proxy is between; {_REMEDY}"
        if not _names_loopback(headers.get("Host", "")):
            return f"the Host is not this machine, but localhost is open; else {_REMEDY}"
        return ""


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
