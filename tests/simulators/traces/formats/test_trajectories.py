"""Trajectories with lists of turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_sched.simulators.traces import SampleRecord, Turn
from tests.simulators.traces.imported import imported


def test_short_key_turns(tmp_path: Path) -> None:
    trace = imported(tmp_path, '{"g":3,"s":0,"p":9,"t":[[5,2,null],[6,1,0.5],[7,4,9.0]]}\n')
    assert trace.groups["3"][0] == SampleRecord("3", 0, 9, (Turn(5, 2), Turn(6, 1, 0.5), Turn(7)))


@pytest.mark.parametrize("after", ["[2],[0.5]", "[2,8],[0.5,9]"])
def test_replay_records(tmp_path: Path, after: str) -> None:
    observed, waited = after.split("],[")
    trace = imported(
        tmp_path,
        '{"group":"g","stream":1,"prompt_len":9,"out_lens":[5,6],'
        f'"obs_lens":{observed}],"tool_times":[{waited}}}\n',
    )
    assert trace.groups["g"][0] == SampleRecord("g", 1, 9, (Turn(5, 2, 0.5), Turn(6)))
