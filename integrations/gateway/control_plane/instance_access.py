"""Which instances may be added while the gateway runs, and which key each of them gets.

A URL from a call may point to any server. Until the server has proven to be vLLM, it gets only the
key given for it, and none of its output is passed on.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.control_plane.auth import lines_of
from rollout_sched.integrations.http.bearer import check_key
from rollout_sched.integrations.vllm.http_instance import HttpInstance
from rollout_sched.integrations.vllm.protocol.refusals import AnswerRefused
from rollout_sched.live.ports import Description, InstanceError


class NotAllowed(CallerError):
    """No --allow-instance pattern matches this URL."""


class InstanceKeys(msgspec.Struct, frozen=True):
    """`common` is the key for the instances `named` at start, `by_url` has keys of single ones."""

    common: str | None = None
    by_url: Mapping[str, str] = {}
    named: frozenset[str] = frozenset()

    def of(self, url: str) -> str | None:
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


class AddedInstance(HttpInstance):
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
