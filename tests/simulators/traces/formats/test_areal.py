"""AReaL's session records, made up: times become tokens, which is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_sched.simulators.traces import Counting, SampleRecord, TraceError, Turn
from tests.simulators.traces.imported import imported

RECORDS = """
{"task_id":7,"session_id":70,"rank":0,"status":"accepted","submit_ts":102.0,"finalized_ts":112.0,"total_s":10.0,"generate_s":8.0,"reward_s":0.5,"toolcall_s":1.5}
{"task_id":7,"session_id":71,"rank":0,"status":"rejected","submit_ts":102.5,"finalized_ts":104.0,"total_s":1.5,"generate_s":1.5,"reward_s":0.0,"toolcall_s":0.0}
{"task_id":null,"session_id":72,"submit_ts":100.0,"finalized_ts":101.0,"generate_s":0.001}
{"task_id":8,"session_id":80,"status":"failed","submit_ts":99.0,"finalized_ts":99.1,"generate_s":0.0}
"""


def test_sessions_of_a_task_are_a_group(tmp_path: Path) -> None:
    trace = imported(tmp_path, RECORDS, Counting(tokens_per_s=50))
    counted = {"tokens_counted_by": "seconds * 50"}
    assert trace.about == "AReaL session records"
    assert trace.groups["7"] == [
        SampleRecord(
            *("7", 0, 1, (Turn(200, 0, 1.5), Turn(200)), 2.0, "unknown"),
            labels={"status": "accepted", **counted},
        ),
        SampleRecord(
            *("7", 1, 1, (Turn(75),), 2.5, "unknown"), labels={"status": "rejected", **counted}
        ),
    ]
    assert trace.groups["session-2"][0] == SampleRecord(
        *("session-2", 0, 1, (Turn(1),), 0.0, "unknown"), labels=counted
    )
    assert len(trace.groups) == 2  # who never generated is no sample
    assert trace.estimated_by == "seconds * 50"


@pytest.mark.parametrize("time", ['"soon"', "1e9", "-1"])
def test_a_bad_time_is_named(tmp_path: Path, time: str) -> None:
    record = f'{{"submit_ts":1,"finalized_ts":2,"generate_s":{time}}}'
    with pytest.raises(TraceError, match=r"line 1, field 'generate_s': found"):
        imported(tmp_path, record)
