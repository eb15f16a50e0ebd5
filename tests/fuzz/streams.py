"""Streams of instances: a client gets one valid stream of events with an end, in any packets.

An input is a letter, which selects how the streams come (`KINDS`), and the bytes of a stream.
"""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

from rollout_sched.integrations.gateway.data_plane.answers import read_event
from rollout_sched.live.ports import InstanceError
from tests import virtual_loop
from tests.fuzz.answers import FIRST, LIMIT, Kind, request, says_first
from tests.fuzz.answers import WORDS as ANSWER_WORDS
from tests.fuzz.fixtures import (
    ENDPOINTS,
    MAX_ATTEMPTS,
    Client,
    Says,
    ask,
    check_error,
    chunk,
    read_events,
    read_whole,
)
from tests.fuzz.laws import Broken, cuts, hold, packets

KINDS = [
    *itertools.product(ENDPOINTS, (False, True), (False, True), (200,), (False,)),
    *itertools.product(ENDPOINTS[:2], (True,), (False, True), (200,), (True,)),
    *itertools.product(ENDPOINTS[:1], (True,), (False, True), (400, 500), (False,)),
]
DONE = b"data: [DONE]\n\n"
#: Events with this text pass without parsing, on purpose.
GOES_ON = b'"finish_reason":null'
ONE, CHAT = ENDPOINTS[:2]
STREAMS = (
    chunk(ONE, [1]) + chunk(ONE, [2]) + chunk(ONE, [3], "stop") + DONE,
    chunk(CHAT, [1]) + chunk(CHAT, [2]) + chunk(CHAT, [3], "stop") + DONE,
    chunk(ONE, [1]) + chunk(ONE, [2]) + chunk(ONE, [], "length") + DONE,
    chunk(ONE, [1]) + chunk(ONE, [2]) + chunk(ONE, [], "abort") + DONE,
    chunk(CHAT, [1]) + chunk(CHAT, [2]) + chunk(CHAT, [], "abort") + DONE,
    chunk(ONE, [], "abort") + DONE,
    chunk(ONE, [1]) + chunk(ONE, [2]) + DONE,
    chunk(ONE, [1]) + chunk(ONE, [2], "stop"),
    chunk(ONE, [1]) + chunk(ONE, [2]),
    chunk(ONE, list(range(8))),
    chunk(ONE, [1]) + chunk(ONE, [2])[:-1],
    chunk(ONE, [1]) + chunk(ONE, [2])[:-9] + b"\n\n" + DONE,
    chunk(ONE, [1], "stop") + DONE + chunk(ONE, [2]) + DONE,
    chunk(ONE, [1], "stop") + chunk(ONE, [2], "stop") + DONE,
    DONE,
    DONE + DONE,
    b"",
    b": ping\n\n" + chunk(ONE, [1]) + chunk(ONE, [2], "stop") + DONE,
    chunk(ONE, [1]).replace(b"\n\n", b"\r\n\r\n") + chunk(ONE, [2], "stop") + DONE,
    chunk(ONE, [1]).replace(b"data: ", b"data:") + chunk(ONE, [2], "stop") + DONE,
    chunk(ONE, [1]) + b'data: {"error":{"message":"no","code":500}}\n\n' + DONE,
    chunk(ONE, [1]).replace(b"w1", b"\xff") + chunk(ONE, [2], "stop") + DONE,
    chunk(ONE, [1]).replace(b"[1]", b'["x"]') + chunk(ONE, [2], "abort") + DONE,
    chunk(ONE, [1]) + b'data: {"choices":[]}\n\n' + chunk(ONE, [2], "stop") + DONE,
    chunk(ONE, [1]) + b'data: {"choices":[],"usage":{"completion_tokens":1}}\n\n' + DONE,
    chunk(ONE, [1]) + b"data: [1]\n\n" + chunk(ONE, [2], "stop") + DONE,
    b"data: garbage\n\n" + DONE,
    b'data: "finish_reason":null\n\n' + chunk(ONE, [2], "stop") + DONE,
    b"event: x\ndata: 1\n\n" + chunk(ONE, [2], "stop") + DONE,
    b'{"error":{"message":"no","code":400}}',
    chunk(ONE, [1]) * 40 + chunk(ONE, [2], "stop") + DONE,
)
WORDS = (
    *(*ANSWER_WORDS, DONE, b"data: ", b"data:", b"\n\n", b"\r\n", b": ping\n\n", b"event: x\n"),
    *(chunk(ONE, [1]), chunk(ONE, [2], "stop"), chunk(ONE, [], "abort"), b'data: {"error":1}\n\n'),
)

_PROMPT = b'"prompt_token_ids"'
_IDS = re.compile(rb'"token_ids"\s*:\s*\[([^\]]*)')


def kind_of(data: bytes) -> Kind | None:
    number = data[0] - FIRST if data else -1
    return Kind(*KINDS[number]) if 0 <= number < len(KINDS) else None


class Streams:
    name = "streams"
    words = WORDS
    corpus = tuple(
        b"%c%b" % (FIRST + kind, body)
        for number, body in enumerate(STREAMS)
        for kind in sorted({0, 1, 2, 3, 13, number % len(KINDS)})
    )

    def make(self, rng: random.Random) -> bytes:
        kind = rng.randrange(len(KINDS))
        path = KINDS[kind][0]
        events = [chunk(path, [n] * rng.choice((1, 1, 1, 0, 3))) for n in range(rng.randrange(7))]
        end = rng.choice(("stop", "stop", "length", "abort", "abort", "", "error"))
        events.append(chunk(path, [9] * rng.randrange(2), end))
        events += rng.choice(([DONE], [DONE], [DONE], []))
        if rng.random() < 0.3:
            events.insert(rng.randrange(len(events) + 1), rng.choice(WORDS))
        if rng.random() < 0.2:
            del events[rng.randrange(len(events))]
        return b"%c%b" % (FIRST + kind, b"".join(events))

    def check(self, data: bytes) -> None:
        kind = kind_of(data)
        if kind is None:
            return
        told = [self._told(kind, says_first(kind, cut), data[1:]) for cut in cuts(data[1:])]
        if not _alike_unread(data[1:]):
            return
        hold("packet boundaries do not matter", told[1:] == told[:-1], told)

    def _told(self, kind: Kind, says: Says, body: bytes) -> Any:
        """What the client gets; an error counts only as an error."""
        client, asked = virtual_loop.run(
            ask(kind.path, request(kind.path, stream=True), says, partial=kind.partial)
        )
        hold("a call has a bounded number of attempts", len(asked) <= MAX_ATTEMPTS, len(asked))
        if not client.streamed:
            check_error(client, passed_on=400 <= kind.status < 500)
            return client.status
        events = read_events(bytes(client.data), GOES_ON)
        failed = bool(events) and events[-1] is not None and "error" in events[-1]
        if failed:
            return [*events[:-1], "an error"]
        hold("a stream ends with [DONE] or an error", events[-1:] == [None], client.data)
        ends = [end for event in events[:-1] for end in _ends(event)]
        hold("a stream has at most one finish reason", len(ends) <= 1, ends)
        hold("an abort never reaches a client", "abort" not in ends, ends)
        if len(asked) == 1 and _alike_unread(body):
            self._compare(client, events, body)
        return events

    def _compare(self, client: Client, events: list[Any], body: bytes) -> None:
        """Check that a valid stream reaches the client with nothing removed and nothing added."""
        try:
            said = read_events(body, GOES_ON)
        except Broken:
            return
        ends = [end for event in said for end in _ends(event)]
        if not ends or {"abort", "error"} & set(ends):  # the gateway writes the end itself
            return
        if any("error" in event for event in said if event is not None):
            return  # the earlier tokens may already complete the response
        if sum(1 + ids.count(b",") for ids in _IDS.findall(body) if ids) > LIMIT:
            return  # the stream may be cut there
        told, said = ([event for event in each if event is not None] for each in (events, said))
        end = next(number for number, event in enumerate(said) if _ends(event))
        # After the end, only the usage belongs to the stream.
        said = [*said[: end + 1], *(event for event in said[end + 1 :] if event.get("usage"))]
        for event in told:
            event.pop("rollout_sched", None)
        hold("a stream is passed on unchanged", told == said, (told, said))

    def spend(self, data: bytes) -> None:
        kind = kind_of(data)
        if kind is not None:
            says = says_first(kind, packets(data[1:], 256))
            body = request(kind.path, stream=True)
            virtual_loop.run(ask(kind.path, body, says, partial=kind.partial))


def _alike_unread(body: bytes) -> bool:
    """Whether events that pass without parsing are also valid if parsed, so that parsing makes no
    difference: JSON does not define which of two fields with the same name counts, unused fields
    are not checked, and the prompt's ids are in the first event."""
    first, *others = body.split(b"\n\n")
    if _PROMPT not in first and any(_PROMPT in event for event in others):
        return False
    for event in (first, *others):
        if GOES_ON in event:
            if event.count(b'"token_ids"') > 1:
                return False
            try:
                read_whole(event.removeprefix(b"data:"))
                told = read_event(event.removeprefix(b"data:").strip())
                _ = [choice.ids for choice in told.choices or ()]
            except (Broken, InstanceError):
                return False
    return True


def _ends(event: dict[str, Any] | None) -> list[Any]:
    choices = (event or {}).get("choices")
    told = [c.get("finish_reason") for c in choices or () if isinstance(c, dict)]
    return [end for end in told if end is not None]
