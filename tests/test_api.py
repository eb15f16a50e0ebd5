"""The public API is this page; a change to it is a decision."""

from __future__ import annotations

import subprocess
import sys

import rollout_sched


def test_the_public_names_are_pinned():
    assert rollout_sched.__all__ == [
        "CallerError",
        "ConfigError",
        "PolicyError",
        "PolicyFile",
        "RolloutError",
        "Scheduler",
        "__version__",
        "actions",
        "events",
        "load_policy",
        "parse_policy",
    ]
    assert all(hasattr(rollout_sched, name) for name in rollout_sched.__all__)


def test_the_core_runs_from_the_public_names_alone():
    scheduler = rollout_sched.load_policy("round_robin_sync").scheduler(prompts_per_step=1)
    events = rollout_sched.events
    scheduler.handle(events.InstanceJoined("a", slots=4, kv_tokens=1000), 0.0)
    scheduler.handle(events.GroupSubmitted("g", 1, 10, 20), 0.0)
    (dispatch,) = scheduler.handle(events.BatchRequested(), 0.0)
    assert isinstance(dispatch, rollout_sched.actions.Dispatch)
    answer = events.RequestFinished(dispatch.request, dispatch.attempt, 7)
    (deliver,) = scheduler.handle(answer, 1.0)
    assert deliver.samples[0].response_tokens == 7


def test_importing_the_package_needs_no_simulator_and_no_heavy_library():
    code = (
        "import sys, rollout_sched; "
        "print([m for m in ('torch', 'vllm', 'numpy', 'rich', 'rollout_sched.simulators') "
        "if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
