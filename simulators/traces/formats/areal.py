"""AReaL's session records (perf_tracer): time that each session generated and waited for tools."""

from __future__ import annotations

from collections.abc import Iterable

from rollout_sched.simulators.traces.model import (
    COUNTED_BY,
    MOST_TOKENS,
    Counting,
    SampleRecord,
    Turn,
)
from rollout_sched.simulators.traces.rows import Importer, Placed, Row

#: The records say nothing about the prompt.
UNKNOWN_PROMPT = 1


def _convert(rows: Iterable[Row], counting: Counting) -> Placed:
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
                _turns(row, counting),
                row.seconds("submit_ts") - start,
                "unknown",
                labels=labels,
            ),
        )


def _turns(row: Row, counting: Counting) -> tuple[Turn, ...]:
    made_s = row.seconds("generate_s")
    if made_s * counting.tokens_per_s > MOST_TOKENS:
        raise row.error("generate_s", f"expected seconds for at most {MOST_TOKENS} tokens")
    acting_s = row.seconds("toolcall_s") if row.fields.get("toolcall_s") is not None else 0.0
    if not acting_s:
        return (Turn(counting.of_seconds(made_s)),)
    half = counting.of_seconds(made_s / 2)
    return Turn(half, 0, acting_s), Turn(half)


SESSIONS = Importer(
    "AReaL session records", frozenset({"submit_ts", "finalized_ts", "generate_s"}), _convert
)
