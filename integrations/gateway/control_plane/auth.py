"""Who may call what: clients, trainers, administrators with keys, or programs of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from ipaddress import ip_address
from pathlib import Path

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.data_plane.data_plane import UNADMITTED
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


class Access(IntEnum):
    """What a route asks for. A key of one class opens the routes of those before it, too."""

    OPEN = 0
    CLIENT = 1
    TRAINER = 2
    ADMIN = 3


#: Where the keys of a class stand, and who is let in by one.
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


class AccessControl:
    """Lets in who has a key of the route's class or a higher one, or comes by the socket.

    Clients' routes are everybody's where clients have no keys. Where neither trainers nor
    administrators have any, and there is no socket (`has_socket`), their routes are open to
    programs of this machine. Those could also be a browser or a proxy that carries in somebody
    else's wish, so what shows their headers is not let in; one that shows none cannot be told from
    a program. With keys for trainers alone, the administrators' routes are closed but for the
    socket: a trainer is a program, too. Raises CallerError where one key is of two classes.
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
        """Whether programs on this machine need nothing for anything."""
        return self._is_open

    @property
    def shuts_admins_out(self) -> bool:
        """Whether nobody can call the administrators' routes."""
        return not (self._is_open or self._has_socket or self._keys[Access.ADMIN])

    def opening(self, access: Access) -> list[str]:
        """The keys that open a class; none where no key is asked for."""
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
        """Why a request may not enter, and what to do; "" if it may."""
        if by_socket or access is Access.OPEN:
            return ""
        if self.takes_keys(access):
            given = headers.get("Authorization", "").encode(errors="surrogateescape")
            return "" if self._opening[access].admit(given) else _NEEDED[access]
        if access is Access.CLIENT:
            return ""
        if self._has_socket:
            return "this is open only by the gateway's --admin-socket"
        if self.shuts_admins_out:
            return f"this is for administrators, and the gateway has no key of theirs; {_REMEDY}"
        return _as_from_elsewhere(peer, headers)


def _check_apart(keys: Mapping[Access, Sequence[str]]) -> None:
    """Who holds a key that stands in two files would be more than he was meant to be."""
    holders: dict[str, Access] = {}
    for access, held in keys.items():
        for key in held:
            if holders.setdefault(key, access) is not access:
                raise CallerError(
                    f"a key of {_FLAGS[holders[key]]} stands in {_FLAGS[access]}, too; give each "
                    "kind keys of its own: one of the latter opens what the former does"
                )


def _as_from_elsewhere(peer: str | None, headers: Mapping[str, str]) -> str:
    """Why a request does not come from a program of this machine; "" if it seems to."""
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
