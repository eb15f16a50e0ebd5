"""What a run notes beside its metrics."""

from __future__ import annotations

import pytest

from rollout_sched.config import load_policy
from rollout_sched.core.model.errors import PolicyError
from rollout_sched.core.model.events import Woke
from rollout_sched.simulators.replay.runs import RunNotes, run_policy
from rollout_sched.simulators.replay.scenario import Job, load_scenario
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.synthetic import synthetic


def test_a_run_that_lasts_too_long_is_given_up() -> None:
    trace = synthetic(2, 2, median=5, cap=9, prompt_median=5)
    notes = RunNotes("ours", Workload(trace, Job(prompts_per_step=2)), None, give_up_s=10.0)
    notes.observe(10.0, Woke(), [])
    with pytest.raises(PolicyError, match="ours: run not finished after 10 s"):
        notes.observe(10.1, Woke(), [])
    assert notes.events == 2


def test_progress_is_told_groups_delivered() -> None:
    trace, told = synthetic(4, 2, median=50, cap=200, prompt_median=20), list[int]()
    run = run_policy(
        load_policy("streamed_sync"), trace, load_scenario("tiny-cpu-2"), progress=told.append
    )
    assert sum(told) == 4
    assert run.samples_lost == 0
