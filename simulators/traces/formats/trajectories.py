"""Trajectories of a group, with one list per turn, or one list per kind of length."""

from __future__ import annotations

from collections.abc import Iterable

from rollout_sched.simulators.traces.model import Counting, SampleRecord, Turn
from rollout_sched.simulators.traces.rows import Importer, Placed, Row


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
