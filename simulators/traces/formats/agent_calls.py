"""Calls of coding agents by session, as in semianalysisai/cc-traces-weka-062126 (Apache-2.0)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from rollout_sched.simulators.traces.model import Counting, SampleRecord, Turn
from rollout_sched.simulators.traces.rows import Importer, Placed, Row

SUBAGENT = "subagent"


def _convert(rows: Iterable[Row], _: Counting) -> Placed:
    """{"id", "requests": [{"t", "type", "in", "out", "api_time"}, ...]}: a session on each line.

    A session is a group of one, and so is each of its subagents (`type` "subagent", with requests
    of its own), which run in parallel. `in` and `out` are tokens, `t` is the start of a call and
    `api_time` its duration, in seconds. Block hashes are left out. The tokens that a prompt has
    beyond the previous turn are the observation. If the agent has compacted its context, the prompt
    is shorter and there is no observation.
    """
    for serial, row in enumerate(rows):
        name = row.text("id") if row.fields.get("id") is not None else f"session-{serial}"
        for number, calls in enumerate(_agents(row, row.list_of("requests"))):
            group = f"{name}/{number}" if number else name
            yield row.place, _sample(group, calls)


def _agents(row: Row, requests: list[object]) -> Iterator[list[Row]]:
    """The calls of a session without those of its subagents; then the calls of each subagent."""
    waiting = [requests]
    while waiting:
        own = []
        for request in waiting.pop(0):
            if not isinstance(request, dict):
                raise row.error("requests", "expected an object for each call")
            if request.get("type") == SUBAGENT:
                waiting.append(Row(row.where, row.line, request).list_of("requests"))
            else:
                own.append(Row(row.where, row.line, request))
        if own:
            yield sorted(own, key=lambda call: call.seconds("t"))


def _sample(group: str, calls: list[Row]) -> SampleRecord:
    followed = [_turn(call, after) for call, after in pairwise(calls)]
    first, last = calls[0], calls[-1]
    turns = (*followed, Turn(_made(last)))
    return SampleRecord(group, 0, first.tokens("in"), turns, first.seconds("t"), "unknown")


def _turn(call: Row, after: Row) -> Turn:
    made = _made(call)
    observed = after.tokens("in") - call.tokens("in") - made
    took_s = call.seconds("api_time") if call.fields.get("api_time") is not None else 0.0
    waited_s = after.seconds("t") - call.seconds("t") - took_s
    return Turn(made, max(0, observed), max(0.0, waited_s))


def _made(call: Row) -> int:
    """Output tokens. An aborted call has 0 in the trace; it counts as one token."""
    return max(1, call.whole("out"))


AGENT_CALLS = Importer("agent sessions", frozenset({"id", "requests"}), _convert)
