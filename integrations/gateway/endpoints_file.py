"""Instances named by a file that somebody else writes: who is added to it joins, who is taken out
of it goes.

The file is that of llm-d's file discovery, which scripts for Slurm, config maps and Ray write:
`endpoints:` and a list of {name, address, port, labels}; other keys are ignored. YAML, or JSON by
its suffix.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from ipaddress import IPv6Address
from pathlib import Path
from typing import Annotated

import msgspec

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.vllm.instance_url import checked_url
from rollout_sched.integrations.vllm.off_loop import off_loop

log = logging.getLogger(__name__)

#: Seconds between two looks at the file. A change is followed at the second look that finds it.
LOOK_S = 2.0

#: Seconds that a disk may take for a look, until that is said.
READ_S = 60.0

#: Of a YAML file, some thousands of endpoints; PyYAML takes time with the square of some.
MOST_YAML = 256 * 1024

#: Characters of a value in YAML. A number may be written to the base of 60, which takes PyYAML time
#: with the square of its digits.
LONGEST_VALUE = 1000

#: Levels of lists and mappings that a YAML file may have; PyYAML crashes at some tens of thousands.
DEEPEST = 64

_FORMAT = "it takes `endpoints:` and a list of {address, port}, as docs/gateway.md has it"


class Endpoint(msgspec.Struct, frozen=True):
    """One server, by a host's name or IP address. Its `name` and `labels` are for people, and not
    read."""

    address: Annotated[str, msgspec.Meta(min_length=1)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]

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
    """Raises CallerError, which names the file, the place and what belongs there."""
    decode = msgspec.json.decode if path.suffix == ".json" else _decode_yaml
    try:
        endpoints = decode(text, type=_File, strict=False).endpoints
    except ImportError as error:
        raise CallerError(
            f"{path}: YAML is read by PyYAML; install rollout-sched[endpoints], or write JSON to a "
            "file that ends in .json"
        ) from error
    except Exception as error:  # PyYAML has more than its own: `!!bool x` is a KeyError
        told = str(error) if isinstance(error, msgspec.MsgspecError) else repr(error)
        raise CallerError(f"{path}: {' '.join(told.split())[:300]}; {_FORMAT}") from error
    try:
        _check(endpoints)
    except ValueError as error:
        raise CallerError(f"{path}: {error}") from error
    return endpoints


def _decode_yaml(text: bytes, *, type: type[_File], strict: bool) -> _File:
    """Raises ImportError without PyYAML, and whatever it and msgspec raise."""
    import yaml

    if len(text) > MOST_YAML:
        raise ValueError(
            f"{len(text):,} bytes, YAML may have {MOST_YAML:,}: write JSON to a file that ends in "
            ".json"
        )
    depth = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"nested more than {DEEPEST} levels deep")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > LONGEST_VALUE:
            raise ValueError(
                f"a value of {len(event.value):,} characters, {LONGEST_VALUE:,} at most"
            )
    return msgspec.yaml.decode(text, type=type, strict=strict)


def _check(endpoints: Iterable[Endpoint]) -> None:
    """Raises ValueError naming the one that cannot be called, or is there already."""
    seen: dict[str, int] = {}
    for number, endpoint in enumerate(endpoints):
        if not _can_be_called(endpoint):
            raise ValueError(
                f"endpoints[{number}]: address {endpoint.address[:200]!r} is no host's name or IP "
                "address; the port goes into a field of its own, and no http:// before it"
            )
        first = seen.setdefault(endpoint.url.lower(), number)
        if first != number:
            raise ValueError(
                f"{endpoint.url} is there twice, endpoints[{first}] and endpoints[{number}]; leave "
                "one of them out"
            )


def _can_be_called(endpoint: Endpoint) -> bool:
    try:
        checked_url(endpoint.url)
        return ":" not in endpoint.address or bool(IPv6Address(endpoint.address))
    except ValueError:
        return False


class EndpointsFile:
    """Watches the file; `add` and `remove` are told of URLs.

    What cannot be read changes nothing, and is logged once. Who was not added by this file is not
    removed by it. Only what two looks in a row have found is followed: who writes into the file
    itself may have written half of it, and half of a list is a list.
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
        self._seen = self._followed = b""
        self._complaint = ""
        self._named: set[str] = set()
        self._ours: set[str] = set()
        self._changing: dict[str, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Take in those that are named now. Raises CallerError if the file is no use."""
        self._follow(read_endpoints(self._path))
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
            await self._look()

    async def _look(self) -> None:
        try:
            text = await off_loop(self._path.read_bytes, READ_S)
            stands = text == self._seen
            self._seen = text
            if stands and text != self._followed:
                self._follow(parse_endpoints(self._path, text))
                self._followed = text
        except TimeoutError:
            self._complain(f"{self._path}: its disk has not answered for {READ_S:g} s")
        except (OSError, CallerError) as error:
            self._complain(str(error))
        else:
            if stands:
                self._complaint = ""

    def _complain(self, what: str) -> None:
        if what != self._complaint:
            log.error("the instances stay as they are: %s", what)
            self._complaint = what

    def _follow(self, endpoints: Iterable[Endpoint]) -> None:
        named = {endpoint.url for endpoint in endpoints}
        before, self._named = self._named, named
        for url in before - named:
            self._change(url, self._let_go)
        for url in named - before:
            self._change(url, self._take_in)

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

    async def _take_in(self, url: str) -> None:
        await self._add(url)
        self._ours.add(url)

    async def _let_go(self, url: str) -> None:
        if url in self._ours:
            self._ours.discard(url)
            await self._remove(url)

    def _forget(self, url: str, task: asyncio.Task[None]) -> None:
        if self._changing.get(url) is task:
            del self._changing[url]
