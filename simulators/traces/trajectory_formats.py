"""Foreign trace formats of trajectories: turns in lists, sessions, logs of requests, dumps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

from rollout_sched.simulators.traces.model import (
    COUNTED_BY,
    MAX_TOKENS,
    Counting,
    SampleRecord,
    Turn,
)
from rollout_sched.simulators.traces.rows import Importer, Placed, Row

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
    """Turns from three (field, values) lists; values after the last turn are dropped."""
    field, lengths = outputs
    if not lengths:
        raise row.error(field, "expected at least one turn")
    for other, values in (observations, times):
        if len(values) not in (len(lengths), len(lengths) - 1):
            raise row.error(other, f"expected one value per turn of {field} ({len(lengths)})")
    tokens = [row.checked_whole(field, value, least=1) for value in lengths]
    heard = [row.checked_whole(observations[0], value, least=0) for value in observations[1]]
    waited = [row.checked_seconds(times[0], 0.0 if value is None else value) for value in times[1]]
    followed = [Turn(*turn) for turn in zip(tokens[:-1], heard, waited, strict=False)]
    return (*followed, Turn(tokens[-1]))


SHORT_KEYS = Importer("short-key turns JSONL", frozenset({"g", "s", "p", "t"}), _short_keys)
TPU_INFERENCE = Importer(
    "tpu-inference replay JSONL",
    frozenset({"group", "stream", "prompt_len", "out_lens", "obs_lens", "tool_times"}),
    _lists,
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
    is shorter and there is no observation.
    """
    for serial, row in enumerate(rows):
        name = row.text("id") if row.fields.get("id") is not None else f"session-{serial}"
        for number, calls in enumerate(_agents(row, row.list_of("requests"))):
            group = f"{name}/{number}" if number else name
            yield row.place, _agent_sample(group, calls)


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


def _agent_sample(group: str, calls: list[Row]) -> SampleRecord:
    followed = [_agent_turn(call, after) for call, after in pairwise(calls)]
    first, last = calls[0], calls[-1]
    turns = (*followed, Turn(_made(last)))
    return SampleRecord(group, 0, first.tokens("in"), turns, first.seconds("t"), "unknown")


def _agent_turn(call: Row, after: Row) -> Turn:
    made = _made(call)
    observed = after.tokens("in") - call.tokens("in") - made
    took_s = call.seconds("api_time") if call.fields.get("api_time") is not None else 0.0
    waited_s = after.seconds("t") - call.seconds("t") - took_s
    return Turn(made, max(0, observed), max(0.0, waited_s))


def _made(call: Row) -> int:
    """Output tokens. An aborted call has 0 in the trace; it counts as one token."""
    return max(1, call.whole("out"))


AGENT_CALLS = Importer("agent sessions", frozenset({"id", "requests"}), _agent_sessions)


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
    start = min((_begun(row) for turns in trajectories.values() for row in turns), default=0.0)
    members: dict[str, int] = {}
    for request, turns in trajectories.items():
        turns.sort(key=_number)
        first = turns[0]
        group = first.text("prompt_hash") if "prompt_hash" in first.fields else request
        index = members[group] = members.get(group, -1) + 1
        followed = [_logged_turn(turn, after) for turn, after in pairwise(turns)]
        yield (
            first.place,
            SampleRecord(
                group,
                index,
                first.tokens("prompt_tokens"),
                (*followed, Turn(turns[-1].tokens("output_tokens"))),
                max(0.0, _begun(first) - start),
                "unknown",
            ),
        )


def _logged_turn(turn: Row, after: Row) -> Turn:
    made = turn.tokens("output_tokens")
    observed = after.tokens("prompt_tokens") - turn.tokens("prompt_tokens") - made
    return Turn(made, max(0, observed), max(0.0, _begun(after) - turn.seconds("ts")))


def _begun(row: Row) -> float:
    return row.seconds("ts") - (row.seconds("gen_s") if "gen_s" in row.fields else 0.0)


def _number(row: Row) -> int:
    return row.whole("turn") if "turn" in row.fields else 0


REQUEST_LOG = Importer(
    "llm-d request log",
    frozenset({"ts", "request_id", "prompt_tokens", "output_tokens"}),
    _request_log,
)


# ------------------------------------------------------------------------------------------
# AReaL's session records (perf_tracer): time that each session generated and waited for tools.

#: The records say nothing about the prompt.
UNKNOWN_PROMPT = 1


def _session_records(rows: Iterable[Row], counting: Counting) -> Placed:
    """submit_ts, finalized_ts, generate_s [, task_id, toolcall_s, reward_s, status, ...].

    Sessions of a `task_id` are a group, others groups of one. They have times and no tokens, so
    tokens are estimated from the seconds of generation, and a label says so. The number of turns is
    unknown, so the time with tools lies between two turns of equal length. A session that never
    generated is left out.
    """
    sessions = [row for row in rows if row.seconds("generate_s") > 0]
    start = min((row.seconds("submit_ts") for row in sessions), default=0.0)
    members: dict[str, int] = {}
    for serial, row in enumerate(sessions):
        named = row.fields.get("task_id") is not None
        group = row.text("task_id") if named else f"session-{serial}"
        index = members[group] = members.get(group, -1) + 1
        labels = {k: row.text(k) for k in ("status",) if row.fields.get(k) is not None}
        labels[COUNTED_BY] = counting.label_of_seconds
        yield (
            row.place,
            SampleRecord(
                group,
                index,
                UNKNOWN_PROMPT,
                _timed_turns(row, counting),
                row.seconds("submit_ts") - start,
                "unknown",
                labels=labels,
            ),
        )


def _timed_turns(row: Row, counting: Counting) -> tuple[Turn, ...]:
    made_s = row.seconds("generate_s")
    if made_s * counting.tokens_per_s > MAX_TOKENS:
        raise row.error("generate_s", f"expected seconds for at most {MAX_TOKENS} tokens")
    acting_s = row.seconds("toolcall_s") if row.fields.get("toolcall_s") is not None else 0.0
    if not acting_s:
        return (Turn(counting.of_seconds(made_s)),)
    half = counting.of_seconds(made_s / 2)
    return Turn(half, 0, acting_s), Turn(half)


SESSIONS = Importer(
    "AReaL session records",
    frozenset({"submit_ts", "finalized_ts", "generate_s"}),
    _session_records,
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
        step = row.text("step") if "step" in row.fields else "0"
        if "uid" in row.fields:
            group = row.text("uid")
        else:
            key = (step, row.text("input"))
            group = names.setdefault(key, f"step{step}-prompt{len(names)}")
        prompt, output = counting(row.text("input")), counting(row.text("output"))
        labels = {k: row.text(k) for k in ("step", "score") if row.fields.get(k) is not None}
        labels[COUNTED_BY] = counting.label
        index = members[group]
        members[group] += 1
        sample = SampleRecord(
            group, index, prompt, (Turn(output),), finish="unknown", labels=labels
        )
        yield row.place, sample


VERL = Importer("verl rollout dump", frozenset({"input", "output"}), _rollout_dump)

TRAJECTORIES = (SHORT_KEYS, TPU_INFERENCE, VERL, SESSIONS, REQUEST_LOG, AGENT_CALLS)
