"""Instances named by a file that somebody else writes: who is added to it joins, who is taken out
of it goes.

The file is that of llm-d's file discovery, which scripts for Slurm, config maps and Ray write:
`endpoints:` and a list of {name, address, port, labels}; other keys are ignored. YAML, or JSON by
its suffix.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated

import msgspec

from rollout_sched.core.errors import CallerError

log = logging.getLogger(__name__)

#: Seconds between two looks at the file: no change is noticed later.
LOOK_S = 2.0


class Endpoint(msgspec.Struct, frozen=True):
    """One server. `address`: a host's name or IP address; `name` and `labels` are for people."""

    address: Annotated[str, msgspec.Meta(min_length=1)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    name: str = ""
    labels: dict[str, str] = {}

    @property
    def url(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}"


class _File(msgspec.Struct, frozen=True):
    endpoints: list[Endpoint]


def read_endpoints(path: Path) -> list[Endpoint]:
    """Raises CallerError, which names the file and what is wrong with it."""
    try:
        return parse_endpoints(path, path.read_bytes())
    except OSError as error:
        raise CallerError(f"{path}: {error.strerror}") from error


def parse_endpoints(path: Path, text: bytes) -> list[Endpoint]:
    """Raises CallerError."""
    decode = msgspec.json.decode if path.suffix == ".json" else msgspec.yaml.decode
    try:
        endpoints = decode(text, type=_File, strict=False).endpoints
    except ImportError as error:
        raise CallerError(
            f"{path}: YAML is read by PyYAML; install rollout-sched[endpoints], or write JSON to a "
            "file that ends in .json"
        ) from error
    except msgspec.MsgspecError as error:
        raise CallerError(f"{path}: {error}; see docs/gateway.md") from error
    urls = [endpoint.url for endpoint in endpoints]
    for url in urls:
        if urls.count(url) > 1:
            raise CallerError(f"{path}: {url} is there twice")
    return endpoints


class EndpointsFile:
    """Watches the file; `add` and `remove` are told of URLs.

    What cannot be read changes nothing, and is logged once. Who was not added by this file is not
    removed by it.
    """

    def __init__(
        self,
        path: Path,
        add: Callable[[str], Awaitable[None]],
        remove: Callable[[str], Awaitable[None]],
        *,
        look_s: float = LOOK_S,
    ) -> None:
        self._path = path
        self._add = add
        self._remove = remove
        self._look_s = look_s
        self._read = b""
        self._complaint = ""
        self._here: set[str] = set()
        self._changing: dict[str, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Take in those that are named now. Raises CallerError if the file is no use."""
        read_endpoints(self._path)
        self._look()
        await asyncio.gather(*self._changing.values())
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        tasks = [*self._changing.values(), *filter(None, (self._watching,))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            self._look()

    def _look(self) -> None:
        try:
            text = self._path.read_bytes()
            if text == self._read:
                return
            wanted = {endpoint.url for endpoint in parse_endpoints(self._path, text)}
        except (OSError, CallerError) as error:
            self._complain(str(error))
            return
        self._read, self._complaint = text, ""
        for url in self._here - wanted:
            self._change(url, self._remove)
        for url in wanted - self._here:
            self._change(url, self._add)
        self._here = wanted

    def _complain(self, what: str) -> None:
        if what != self._complaint:
            log.error("the instances stay as they are: %s", what)
            self._complaint = what

    def _change(self, url: str, change: Callable[[str], Awaitable[None]]) -> None:
        """One after the other for each instance."""
        task = asyncio.ensure_future(self._apply(url, change, self._changing.get(url)))
        self._changing[url] = task
        task.add_done_callback(lambda done: self._forget(url, done))

    async def _apply(
        self,
        url: str,
        change: Callable[[str], Awaitable[None]],
        before: asyncio.Task[None] | None,
    ) -> None:
        if before is not None:
            await asyncio.wait({before})
        try:
            await change(url)
        except CallerError as error:
            log.error("%s, which %s names: %s", url, self._path, error)

    def _forget(self, url: str, task: asyncio.Task[None]) -> None:
        if self._changing.get(url) is task:
            del self._changing[url]
