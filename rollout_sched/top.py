"""`rollout-sched top`: the live state of a gateway in a terminal.

It draws the document that the live page draws, and computes nothing that the gateway has not. A
gateway that does not answer is asked again, with the last known state on the screen; one that
refuses the key ends the command.
"""

from __future__ import annotations

import argparse
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from http.client import HTTPException, HTTPResponse
from typing import Literal
from urllib.parse import urlsplit

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollout_sched import terminal
from rollout_sched.core.errors import CallerError, RolloutError
from rollout_sched.core.model.records import Count, Serial, Size

# ------------------------------------------------------------------------------------------
# The fields of a gateway's live state (`GET /admin/live`) that the terminal shows.

SCHEMA = "rollout-sched-live/1"


class RequestCounts(msgspec.Struct, frozen=True):
    in_flight: Count
    waiting: Count
    parked: Count


class WaitsFor(msgspec.Struct, frozen=True):
    """What the next batch and the newest weights wait for; "" if nothing is missing."""

    batch: str
    weights: str


class InstanceLine(msgspec.Struct, frozen=True):
    """One instance. A field is None if the instance does not report it or is away."""

    url: str
    status: str
    reason: str
    version: Serial | None
    in_flight: Count
    slots: Count
    waiting: Count | None
    kv_usage: float | None
    held: bool = False
    leaving: bool = False


class PresentStep(msgspec.Struct, frozen=True):
    """The current step. number: batches before it; finished: samples that ended in it; in_batch:
    groups of its batch that are delivered; complete: further groups that are complete."""

    number: Serial
    elapsed_s: float
    finished: Count
    in_batch: Size
    complete: Count


class PastStep(msgspec.Struct, frozen=True):
    """A past step; fields as in `metrics.steps.Step`."""

    version: Serial
    rollout_s: float
    t50_s: float
    t90_s: float
    t99_s: float
    trainer_wait_s: float
    samples: Count
    tokens: Serial
    max_staleness: Serial
    idle_bubble: float


class Change(msgspec.Struct, frozen=True):
    """`at`: seconds on the scheduler's clock."""

    at: float
    level: Literal["info", "warning", "error"]
    text: str


class Document(msgspec.Struct, frozen=True):
    """`now`: seconds on the scheduler's clock; `watched_s`: seconds since which staleness, waste
    and changes have been gathered."""

    schema: Literal["rollout-sched-live/1"]
    now: float
    watched_s: float
    policy: str
    version: Serial
    fleet_version: Serial
    healthy: bool
    broken: str | None
    requests: RequestCounts
    groups: dict[str, Count]
    batches: Serial
    prompts_per_step: Size
    trainer_waiting: bool
    waits_for: WaitsFor
    instances: list[InstanceLine]
    step: PresentStep
    steps: list[PastStep]
    staleness: dict[str, Serial]
    waste: dict[str, Serial]
    changes: list[Change]


#: How many of the newest steps and changes are shown.
STEPS = 5
CHANGES = 6

#: Width of a bar in cells.
BAR = 8

_STYLES = {"serving": "green", "away": "red", "warning": "yellow", "error": "red"}


def screen(document: Document, url: str, limit: int, away: str = "") -> Group:
    """`most`: how many instances are shown; `away`: why the gateway does not answer now."""
    parts: list[RenderableType] = [_head(document, url)]
    if away:
        parts.append(Text(f"no answer: {away}. Below is the last known state.", "bold red"))
    if document.broken:
        parts.append(Text(f"the scheduler has stopped: {document.broken}", "bold red"))
    parts += [_queue(document), _fleet(document.instances, limit), _step(document)]
    if document.steps:
        parts.append(_steps(document.steps[-STEPS:]))
    parts += [_shares(document), *_changes(document)]
    return Group(*parts)


def _head(document: Document, url: str) -> Text:
    state = "healthy" if document.healthy else "not healthy"
    versions = f"version {document.version}"
    if document.fleet_version != document.version:
        versions += f", oldest instance has {document.fleet_version}"
    style = "bold green" if document.healthy else "bold red"
    return Text.assemble(
        (url, "bold"), "  ", (state, style), f"  policy {document.policy}, {versions}"
    )


def _queue(document: Document) -> Text:
    requests = document.requests
    groups = ", ".join(f"{count:,} {state}" for state, count in document.groups.items() if count)
    return Text(
        f"requests: {requests.in_flight:,} in flight, {requests.waiting:,} waiting, "
        f"{requests.parked:,} parked\ngroups: {groups or 'none'}"
    )


def _fleet(instances: Sequence[InstanceLine], limit: int) -> RenderableType:
    """A table: first the instances that do not serve, then the fullest."""
    if not instances:
        return Text("no instances")
    table = _table()
    table.add_column("instance", overflow="fold", ratio=1)
    table.add_column("state", no_wrap=True)
    for name in ("version", "in flight", "queued", "KV"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", width=BAR)
    ordered = sorted(instances, key=lambda one: (one.status == "serving", -one.in_flight))
    shown, left = ordered[:limit], ordered[limit:]
    for one in shown:
        table.add_row(*_instance(one))
    reasons = [Text(f"{_short(one.url)}: {one.reason}", "red") for one in shown if one.reason]
    if left:
        reasons.append(Text(f"and {len(left):,} more, {_count_of_states(left)}", "dim"))
    return Group(table, *reasons)


def _table() -> Table:
    return Table(
        box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, expand=True
    )


def _short(url: str) -> str:
    return url.removeprefix("http://")


def _instance(one: InstanceLine) -> Iterable[RenderableType]:
    marks = [mark for mark, so in (("held", one.held), ("leaving", one.leaving)) if so]
    return (
        Text(_short(one.url)),
        Text("\n".join([one.status, *marks]), _STYLES.get(one.status, "yellow")),
        "-" if one.version is None else str(one.version),
        f"{one.in_flight:,}/{one.slots:,}",
        "-" if one.waiting is None else f"{one.waiting:,}",
        "-" if one.kv_usage is None else f"{one.kv_usage:.0%}",
        ProgressBar(total=max(1, one.slots), completed=one.in_flight, width=BAR),
    )


def _count_of_states(instances: Sequence[InstanceLine]) -> str:
    states: dict[str, int] = {}
    for one in instances:
        states[one.status] = states.get(one.status, 0) + 1
    return ", ".join(f"{count:,} {state}" for state, count in states.items())


def _step(document: Document) -> RenderableType:
    step, wanted = document.step, document.prompts_per_step
    whole = min(wanted, step.in_batch + step.complete)
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_row(
        f"step {step.number + 1}: {step.elapsed_s:,.1f} s, {whole:,}/{wanted:,} groups whole, "
        f"{step.finished:,} samples",
        ProgressBar(total=wanted, completed=whole),
    )
    waits = [f"the batch waits for {document.waits_for.batch}"] * bool(document.waits_for.batch)
    waits += [f"weights wait for {document.waits_for.weights}"] * bool(document.waits_for.weights)
    if document.trainer_waiting:
        waits.insert(0, "the trainer waits")
    return Group(line, *(Text(wait, "yellow") for wait in waits))


def _steps(steps: Sequence[PastStep]) -> Table:
    """A table of past steps, with their tails."""
    table = _table()
    names = ("version", "took s", "50 % by", "90 % by", "99 % by", "waited", "samples", "tokens")
    for name in (*names, "stale", "idle"):
        table.add_column(name, justify="right", no_wrap=True)
    for step in steps:
        times = (step.rollout_s, step.t50_s, step.t90_s, step.t99_s, step.trainer_wait_s)
        table.add_row(
            str(step.version),
            *(_seconds(time) for time in times),
            _count(step.samples),
            _count(step.tokens),
            str(step.max_staleness),
            f"{step.idle_bubble:.0%}",
        )
    return table


def _shares(document: Document) -> Text:
    """Staleness and waste since the gateway has gathered them."""
    delivered = sum(document.staleness.values())
    ages = [
        f"{versions}: {count / delivered:.0%}"
        for versions, count in document.staleness.items()
        if count
    ]
    waste = _counts(document.waste)
    return Text(
        f"in the last {document.watched_s:,.0f} s\n"
        f"staleness: {', '.join(ages) or 'nothing was delivered'}\n"
        f"tokens wasted: {waste or 'none'}"
    )


def _counts(by_name: Mapping[str, int]) -> str:
    most_first = sorted(by_name.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {count:,}" for name, count in most_first if count)


def _changes(document: Document) -> Iterable[Text]:
    return (_change(document.now, each) for each in document.changes[-CHANGES:])


def _change(now: float, change: Change) -> Text:
    return Text(f"{_ago(now - change.at)}: {change.text}", _STYLES.get(change.level, ""))


def _ago(seconds: float) -> str:
    return f"{seconds:3.0f} s ago" if seconds < 600 else f"{seconds / 60:,.0f} min ago"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 1000 else f"{seconds:,.0f}"


def _count(number: int) -> str:
    """A number for a table column; with a unit from 10,000 on."""
    for unit, size, least in (("G", 10**9, 10**9), ("M", 10**6, 10**6), ("k", 10**3, 10**4)):
        if number >= least:
            shown = number / size
            return f"{shown:.1f}{unit}" if shown < 100 else f"{shown:.0f}{unit}"
    return str(number)


# ------------------------------------------------------------------------------------------
# Requests the live state of a gateway.

PATH = "/admin/live"

#: The environment variable that holds an administrator's key.
KEY = "ROLLOUT_SCHED_ADMIN_KEY"

#: Timeout in seconds.
PATIENCE_S = 5.0


#: Most bytes of an answer: a thousand instances have half a megabyte.
LARGEST = 2**24


class Away(RolloutError):
    """The gateway does not answer now, but may answer later."""


class GatewaySource:
    """One gateway; `key`: an administrator's, "" for none. Raises CallerError for a bad URL."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CallerError(f"{url!r} is not a gateway's URL, such as http://127.0.0.1:9000")
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._request = urllib.request.Request(self.url + PATH, headers=headers)
        # Ignore the proxy settings of the environment: gateways are reached directly.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(self) -> Document:
        """Raises Away if the gateway does not answer, CallerError if a retry cannot help."""
        try:
            with self._opener.open(self._request, timeout=PATIENCE_S) as answer:
                body = _body(answer)
        except urllib.error.HTTPError as error:
            raise self._refused(error.code) from error
        except (OSError, HTTPException) as error:  # includes URLError
            raise Away(str(getattr(error, "reason", error))) from error
        try:
            return msgspec.json.decode(body, type=Document)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CallerError(
                f"{self.url}{PATH} does not answer as {SCHEMA}: {error}; use the same version as "
                "the gateway's"
            ) from error

    def _refused(self, status: int) -> RolloutError:
        if status in (401, 403):
            return CallerError(
                f"{self.url} needs an administrator's key ({status}): set it as {KEY} in the "
                "environment"
            )
        if status == 404:
            return CallerError(f"{self.url} has no {PATH}: it is not a gateway, or an older one")
        return Away(f"the gateway answered {status}")


def _body(answer: HTTPResponse) -> bytes:
    """Raises CallerError if it is too long, Away if it does not end within PATIENCE_S."""
    deadline, body = time.monotonic() + PATIENCE_S, bytearray()
    while part := answer.read1(2**16):
        body += part
        if len(body) > LARGEST:
            raise CallerError(f"{answer.url} answers with more than {LARGEST} bytes")
        if time.monotonic() > deadline:
            raise Away(f"its answer took more than {PATIENCE_S:g} s")
    return bytes(body)


#: Approximate number of lines of a screen that are not instances.
REST = 24

#: Fewest instances that are shown, however small the terminal is.
LEAST = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = f"Uses the administrator's key in the environment variable {KEY}, if set."
    parser.add_argument("url", metavar="URL", help="URL of the gateway")
    parser.add_argument("--once", action="store_true", help="print one screen and exit")
    parser.add_argument(
        "--every", type=float, default=1.0, metavar="SECONDS", help="interval; default: %(default)g"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Raises CallerError if the gateway refuses the request, Away if `--once` gets no answer."""
    source, console = GatewaySource(options.url, os.environ.get(KEY, "")), terminal.console()
    if options.once:
        document = source.ask()
        console.print(screen(document, source.url, limit=len(document.instances)))
        return
    watch(source, console, options.every)


def watch(source: GatewaySource, console: Console, every_s: float) -> None:
    """Refresh the screen until Ctrl-C. A gateway that does not answer is asked again."""
    shown = Watched(source)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(shown.look(console.height), refresh=True)
                time.sleep(every_s)
    except KeyboardInterrupt:
        return


class Watched:
    """The last known state of a gateway, whether it answers or not."""

    def __init__(self, source: GatewaySource) -> None:
        self._source = source
        self._last: Document | None = None

    def look(self, height: int) -> RenderableType:
        """The screen, for a terminal of `height` lines. Raises CallerError."""
        away = ""
        try:
            self._last = self._source.ask()
        except Away as error:
            away = str(error)
        if self._last is None:
            return Text(f"{self._source.url}: no answer yet: {away}", "bold red")
        return screen(self._last, self._source.url, max(LEAST, height - REST), away)
