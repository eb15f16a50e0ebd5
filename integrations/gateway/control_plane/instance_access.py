"""Which instances may be taken in while the gateway runs, and which key each is sent.

A URL that comes in a call may be anybody's: until what is there has shown to be vLLM, it is sent no
key but its own, and nothing that it says is passed on.
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
    """--allow-instance does not name this URL."""


class InstanceKeys(msgspec.Struct, frozen=True):
    """`common` is for the instances that are `named` at start, `by_url` for one each."""

    common: str | None = None
    by_url: Mapping[str, str] = {}
    named: frozenset[str] = frozenset()

    def of(self, url: str) -> str | None:
        url = url.rstrip("/")
        return self.by_url.get(url) or (self.common if url in self.named else None)


def read_instance_keys(path: Path | None, named: Iterable[str]) -> InstanceKeys:
    """A file with lines `KEY`, at most one, and `URL KEY`. Raises CallerError naming the line."""
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
                f"{path}:{number}: a second key for all instances; write `URL KEY` for one of them"
            )
        else:
            common = key
    return InstanceKeys(common, by_url, frozenset(url.rstrip("/") for url in named))


class AllowList:
    """The URLs that may be added: all without `patterns`, else those that match one or are `named`.

    `*` in a pattern stands for a part of a name between dots, or of a port: never for a dot, a
    colon or a slash, so that http://10.0.0.* does not let in http://10.0.0.1.evil.example. Raises
    CallerError for a pattern that is none of a URL.
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
                f"instance {url!r} may not be added: --allow-instance names "
                f"{', '.join(self._patterns)}; start the gateway with one for this, too"
            )


class AddedInstance(HttpInstance):
    """One whose URL came in a call: whoever sent it is not shown what is there."""

    async def describe(self) -> Description:
        try:
            return await super().describe()
        except AnswerRefused as error:
            raise InstanceError(f"{self.name}: {error.unquoted}") from None


def id_of(name: str) -> str:
    """An instance's name as it can stand in a path, the same in every run."""
    return f"{zlib.crc32(name.encode()):08x}"


def checked_url(url: str) -> str:
    """A URL of printable ASCII, as fits into a log and a header. Raises CallerError."""
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise CallerError(f"instance {url!r}: a URL is printable ASCII without spaces")
    return url
