"""Foreign trace formats of trajectories: turns in lists, sessions, logs of requests, dumps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from rollout_sched.simulators.traces.model import (
    COUNTED_BY,
    MAX_TOKENS,
    UNIX_S,
    Counting,
    SamplePlace,
    SampleRecord,
    Turn,
)
from rollout_sched.simulators.traces.rows import Importer, Placed, Row, without_tokens

# ------------------------------------------------------------------------------------------
# Trajectories of a group, with one list per turn, or one list per kind of length.


def _short_keys(rows: Iterable[Row], _: Counting) -> Placed:
    """{"g", "s", "p", "t": [[output, observation, seconds or null], ...]}: short-key turns."""
    for row in rows:
        outputs, observations, times = _columns(row, "t", row.list_of("t"))
        turns = _turns(row, ("t", outputs), ("t", observations), ("t", times))
        yield row.place, SampleRecord(row.text("g"), row.whole("s"), row.tokens("p"), turns)


def _lists(rows: Iterable[Row], _: Counting) -> Placed:
    """{"group", "stream", "prompt_len", "out_lens", "obs_lens", "tool_times"}: tpu-inference.

    obs_lens and tool_times may omit the last turn, because nothing follows it.
    """
    for row in rows:
        out, obs, times = (
            (key, row.list_of(key)) for key in ("out_lens", "obs_lens", "tool_times")
        )
        turns = _turns(row, out, obs, times)
        yield (
            row.place,
            SampleRecord(row.text("group"), row.whole("stream"), row.tokens("prompt_len"), turns),
        )


def _columns(row: Row, field: str, turns: list[object]) -> tuple[list[object], ...]:
    """[[output, observation, seconds], ...] as three lists."""
    if not all(isinstance(turn, list) and len(turn) == 3 for turn in turns):
        raise row.error(field, "expected [output, observation, seconds or null] for every turn")
    return tuple([turn[i] for turn in turns if isinstance(turn, list)] for i in range(3))


def _turns(
    row: Row,
    outputs: tuple[str, list[object]],
    observations: tuple[str, list[object]],
    times: tuple[str, list[object]],
) -> tuple[Turn, ...]:
    """Turns from three (field, values) lists; values after the last turn are dropped.

    A turn of 0 tokens is an aborted call, which counts as one token.
    """
    field, lengths = outputs
    if not lengths:
        raise row.error(field, "expected at least one turn")
    for other, values in (observations, times):
        if len(values) not in (len(lengths), len(lengths) - 1):
            raise row.error(other, f"expected one value per turn of {field} ({len(lengths)})")
    tokens = [max(1, row.checked_whole(field, value or 0, least=0)) for value in lengths]
    heard = [row.checked_whole(observations[0], value, least=0) for value in observations[1]]
    waited = [row.checked_seconds(times[0], 0.0 if value is None else value) for value in times[1]]
    followed = [Turn(*turn) for turn in zip(tokens[:-1], heard, waited, strict=False)]
    return (*followed, Turn(tokens[-1]))


def _made_nothing(prompt: str, outputs: str) -> Callable[[Row], bool]:
    """`Importer.failed` of a format with a list of outputs, or of turns that begin with theirs."""

    def failed(row: Row) -> bool:
        turns = row.fields.get(outputs)
        if not isinstance(turns, list) or not turns:
            return False
        made = [turn[0] if isinstance(turn, list) and turn else turn for turn in turns]
        return row.promptless(prompt) or all(value in (0, None) for value in made)

    return failed


SHORT_KEYS = Importer(
    "short-key turns JSONL",
    frozenset({"g", "s", "p", "t"}),
    _short_keys,
    _made_nothing("p", "t"),
)
TPU_INFERENCE = Importer(
    "tpu-inference replay JSONL",
    frozenset({"group", "stream", "prompt_len", "out_lens", "obs_lens", "tool_times"}),
    _lists,
    _made_nothing("prompt_len", "out_lens"),
)


# ------------------------------------------------------------------------------------------
# Calls of coding agents by session, as in semianalysisai/cc-traces-weka-062126 (Apache-2.0).

SUBAGENT = "subagent"


def _agent_sessions(rows: Iterable[Row], _: Counting) -> Placed:
    """{"id", "requests": [{"t", "type", "in", "out", "api_time"}, ...]}: a session on each line.

    A session is a group of one, and so is each of its subagents (`type` "subagent", with requests
    of its own), which run in parallel. `in` and `out` are tokens, `t` is the start of a call and
    `api_time` its duration, in seconds. Block hashes are left out. The tokens that a prompt has
    beyond the previous turn are the observation. If the agent has compacted its context, the prompt
    is shorter and there is no observation. Calls without a prompt are left out.
    """
    for serial, row in enumerate(rows):
        name = row.text("id") if row.given("id") else f"session-{serial}"
        for number, calls in enumerate(_agents(row, row.list_of("requests"))):
            group = f"{name}/{number}" if number else name
            prompted = [call for call in calls if not call.idle("in")]
            yield from [(row.place, None)] * (len(calls) - len(prompted))
            if prompted:
                yield row.place, _agent_sample(group, prompted)


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
            yield sorted(own, key=lambda call: call.time("t"))


def _agent_sample(group: str, calls: list[Row]) -> SampleRecord:
    followed = [_agent_turn(call, after) for call, after in pairwise(calls)]
    first, last = calls[0], calls[-1]
    turns = (*followed, Turn(_made(last)))
    return SampleRecord(group, 0, first.tokens("in"), turns, first.time("t"), "unknown")


def _agent_turn(call: Row, after: Row) -> Turn:
    made = _made(call)
    observed = after.tokens("in") - call.tokens("in") - made
    took_s = call.seconds("api_time") if call.given("api_time") else 0.0
    waited_s = after.time("t") - call.time("t") - took_s
    return Turn(made, max(0, observed), max(0.0, waited_s))


def _made(call: Row) -> int:
    """Output tokens. An aborted call has 0 in the trace; it counts as one token."""
    return 1 if call.idle("out") else call.whole("out")


AGENT_CALLS = Importer(
    "agent sessions",
    frozenset({"id", "requests"}),
    _agent_sessions,
    lambda row: row.fields.get("requests") == [],
)


# ------------------------------------------------------------------------------------------
# llm-d's request logs: one line per answer, several per conversation.


def _request_log(rows: Iterable[Row], _: Counting) -> Placed:
    """ts, request_id, prompt_tokens, output_tokens [, turn, prompt_hash, gen_s, endpoint].

    The lines of one request_id are the turns of one trajectory, by `turn`; trajectories whose first
    prompts have the same hash are a group. `ts` is when a turn was answered, `gen_s` its generation
    time in seconds. The tokens that a prompt has beyond the previous turn are the observation. If a
    client removes reasoning from the history, the prompt is shorter and there is no observation.
    """
    trajectories: dict[str, list[Row]] = {}
    for row in rows:
        trajectories.setdefault(row.text("request_id"), []).append(row)
    members: dict[str, int] = {}
    for request, turns in trajectories.items():
        turns.sort(key=_number)
        first = turns[0]
        group = first.text("prompt_hash") if first.given("prompt_hash") else request
        index = members[group] = members.get(group, -1) + 1
        followed = [_logged_turn(turn, after) for turn, after in pairwise(turns)]
        yield (
            first.place,
            SampleRecord(
                group,
                index,
                first.tokens("prompt_tokens"),
                (*followed, Turn(turns[-1].tokens("output_tokens"))),
                _begun(first),
                "unknown",
            ),
        )


def _logged_turn(turn: Row, after: Row) -> Turn:
    made = turn.tokens("output_tokens")
    observed = after.tokens("prompt_tokens") - turn.tokens("prompt_tokens") - made
    return Turn(made, max(0, observed), max(0.0, _begun(after) - turn.time("ts")))


def _begun(row: Row) -> float:
    return row.time("ts") - (row.seconds("gen_s") if row.given("gen_s") else 0.0)


def _number(row: Row) -> int:
    return row.whole("turn") if row.given("turn") else 0


REQUEST_LOG = Importer(
    "llm-d request log",
    frozenset({"ts", "request_id", "prompt_tokens", "output_tokens"}),
    _request_log,
    without_tokens("prompt_tokens", "output_tokens"),
)


# ------------------------------------------------------------------------------------------
# Mooncake's requests; those of AIPerf and genai-perf have sessions.


class _Request(NamedTuple):
    """A request, in tokens and seconds; its row, with all block hashes, is not kept.

    at: when it was asked, delay_s: how long after the answer before it; None if not given.
    block: the hash of its first block.
    """

    place: SamplePlace
    prompt: int
    output: int
    at: float | None
    delay_s: float | None
    block: object


def _mooncake(rows: Iterable[Row], _: Counting) -> Placed:
    """input_length, output_length [, timestamp (ms), session_id, delay (ms), hash_ids].

    The requests of a session_id are the turns of one trajectory, by their timestamps if all have
    one, else as they follow in the file; others are groups of one. Requests without a timestamp
    arrive at the start. Hashes describe sharing between requests, not lengths.
    """
    sessions: dict[str, list[_Request]] = {}
    for serial, row in enumerate(rows):
        name = row.text("session_id") if row.given("session_id") else f"request-{serial}"
        sessions.setdefault(name, []).append(_request(row))
    times = [one.at for requests in sessions.values() for one in requests if one.at is not None]
    start = min(times, default=0.0)
    # Unix times in seconds are milliseconds of many days, at which no recording begins.
    scale = 1000 if UNIX_S / 1000 <= start < UNIX_S / 100 else 1
    for name, requests in sessions.items():
        asked = [one.at for one in requests if one.at is not None]
        if len(asked) == len(requests):
            requests.sort(key=lambda one: one.at or 0.0)
        first = requests[0]
        arrival_s = scale * min(asked, default=start)
        turns = _session_turns(requests, scale)
        yield first.place, SampleRecord(name, 0, first.prompt, turns, arrival_s, "unknown")


def _request(row: Row) -> _Request:
    hashes = row.fields.get("hash_ids")
    return _Request(
        row.place,
        row.tokens("input_length"),
        row.tokens("output_length"),
        row.time("timestamp", per_s=1000) if row.given("timestamp") else None,
        row.milliseconds("delay") / 1000 if row.given("delay") else None,
        hashes[0] if isinstance(hashes, list) and hashes else None,
    )


def _session_turns(requests: list[_Request], scale: int) -> tuple[Turn, ...]:
    """A prompt of a session has the turns before it or, as in AIPerf, only what is new."""
    followed = list(pairwise(requests))
    history = all(_has_history(request, after) for request, after in followed)
    turns = [
        Turn(
            request.output,
            max(0, after.prompt - request.prompt - request.output) if history else after.prompt,
            _waited_s(request, after, scale),
        )
        for request, after in followed
    ]
    return (*turns, Turn(requests[-1].output))


def _has_history(request: _Request, after: _Request) -> bool:
    """Whether a prompt may begin with the one before it; without hashes its length must tell."""
    if request.block is None or after.block is None:
        return after.prompt >= request.prompt + request.output
    return after.block == request.block and after.prompt >= request.prompt


def _waited_s(request: _Request, after: _Request, scale: int) -> float:
    """The delay, or else the time between requests, since no row says how long an answer took."""
    if after.delay_s is not None:
        return after.delay_s
    if request.at is None or after.at is None:
        return 0.0
    return max(0.0, after.at - request.at) * scale


MOONCAKE = Importer(
    "Mooncake JSONL",
    frozenset({"input_length", "output_length"}),
    _mooncake,
    without_tokens("input_length", "output_length"),
)


# ------------------------------------------------------------------------------------------
# AReaL's session records (perf_tracer): time that each session generated and waited for tools.

#: The records say nothing about the prompt.
UNKNOWN_PROMPT = 1


def _session_records(rows: Iterable[Row], counting: Counting) -> Placed:
    """submit_ts, finalized_ts, generate_s [, task_id, toolcall_s, reward_s, status, ...].

    Sessions of a `task_id` are a group, others groups of one. They have times and no tokens, so
    tokens are estimated from the seconds of generation, and a label says so. The number of turns is
    unknown, so the time with tools lies between two turns of equal length.
    """
    members: dict[str, int] = {}
    for serial, row in enumerate(rows):
        group = row.text("task_id") if row.given("task_id") else f"session-{serial}"
        index = members[group] = members.get(group, -1) + 1
        labels = {k: row.text(k) for k in ("status",) if row.given(k)}
        labels[COUNTED_BY] = counting.label_of_seconds
        yield (
            row.place,
            SampleRecord(
                group,
                index,
                UNKNOWN_PROMPT,
                _timed_turns(row, counting),
                row.time("submit_ts"),
                "unknown",
                labels=labels,
            ),
        )


def _timed_turns(row: Row, counting: Counting) -> tuple[Turn, ...]:
    made_s = row.seconds("generate_s")
    if made_s * counting.tokens_per_s > MAX_TOKENS:
        raise row.error("generate_s", f"expected seconds for at most {MAX_TOKENS} tokens")
    acting_s = row.seconds("toolcall_s") if row.given("toolcall_s") else 0.0
    if not acting_s:
        return (Turn(counting.of_seconds(made_s)),)
    half = counting.of_seconds(made_s / 2)
    return Turn(half, 0, acting_s), Turn(half)


SESSIONS = Importer(
    "AReaL session records",
    frozenset({"submit_ts", "finalized_ts", "generate_s"}),
    _session_records,
    lambda row: row.idle("generate_s"),
)


# ------------------------------------------------------------------------------------------
# verl's rollout dumps: texts, whose tokens we count.


def _rollout_dump(rows: Iterable[Row], counting: Counting) -> Placed:
    """{"input", "output" [, "uid", "step", "score", ...]}: verl's rollout dump.

    Group: the uid if there is one, else equal inputs within a step. The texts are dropped; step,
    score and the way of counting become labels.
    """
    names: dict[tuple[str, str], str] = {}
    members: Counter[str] = Counter()
    for row in rows:
        step = row.text("step") if row.given("step") else "0"
        if row.given("uid"):
            group = row.text("uid")
        else:
            key = (step, row.text("input"))
            group = names.setdefault(key, f"step{step}-prompt{len(names)}")
        prompt, output = counting(row.text("input")), counting(row.text("output"))
        labels = {k: row.text(k) for k in ("step", "score") if row.given(k)}
        labels[COUNTED_BY] = counting.label
        index = members[group]
        members[group] += 1
        sample = SampleRecord(
            group, index, prompt, (Turn(output),), finish="unknown", labels=labels
        )
        yield row.place, sample


VERL = Importer(
    "verl rollout dump",
    frozenset({"input", "output"}),
    _rollout_dump,
    lambda row: row.fields.get("output", "") is None,  # an empty text has its stop token
)

TRAJECTORIES = (SHORT_KEYS, TPU_INFERENCE, VERL, SESSIONS, REQUEST_LOG, AGENT_CALLS, MOONCAKE)
