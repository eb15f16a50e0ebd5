"""Watches a file that lists instances: an instance added to the file joins the fleet, an instance
removed from it leaves.

The format is that of llm-d's file discovery, which scripts for Slurm, config maps and Ray write:
`endpoints:` and a list of {name, address, port, labels}; other keys are ignored. The file is YAML,
or JSON if its name ends in .json.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from ipaddress import IPv6Address
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.vllm import checked_url
from rollout_sched.process import install_extra, off_loop

log = logging.getLogger(__name__)

#: Seconds between two reads of the file. A change is applied at the second read that finds it.
POLL_S = 2.0

#: Seconds that reading the file may take before an error is logged.
READ_S = 60.0

#: Bytes of a YAML file, enough for thousands of endpoints. PyYAML needs quadratic time for some
#: inputs.
MAX_YAML = 256 * 1024

#: Characters of a value in YAML. A number may be written in base 60, for which PyYAML needs time
#: quadratic in its digits.
LONGEST_VALUE = 1000

#: Levels of lists and mappings in a YAML file. PyYAML crashes at tens of thousands of levels.
DEEPEST = 64

_FORMAT = "the file needs `endpoints:` and a list of {address, port}, see docs/gateway.md"


class Endpoint(msgspec.Struct, frozen=True):
    """One server, by host name or IP address. By its `labels` weights are loaded; its `name` is for
    people and is not read."""

    address: Annotated[str, msgspec.Meta(min_length=1)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    labels: Any = None

    @property
    def named_labels(self) -> dict[str, str]:
        """Empty if they are not a mapping."""
        labels = self.labels if isinstance(self.labels, dict) else {}
        return {str(name): str(value) for name, value in labels.items()}

    @property
    def url(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}"


class _File(msgspec.Struct, frozen=True):
    endpoints: list[Endpoint]


def read_endpoints(path: Path) -> list[Endpoint]:
    """Raises CallerError with the file and what is wrong with it."""
    try:
        return parse_endpoints(path, path.read_bytes())
    except OSError as error:
        raise CallerError(f"{path}: {error.strerror}") from error


def parse_endpoints(path: Path, text: bytes) -> list[Endpoint]:
    """Raises CallerError with the file, the position and what is expected at it."""
    decode = msgspec.json.decode if path.suffix == ".json" else _decode_yaml
    try:
        endpoints = decode(text, type=_File, strict=False).endpoints
    except ImportError as error:
        raise CallerError(
            f"{path}: YAML needs PyYAML: {install_extra('endpoints')}, or write JSON to a file "
            "that ends in .json"
        ) from error
    except Exception as error:  # PyYAML raises other errors too: `!!bool x` is a KeyError
        said = isinstance(error, msgspec.MsgspecError | ValueError)
        told = str(error) if said else repr(error)
        raise CallerError(f"{path}: {' '.join(told.split())[:300]}; {_FORMAT}") from error
    try:
        _check(endpoints)
    except ValueError as error:
        raise CallerError(f"{path}: {error}") from error
    return endpoints


def _decode_yaml(text: bytes, *, type: type[_File], strict: bool) -> _File:
    """Raises ImportError without PyYAML, ValueError with the position of wrong YAML, and any other
    error of PyYAML or msgspec."""
    import yaml

    if len(text) > MAX_YAML:
        raise ValueError(
            f"{len(text):,} bytes, the limit for YAML is {MAX_YAML:,}: write JSON to a file that "
            "ends in .json"
        )
    try:
        _check_events(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    return msgspec.yaml.decode(text, type=type, strict=strict)


def _check_events(events: Iterable[Any]) -> None:
    """Raises ValueError if the document is nested too deep, or one of its values is too long."""
    import yaml

    depth = 0
    for event in events:
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"nested deeper than {DEEPEST} levels")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > LONGEST_VALUE:
            raise ValueError(
                f"a value has {len(event.value):,} characters, the limit is {LONGEST_VALUE:,}"
            )


def _check(endpoints: Iterable[Endpoint]) -> None:
    """Raises ValueError with the endpoint that is not a valid URL or is listed twice."""
    seen: dict[str, int] = {}
    for number, endpoint in enumerate(endpoints):
        if not _can_be_called(endpoint):
            raise ValueError(
                f"endpoints[{number}]: address {endpoint.address[:200]!r} is not a host name or IP "
                "address; write it without http://, and the port in the field `port`"
            )
        first = seen.setdefault(endpoint.url.lower(), number)
        if first != number:
            raise ValueError(
                f"{endpoint.url} is listed twice, endpoints[{first}] and endpoints[{number}]; "
                "remove one of them"
            )


def _can_be_called(endpoint: Endpoint) -> bool:
    try:
        checked_url(endpoint.url)
        return ":" not in endpoint.address or bool(IPv6Address(endpoint.address))
    except ValueError:
        return False


class EndpointsFile:
    """Watches the file and calls `add` with endpoints and `remove` with URLs.

    A file that cannot be read changes nothing and is logged once. An instance that this file did
    not add is not removed by it. A change is applied only when two reads in a row find the same
    content: an author who writes the file in place may have written half of it, and half of a list
    is a valid list.
    """

    def __init__(
        self,
        path: Path,
        add: Callable[[Endpoint], Awaitable[None]],
        remove: Callable[[str], Awaitable[None]],
        *,
        poll_s: float = POLL_S,
    ) -> None:
        self._path = path
        self._add = add
        self._remove = remove
        self._poll_s = poll_s
        self._seen = self._followed = b""
        self._complaint = ""
        self._named: set[str] = set()
        self._ours: set[str] = set()
        self._changing: dict[str, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Add the instances that the file lists now. Raises CallerError if it is not valid."""
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
            await asyncio.sleep(self._poll_s)
            await self._poll()

    async def _poll(self) -> None:
        try:
            text = await off_loop(self._path.read_bytes, READ_S)
            stands = text == self._seen
            self._seen = text
            if stands and text != self._followed:
                self._follow(parse_endpoints(self._path, text))
                self._followed = text
        except TimeoutError:
            self._complain(f"{self._path}: not read within {READ_S:g} s; check its disk")
        except (OSError, CallerError) as error:
            self._complain(str(error))
        else:
            if stands:
                self._complaint = ""

    def _complain(self, what: str) -> None:
        if what != self._complaint:
            log.error("endpoints file ignored, the instances stay as they are: %s", what)
            self._complaint = what

    def _follow(self, endpoints: Iterable[Endpoint]) -> None:
        named = {endpoint.url: endpoint for endpoint in endpoints}
        before, self._named = self._named, {*named}
        for url in before - self._named:
            self._change(url, partial(self._let_go, url))
        for url in self._named - before:
            self._change(url, partial(self._take_in, named[url]))

    def _change(self, url: str, change: Callable[[], Awaitable[None]]) -> None:
        """Changes of one instance run one after the other."""
        task = asyncio.ensure_future(self._apply(url, change, self._changing.get(url)))
        self._changing[url] = task
        task.add_done_callback(lambda done: self._forget(url, done))

    async def _apply(
        self,
        url: str,
        change: Callable[[], Awaitable[None]],
        before: asyncio.Task[None] | None,
    ) -> None:
        if before is not None:
            await asyncio.wait({before})
        try:
            await change()
        except CallerError as error:
            log.error("instance %s, listed in %s: %s", url, self._path, error)

    async def _take_in(self, endpoint: Endpoint) -> None:
        await self._add(endpoint)
        self._ours.add(endpoint.url)

    async def _let_go(self, url: str) -> None:
        if url in self._ours:
            self._ours.discard(url)
            await self._remove(url)

    def _forget(self, url: str, task: asyncio.Task[None]) -> None:
        if self._changing.get(url) is task:
            del self._changing[url]
