"""Access control: what clients, trainers, administrators and programs on this machine may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from ipaddress import ip_address
from pathlib import Path

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.data_plane.data_plane import UNADMITTED
from rollout_sched.integrations.http.bearer import BearerKeys, check_key

#: Headers that a proxy or a browser adds, and prefixes of more such names: a request with one of
#: them does not come directly from a program on this machine.
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

_REMEDY = "start the gateway with --admin-key-file and send a key, or use --admin-socket"


class Access(IntEnum):
    """The access class of a route. A key of a class also opens the routes of the lower classes."""

    OPEN = 0
    CLIENT = 1
    TRAINER = 2
    ADMIN = 3


#: The flag for the keys of a class, and the error text without such a key.
_FLAGS = {
    Access.CLIENT: "--api-key-file",
    Access.TRAINER: "--trainer-key-file",
    Access.ADMIN: "--admin-key-file",
}
_NEEDED = {
    Access.CLIENT: UNADMITTED,
    Access.TRAINER: "this needs a trainer's or an administrator's key as a bearer token",
    Access.ADMIN: "this needs an administrator's key as a bearer token",
}


def read_keys(path: Path) -> list[str]:
    """The keys of a file, one per line; empty lines and lines that begin with # are ignored.

    Raises CallerError for a file without a key, or with a key that is not valid in a header.
    """
    keys = []
    for number, key in lines_of(path):
        check_key(f"{path}:{number}", key)
        keys.append(key)
    return keys


def lines_of(path: Path) -> list[tuple[int, str]]:
    """The lines that are not empty or comments, with their numbers. Raises CallerError if there
    are none."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CallerError(f"{path}: cannot be read: {error}") from error
    numbered = [(number, line.strip()) for number, line in enumerate(lines, start=1)]
    said = [(number, line) for number, line in numbered if line and not line.startswith("#")]
    if not said:
        raise CallerError(f"{path}: the file has no key; write one key per line")
    return said


class AccessControl:
    """Admits requests with a key of the route's class or a higher one, and requests by the socket.

    Clients' routes are open to everybody if there are no client keys. If there are no trainer and
    administrator keys and no socket (`has_socket`), the routes of trainers and administrators are
    open to programs on this machine. A browser or a proxy on this machine may forward a request
    from elsewhere, so requests with their headers are refused; without such a header they cannot be
    told from a program. If only trainers have keys, the administrators' routes are closed except
    for the socket, because a trainer also is a program. Raises CallerError if two classes share a
    key.
    """

    def __init__(
        self, keys: Mapping[Access, Sequence[str]] | None = None, *, has_socket: bool = False
    ) -> None:
        self._keys = {access: list((keys or {}).get(access, ())) for access in _FLAGS}
        _check_apart(self._keys)
        self._opening = {access: BearerKeys(self.opening(access)) for access in _FLAGS}
        self._is_open = not (has_socket or self._keys[Access.TRAINER] or self._keys[Access.ADMIN])
        self._has_socket = has_socket

    @property
    def is_open(self) -> bool:
        """Whether programs on this machine may call every route without a key."""
        return self._is_open

    @property
    def shuts_admins_out(self) -> bool:
        """Whether nobody can call the administrators' routes."""
        return not (self._is_open or self._has_socket or self._keys[Access.ADMIN])

    def opening(self, access: Access) -> list[str]:
        """The keys that open a class; empty if no key is needed."""
        if access is Access.CLIENT and not self._keys[access]:
            return []
        return [key for holder, keys in self._keys.items() if holder >= access for key in keys]

    def takes_keys(self, access: Access) -> bool:
        """Whether there is a key that opens this class."""
        return access in self._opening and self._opening[access].known

    def refusal(
        self,
        access: Access,
        peer: str | None,
        headers: Mapping[str, str],
        *,
        by_socket: bool = False,
    ) -> str:
        """Why a request is refused, and the remedy; "" if it is admitted."""
        if by_socket or access is Access.OPEN:
            return ""
        if self.takes_keys(access):
            given = headers.get("Authorization", "").encode(errors="surrogateescape")
            return "" if self._opening[access].admit(given) else _NEEDED[access]
        if access is Access.CLIENT:
            return ""
        if self._has_socket:
            return "this is open only through the gateway's --admin-socket"
        if self.shuts_admins_out:
            return f"this is for administrators, and the gateway has no admin key; {_REMEDY}"
        return _as_from_elsewhere(peer, headers)


def _check_apart(keys: Mapping[Access, Sequence[str]]) -> None:
    """A key in two files would give its holder more access than intended."""
    holders: dict[str, Access] = {}
    for access, held in keys.items():
        for key in held:
            if holders.setdefault(key, access) is not access:
                raise CallerError(
                    f"a key of {_FLAGS[holders[key]]} is also in {_FLAGS[access]}; use different "
                    "keys: a key of the latter opens everything that the former opens"
                )


def _as_from_elsewhere(peer: str | None, headers: Mapping[str, str]) -> str:
    """Why a request does not come from a program on this machine; "" if it seems to."""
    if not is_loopback(peer):
        return f"this is open only to programs on the gateway's machine; {_REMEDY}"
    for name in headers:
        if name.lower() in _FROM_ELSEWHERE or name.lower().startswith(_FROM_ELSEWHERE_TOO):
            return f"the header {name} shows a browser or a proxy in between; {_REMEDY}"
    if not _names_loopback(headers.get("Host", "")):
        return f"the Host header does not name this machine: call localhost, or {_REMEDY}"
    return ""


def is_loopback(peer: str | None) -> bool:
    """Whether this is a loopback address or "localhost"; False for every other name."""
    if peer == "localhost":
        return True
    try:
        address = ip_address(peer or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or (mapped is not None and mapped.is_loopback)


def _names_loopback(host: str) -> bool:
    """Any other name that resolves to this machine may be that of a web page in a browser."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    name = name.strip("[]")
    return not name or is_loopback(name)
