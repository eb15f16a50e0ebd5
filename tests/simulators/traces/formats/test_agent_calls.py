"""Sessions of coding agents, made up by the format of cc-traces-weka."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout_sched.simulators.traces import SampleRecord, TraceError, Turn
from tests.simulators.traces.imported import imported


def call(t: float, prompt: int, out: int, took_s: float | None = 1.0) -> dict[str, Any]:
    made = {"t": t, "type": "n", "model": "m", "in": prompt, "out": out, "hash_ids": [1, 2]}
    return made if took_s is None else {**made, "api_time": took_s}


def session(*requests: Any, name: str = "s") -> str:
    about = {"id": name, "models": ["m"], "block_size": 64, "hash_id_scope": "local"}
    return json.dumps({**about, "requests": requests})


def test_calls_are_turns_and_subagents_are_samples_of_their_own(tmp_path: Path) -> None:
    subagent = {
        "t": 5.0,
        "type": "subagent",
        "agent_id": "x",
        "requests": [call(5.5, 30, 7), call(7.0, 50, 2)],
    }
    text = "\n".join(
        (
            session(call(0.0, 100, 20), subagent, call(10.0, 180, 0), call(12.0, 90, 5, None)),
            session(call(3.0, 11, 12), name="t"),
        )
    )
    assert imported(tmp_path, text).groups == {
        "s": [
            SampleRecord("s", 0, 100, (Turn(20, 60, 9.0), Turn(1, 0, 1.0), Turn(5)), 0.0, "unknown")
        ],
        "s/1": [SampleRecord("s/1", 0, 30, (Turn(7, 13, 0.5), Turn(2)), 5.5, "unknown")],
        "t": [SampleRecord("t", 0, 11, (Turn(12),), 3.0, "unknown")],
    }


@pytest.mark.parametrize(
    ("requests", "field"),
    [([7], "requests"), ([{"t": 0, "in": 0, "out": 1}], "in"), ([{"in": 1, "out": 1}], "t")],
)
def test_a_bad_call_is_named(tmp_path: Path, requests: Any, field: str) -> None:
    with pytest.raises(TraceError, match=f"line 1, field '{field}'"):
        imported(tmp_path, session(*requests))


def test_agents_within_agents_end(tmp_path: Path) -> None:
    inner: dict[str, Any] = call(1.0, 5, 6)
    for _ in range(400):
        inner = {"t": 1.0, "type": "subagent", "requests": [inner]}
    assert imported(tmp_path, session(inner)).sample_count == 1
