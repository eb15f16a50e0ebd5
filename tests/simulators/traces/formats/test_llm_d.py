"""llm-d's request logs, made up: conversations by id, groups by the hash of the prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_sched.simulators.traces import SampleRecord, TraceError, Turn
from tests.simulators.traces.imported import imported

LOG = """
{"ts":110.0,"request_id":"a","turn":0,"endpoint":"10.0.0.1","prompt_hash":"h","prompt_tokens":100,"output_tokens":40,"gen_s":5.0}
{"ts":112.0,"request_id":"b","turn":0,"endpoint":"10.0.0.2","prompt_hash":"h","prompt_tokens":100,"output_tokens":60,"gen_s":7.0}
{"ts":120.0,"request_id":"a","turn":2,"endpoint":"10.0.0.1","prompt_hash":"j","prompt_tokens":120,"output_tokens":9,"gen_s":1.0}
{"ts":116.0,"request_id":"a","turn":1,"endpoint":"10.0.0.1","prompt_hash":"i","prompt_tokens":150,"output_tokens":30,"gen_s":4.0}
{"ts":130.0,"request_id":"c","prompt_tokens":7,"output_tokens":8}
"""


def test_turns_of_a_request_follow_each_other(tmp_path: Path) -> None:
    trace = imported(tmp_path, LOG)
    # 150 = 100 + 40 + 10 observed; then the history shrank. Turn 1 began at 112, 2 s after turn 0.
    turns = (Turn(40, 10, 2.0), Turn(30, 0, 3.0), Turn(9))
    assert trace.groups == {
        "h": [
            SampleRecord("h", 0, 100, turns, 0.0, "unknown"),
            SampleRecord("h", 1, 100, (Turn(60),), 0.0, "unknown"),
        ],
        "c": [SampleRecord("c", 0, 7, (Turn(8),), 25.0, "unknown")],
    }


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    log = '{"ts":1,"request_id":"a","prompt_tokens":5,"output_tokens":0}'
    with pytest.raises(TraceError, match=r"line 1, field 'output_tokens': found 0"):
        imported(tmp_path, log)
