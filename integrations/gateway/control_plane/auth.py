"""Access control: what clients, trainers, administrators and programs on this machine may call."""

from __future__ import annotations

import re
import secrets
import zlib
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from ipaddress import ip_address
from pathlib import Path

import msgspec

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.data_plane.data_plane import UNADMITTED
from rollout_sched.integrations.http.server import BearerKeys, check_key, lines_of, read_keys
from rollout_sched.integrations.sglang import EngineInstance
from rollout_sched.integrations.vllm.protocol.refusals import AnswerRefused
from rollout_sched.live.ports import Description, InstanceError

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


class AccessControl:
    """Admits requests with a key of the route's class or a higher one, and requests by the socket.

    Clients' routes are open to everybody if there are no client keys. If there are no trainer and
    administrator keys and no socket (`has_socket`), the routes of trainers and administrators are
    open to programs on this machine. A browser or a proxy on this machine may forward a request
    from elsewhere, so requests with their headers are refused; without such a header they cannot be
    told from a program. If only trainers have keys, the administrators' routes are closed except
    for the socket, because a trainer also is a program. Raises CallerError if two classes share a
    key.

    page_key   while they are so open: admits a browser on this machine, too; "" otherwise
    """

    def __init__(
        self, keys: Mapping[Access, Sequence[str]] | None = None, *, has_socket: bool = False
    ) -> None:
        self._keys = {access: list((keys or {}).get(access, ())) for access in _FLAGS}
        _check_apart(self._keys)
        self._opening = {access: BearerKeys(self.opening(access)) for access in _FLAGS}
        self._is_open = not (has_socket or self._keys[Access.TRAINER] or self._keys[Access.ADMIN])
        self._has_socket = has_socket
        self.page_key = secrets.token_urlsafe() if self._is_open else ""
        self._page_key = BearerKeys([self.page_key] if self.page_key else [])

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
        given = headers.get("Authorization", "").encode(errors="surrogateescape")
        if self.takes_keys(access):
            if self._opening[access].admit(given):
                return ""
            return (
                f"the key that was sent is not known: {_NEEDED[access]}"
                if given
                else _NEEDED[access]
            )
        if access is Access.CLIENT:
            return ""
        if self._has_socket:
            return "this is open only through the gateway's --admin-socket"
        if self.shuts_admins_out:
            return f"this is for administrators, and the gateway has no admin key; {_REMEDY}"
        if self._page_key.known and is_loopback(peer) and self._page_key.admit(given):
            return ""
        return _as_from_elsewhere(peer, headers)


def read_access(
    client: Path | None, trainer: Path | None, admin: Path | None, *, has_socket: bool = False
) -> AccessControl:
    """Access by the keys of these files, one for each class. Raises CallerError."""
    files = {Access.CLIENT: client, Access.TRAINER: trainer, Access.ADMIN: admin}
    keys = {access: read_keys(path) for access, path in files.items() if path is not None}
    return AccessControl(keys, has_socket=has_socket)


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


# ------------------------------------------------------------------------------------------
# Which instances may be added while the gateway runs, and which key each of them gets.
#
# A URL from a call may point to any server. Until the server has proven to be vLLM, it gets only
# the key given for it, and none of its output is passed on.


class NotAllowed(CallerError):
    """No --allow-instance pattern matches this URL."""


class InstanceKeys(msgspec.Struct, frozen=True):
    """`common` is the key for the instances `named` at start, `by_url` has keys of single ones."""

    common: str | None = None
    by_url: Mapping[str, str] = {}
    named: frozenset[str] = frozenset()

    def key_of(self, url: str) -> str | None:
        url = url.rstrip("/")
        return self.by_url.get(url) or (self.common if url in self.named else None)


def read_instance_keys(path: Path | None, named: Iterable[str]) -> InstanceKeys:
    """A file with lines `KEY`, at most one, and `URL KEY`. Raises CallerError with the line."""
    common: str | None = None
    by_url: dict[str, str] = {}
    for number, line in [] if path is None else lines_of(path):
        url, _, key = line.rpartition(" ")
        url = url.strip().rstrip("/")
        check_key(f"{path}:{number}", key)
        if url:
            by_url[checked_url(url)] = key
        elif common is not None:
            raise CallerError(
                f"{path}:{number}: second key for all instances; write `URL KEY` for a single one"
            )
        else:
            common = key
    return InstanceKeys(common, by_url, frozenset(url.rstrip("/") for url in named))


class AllowList:
    """The URLs that may be added: all without `patterns`, else those that match one or are `named`.

    `*` in a pattern matches part of a name between dots, or part of a port, but no dot, colon or
    slash: http://10.0.0.* does not match http://10.0.0.1.evil.example. Raises CallerError for a
    pattern that is not a URL pattern.
    """

    def __init__(self, patterns: Iterable[str] = (), named: Iterable[str] = ()) -> None:
        self._patterns = [pattern.rstrip("/") for pattern in patterns]
        for pattern in self._patterns:
            if not pattern.startswith(("http://", "https://")):
                raise CallerError(
                    f"--allow-instance {pattern!r} matches nothing: begin it with http:// or https://"
                )
        self._named = frozenset(url.rstrip("/") for url in named)
        parts = (map(re.escape, pattern.split("*")) for pattern in self._patterns)
        self._allowed = [re.compile(r"[^/.:@?#\[\]]*".join(part)) for part in parts]

    def check(self, url: str) -> None:
        """Raises NotAllowed."""
        url = url.rstrip("/")
        if not self._allowed or url in self._named:
            return
        if not any(pattern.fullmatch(url) for pattern in self._allowed):
            raise NotAllowed(
                f"instance {url!r} may not be added: --allow-instance has only "
                f"{', '.join(self._patterns)}; start the gateway with one that matches"
            )


class AddedInstance(EngineInstance):
    """An instance whose URL came in a call: the caller is not shown what the server answers."""

    async def describe(self) -> Description:
        try:
            return await super().describe()
        except AnswerRefused as error:
            raise InstanceError(f"{self.name}: {error.unquoted}") from None


def id_of(name: str) -> str:
    """An id of the instance for use in paths, the same in every run."""
    return f"{zlib.crc32(name.encode()):08x}"


def checked_url(url: str) -> str:
    """The URL, if it is printable ASCII, safe for logs and headers. Raises CallerError."""
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise CallerError(f"instance {url!r}: a URL must be printable ASCII without spaces")
    return url
