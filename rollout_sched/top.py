"""`rollout-sched top`: the live state of a gateway in a terminal.

It draws the document that the live page draws, and the same six figures first; a rate is between
two of its looks. A gateway that does not answer is asked again, with the last known state on the
screen; one that refuses the key ends the command.
"""

from __future__ import annotations

import argparse
import os
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from http.client import HTTPException, HTTPResponse
from itertools import pairwise
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollout_sched import terminal
from rollout_sched.core.errors import CallerError, RolloutError, reason_of
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
    generated_tokens: Serial | None
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
    """A past step; fields as in `metrics.Step`. The times are None if it was seen in part."""

    version: Serial
    end_s: float
    rollout_s: float
    t50_s: float | None
    t90_s: float | None
    t99_s: float | None
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
    and changes have been gathered; `instance_s`: instance-seconds by state."""

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
    instance_s: dict[str, float]
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


def screen(
    document: Document, url: str, limit: int, away: str = "", trend: Trend | None = None
) -> Group:
    """`limit`: how many instances are shown; `away`: why the gateway does not answer now; `trend`:
    of the documents so far."""
    parts: list[RenderableType] = [_head(document, url)]
    parts.append(_headline(document, trend or Trend([document])))
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
        ("rollout_sched", "bold"),
        f" at {url}  ",
        (state, style),
        f"\npolicy {document.policy}, {versions}",
    )


#: Seconds over which a rate is taken: instances are polled each second.
RATE_S = 10.0

#: How many looks a trend keeps.
KEPT = 300


class _Level(NamedTuple):
    """Counters at a moment (tokens, instance-seconds), and the figures that come of them."""

    at: float
    made: int
    idle_s: float
    fleet_s: float
    open: int
    tokens_per_s: float | None = None
    idle: float | None = None


class Trend:
    """What changes from look to look, as the live page's `live_series.js` has it."""

    def __init__(self, documents: Iterable[Document] = ()) -> None:
        self.levels: deque[_Level] = deque(maxlen=KEPT)
        self._counted: dict[str, int] = {}
        self._made = 0
        for document in documents:
            self.take(document)

    def take(self, document: Document) -> None:
        if self.levels and document.now < self.levels[-1].at:
            self.levels.clear()  # the gateway was restarted
        now = self._level(document)
        earlier = [level for level in self.levels if level.at <= now.at - RATE_S]
        before = earlier[-1] if earlier else self.levels[0] if self.levels else now
        if now.at > before.at:
            now = now._replace(tokens_per_s=(now.made - before.made) / (now.at - before.at))
        if now.fleet_s > before.fleet_s:
            idle_s, fleet_s = now.idle_s - before.idle_s, now.fleet_s - before.fleet_s
            now = now._replace(idle=idle_s / fleet_s)
        self.levels.append(now)

    def _level(self, document: Document) -> _Level:
        for one in document.instances:
            if one.generated_tokens is not None:
                before = self._counted.get(one.url, one.generated_tokens)
                since_start = one.generated_tokens < before  # it was restarted
                self._made += one.generated_tokens - (0 if since_start else before)
                self._counted[one.url] = one.generated_tokens
        fleet_s = sum(document.instance_s.values())
        idle_s = fleet_s - document.instance_s.get("busy", 0.0)
        step = document.step
        left = max(0, document.prompts_per_step - step.in_batch - step.complete)
        return _Level(document.now, self._made, idle_s, fleet_s, left)


_Figure = tuple[str, str, Sequence[float | None]]


def _headline(document: Document, trend: Trend) -> Table:
    """A row of figures, each above its last minutes or steps as a line."""
    levels, steps = trend.levels, document.steps
    now = levels[-1]
    waits = [
        min(1.0, step.trainer_wait_s / max(1e-9, step.end_s - before.end_s))
        for before, step in pairwise(steps)
    ]
    speed = "-" if now.tokens_per_s is None else _count(round(now.tokens_per_s))
    begun = bool(steps or any(document.groups.values()))
    tail = f"{now.open:,}/{document.prompts_per_step:,}" if begun else "-"
    figures: list[_Figure] = [
        ("tokens/s", speed, [level.tokens_per_s for level in levels]),
        ("idle", _share(now.idle), [level.idle for level in levels]),
        ("groups open", tail, [level.open for level in levels]),
        ("staleness", _stale(steps), [step.max_staleness for step in steps]),
        ("trainer wait", _share(waits[-1] if waits else None), waits),
        ("inst-h idle", f"{now.idle_s / 3600:,.2f}", [x.idle_s - levels[0].idle_s for x in levels]),
    ]
    table = Table.grid(padding=(0, 1), expand=True)
    for _ in figures:
        table.add_column(no_wrap=True, ratio=1)
    table.add_row(*(Text(label, "dim") for label, _, _ in figures))
    table.add_row(*(Text(value, "bold") for _, value, _ in figures))
    table.add_row(*(Text(_line(values), "blue") for _, _, values in figures))
    return table


def _share(part: float | None) -> str:
    return "-" if part is None else f"{part:.0%}"


def _stale(steps: Sequence[PastStep]) -> str:
    return str(steps[-1].max_staleness) if steps else "-"


#: Width of a line in characters, and its levels.
LINE = 11
_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def _line(values: Sequence[float | None]) -> str:
    """At most LINE blocks, each for the largest of its part of the values, in relation to all."""
    known = [value for value in values if value is not None]
    most = max(known, default=0.0)
    parts = min(LINE, len(known)) if len(known) > 1 else 0
    cuts = [len(known) * part // parts for part in range(parts + 1)] if parts else []
    tops = [max(known[low:high]) for low, high in pairwise(cuts)]
    return "".join(_BLOCKS[round(7 * top / most) if most > 0 else 0] for top in tops)


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


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
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
            reason = getattr(error, "reason", error)
            said = reason_of(reason) if isinstance(reason, Exception) else reason
            raise Away(f"{self.url}: {said}") from error
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
        return Away(f"{self.url}: the gateway answered {status}")


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
REST = 28

#: Fewest instances that are shown, however small the terminal is.
LEAST = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = f"Uses the administrator's key in the environment variable {KEY}, if set."
    parser.add_argument("url", metavar="URL", help="URL of the gateway")
    parser.add_argument(
        "--once", action="store_true", help="print one screen after two looks, and exit"
    )
    parser.add_argument(
        "--every", type=float, default=1.0, metavar="SECONDS", help="interval; default: %(default)g"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Raises CallerError if the gateway refuses the request, Away if `--once` gets no answer."""
    source, console = GatewaySource(options.url, os.environ.get(KEY, "")), terminal.console()
    if options.once:
        documents = [source.ask()]
        time.sleep(options.every)
        documents.append(source.ask())
        limit = len(documents[-1].instances)
        console.print(screen(documents[-1], source.url, limit, trend=Trend(documents)))
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
        self._trend = Trend()

    def look(self, height: int) -> RenderableType:
        """The screen, for a terminal of `height` lines. Raises CallerError."""
        away = ""
        try:
            self._last = self._source.ask()
            self._trend.take(self._last)
        except Away as error:
            away = str(error)
        if self._last is None:
            return Text(f"no answer yet: {away}", "bold red")
        limit = max(LEAST, height - REST)
        return screen(self._last, self._source.url, limit, away, self._trend)
