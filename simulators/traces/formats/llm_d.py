"""llm-d's request logs: one line per answer, several per conversation."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from rollout_sched.simulators.traces.model import Counting, SampleRecord, Turn
from rollout_sched.simulators.traces.rows import Importer, Placed, Row


def _convert(rows: Iterable[Row], _: Counting) -> Placed:
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
        followed = [_turn(turn, after) for turn, after in pairwise(turns)]
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


def _turn(turn: Row, after: Row) -> Turn:
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
    _convert,
)
